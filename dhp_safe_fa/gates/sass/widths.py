"""How many registers the operands of arithmetic instructions take; read off ptxas output."""

from __future__ import annotations

import re
from collections.abc import Callable

from .operands import UnknownInstruction

Widths = tuple[int, tuple[int, ...]]  # of the destination register, of the register sources in their order


def _conversion(modifiers: list[str]) -> Widths:
    """F2F.to.from, F2I.to.from, I2F.to.from; the 32-bit type is not printed, except between floats."""
    types = [m for m in modifiers if re.fullmatch(r"(F|BF|TF|S|U)(8|16|32|64)", m)]
    to, source = (types[0], types[1]) if len(types) > 1 else (types[0] if types else "", "")
    return 2 if to.endswith("64") else 1, (2 if source.endswith("64") else 1,)


def _f2i(modifiers: list[str]) -> Widths:
    return 2 if {"S64", "U64"} & set(modifiers) else 1, (2 if "F64" in modifiers else 1,)


def _i2f(modifiers: list[str]) -> Widths:
    return 2 if "F64" in modifiers else 1, (2 if {"S64", "U64"} & set(modifiers) else 1,)


def _imad(modifiers: list[str]) -> Widths:
    wide, high = "WIDE" in modifiers, "HI" in modifiers
    return 2 if wide else 1, (1, 1, 2 if wide or high else 1)


# Registers of A, B, and of C and D, per thread: PTX ISA, "Matrix fragments for mma".
_HMMA = {"884": (2, 2, 4), "1688": (2, 1, 4), "16816": (4, 2, 4), "1684": (2, 1, 4)}
_IMMA = {"8816": (1, 1, 2), "8832": (1, 1, 2), "16816": (2, 1, 4), "16832": (4, 2, 4), "16864": (4, 2, 4)}
_DMMA = {"884": (2, 2, 4), "1684": (4, 2, 8), "1688": (8, 4, 8), "16816": (16, 8, 8)}
_BMMA = {"88128": (1, 1, 2), "168128": (2, 1, 4), "168256": (4, 2, 4)}


def _mma(table: dict[str, tuple[int, int, int]]) -> Callable[[list[str]], Widths]:
    def widths(modifiers: list[str]) -> Widths:
        shape = next((m for m in modifiers if m in table), None)
        if shape is None:
            raise UnknownInstruction(f"matrix shape {'.'.join(modifiers)}")
        a, b, c = table[shape]
        if "TF32" in modifiers and shape == "1688":
            a, b = 4, 2
        if "SP" in modifiers:
            b *= 2  # a sparse A meets twice the depth of B
        if table is _HMMA and "F32" not in modifiers and shape != "884":
            c = 2
        return c, (a, b, c)

    return widths


def _all_double(_: list[str]) -> Widths:
    return 2, (2, 2, 2)


_WIDTHS: dict[str, Callable[[list[str]], Widths]] = {
    **dict.fromkeys(["DADD", "DMUL", "DFMA", "DMNMX", "DSETP"], _all_double),
    **dict.fromkeys(["IMAD", "UIMAD"], _imad),
    **dict.fromkeys(["F2F"], _conversion),
    **dict.fromkeys(["F2I"], _f2i),
    **dict.fromkeys(["I2F"], _i2f),
    "FRND": lambda m: (2, (2,)) if "F64" in m else (1, (1,)),
    "CS2R": lambda m: (1, ()) if "32" in m else (2, ()),
    "LEPC": lambda _: (2, ()),
    "HMMA": _mma(_HMMA),
    "IMMA": _mma(_IMMA),
    "DMMA": _mma(_DMMA),
    "BMMA": _mma(_BMMA),
}


def widths(base: str, modifiers: list[str]) -> Widths:
    rule = _WIDTHS.get(base)
    if rule:
        return rule(modifiers)
    return (2, (2, 2, 2)) if "64" in modifiers else (1, ())  # UIADD3.64 and its like
