"""A wait without a branch says at the end whether the tile came. A warp that reads the tile before it knows that has
not waited, and what it says of the wait is no use: so in shipped machine code no read follows a try whose outcome is
still open, and which counts. A try that is made only if the one before was in vain stands under a predicate: with a
branch the number of executed instructions would depend on when the tile comes. A sleep may end at once, and a second
one right after it not: a wait that gives up after it naps has two."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from snippets import program

from dhp_safe_fa.gates import controls, provenance, targets, tools
from dhp_safe_fa.gates.sass.cfg import build_graph
from dhp_safe_fa.gates.sass.listing import Instruction, Program, parse_listing
from dhp_safe_fa.gates.tools import NotRun

READS = ("LDS", "LDSM", "HGMMA")  # of what TMA brings
BRANCHES = ("BRA", "BRX", "BRXU", "EXIT")


def is_try(instruction: Instruction) -> bool:
    return instruction.base == "SYNCS" and "TRYWAIT" in instruction.modifiers


def early_reads(code: Program, kernel: str) -> list[str]:
    """Reads of shared memory between a try and the first instruction that needs its outcome, on any path."""
    graph = build_graph(code, kernel)
    block_of = {at: block for block, (first, last) in enumerate(graph.blocks) for at in range(first, last + 1)}

    def after(at: int) -> list[int]:
        block = block_of[at]
        last = at == graph.blocks[block][1]
        return [graph.blocks[next_one][0] for next_one in graph.successors[block]] if last else [at + 1]

    found: set[int] = set()
    for start in (at for at in block_of if is_try(code.code[at])):
        predicate = code.code[start].operands.split(",")[0]
        if predicate == "PT":  # nobody can ask
            continue
        outcome = re.compile(rf"\b{predicate}\b")
        todo, seen = [(at, -1) for at in after(start)], set()
        while todo:
            at, read = todo.pop()
            if (at, read >= 0) in seen:
                continue
            seen.add((at, read >= 0))
            instruction = code.code[at]
            written, _, used = instruction.operands.partition(",")
            if outcome.search(instruction.guard) or outcome.search(used):
                found |= {read} - {-1}
            elif not outcome.search(written):  # else the outcome is lost
                is_read = read < 0 and instruction.base in READS
                todo += [(one, at if is_read else read) for one in after(at)]
    return [f"{code.code[at].address:#x} {code.code[at].text}" for at in sorted(found)]


def lone_naps(code: Program) -> list[str]:
    """Sleeps that no second one of the same length follows, or comes before, with no other instruction of waiting in
    between."""
    waits = [one for one in code.code if one.base == "NANOSLEEP" or is_try(one)]
    naps, found = iter(waits), []
    for one in naps:
        if one.base == "NANOSLEEP":
            second = next(naps, None)
            if second is None or second.base != "NANOSLEEP" or second.operands != one.operands:
                found.append(f"{one.address:#x} {one.text}")
    return found


def is_look(instruction: Instruction) -> bool:
    return instruction.base == "SYNCS" and instruction.modifiers[:1] == ["PHASECHK"] and not is_try(instruction)


def tries_behind_branches(code: Program) -> list[str]:
    """Tries under a predicate that no look or try before made, or between which and the try before control may go
    elsewhere. Between a look and the first try it may, and there the predicate may move: what the look said is asked by
    the try."""
    found, follows_look, asked = [], False, ""
    for one in code.code:
        if is_try(one):
            is_known = follows_look or one.guard == f"!{asked}"
            found += [f"{one.address:#x} {one.text}"] if one.guard and not is_known else []
            follows_look, asked = False, one.operands.split(",")[0]
        elif is_look(one):
            follows_look = True
        elif one.base in BRANCHES:
            asked = ""
    return found


TRY = "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3\n"
FURTHER = "@!P0 " + TRY
LOOK = TRY.replace(".TRYWAIT", "")
KNOWN = "SEL R5, R5, R6, P0\n"
READ = "LDS.64 R8, [R9]\n"


@pytest.mark.parametrize(
    ("code", "is_early"),
    [
        (TRY + KNOWN + READ, False),
        (TRY + READ + KNOWN, True),
        (TRY + READ, False),  # nobody asks what it says
        (TRY.replace("P0", "PT") + READ + "ISETP.NE.AND P0, PT, R1, RZ, PT\n", False),
        (TRY + KNOWN + TRY + READ, False),
        (TRY + KNOWN + TRY + READ + KNOWN, True),
        (TRY + READ + "ISETP.NE.AND P0, PT, R1, RZ, PT\n" + KNOWN, False),
        (TRY + "HGMMA.64x128x16.F32 R24, gdesc[UR8], R24\n" + "VOTEU.ANY UP0, P0\n", True),
        (TRY + "VOTEU.ANY UP0, P0\n" + READ + KNOWN, False),
        (TRY + FURTHER + KNOWN + READ, False),
        (TRY + FURTHER + READ + KNOWN, True),
        (TRY + READ + FURTHER + KNOWN, True),
        (TRY + READ + "BRA `(.L_1)\nEXIT\n.L_1:\n" + KNOWN + "EXIT\n", True),
    ],
)
def test_an_early_read_is_found(code: str, is_early: bool) -> None:
    assert bool(early_reads(program(code), "snippet")) == is_early


@pytest.mark.parametrize(
    ("code", "behind"),
    [
        (TRY + FURTHER + FURTHER + KNOWN, 0),
        (TRY + "BRA `(.L_1)\n.L_1:\n" + FURTHER + FURTHER + KNOWN, 1),
        (TRY + FURTHER + "@P0 BRA `(.L_1)\n" + FURTHER + ".L_1:\n" + KNOWN, 1),
        (FURTHER + KNOWN, 1),
        (TRY + FURTHER.replace("@!P0", "@!P1") + KNOWN, 1),
        (TRY + FURTHER.replace("@!P0", "@P0") + KNOWN, 1),
        (TRY + "BRA `(.L_1)\n.L_1:\n" + TRY + KNOWN, 0),
        (LOOK + "BRA `(.L_1)\n.L_1:\n" + FURTHER + FURTHER + KNOWN, 0),
        (LOOK + "BRA `(.L_1)\n.L_1:\n" + FURTHER + "BRA `(.L_2)\n.L_2:\n" + FURTHER + KNOWN, 1),
    ],
)
def test_a_try_behind_a_branch_is_found(code: str, behind: int) -> None:
    assert len(tries_behind_branches(program(code))) == behind


NAP = "NANOSLEEP R7\n"


@pytest.mark.parametrize(
    ("code", "lone"),
    [
        (TRY + NAP + NAP + TRY + KNOWN, 0),
        (TRY + NAP + KNOWN + NAP + TRY, 0),
        (TRY + NAP + TRY, 1),
        (TRY + NAP + TRY + NAP, 2),
        (TRY + NAP, 1),
        (TRY + NAP + NAP.replace("R7", "R8") + TRY, 1),
    ],
)
def test_a_lone_nap_is_found(code: str, lone: int) -> None:
    assert len(lone_naps(program(code))) == lone


AWAIT = """
#include "hopper/ptx.cuh"
extern "C" __global__ void await(uint32_t *out, uint32_t barrier, uint32_t parity) {
  *out = mbarrier_await(barrier, PHASE(parity), 3);
}
"""


def of_shifted(code: Program) -> list[str]:
    """Looks and tries, in a program without branches, that name a word into which something was shifted by 31."""
    shifted: set[str] = set()
    found = []
    for one in code.code:
        written, _, used = (part.strip() for part in one.operands.partition(","))
        if one.base == "SYNCS":
            word = used.rpartition(",")[2].strip()
            found += [".".join([one.base, *one.modifiers])] if word in shifted else []
        elif (one.base in ("SHF", "USHF") and one.modifiers[0] == "L" and "0x1f" in used) or (
            one.base in ("MOV", "UMOV") and used in shifted
        ):
            shifted.add(written)
        else:
            shifted.discard(written)
    return found


@pytest.mark.parametrize("by_state", [0, 1])
def test_a_state_has_the_parity_in_its_high_word(tmp_path: Path, nvdisasm: None, by_state: int) -> None:
    """What PTX leaves open (ptx.cuh): of either form the machine code looks at one word, with the parity in bit 31. Of
    a state, a pair of registers, that is the odd one."""
    nvcc = controls.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found")
    (tmp_path / "k.cu").write_text(AWAIT)
    options = [f"-DWAITS_BY_STATE={by_state}", "-DELEMENT_IS_BFLOAT16=1", f"-I{provenance.ROOT / 'csrc'}", "-std=c++17"]
    cubin = tmp_path / "k.cubin"
    subprocess.run([nvcc, "-arch=sm_90a", "-cubin", *options, "-o", cubin, tmp_path / "k.cu"], check=True)
    code = parse_listing(tools.disassemble(cubin.read_bytes()))
    look, *tries = of_shifted(code)
    assert look == "SYNCS.PHASECHK.TRANS64" and tries == 3 * ["SYNCS.PHASECHK.TRANS64.TRYWAIT"]
    if by_state:
        words = {int(one.operands.rpartition("R")[2]) % 2 for one in code.code if one.base == "SYNCS"}
        assert words == {1}


def test_shipped_kernels_wait(nvdisasm: None) -> None:
    try:
        cubins = targets.shipped()
    except NotRun as reason:
        pytest.skip(str(reason))
    tries = looks = naps = 0
    for cubin in cubins:
        code = parse_listing(tools.disassemble(cubin.data))
        (kernel,) = code.kernels
        tries += sum(map(is_try, code.code))
        looks += sum(map(is_look, code.code))
        assert early_reads(code, kernel) == [], cubin.name
        assert tries_behind_branches(code) == [], cubin.name
        if cubin.name.startswith(("bwd_", "dec_")):  # the forward waits again where it has slept in vain
            naps += sum(one.base == "NANOSLEEP" for one in code.code)
            assert lone_naps(code) == [], cubin.name
    assert tries > looks > 0
    assert naps > 0
