#!/usr/bin/env python3
"""Makes `ebb_client/shapes.py` and `ebb_client/client.py` from `docs/openapi.json`.

With --check it writes nothing, and fails if a file is not what the document gives.
"""

from __future__ import annotations

import json
import keyword
import re
import sys
import textwrap
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

HERE = Path(__file__).resolve().parent
DOCUMENT = HERE.parent.parent / "docs" / "openapi.json"
PACKAGE = HERE / "ebb_client"
WIDTH = 100
NOTE = "# Made by generate.py from docs/openapi.json: change that, not this.\n"
UNITS = {
    "bytes": "bytes",
    "ns": "nanoseconds",
    "us": "microseconds",
    "ms": "milliseconds",
    "s": "seconds",
    "percent": "percent",
    "permille": "thousandths",
}
SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}
# How the listener on TCP refuses any request: EbbError says enough of that.
OVER_TCP = ("401", "403", "408", "413")
METHODS = ("get", "put", "post", "delete")
JSON, EVENTS = "application/json", "text/event-stream"
# The query by which a long operation becomes a job.
JOB = "job"

Json = Dict[str, Any]


def kind(schema: Json) -> str:
    """The type of a value of this schema, as Python writes it."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "oneOf" in schema:
        others = [one for one in schema["oneOf"] if one.get("type") != "null"]
        if len(others) == 1 and len(schema["oneOf"]) == 2:
            return f"Optional[{kind(others[0])}]"
    types = schema.get("type")
    if isinstance(types, list):
        [one] = [one for one in types if one != "null"]
        return f"Optional[{kind({**schema, 'type': one})}]"
    if types == "array":
        return f"List[{kind(schema['items'])}]"
    if types in SCALARS and "enum" not in schema:
        return SCALARS[types]
    sys.exit(f"generate.py does not know how to write {schema}")


def optional(schema: Json) -> str:
    """The type of a value of this schema that may be left out."""
    its = kind(schema)
    return its if its.startswith("Optional[") else f"Optional[{its}]"


def described(schema: Json) -> str:
    """What the document says about a member; it may stand in the part that is not null."""
    parts = [schema, *schema.get("oneOf", [])]
    return next((str(part["description"]) for part in parts if "description" in part), "")


def unit(name: str, text: str) -> str:
    """The unit in which a name ends, unless the text has it."""
    its = UNITS.get(name.rpartition("_")[2])
    return f"In {its}." if its and not re.search(rf"\b{its}\b", text) else ""


def member_doc(name: str, schema: Json) -> str:
    text = " ".join(described(schema).split())
    if text and not text.endswith("."):
        text += "."
    return f"{text} {unit(name, text)}".strip()


def docstring(text: str, indent: str) -> str:
    """A docstring of paragraphs, with the lines of the document joined and broken again."""
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    whole = '"""' + "\n\n".join(paragraphs) + '"""'
    wrapped = [
        textwrap.fill(part, WIDTH, initial_indent=indent, subsequent_indent=indent,
                      break_long_words=False, break_on_hyphens=False)
        for part in whole.replace("\\", "\\\\").split("\n\n")
    ]
    return "\n\n".join(wrapped) + "\n"


def python_name(name: str) -> str:
    plain = re.sub(r"\W", "_", name).lower()
    return plain + "_" if keyword.iskeyword(plain) else plain


def shape(name: str, schema: Json) -> str:
    if "enum" in schema:
        words = ", ".join(json.dumps(word) for word in schema["enum"])
        lines = textwrap.fill(f"{name} = Literal[{words}]", WIDTH, subsequent_indent="    ")
        return f"{lines}\n" + docstring(described(schema) or name, "")
    text = f"@dataclass(kw_only=True)\nclass {name}:\n"
    text += docstring(described(schema) or name, "    ")
    required = schema.get("required", [])
    for member, content in schema.get("properties", {}).items():
        own = python_name(member)
        its = kind(content) if member in required else optional(content)
        extra = []
        if member not in required or its.startswith("Optional["):
            extra.append("default=None")
        if own != member:
            extra.append(f'metadata={{"name": "{member}"}}')
        value = ""
        if extra == ["default=None"]:
            value = " = None"
        elif extra:
            value = f" = field({', '.join(extra)})"
        text += f"\n    {own}: {its}{value}\n"
        doc = member_doc(member, content)
        text += docstring(doc, "    ") if doc else ""
    return text


def shapes(document: Json) -> str:
    schemas = document["components"]["schemas"]
    names = sorted(schemas)
    # Words come first: they are used in dataclasses.
    order = sorted(names, key=lambda name: "enum" not in schemas[name])
    text = f'"""The shapes of requests and answers."""\n\n{NOTE}\n'
    text += "from __future__ import annotations\n\n"
    text += "from dataclasses import dataclass, field\n"
    text += "from typing import List, Literal, Optional\n\n"
    text += "__all__ = [\n" + "".join(f'    "{name}",\n' for name in names) + "]\n"
    for name in order:
        text += "\n" + ("" if "enum" in schemas[name] else "\n") + shape(name, schemas[name])
    return text


def operations(document: Json) -> Iterator[Tuple[str, str, Json]]:
    for path, item in document["paths"].items():
        for method in METHODS:
            if method in item:
                operation = item[method]
                parameters = item.get("parameters", []) + operation.get("parameters", [])
                yield method, path, {**operation, "parameters": parameters}


def call_doc(method: str, path: str, operation: Json) -> str:
    parts = [str(operation.get(part, "")).strip() for part in ("summary", "description")]
    text = " ".join(part.rstrip(".") + "." for part in parts if part)
    text = f"{text}\n\n{method.upper()} {path}"
    refusals = [
        f"{status}: {content['description']}"
        for status, content in operation["responses"].items()
        if status[0] != "2" and status not in OVER_TCP and content.get("description")
    ]
    if refusals:
        text += "\n\nRaises EbbError. " + " ".join(refusals)
    return text


def calls(method: str, path: str, operation: Json) -> Iterator[str]:
    """A method for the answer that comes once all is done, and one for a job if there is one."""
    answers = operation["responses"]
    if "202" not in answers:
        yield call(method, path, operation)
        return
    parameters = [one for one in operation["parameters"] if one["name"] != JOB]
    done = {status: answer for status, answer in answers.items() if status not in ("202", "429")}
    yield call(method, path, {**operation, "parameters": parameters, "responses": done})
    begun = {status: answer for status, answer in answers.items() if status != "200"}
    as_job = {
        **operation,
        "operationId": operation["operationId"] + "_job",
        "description": "It is done as a job: the answer comes at once, and `job` tells how far it is.",
        "parameters": parameters,
        "responses": begun,
    }
    yield call(method, path, as_job, flags=(JOB,))


def call(method: str, path: str, operation: Json, flags: Tuple[str, ...] = ()) -> str:
    name = operation["operationId"]
    answers = [answer for status, answer in operation["responses"].items() if status[0] == "2"]
    content, parameters = answers[0].get("content") or {}, operation["parameters"]
    arguments: List[str] = ["self"]
    in_path = {one["name"]: kind(one["schema"]) for one in parameters if one["in"] == "path"}
    arguments += [f"{python_name(name)}: {its}" for name, its in in_path.items()]
    given: List[str] = []
    if "requestBody" in operation:
        arguments.append(f"request: {kind(operation['requestBody']['content'][JSON]['schema'])}")
        given.append("request=request")
    options: List[str] = []
    for place, passed in (("query", "query"), ("header", "headers")):
        found = [one for one in parameters if one["in"] == place]
        options += [f"{python_name(one['name'])}: {optional(one['schema'])} = None" for one in found]
        pairs = [f'"{one["name"]}": {python_name(one["name"])}' for one in found]
        if place == "query":
            pairs += [f'"{flag}": True' for flag in flags]
        if pairs:
            given.append(f"{passed}={{{', '.join(pairs)}}}")
    if options:
        arguments += ["*", *options]
    target = re.sub(r"{(\w+)}", lambda found: "{" + in_a_path(found[1], in_path) + "}", path)
    target = f'f"{target}"' if "{" in target else f'"{target}"'
    if EVENTS in content:
        its = kind(content[EVENTS]["schema"]) if content[EVENTS].get("schema") else "Any"
        answer = f"Iterator[{its}]"
        made = f"self._events({', '.join([target, its, *given])})"
    else:
        answer = kind(content[JSON]["schema"]) if JSON in content else "Any"
        made = f"self._call({', '.join([json.dumps(method.upper()), target, answer, *given])})"
    text = wrapped_call(f"    def {name}(", arguments, f") -> {answer}:\n")
    text += docstring(call_doc(method, path, operation), "        ")
    for one in parameters:
        if one["in"] != "path" and one.get("description"):
            text = text.rstrip("\n").removesuffix('"""') + "\n\n"
            text += textwrap.fill(
                " ".join(f"{python_name(one['name'])}: {one['description']}".split()), WIDTH,
                initial_indent="        ", subsequent_indent="            ") + '"""\n'
    result = f"        return {made}\n"
    if len(result) > WIDTH:
        result = wrapped_call("        return " + made.partition("(")[0] + "(", split(made), ")\n")
    return text + result


