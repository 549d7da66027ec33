"""How many registers the operands of an instruction take, from its modifiers."""

from __future__ import annotations

import re
from collections.abc import Callable

from .operands import UnknownInstruction

Widths = tuple[int, tuple[int, ...]]  # of the destination register, of the register sources in their order
_TYPE = re.compile(r"(?:U|S|F|BF)?(8|16|32|64|128)(?:x(\d+))?")
_FRAGMENT_BITS = 1024  # a matrix is spread over 32 threads in registers of 32 bits
_GROUP_FRAGMENT_BITS = 4 * _FRAGMENT_BITS  # the same for a group of four warps


def moved(modifiers: list[str]) -> int:
    """Registers that a memory instruction or an atomic moves per thread: type times count, 32 bits if none is named."""
    types = [match for match in map(_TYPE.fullmatch, modifiers) if match]
    if len(types) > 1:
        raise UnknownInstruction(f"types {' '.join(match[0] for match in types)}")
    if not types:
        return 1
    return -(-int(types[0][1]) * int(types[0][2] or 1) // 32)


def _conversion(modifiers: list[str]) -> Widths:
    """F2F.to.from; the 32-bit types are printed where one side has 64 bits."""
    types = [m for m in modifiers if _TYPE.fullmatch(m)]
    if len(types) != 2:
        raise UnknownInstruction(f"types {' '.join(types)}")
    return 2 if types[0] == "F64" else 1, (2 if types[1] == "F64" else 1,)


def _f2i(modifiers: list[str]) -> Widths:
    return 2 if {"S64", "U64"} & set(modifiers) else 1, (2 if "F64" in modifiers else 1,)


def _i2f(modifiers: list[str]) -> Widths:
    return 2 if "F64" in modifiers else 1, (2 if {"S64", "U64"} & set(modifiers) else 1,)


def _imad(modifiers: list[str]) -> Widths:
    wide, high = "WIDE" in modifiers, "HI" in modifiers
    return 2 if wide else 1, (1, 1, 2 if wide or high else 1)


# Shape as printed: rows, columns and depth.
_SHAPES = {
    **{"884": (8, 8, 4), "8x8x4": (8, 8, 4), "16x8x4": (16, 8, 4), "16x8x8": (16, 8, 8), "16x8x16": (16, 8, 16)},
    **{"8816": (8, 8, 16), "8832": (8, 8, 32), "88128": (8, 8, 128)},
    **{f"168{depth}": (16, 8, depth) for depth in (4, 8, 16, 32, 64, 128, 256)},
}
_ELEMENT_BITS = {"BF16": 16, "TF32": 32, "E4M3": 8, "E5M2": 8, "U8": 8, "S8": 8, "U4": 4, "S4": 4}


def _mma(element: int | None, result: int | None) -> Callable[[list[str]], Widths]:
    """Widths of a matrix product. Bits of an element of A and B (None: the modifiers say it) and of C and D (None: 32
    with F32, else 16). A sparse A holds half of its elements; its metadata is one register behind C."""

    def widths(modifiers: list[str]) -> Widths:
        shapes = [_SHAPES[m] for m in modifiers if m in _SHAPES]
        named = {_ELEMENT_BITS[m] for m in modifiers if m in _ELEMENT_BITS}
        if len(shapes) != 1 or len(named) > 1 or (element is None and not named):
            raise UnknownInstruction(f"matrix shape {'.'.join(modifiers)}")
        rows, columns, depth = shapes[0]
        bits = named.pop() if named else element
        assert bits is not None
        sparse = "SP" in modifiers
        a = rows * depth * bits // (2 * _FRAGMENT_BITS if sparse else _FRAGMENT_BITS)
        b = depth * columns * bits // _FRAGMENT_BITS
        c = rows * columns * (result or (32 if "F32" in modifiers else 16)) // _FRAGMENT_BITS
        return c, (a, b, c, 1) if sparse else (a, b, c)

    return widths


def gmma(base: str, modifiers: list[str]) -> tuple[int, int]:
    """Registers of D, which is C as well, and of A where it is in registers, for a product of a group of warps."""
    shapes = [m for m in modifiers if m.startswith("64x")]
    if len(shapes) != 1:
        raise UnknownInstruction(f"matrix shape {'.'.join(modifiers)}")
    rows, columns, _ = map(int, shapes[0].split("x"))
    floating = base in ("HGMMA", "QGMMA")
    if floating and ("F32" in modifiers) == ("F16" in modifiers):
        raise UnknownInstruction(f"accumulator {'.'.join(modifiers)}")
    bits = 16 if "F16" in modifiers else 32
    return rows * columns * bits // _GROUP_FRAGMENT_BITS, 4  # 256 bits of each row of A, whatever its type


def _all_double(_: list[str]) -> Widths:
    return 2, (2, 2, 2)


_WIDTHS: dict[str, Callable[[list[str]], Widths]] = {
    **dict.fromkeys(["DADD", "DMUL", "DFMA", "DSETP"], _all_double),
    **dict.fromkeys(["IMAD", "UIMAD"], _imad),
    "F2F": _conversion,
    "F2I": _f2i,
    "I2F": _i2f,
    "UIADD3": lambda m: (2, (2, 2, 2)) if "64" in m else (1, (1, 1, 1)),
    "FRND": lambda m: (2, (2,)) if "F64" in m else (1, (1,)),
    "MATCH": lambda m: (1, (2,)) if "U64" in m else (1, (1,)),
    "CS2R": lambda m: (1, ()) if "32" in m else (2, ()),
    "LEPC": lambda _: (2, ()),
    "HMMA": _mma(16, None),
    "QMMA": _mma(None, None),
    "IMMA": _mma(None, 32),
    "DMMA": _mma(64, 64),
    "BMMA": _mma(1, 32),
}


def widths(base: str, modifiers: list[str]) -> tuple[int, tuple[int, ...] | None]:
    """Of the destination register, and of the sources. The opcodes without a rule (None: all sources) take one register
    each: their lists of modifiers name no type that is wider."""
    rule = _WIDTHS.get(base)
    return rule(modifiers) if rule else (1, None)
