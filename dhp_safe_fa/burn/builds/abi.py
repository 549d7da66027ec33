"""The structs of a C header, read from its text into ctypes.

Two builds of the library are called side by side, and the older one may have been built from an older dhp_fa.h. So each
is called through the header that it was built with: fields go by name, and a field that one of them lacks is no matter.
Only what dhp_fa.h uses is understood: structs of numbers, arrays, enums, structs and pointers; enumerators with values.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

_NUMBERS: dict[str, type] = {
    "char": ctypes.c_char,
    "int": ctypes.c_int,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
}
_FUNCTION_POINTER = re.compile(r"[\w ]+\*?\(\*(\w+)\)\(.*\)", re.DOTALL)
_DECLARATOR = re.compile(r"(\*?)(\w+)(?:\[(\d+)\])?")


@dataclass(frozen=True)
class Header:
    """structs: name → ctypes class, in the header's order. enumerators: name → value. prototypes: name → text."""

    structs: dict[str, type[ctypes.Structure]]
    enumerators: dict[str, int]
    prototypes: dict[str, str]


def parse(text: str) -> Header:
    """ValueError names what cannot be read."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    text = re.sub(r"^#(?:.*\\\n)*.*$", "", text, flags=re.MULTILINE)  # preprocessor lines, continued ones too
    types: dict[str, Any] = dict(_NUMBERS)
    enumerators: dict[str, int] = {}
    structs: dict[str, type[ctypes.Structure]] = {}
    for match in re.finditer(r"typedef\s+(enum|struct)\s+(\w+)\s*\{(.*?)\}\s*\w+\s*;", text, re.DOTALL):
        kind, name, body = match.groups()
        if kind == "enum":
            enumerators |= {key: int(value) for key, value in re.findall(r"(\w+)\s*=\s*(\d+)", body)}
            types[name] = ctypes.c_int
        else:
            fields = [field for line in body.split(";") if line.strip() for field in _fields(name, line.strip(), types)]
            types[name] = structs[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    prototypes = {m[2]: " ".join(m[1].split()) for m in re.finditer(r"DHP_API\s+([^;(]*?\b(\w+)\([^;]*\));", text)}
    return Header(structs, enumerators, prototypes)


def _fields(struct: str, line: str, types: dict[str, Any]) -> list[tuple[str, Any]]:
    """The fields of one declaration: ``int tile_q, tile_k`` has two."""
    if pointer := _FUNCTION_POINTER.fullmatch(line):
        return [(pointer[1], ctypes.c_void_p)]
    words = re.sub(r"\bconst\b", "", line).split(maxsplit=1)
    fields = []
    for declarator in words[1].split(",") if len(words) == 2 else [""]:
        match = _DECLARATOR.fullmatch(declarator.strip())
        if match is None or (not match[1] and words[0] not in types):
            raise ValueError(f"header: struct {struct}: cannot read the field '{line}'")
        if match[1]:
            kind: Any = ctypes.c_char_p if words[0] == "char" else ctypes.c_void_p
        else:
            kind = types[words[0]]
        fields.append((match[2], kind * int(match[3]) if match[3] else kind))
    return fields