def in_a_path(name: str, kinds: Dict[str, str]) -> str:
    """What stands for a parameter in a path. Numbers need no quotes."""
    own = python_name(name)
    return own if kinds.get(name) == "int" else f"quoted({own})"


def split(made: str) -> List[str]:
    """The arguments of a call as it is written."""
    inner, parts, depth = made.partition("(")[2][:-1], [""], 0
    for character in inner:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def wrapped_call(begin: str, arguments: List[str], end: str) -> str:
    line = begin + ", ".join(arguments) + end
    if len(line) <= WIDTH:
        return line
    indent = " " * (len(begin) - len(begin.lstrip()))
    body = "".join(f"{indent}    {one},\n" for one in arguments)
    return f"{begin}\n{body}{indent}{end}"


def client(document: Json) -> str:
    text = f'"""The calls."""\n\n{NOTE}\n'
    text += "from __future__ import annotations\n\n"
    text += "from typing import Any, Iterator, List, Optional\n\n"
    text += "from .connection import Connection, quoted\nfrom .shapes import *\n\n\n"
    text += 'class Client(Connection):\n    """Asks `ebbd`, with one method for each route."""\n'
    for method, path, operation in operations(document):
        text += "".join("\n" + one for one in calls(method, path, operation))
    return text


def main() -> None:
    document = json.loads(DOCUMENT.read_text())
    made = {PACKAGE / "shapes.py": shapes(document), PACKAGE / "client.py": client(document)}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if sys.argv[1:] == ["--check"]:
        names = ", ".join(path.name for path in stale)
        mend = "not what docs/openapi.json gives: run python3 clients/python/generate.py"
        sys.exit(f"{names}: {mend}" if stale else 0)
    if sys.argv[1:]:
        sys.exit("usage: generate.py [--check]")
    for path in stale:
        path.write_text(made[path])


if __name__ == "__main__":
    main()
