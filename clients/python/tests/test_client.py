"""The client against a daemon that the test plays, and what the generator makes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any, Dict, List

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import generate  # noqa: E402
from ebb_client import Client, DiskRequest, EbbError, LimitRequest, RunRequest  # noqa: E402
from ebb_client.connection import event_data  # noqa: E402
from ebb_client.convert import Misfit, from_json, to_json  # noqa: E402
from ebb_client.shapes import PoolStatus, Version  # noqa: E402


class Daemon:
    """Gives one answer, and keeps the request."""

    def __init__(self, answer: bytes) -> None:
        self._directory = tempfile.TemporaryDirectory()
        self.run_dir = self._directory.name
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(f"{self.run_dir}/ebbd.sock")
        self._socket.listen()
        self._answer = answer
        self.request = b""
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        stream, _ = self._socket.accept()
        with stream, stream.makefile("rb") as lines:
            length = 0
            for line in lines:
                self.request += line
                if line.lower().startswith(b"content-length:"):
                    length = int(line.split(b":")[1])
                if line == b"\r\n":
                    break
            self.request += lines.read(length)
            stream.sendall(self._answer)

    def __enter__(self) -> "Daemon":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()
        self._socket.close()
        self._directory.cleanup()


def answer(status: int, body: Any) -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(text), text)


VERSION = {"version": "1", "pid": 7, "run_dir": "/run/ebb"}


class Calls(unittest.TestCase):
    def test_an_answer_becomes_a_dataclass(self) -> None:
        with Daemon(answer(200, {**VERSION, "of_later": [1]})) as daemon:
            self.assertEqual(
                Client.local(daemon.run_dir).version(),
                Version(version="1", pid=7, run_dir="/run/ebb"),
            )
            self.assertTrue(daemon.request.startswith(b"GET /v1/version HTTP/1.1\r\n"))

    def test_a_request_has_only_what_was_given(self) -> None:
        with Daemon(answer(404, {"error": "there is no VM a/b"})) as daemon:
            with self.assertRaises(EbbError):
                Client.local(daemon.run_dir).limit("a/b", LimitRequest(bytes=1 << 30))
            head, _, body = daemon.request.partition(b"\r\n\r\n")
            self.assertTrue(head.startswith(b"PUT /v1/vms/a%2Fb/limit HTTP/1.1\r\n"), head)
            self.assertEqual(json.loads(body), {"bytes": 1 << 30})

    def test_a_refusal_has_its_words(self) -> None:
        body = {"error": "no room", "code": "no_room", "hint": "make some"}
        old = {"error": "no room"}
        for sent, code, hint in ((body, "no_room", "make some"), (old, None, None)):
            with self.subTest(sent), Daemon(answer(507, sent)) as daemon:
                with self.assertRaises(EbbError) as caught:
                    Client.local(daemon.run_dir).detach("web")
                error = caught.exception
                self.assertEqual(
                    (error.status, error.sentence, error.code, error.hint),
                    (507, "no room", code, hint),
                )

    def test_what_is_no_answer_is_an_error_of_the_same_class(self) -> None:
        no_shape = answer(200, b"{}"), answer(200, b"no JSON")
        for sent in (b"", answer(500, b"<html>"), *no_shape, b"SSH-2.0\r\n"):
            with self.subTest(sent), Daemon(sent) as daemon:
                with self.assertRaises(EbbError):
                    Client.local(daemon.run_dir).version()
        with self.assertRaises(EbbError) as caught:
            Client.local("/nowhere").version()
        self.assertIn("/nowhere/ebbd.sock", caught.exception.sentence)
        self.assertIsNone(caught.exception.status)

    def test_only_tls_leaves_the_host(self) -> None:
        no_port = "https://web1:port", "https://web1:1/v1"
        for url in ("http://web1:1", "web1:1", "https://", "https://a@b", *no_port):
            with self.subTest(url), self.assertRaises(EbbError) as caught:
                Client.remote(url, "/nowhere")
            self.assertIn("https://HOST:PORT", caught.exception.sentence)
        with tempfile.NamedTemporaryFile("w") as file:
            file.write("control 0123456789abcdef0123456789abcdef\n")
            file.flush()
            with self.assertRaises(EbbError) as caught:
                Client.remote("https://web1:1", file.name)
            self.assertIn("the token alone", caught.exception.sentence)


class Conversion(unittest.TestCase):
    def test_members_that_are_none_are_left_out(self) -> None:
        request = RunRequest(name="web", disks=[DiskRequest(path="/a")])
        self.assertEqual(to_json(request), {"name": "web", "disks": [{"path": "/a"}]})

    def test_another_shape_is_refused(self) -> None:
        wrong: List[Any] = [{**VERSION, "pid": "7"}, {**VERSION, "pid": True}, {"pid": 7}, [], None]
        for members in wrong:
            with self.subTest(members), self.assertRaises(Misfit):
                from_json(Version, members)
        with self.assertRaises(Misfit):
            from_json(PoolStatus, {"vms": {}})


class Events(unittest.TestCase):
    def test_data_comes_in_lines_until_an_empty_one(self) -> None:
        lines = [
            *(b": hello\n", b"\n", b"id: 1\r\n", b"event: state\r\n"),
            *(b'data: {"a":\r\n', b"data:1}\r\n", b"\r\n", b"data: 2\n", b"\n", b"data: cut"),
        ]
        self.assertEqual(list(event_data(iter(lines))), [b'{"a":\n1}', b"2"])

    def test_a_stream_ends_with_its_connection(self) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        data = b"data: " + json.dumps(VERSION).encode() + b"\n\n"
        with Daemon(head + data + b": still here\n\n" + data) as daemon:
            client, headers = Client.local(daemon.run_dir), {"Last-Event-ID": 4}
            found = list(client._events("/v1/e", Version, {"since": 3}, headers))
            self.assertEqual([one.pid for one in found], [7, 7])
            self.assertTrue(daemon.request.startswith(b"GET /v1/e?since=3 HTTP/1.1\r\n"))
            self.assertIn(b"\r\nLast-Event-ID: 4\r\n", daemon.request)


class Generator(unittest.TestCase):
    def test_the_code_is_what_the_document_gives(self) -> None:
        words = [sys.executable, str(HERE / "generate.py"), "--check"]
        check = subprocess.run(words, capture_output=True, text=True)
        self.assertEqual((check.returncode, check.stderr), (0, ""))

    def test_a_stream_of_events_becomes_an_iterator(self) -> None:
        number: Dict[str, Any] = {"type": ["integer", "null"]}
        parameters: List[Dict[str, Any]] = [
            {"name": "since", "in": "query", "schema": number, "description": "Only later ones."},
            {"name": "Last-Event-ID", "in": "header", "schema": number},
        ]
        content = {"text/event-stream": {"schema": {"$ref": "#/components/schemas/Event"}}}
        text = generate.call("get", "/v1/events", {
            "operationId": "events", "summary": "What happens.", "parameters": parameters,
            "responses": {"200": {"content": content}, "429": {"description": "Too many."}},
        })
        self.assertIn("last_event_id: Optional[int] = None", text)
        self.assertIn("-> Iterator[Event]:", text)
        self.assertIn("since: Only later ones.", text)
        self.assertIn('headers={"Last-Event-ID": last_event_id}', text)

    def test_what_may_be_a_job_becomes_two_methods(self) -> None:
        def answer(name: str) -> Dict[str, Any]:
            schema = {"$ref": f"#/components/schemas/{name}"}
            return {"content": {"application/json": {"schema": schema}}}

        parameters: List[Dict[str, Any]] = [
            {"name": "id", "in": "path", "schema": {"type": "integer"}},
            {"name": "job", "in": "query", "schema": {"type": "boolean"}},
        ]
        responses = {"200": answer("Report"), "202": answer("Job"), "429": {"description": "Full."}}
        direct, as_job = generate.calls("delete", "/v1/a/{id}", {
            "operationId": "act", "summary": "Act.", "parameters": parameters,
            "responses": responses,
        })
        self.assertIn("def act(self, id: int) -> Report:", direct)
        self.assertIn('self._call("DELETE", f"/v1/a/{id}", Report)', direct)
        self.assertNotIn("429", direct)
        self.assertIn("def act_job(self, id: int) -> Job:", as_job)
        self.assertIn('query={"job": True}', as_job)
        self.assertIn("429: Full.", as_job)

    def test_a_word_of_python_gets_another_name(self) -> None:
        members: Dict[str, Any] = {"from": {"type": "string"}, "size_bytes": {"type": "integer"}}
        schema = {"description": "A change.", "required": list(members), "properties": members}
        text = generate.shape("Change", schema)
        self.assertIn('from_: str = field(metadata={"name": "from"})', text)
        self.assertIn('"""In bytes."""', text)

    def test_a_schema_that_it_does_not_know_is_not_guessed(self) -> None:
        with self.assertRaises(SystemExit):
            generate.kind({"anyOf": []})


if __name__ == "__main__":
    unittest.main()
