"""JSON data to dataclasses, checked against their type hints: every field there, of its type, and none besides."""

from __future__ import annotations

import dataclasses
import types
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")


def decode(kind: type[T], data: Any) -> T:
    """ValueError says where the data is not as the class declares it."""
    value: T = _decode(kind, data, kind.__name__)
    return value


def _decode(kind: Any, data: Any, where: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, types.UnionType):
        if data is None and type(None) in parts:
            return None
        (kind,) = (part for part in parts if part is not type(None))
        return _decode(kind, data, where)
    if origin is Literal:
        return _expect(data in parts, data, where, f"one of {', '.join(map(str, parts))}")
    if origin is list:
        _expect(isinstance(data, list), data, where, "a list")
        return [_decode(parts[0], item, f"{where}[{i}]") for i, item in enumerate(data)]
    if origin is dict:
        _expect(isinstance(data, dict), data, where, "an object")
        return {key: _decode(parts[1], item, f"{where}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        _expect(isinstance(data, dict), data, where, "an object")
        hints = get_type_hints(kind)
        names = {f.name for f in dataclasses.fields(kind)}
        if missing := sorted(names - data.keys()):
            raise ValueError(f"{where}: lacks {', '.join(missing)}")
        if unknown := sorted(data.keys() - names):
            raise ValueError(f"{where}: has unknown {', '.join(unknown)}")
        return kind(**{name: _decode(hints[name], data[name], f"{where}.{name}") for name in names})  # type: ignore[operator]
    if kind is float:
        _expect(isinstance(data, (int, float)) and not isinstance(data, bool), data, where, "a number")
        return float(data)
    # bool is an int to isinstance; a count is not a truth
    return _expect(type(data) is kind, data, where, f"of type {kind.__name__}")


def _expect(holds: bool, data: Any, where: str, wanted: str) -> Any:
    if not holds:
        raise ValueError(f"{where}: {data!r:.60} is not {wanted}")
    return data
