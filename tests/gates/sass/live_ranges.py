"""What instructions read and write as the disassembler itself says it, and where the opcode table says otherwise.

``nvdisasm -plr`` marks, for each instruction, the registers and predicates that it defines (^), uses (v) or both (x).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from dhp_safe_fa.gates import tools
from dhp_safe_fa.gates.sass.isa import Effects, effects
from dhp_safe_fa.gates.sass.isa.operands import UP, UR, B, P, R, UnknownInstruction, location_name
from dhp_safe_fa.gates.sass.listing import Instruction, parse_listing

FILES = {"GPR": R, "PRED": P, "UGPR": UR, "UPRED": UP}
# Calls clobber what their callee does; P2R prints no use for the predicates that it reads, UR2UP none that it defines.
NOT_COMPARED = {"CALL", "RET", "P2R", "UP2UR", "UR2UP"}
# Before sm_90, these have a memory descriptor in a pair of uniform registers that is not printed.
DESCRIBED = {"LD", "LDG", "ST", "STG", "ATOM", "ATOMG", "RED", "LDGSTS"}


@dataclass(frozen=True)
class Marked:
    """One instruction and the locations that the disassembler marks."""

    instruction: Instruction
    defined: frozenset[int]
    used: frozenset[int]


def columns(files: list[str], numbers: str) -> dict[int, int]:
    """Character position to the location whose mark stands there, from the two header lines."""
    found = {}
    start = 0
    for name, part in zip(files, numbers.split("|"), strict=True):
        if name in FILES:
            first = part.index("#") + 1
            for match in re.finditer(r"\d+", part[first:]):
                for at in range(match.start(), match.end()):
                    found[start + first + at] = FILES[name] + int(match[0])
        start += len(part) + 1
    return found


def read(listing: str) -> Iterator[Marked]:
    """The instructions of a listing with live ranges."""
    files: list[str] = []
    where: dict[int, int] = {}
    for line in listing.split("\n"):
        code, _, table = line.partition("// ")
        if re.search(r"\|\s+GPR\s", table):
            files = [part.strip() for part in table.split("|")]
        elif "#" in table and files:
            where, files = columns(files, table), []
        elif where and code.strip().startswith("/*"):
            marks = [(m[0], where[m.start()]) for m in re.finditer(r"[\^vx]", table) if m.start() in where]
            (instruction,) = parse_listing(re.sub(r"/\*[0-9a-f]+\*/", "", code)).code
            yield Marked(
                instruction,
                frozenset(location for mark, location in marks if mark in "^x"),
                frozenset(location for mark, location in marks if mark in "vx"),
            )


def marked(cubin: bytes, folder: Path) -> list[Marked]:
    """Every instruction of a cubin."""
    path = folder / "image.cubin"
    path.write_bytes(cubin)
    return list(read(tools.run([tools.find("nvdisasm"), "-c", "-plr", "-lrm", "wide", path])))


def forms(instructions: Iterable[Marked], each: int) -> list[Marked]:
    """The first few of each form: opcode, kinds of operands and how many locations are marked."""
    count: dict[tuple[str, str, int, int], int] = {}
    found = []
    for one in instructions:
        shape = re.sub(r"(?<=[RPB])\d+|0x[0-9a-f]+", "#", one.instruction.operands)
        key = (one.instruction.opcode, shape, len(one.defined), len(one.used))
        count[key] = count.get(key, 0) + 1
        if count[key] <= each:
            found.append(one)
    return found


def _names(locations: Iterable[int]) -> str:
    return " ".join(map(location_name, sorted(locations)))


def _hidden(one: Marked) -> set[int]:
    """Uses that the text does not show, or that the table leaves out on purpose."""
    base, operands = one.instruction.base, one.instruction.operands
    uniform = {x for x in one.used if UR <= x < P}
    if base in DESCRIBED and "desc[" not in operands:
        return uniform
    if base.endswith("GMMA") and not operands.split(", ")[1].startswith("gdesc"):
        pair = re.search(r"gdesc\[UR(\d+)\]", operands)  # A is in registers, and the descriptor of A is not looked at
        return {UR + int(pair[1]), UR + int(pair[1]) + 1} if pair else set()
    return set()


def disagreement(one: Marked, table: Callable[[str, str, str], Effects] = effects) -> str:
    """A line if the table sees an instruction differently, or does not know it; empty if not."""
    instruction = one.instruction
    try:
        effect = table(instruction.opcode, instruction.operands, instruction.guard)
    except UnknownInstruction as error:
        return f"unknown: {error}"
    if instruction.base in NOT_COMPARED:
        return ""
    writes = {x for x in (*effect.writes, *effect.apart) if x < B}
    defined = set(one.defined)
    if instruction.base == "LDGSTS":  # its predicate, printed negated too, is marked as if it were a result
        defined = {x for x in defined if x < P}
    if writes != defined:
        return f"{instruction.text} writes {_names(writes)}, defines {_names(defined)}"
    sinks = {x for _, locations in effect.sinks for x in locations}
    reads = {x for x in {*effect.flows, *sinks, *effect.stores, *effect.steers} if x < B}
    if instruction.base == "LDGSTS":  # of a descriptor behind a uniform address, only the lower half is marked
        reads -= {x for x in reads - one.used if UR <= x < P}
    # a guarded write is printed as a use of the old value too
    missing = one.used - reads - _hidden(one) - (writes if effect.guard is not None else set())
    if missing or reads - one.used:
        return f"{instruction.text} reads {_names(reads)}, uses {_names(one.used)}"
    return ""
