"""Disassembly text to instructions: the format of ``nvdisasm -c -gi``, of which hand-written snippets are a subset.

The text is preferred to ``nvdisasm -json`` because only the text resolves branch labels, lists the targets of indirect
branches (which ptxas records in the cubin) and carries source lines.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(
    r"(?:/\*(?P<address>[0-9a-f]+)\*/)?\s*(?:@(?P<guard>!?U?P[\dT])\s+)?(?P<opcode>[A-Z][A-Z0-9_]*(?:\.\w+)*)"
    r"(?:\s+(?P<operands>[^;]*?))?\s*(?:\(\*\"(?P<note>[^\"]*)\"\*\)\s*)?;"
)
_LABEL = re.compile(r"([.$\w]+):")
_ENTRY = re.compile(r"\.other\s+(\S+),@\"STO_CUDA_ENTRY\b.*")
_SECTION = re.compile(r"\.section\s+([^\s,]+),.*")
_TARGET = re.compile(r"\.target\s+(\w+)")
_LINE = re.compile(r"//## File \"([^\"]+)\", line (\d+).*")
FRAGMENT = "snippet"  # the section, and the kernel, of code that comes without either
INSTRUCTION_BYTES = 16  # every instruction since sm_70


class ListingError(Exception):
    """A line of the disassembly is of no known form, or the listing contradicts itself."""


@dataclass(frozen=True)
class Instruction:
    """One instruction; `targets` are the labels that the cubin lists for an indirect branch."""

    section: str
    address: int
    guard: str
    opcode: str
    operands: str
    targets: tuple[str, ...] = ()
    source: str = ""  # file:line, where line information is there

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def modifiers(self) -> list[str]:
        return self.opcode.split(".")[1:]

    @property
    def text(self) -> str:
        return " ".join(part for part in (f"@{self.guard}" if self.guard else "", self.opcode, self.operands) if part)


@dataclass
class Program:
    """All code of a cubin, section after section; positions index `code`."""

    code: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    sections: dict[str, tuple[int, int]] = field(default_factory=dict)  # first position, one past the last
    kernels: list[str] = field(default_factory=list)
    target: str = ""  # sm_90a, where the listing says so
    threads: dict[str, int] = field(default_factory=dict)  # per block at most, of the kernels that are so bounded

    def position(self, section: str, address: int) -> int | None:
        """Position of the instruction at a section's address, if there is one."""
        start, end = self.sections[section]
        position = start + address // INSTRUCTION_BYTES
        return position if address % INSTRUCTION_BYTES == 0 and start <= position < end else None


def parse_listing(text: str) -> Program:
    """Instructions, labels and kernels of a listing. Without a section line, all is one kernel called ``snippet``,
    a piece of code whose registers have been set before it."""
    program = Program()
    section, source, pending = FRAGMENT, "", False
    start = 0
    for raw in text.splitlines():
        line = raw.strip()
        if match := _SECTION.fullmatch(line):
            program.sections[section] = (start, len(program.code))
            section, start, source = match[1], len(program.code), ""
        elif match := _TARGET.fullmatch(line):
            program.target = match[1]
        elif match := _ENTRY.fullmatch(line):
            program.kernels.append(match[1])
        elif match := _LINE.match(line):
            if not pending:  # the first line of a group is the innermost of an inlined call
                source = f"{match[1]}:{match[2]}"
            pending = True
        elif match := _LABEL.fullmatch(line):
            if program.labels.setdefault(match[1], len(program.code)) != len(program.code):
                raise ListingError(f"label {match[1]} is defined twice")
        elif line.startswith(("//", ".")) or not line:
            continue
        elif match := _INSTRUCTION.fullmatch(line):
            pending = False
            expected = (len(program.code) - start) * INSTRUCTION_BYTES
            address = int(match["address"], 16) if match["address"] else expected
            if address != expected:
                raise ListingError(f"{section}: instruction at {address:#x} where {expected:#x} was due")
            note = match["note"] or ""
            targets = note.removeprefix("BRANCH_TARGETS ").split(",") if note.startswith("BRANCH_TARGETS ") else []
            program.code.append(
                Instruction(
                    section,
                    address,
                    match["guard"] or "",
                    match["opcode"],
                    (match["operands"] or "").strip(),
                    tuple(target.strip() for target in targets),
                    source,
                )
            )
        else:
            raise ListingError(f"cannot read: {line}")
    program.sections[section] = (start, len(program.code))
    if program.code and not program.kernels and list(program.sections) == [FRAGMENT]:
        program.kernels.append(FRAGMENT)
        program.labels.setdefault(FRAGMENT, 0)
    return program
