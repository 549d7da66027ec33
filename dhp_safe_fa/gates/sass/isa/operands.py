"""Operands of SASS instructions: text such as ``desc[UR4][R2.64+0x10]`` to the registers it names.

A *location* is an integer that stands for one 32-bit register, predicate or word of local memory. The analysis keeps
its state as a map from locations, so that registers of all files and spill slots are handled alike.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Where each register file starts in the numbering of locations. R255 is RZ, UR63 is URZ, P7 is PT: they hold nothing.
R, UR, P, UP, B = 0, 256, 320, 328, 336
BARRIER_RESULT = 352  # what BAR.RED collects and B2R.RESULT reads
LOCAL = 1 << 30  # word w of the frame, w relative to the stack pointer at entry, is LOCAL + w (w may be negative)
LOCAL_ANY = 353  # something secret was stored in local memory where the analysis does not know

FILES = {"R": (R, 255), "UR": (UR, 63), "P": (P, 7), "UP": (UP, 7), "B": (B, 16)}

_REGISTER = re.compile(r"(UR|UP|R|P|B)(\d+|Z|T)((?:\.\w+)*)")
# What may stand behind a register or a memory operand. Only .64 (a pair) and .U32 (of an address: no pair) say anything
# about widths; the others choose parts of a register, or are hints.
_SUFFIXES = {
    *("reuse", "64", "U32", "X4", "X8", "X16", "H0", "H1", "H0_H0", "H1_H1", "B0", "B1", "B2", "B3"),
    *("ROW", "COL", "SIGN", "tnspA", "tnspB", "negA", "negB"),
}
_TERM = r"(?:-?0x[0-9a-f]+|(?:UR|R)(?:\d+|Z)(?:\.\w+)*)"
_INSIDE = re.compile(rf"(?:{_TERM}(?:\+{_TERM})*)?")
_RELOCATED = re.compile(r"`\(\(.*?\)\)|`\(.*?\)")  # an offset that the linker fills in: `((name + 0x10))
_DECORATED = re.compile(r"([-+~!|]*)(UR|UP|R|P|B)(\d+|Z|T)((?:\.\w+)*)\|?((?:\.\w+)*)")
_NUMBER = re.compile(r"[-+]?(0x[0-9a-f]+|\d+(\.\d*)?(e[-+]?\d+)?|INF|QNAN|SNAN)", re.IGNORECASE)


class UnknownInstruction(Exception):
    """The opcode, or this form of it, is not in the table; the text names it."""


@dataclass(frozen=True)
class Register:
    """One register as an operand names it; index -1 is RZ, URZ, PT or UPT."""

    file: str
    index: int
    suffix: str

    def locations(self, width: int = 1) -> tuple[int, ...]:
        """The `width` consecutive locations that start here; none for the constant registers."""
        base, count = FILES[self.file]
        if self.index < 0:
            return ()
        return tuple(range(base + self.index, base + min(self.index + width, count)))


@dataclass(frozen=True)
class Operand:
    """kind: a register file, ``PR``/``UPR`` (all predicates at once), ``mem``, ``imm``, ``label`` or ``word``."""

    kind: str
    text: str
    register: Register | None = None
    negated: bool = False
    space: str = ""  # of mem: "", "desc", "gdesc", "c", "cx"
    inside: tuple[tuple[Register, ...], ...] = ()  # of mem: the registers of each pair of brackets
    offset: int = 0  # of mem: the constant of the last brackets
    value: int | None = None  # of imm, if it is an integer


def location_name(location: int) -> str:
    """``R4``, ``UP0``, ``local[-0x10]``."""
    if location >= LOCAL // 2:
        return f"local[{4 * (location - LOCAL):#x}]"
    if location in (BARRIER_RESULT, LOCAL_ANY):
        return "barrier result" if location == BARRIER_RESULT else "local memory"
    name, (base, _) = max(((n, f) for n, f in FILES.items() if f[0] <= location), key=lambda item: item[1][0])
    return f"{name}{location - base}"


def _register(file: str, number: str, suffix: str) -> Register:
    """UnknownInstruction if one of the suffixes is not known."""
    left = [part for part in suffix.split(".") if part and part not in _SUFFIXES]
    if left:
        raise UnknownInstruction(f"{file}{number}{suffix}")
    return Register(file, -1 if number in "ZT" else int(number), suffix)


def split(text: str) -> list[str]:
    """Split at the commas outside all brackets; an indirect target's base, printed after a blank, is an operand too."""
    text = re.sub(r"\b(U?R(?:\d+|Z))\s+(?=[-`(0-9])", r"\1, ", text)
    parts, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += (character in "[({") - (character in "])}")
        if character == "," and depth == 0:
            parts.append(text[start:position])
            start = position + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def parse(text: str) -> Operand:
    """One operand. UnknownInstruction if it is of no form that is known."""
    text = text.replace("] [", "][")  # as constants of packed halves are printed
    match = _DECORATED.fullmatch(text)
    if match:
        marks, file, number, suffix, outer = match.groups()
        return Operand(file, text, _register(file, number, suffix + outer), "!" in marks)
    if "[" in text:
        match = re.fullmatch(r"[-+~|]*([a-z]*)((?:\[[^\]]*\])+)\|?((?:\.\w+)*)\|?", text)
        if not match or match[1] not in ("", "desc", "gdesc", "c", "cx"):
            raise UnknownInstruction(text)
        inside = re.findall(r"\[([^\]]*)\]", match[2])
        if match[1] in ("c", "cx"):  # where the content is public whatever the offset
            inside = [_RELOCATED.sub("0x0", part) for part in inside]
        left = [part for part in match[3].split(".") if part and part not in _SUFFIXES]
        if left or not all(_INSIDE.fullmatch(part) for part in inside):
            raise UnknownInstruction(text)
        registers = tuple(tuple(_register(*m.groups()) for m in _REGISTER.finditer(part)) for part in inside)
        constant = re.search(r"(?:^|[+])(-?0x[0-9a-f]+)$", inside[-1])
        offset = int(constant[1], 16) if constant else 0
        return Operand("mem", text, space=match[1], inside=registers, offset=offset)
    if text in ("PR", "UPR"):
        return Operand(text, text)
    if re.match(r"PR\.B\d$|UPR\.B\d$", text):
        raise UnknownInstruction(text)
    if _NUMBER.fullmatch(text):
        integer = re.fullmatch(r"[-+]?(0x[0-9a-f]+|\d+)", text)
        return Operand("imm", text, value=int(text, 0) if integer else None)
    if text.startswith("`(") or re.match(r"\d+@(lo|hi)\(", text):
        return Operand("label", text)
    if re.fullmatch(r"(SRZ?_?[\w.]*|SB\d|gsb\d|\{[\d,]*\}|[A-Z0-9_.]+)", text):
        return Operand("word", text)
    raise UnknownInstruction(text)
