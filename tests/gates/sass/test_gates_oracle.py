"""The opcode table against a second opinion: the live ranges that the disassembler itself prints.

``nvdisasm -plr`` marks, for each instruction, the registers and predicates that it defines (^), uses (v) or both (x).
The table in isa.py was written without them, so agreement on real code says that operand order and widths are right.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dhp_safe_fa.gates import controls, targets, tools
from dhp_safe_fa.gates.sass.isa import effects
from dhp_safe_fa.gates.sass.listing import parse_listing
from dhp_safe_fa.gates.sass.operands import UP, UR, B, P, R, location_name

FILES = {"GPR": R, "PRED": P, "UGPR": UR, "UPRED": UP}
# Calls clobber what their callee does; P2R prints no use for the predicates that it reads.
NOT_COMPARED = {"CALL", "RET", "P2R", "UP2UR"}
# Data that goes to memory or into a matrix product: the result is secret anyhow, so the table leaves it out.
DATA_LEFT_OUT = {"ST", "STG", "STS", "STSM", "STAS", "RED", "REDG", "ATOM", "ATOMG", "ATOMS", "HGMMA"}

Columns = list[tuple[int, int, int]]  # location, first and last character of its column


def columns(files: list[str], numbers: str) -> Columns:
    """Where each location's mark stands, from the two header lines."""
    found: Columns = []
    start = 0
    for name, part in zip(files, numbers.split("|"), strict=True):
        if name in FILES:
            first = part.index("#") + 1
            for match in re.finditer(r"\d+", part[first:]):
                at = start + first
                found.append((FILES[name] + int(match[0]), at + match.start(), at + match.end()))
        start += len(part) + 1
    return found


def marked(listing: str) -> Iterator[tuple[str, set[int], set[int]]]:
    """Instruction text, defined locations, used locations."""
    files: list[str] = []
    where: Columns = []
    for line in listing.split("\n"):
        code, _, table = line.partition("// ")
        if re.search(r"\|\s+GPR\s", table):
            files = [part.strip() for part in table.split("|")]
        elif "#" in table and files:
            where, files = columns(files, table), []
        elif where and code.strip().startswith("/*"):
            marks = {location: table[first:last].strip() for location, first, last in where}
            yield (
                code.strip(),
                {location for location, mark in marks.items() if mark in ("^", "x")},
                {location for location, mark in marks.items() if mark in ("v", "x")},
            )


def disagreements(cubin: bytes, folder: Path) -> tuple[int, list[str]]:
    """Instructions compared, and one line for each that the table sees differently."""
    path = folder / "image.cubin"
    path.write_bytes(cubin)
    listing = tools.run([tools.find("nvdisasm"), "-c", "-plr", "-lrm", "wide", path])
    compared, wrong = 0, []

    def names(locations: set[int]) -> str:
        return " ".join(map(location_name, sorted(locations)))

    for text, defined, used in marked(listing):
        (instruction,) = parse_listing(re.sub(r"/\*[0-9a-f]+\*/", "", text)).code
        effect = effects(instruction.opcode, instruction.operands, instruction.guard)
        if instruction.base in NOT_COMPARED:
            continue
        compared += 1
        writes = {x for x in (*effect.writes, *effect.apart) if x < B}
        sinks = {x for _, locations in effect.sinks for x in locations}
        reads = {x for x in {*effect.flows, *sinks, *effect.stores, *effect.steers} if x < B}
        if writes != defined:
            wrong.append(f"{text} writes {names(writes)}, defines {names(defined)}")
        # a guarded write is printed as a use of the old value too
        missing = used - reads - (writes if effect.guard is not None else set())
        if reads - used or (missing and instruction.base not in DATA_LEFT_OUT):
            wrong.append(f"{text} reads {names(reads)}, uses {names(used)}")
    return compared, wrong


def test_controls(planted: controls.Controls, tmp_path: Path) -> None:
    total = 0
    for cubin in planted.cubins:
        compared, wrong = disagreements(cubin, tmp_path)
        assert wrong == []
        assert compared > 0
        total += compared
    assert total > 1000


def test_largest_shipped_kernel(nvdisasm: None, tmp_path: Path) -> None:
    try:
        cubin = max(targets.shipped(), key=lambda cubin: len(cubin.data))
    except tools.NotRun as error:
        pytest.skip(str(error))
    compared, wrong = disagreements(cubin.data, tmp_path)
    assert wrong == []
    assert compared > 1000
