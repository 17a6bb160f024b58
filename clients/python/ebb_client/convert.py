"""From JSON to dataclasses, and back."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, Dict, Literal, Union, get_args, get_origin


class Misfit(Exception):
    """JSON that has another shape."""


def from_json(kind: Any, value: Any) -> Any:
    """Makes a value of this type. Members that the type does not have are ignored.

    Raises:
        Misfit: the JSON has another shape.
    """
    origin = get_origin(kind)
    if kind is Any or origin is Literal:
        # A later release may have more words than this one knows.
        return value
    if origin in (Union, types.UnionType):
        some = [one for one in get_args(kind) if one is not type(None)]
        return None if value is None else from_json(some[0], value)
    if origin is list:
        return [from_json(get_args(kind)[0], one) for one in _checked(value, list)]
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), _checked(value, dict))
    if kind is float:
        return float(_checked(value, (int, float)))
    if kind is int and isinstance(value, bool):
        raise Misfit(f"{value} in place of a number")
    return _checked(value, kind)


def to_json(value: Any) -> Any:
    """Makes JSON of a dataclass. Members that are None are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        members = ((_name(field), getattr(value, field.name)) for field in fields)
        return {name: to_json(member) for name, member in members if member is not None}
    if isinstance(value, (list, tuple)):
        return [to_json(one) for one in value]
    return value


def _dataclass(kind: type, members: Dict[str, Any]) -> Any:
    hints, found = _hints(kind), {}
    for field in dataclasses.fields(kind):
        name = _name(field)
        if name in members:
            found[field.name] = from_json(hints[field.name], members[name])
        elif field.default is dataclasses.MISSING:
            raise Misfit(f"{kind.__name__} without {name}")
    return kind(**found)


@functools.lru_cache(maxsize=None)
def _hints(kind: type) -> Dict[str, Any]:
    return typing.get_type_hints(kind)


def _name(field: "dataclasses.Field[Any]") -> str:
    """The member's name in JSON. It may be a word that Python keeps to itself."""
    return str(field.metadata.get("name", field.name))


def _checked(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise Misfit(f"{type(value).__name__} in place of {kind}")
    return value
