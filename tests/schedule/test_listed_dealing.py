"""Which query tiles of a list CTAs get: forward/listed_dealing.cpp asks for all of every CTA, on the host."""

from __future__ import annotations

import subprocess
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from compiling import COMPILER, CSRC, SHARED_STUBS, Substitution, copy_sources, needs_compiler, run
from simulated import SCHEDULE, VIOLATION, compile_kernel, compile_object
from simulated_forward import LISTED

pytestmark = needs_compiler

MULTIPROCESSORS = 132


class Call(NamedTuple):
    """CTAs, head groups and those of a section, and the key tiles of each tile of the list."""

    ctas: int
    groups: int
    section: int
    key_tiles: list[int]

    @property
    def text(self) -> str:
        return " ".join(map(str, (*self[:3], len(self.key_tiles), *self.key_tiles)))


def causal(lengths: list[int], rows: int, tile_k: int) -> list[int]:
    """Key tiles of the query tiles of such sequences, longest first."""
    tiles = [-(-min(n, (i + 1) * rows) // tile_k) for n in lengths for i in range(-(-n // rows))]
    return sorted(tiles, reverse=True)


# Lengths that are spread evenly over magnitudes, as those of `bench --varlen`.
MIXED = [round(16 * 512 ** (i * 0.618034 % 1)) for i in range(64)]
# How busy the CTAs have to be kept at least.
BUSY = [
    (Call(MULTIPROCESSORS, 32, 4, causal(MIXED, 128, 128)), 0.99),
    (Call(MULTIPROCESSORS, 16, 1, causal(MIXED, 192, 128)), 0.98),
    (Call(MULTIPROCESSORS, 8, 1, causal(MIXED, 128, 80)), 0.98),
    (Call(MULTIPROCESSORS, 32, 4, causal([2048] * 16, 128, 128)), 0.97),
    (Call(MULTIPROCESSORS, 16, 4, causal([8192] * 2, 128, 128)), 0.99),
    (Call(MULTIPROCESSORS, 8, 4, causal([3000, 5000, 777, 8192, 100, 200, 4000], 128, 128)), 0.95),
    (Call(MULTIPROCESSORS, 8, 8, causal([4096] * 3, 128, 128)), 0.95),  # few rounds: one section
]


def deal(folder: Path, calls: list[Call], changes: tuple[Substitution, ...] = ()) -> list[float]:
    """How busy CTAs are in each call; AssertionError if a tile is left out, or computed twice."""
    compiled = compile_kernel(LISTED, LISTED.kernels[-1], "listed_dealing.cpp", folder, (*LISTED.scheduled, *changes))
    program = folder / "deal"
    linked = run(*COMPILER, compiled, "-Wl,--gc-sections", "-o", program)
    assert linked.returncode == 0, linked.stderr
    lines = "\n".join(call.text for call in calls)
    result = subprocess.run([program], input=lines, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode in (0, VIOLATION), f"ended with status {result.returncode}: {result.stderr}"
    assert "violation" not in result.stdout, result.stdout
    return [float(line) for line in result.stdout.split()]


def random_call(random: Random) -> Call:
    section, sections = random.choice([1, 2, 3, 8]), random.choice([1, 2, 3, 5])
    tiles = sorted((random.randint(1, 90) for _ in range(random.choice([0, 1, 7, 60, 400]))), reverse=True)
    return Call(random.choice([1, 5, MULTIPROCESSORS]), section * sections, section, tiles)


def test_every_tile_is_computed_once(tmp_path: Path, session_seed: int) -> None:
    print(f"to repeat these calls: pytest --seed {session_seed}")
    random = Random(session_seed)
    calls = [call for call, _ in BUSY]
    busy = deal(tmp_path, [*calls, *(random_call(random) for _ in range(300))])
    assert all(got >= least for got, (_, least) in zip(busy, BUSY, strict=False)), busy[: len(BUSY)]


@pytest.mark.parametrize("wrong", [(), (("i < 2;", "i < 0;"),), (("(uint32_t)(result + 1)", "(uint32_t)result"),)])
def test_the_device_divides_by_the_numbers_of_the_host(
    tmp_path: Path, session_seed: int, wrong: tuple[Substitution, ...]
) -> None:
    """By the count of a list, which the host does not know: forward/divisors.cpp."""
    copy = copy_sources([CSRC / "families" / "tiles" / "tiles.cu"], tmp_path, wrong, SCHEDULE / "stubs" / "ptx.cuh")
    hopper, program = copy.parents[1] / "hopper", tmp_path / "divisors"
    source = SCHEDULE / "forward" / "divisors.cpp"
    compiled = compile_object(source, tmp_path / "divisors.o", "-O2", f"-I{hopper}", f"-I{SHARED_STUBS}")
    assert run(*COMPILER, compiled, "-o", program).returncode == 0
    result = run(program, str(session_seed))
    assert result.returncode == (VIOLATION if wrong else 0), result.stdout


WRONG = {
    "sections_overlap": ("nth_section * section +", "0 * section +"),
    "a_section_of_another_size": ("max(count * section, 1)", "max(count * section + 1, 1)"),
    "heads_as_they_come": ("place - of_list * section", "0"),
    "too_few_items": ("items = count * p->head_groups;", "items = count * p->head_groups - 1;"),
    "every_section_descends": ("follow & 1 ? of_section - 1 - rest : rest", "rest"),  # then CTAs are idle
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_deal_is_found(tmp_path: Path, wrong: Substitution) -> None:
    with pytest.raises(AssertionError):
        busy = deal(tmp_path, [call for call, _ in BUSY], (wrong,))
        assert all(got >= least for got, (_, least) in zip(busy, BUSY, strict=True))
