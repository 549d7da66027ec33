"""The opcode table against a second opinion: the live ranges that the disassembler itself prints.

The table was written without them, so agreement says that operand order and widths are right: on the controls, on a
shipped kernel, and on a family of PTX that reaches the instructions which those do not use, in every type and width.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_ranges import Marked, disagreement, forms, marked
from ptx_family import TARGETS, module

from dhp_safe_fa.gates import controls, targets, tools
from dhp_safe_fa.gates.sass.isa import effects, memory, opcodes, widths

LARGEST = "90a"  # the target that has every instruction

pytestmark = pytest.mark.long  # the family takes ptxas and the disassembler some 20 s a target


def family(target: str, folder: Path) -> list[Marked]:
    """Machine code of the family, each form a few times."""
    nvcc = controls.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found")
    source, cubin = folder / "family.ptx", folder / "family.cubin"
    source.write_text(module(target))
    tools.run([nvcc.parent / "ptxas", f"-arch=sm_{target}", "-O3", "-o", cubin, source])
    return forms(marked(cubin.read_bytes(), folder), each=3)


@pytest.fixture(scope="module")
def largest(nvdisasm: None, tmp_path_factory: pytest.TempPathFactory) -> list[Marked]:
    return family(LARGEST, tmp_path_factory.mktemp("family"))


def disagreements(instructions: list[Marked]) -> list[str]:
    return [line for line in map(disagreement, instructions) if line]


def test_controls(planted: controls.Controls, tmp_path: Path) -> None:
    instructions = [one for cubin in planted.cubins for one in marked(cubin, tmp_path)]
    assert disagreements(instructions) == []
    assert len(instructions) > 1000


def test_largest_shipped_kernel(nvdisasm: None, tmp_path: Path) -> None:
    try:
        cubin = max(targets.shipped(), key=lambda cubin: len(cubin.data))
    except tools.NotRun as error:
        pytest.skip(str(error))
    instructions = marked(cubin.data, tmp_path)
    assert disagreements(instructions) == []
    assert len(instructions) > 1000


def test_family(largest: list[Marked]) -> None:
    assert disagreements(largest) == []
    assert len({one.instruction.opcode for one in largest}) > 800


@pytest.mark.parametrize("target", [target for target in TARGETS if target != LARGEST])
def test_family_of_other_targets(nvdisasm: None, target: str, tmp_path: Path) -> None:
    instructions = family(target, tmp_path)
    assert disagreements(instructions) == []
    assert len({one.instruction.opcode for one in instructions}) > 500


# ---- a wrong entry is noticed ----------------------------------------------------------------------------------------


def noticed(instructions: list[Marked]) -> bool:
    return any(disagreement(one, effects.__wrapped__) for one in instructions)


def reached(largest: list[Marked], entries: dict[str, Any]) -> list[str]:
    bases = {one.instruction.base for one in largest}
    return [entry for entry in entries if entry in bases]


def test_the_family_reaches_the_table(largest: list[Marked]) -> None:
    """But for what other targets have, debug code, and what the compiler does with uniform registers alone."""
    elsewhere = {"QMMA", "IMNMX", "RED", "LEPC", "UPLOP3", "UBMSK"}
    assert {*opcodes.SLOTS, *memory._FORM} - {one.instruction.base for one in largest} <= elsewhere


def test_each_rule_of_widths(largest: list[Marked], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its rule, an opcode would take one register everywhere."""
    for opcode in reached(largest, widths._WIDTHS):
        with monkeypatch.context() as patch:
            patch.delitem(widths._WIDTHS, opcode)
            assert noticed([one for one in largest if one.instruction.base == opcode]), opcode


def test_each_destination(largest: list[Marked], monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first destination alone, or none, another row of the table would be meant."""
    unused = {"PLOP3", "VOTEU", "ULEA"}  # their second destination is always the constant predicate here
    for opcode in reached(largest, opcodes.SLOTS):
        slots = opcodes.SLOTS[opcode]
        with monkeypatch.context() as patch:
            patch.setitem(opcodes.SLOTS, opcode, slots[: len(slots) > 1])
            assert opcode in unused or noticed([one for one in largest if one.instruction.base == opcode]), opcode


@pytest.mark.parametrize(
    ("table", "changed"),
    [
        (widths._SHAPES, lambda shape: (shape[0], shape[1], 2 * shape[2])),
        (widths._ELEMENT_BITS, lambda bits: 2 * bits),
        (memory._DIMENSIONS, lambda count: count + 1),
        (memory._SURFACES, lambda count: count + 1),
    ],
    ids=["shapes", "element bits", "texture coordinates", "surface coordinates"],
)
def test_each_entry(
    table: dict[str, Any], changed: Callable[[Any], Any], largest: list[Marked], monkeypatch: pytest.MonkeyPatch
) -> None:
    ruled = {*widths._WIDTHS, *opcodes.words_of(opcodes.TEXTURE)}  # the opcodes that ask these tables

    def names(one: Marked, entry: str) -> bool:
        text = f"{one.instruction.opcode}.{one.instruction.operands}".replace(", ", ".")
        return one.instruction.base in ruled and entry in text.split(".")

    tried = 0
    for entry in table:
        code = [one for one in largest if names(one, entry)]
        with monkeypatch.context() as patch:
            patch.setitem(table, entry, changed(table[entry]))
            tried += bool(code)
            assert not code or noticed(code), entry
    assert tried >= len(table) / 2


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (memory, "moved", lambda modifiers: 4 if "128" in modifiers else 2 if "64" in modifiers else 1),
        (memory, "moved", lambda modifiers: 1),
        (memory, "gmma_widths", lambda base, modifiers: (widths.gmma(base, modifiers)[0], 2)),
        (memory, "gmma_widths", lambda base, modifiers: (widths.gmma(base, modifiers)[0] // 2, 4)),
        (memory, "GLOBAL", ""),
    ],
    ids=["types of atomics", "sizes", "fragment of A", "accumulator", "addresses"],
)
def test_rule(where: Any, name: str, wrong: Any, largest: list[Marked], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not noticed(largest)
    monkeypatch.setattr(where, name, wrong)
    assert noticed(largest)
