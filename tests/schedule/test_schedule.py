"""The schedule of the forward kernel, on the host: csrc/kernels/attention_fwd.cu is compiled by the C++ compiler with
stubs in place of its instructions, and runs in the simulator of tests/schedule under random schedules. What is checked,
and what is not modelled, stands in schedule/simulator.cpp. Which query tiles its CTAs get: schedule/dealing.cpp.

`CXX` names the compiler (default `c++`), `CC` that of C (default `cc`).
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from harness import needs_kernels

import dhp_safe_fa

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "csrc" / "kernels"
SCHEDULE = ROOT / "tests" / "schedule"

sys.path.insert(0, str(KERNELS))
import build_cubins  # noqa: E402

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffunction-sections"]

pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason=f"no C++ compiler: {COMPILER[0]} was not found (CXX names another)"
)


class Shape(NamedTuple):
    """The constants of a kernel that its schedule depends on."""

    head_dim: int
    tile_k: int
    warpgroups: int
    rows: int
    stages: int
    ctas: int

    def __str__(self) -> str:
        return f"d{self.head_dim}_k{self.tile_k}_w{self.warpgroups}_r{self.rows}_s{self.stages}"


SHAPES = [Shape(*shape[:6]) for shape in build_cubins.SHAPES]

# All sequences of up to this many walks of 1 to this many key tiles: short ones next to each other, and ones that are
# longer than the stages. Each under so many schedules.
WALKS_AND_KEY_TILES, SCHEDULES = ((4, 4), (2, 9)), 4
VIOLATION = 1

Substitution = tuple[str, str]

# The simulator chooses the walks.
SCHEDULED_WORK: list[Substitution] = [
    ("work w = work_of(&p, walk);", "work w = scheduled_work<work>(walk);"),
    ("const work next = work_of(&p, ++walk);", "const work next = scheduled_work<work>(++walk);"),
]


@dataclass(frozen=True)
class Mutation:
    """A mistake in the kernel that the simulator has to find in at least one shape."""

    name: str
    substitutions: tuple[Substitution, ...]
    time_outs: bool = False  # only they bring it to light


MUTATIONS = [
    Mutation("load_skipped_never_loads", (("go && u - l->late >= w->tiles, l,", "0 && go, l,"),)),
    Mutation("no_zeros_complete_the_last_pair", (("zeros = next->tiles == 0 && !l->late;", "zeros = 0;"),)),
    Mutation(
        "finished_without_slot",
        (
            ("!is_last_group, FINISHED + pair.slot,", "!is_last_group, FINISHED,"),
            ("== 1 || is_last_group, FINISHED + pair.slot,", "== 1 || is_last_group, FINISHED,"),
        ),
    ),
    Mutation(
        "scored_without_slot",
        (
            ("(!is_last_group, SCORED + pair.slot,", "(!is_last_group, SCORED,"),
            ("(is_last_group, SCORED + pair.slot,", "(is_last_group, SCORED,"),
        ),
    ),
    Mutation(
        "no_arrival_for_the_missing_v", (("mbarrier_arrive_expect_tx(load.active && load.late, pairs_full, 0);", ""),)
    ),
    Mutation("k_asked_for_twice", (("LOAD_PAIR(!EARLY_K || load.late, t - 1);", "LOAD_PAIR(1, t - 1);"),)),
    Mutation("early_k_never_asked_for", (("LOAD_PAIR(!load.late, t);", "LOAD_PAIR(0, t);"),)),
    Mutation(
        "k_asked_for_before_all_have_scores", (("(is_last_group, SCORED + pair.slot,", "(0, SCORED + pair.slot,"),)
    ),
    Mutation("loads_after_a_time_out", (("load_pair((go) && arrived,", "load_pair((go),"),), time_outs=True),
    Mutation("rows_not_poisoned", (("poison = arrived ? 0.f : NAN;", "poison = 0.f;"),), time_outs=True),
]


def substitute(text: str, substitutions: list[Substitution]) -> str:
    for old, new in substitutions:
        count = text.count(old)
        assert count == 1, f"attention_fwd.cu has {count} places with the text {old!r}; this test needs exactly one"
        text = text.replace(old, new)
    return text


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
    print(shlex.join(map(str, command)), result.stdout, result.stderr, sep="\n")
    return result


def compile_object(source: Path, target: Path, *options: str) -> Path:
    result = run(*COMPILER, *FLAGS, *options, "-c", source, "-o", target)
    assert result.returncode == 0, result.stderr
    return target


def compile_kernel(folder: Path, source: str, shape: Shape, text: str) -> Path:
    """An object: `source` of tests/schedule, which includes the kernel, of this shape and text."""
    (folder / "attention_fwd.cu").write_text(text)
    # In this order: the copy of the kernel, what shadows its headers, and the headers that are not shadowed.
    includes = [folder, SCHEDULE / "stubs", SCHEDULE, KERNELS]
    constants = (f"-D{name.upper()}={value}" for name, value in shape._asdict().items())
    return compile_object(SCHEDULE / source, folder / "kernel.o", *constants, *(f"-I{path}" for path in includes))


Build = Callable[[Path, Shape, tuple[Substitution, ...]], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles what all kernels share; the function compiles a kernel, changed as told, and links a program."""
    folder = tmp_path_factory.mktemp("simulator")
    shared = [compile_object(SCHEDULE / f"{name}.cpp", folder / f"{name}.o") for name in ("simulator", "main")]

    def build_program(folder: Path, shape: Shape, changes: tuple[Substitution, ...]) -> Path:
        folder.mkdir(exist_ok=True)
        text = substitute((KERNELS / "attention_fwd.cu").read_text(), [*SCHEDULED_WORK, *changes])
        compiled = compile_kernel(folder, "kernel.cpp", shape, text)
        program = folder / "simulate"
        assert run(*COMPILER, compiled, *shared, "-o", program).returncode == 0
        return program

    return build_program


def simulate(program: Path, seed: int, time_outs: bool, walks: int, key_tiles: int) -> subprocess.CompletedProcess[str]:
    return run(program, *map(str, (walks, key_tiles, SCHEDULES, seed, int(time_outs))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_schedule_breaks_a_rule(tmp_path: Path, build: Build, session_seed: int, shape: Shape) -> None:
    print(f"to repeat these schedules: pytest --seed {session_seed}")
    program = build(tmp_path, shape, ())
    for walks, key_tiles in WALKS_AND_KEY_TILES:
        undisturbed = simulate(program, session_seed, False, walks, key_tiles)
        assert undisturbed.returncode == 0, undisturbed.stdout
        assert ", 0 poisoned" in undisturbed.stdout
        disturbed = simulate(program, session_seed, True, walks, key_tiles)
        assert disturbed.returncode == 0, disturbed.stdout
        assert ", 0 poisoned" not in disturbed.stdout, "no wait timed out"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_is_found(tmp_path: Path, build: Build, mutation: Mutation) -> None:
    for shape in reversed(SHAPES):
        program = build(tmp_path / str(shape), shape, mutation.substitutions)
        result = simulate(program, 0, mutation.time_outs, *WALKS_AND_KEY_TILES[0])
        assert result.returncode in (0, VIOLATION), f"ended with status {result.returncode}"
        if result.returncode == VIOLATION:
            assert result.stdout.startswith("violation: ")
            return
    pytest.fail("the simulator finds nothing wrong with the changed kernel in any shape")


# ---- dealing --------------------------------------------------------------------------------------------------------

# The C compiler of the host core, and the library that plans.
C_COMPILER = shlex.split(os.environ.get("CC", "cc"))
LIBRARY = Path(dhp_safe_fa.__file__).parent / "libdhp_fa.so"

needs_c = pytest.mark.skipif(
    shutil.which(C_COMPILER[0]) is None, reason=f"no C compiler: {C_COMPILER[0]} was not found (CC names another)"
)


class Call(NamedTuple):
    """B, Hq, Hk, Sq, Sk, D of a call in float16, and its mask."""

    batch: int
    heads: int
    key_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    is_causal: int
    causal_offset: int = 0


def causal(batch: int, heads: int, key_heads: int, seqlen: int, head_dim: int) -> Call:
    return Call(batch, heads, key_heads, seqlen, seqlen, head_dim, 1)


# How busy the CTAs have to be kept at least. Groups of packs, each longest first, kept those of the second 55 % busy.
BUSY = {
    causal(4, 16, 16, 900, 128): 0.96,
    causal(4, 8, 8, 2500, 256): 0.95,
    causal(1, 16, 16, 5001, 256): 0.96,
    causal(16, 16, 16, 300, 128): 0.96,
    causal(32, 8, 8, 512, 256): 0.96,
    causal(32, 32, 32, 512, 64): 0.97,
    causal(4, 32, 4, 2500, 64): 0.97,
    causal(2, 32, 32, 8192, 64): 0.98,
    causal(1, 16, 16, 16384, 128): 0.98,
    causal(2, 8, 8, 8192, 256): 0.98,
    causal(1, 1, 1, 200_000, 128): 0.98,
    causal(1, 8, 8, 512, 64): 0.6,  # one tile for each CTA: nothing to even out
    # where the diagonal is cut off, a tile and its mirror image are not equally long
    Call(4, 16, 16, 8192, 8192, 128, 1, -4096): 0.88,
    Call(1, 8, 8, 16384, 2048, 128, 1, -8192): 0.85,
}


# Three warpgroups at head_dim 64 serve long sequences, which are few among the random ones.
LONG = [
    Call(batch, heads, heads // group, seqlen_q, seqlen_k, 64, is_causal, offset)
    for batch, heads, group in ((1, 16, 1), (3, 40, 4), (1, 24, 8))
    for seqlen_q, seqlen_k in ((8192, 8192), (12_000, 5001), (5001, 9000))
    for is_causal, offset in ((0, 0), (1, 0), (1, seqlen_k - seqlen_q), (1, -700))
]


def random_call(random: Random) -> Call:
    key_heads, group = random.choice([1, 2, 3, 8, 16]), random.choice([1, 1, 2, 4, 8, 11])
    seqlen_q, seqlen_k = (int(10 ** random.uniform(0, 3.7)) for _ in range(2))
    offset = random.choice([0, seqlen_k - seqlen_q, random.randint(-2 * seqlen_q, 2 * seqlen_k)])
    head_dim = random.choice([64, 72, 128, 256])
    batch = random.choice([1, 2, 5, 32])
    return Call(batch, key_heads * group, key_heads, seqlen_q, seqlen_k, head_dim, random.randint(0, 1), offset)


def deal(folder: Path, shape: Shape, calls: Sequence[Call], changes: list[Substitution]) -> str:
    """What tests/schedule/dealing.cpp says of the calls that are planned for this kernel."""
    text = substitute((KERNELS / "attention_fwd.cu").read_text(), changes)
    compiled = compile_kernel(folder, "dealing.cpp", shape, text)
    schedule = folder / "schedule.o"
    assert run(*C_COMPILER, "-std=gnu11", "-O2", "-c", KERNELS.parent / "schedule.c", "-o", schedule).returncode == 0
    program = folder / "deal"
    # without the kernel itself, and so without the simulator that it would call
    options = ["-Wl,--gc-sections", f"-Wl,-rpath,{LIBRARY.parent}"]
    linked = run(*COMPILER, compiled, schedule, LIBRARY, *options, "-o", program)
    assert linked.returncode == 0, linked.stderr
    lines = "".join(" ".join(map(str, call)) + "\n" for call in calls)
    result = subprocess.run([program], input=lines, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode in (0, VIOLATION), f"ended with status {result.returncode}: {result.stderr}"
    return result.stdout


def assert_dealt_well(said: str) -> None:
    """No violation, and CTAs as busy as BUSY wants, in what `deal` returned."""
    assert "violation" not in said, said
    busy = {Call(*map(int, line.split(":")[0].split())): float(line.split(":")[1]) for line in said.splitlines()}
    assert busy, "none of the calls is planned for this kernel"
    for call, least in BUSY.items():
        assert busy.get(call, 1) >= least, call


@needs_kernels
@needs_c
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_query_tile_is_computed_once(tmp_path: Path, session_seed: int, shape: Shape) -> None:
    print(f"to repeat these calls: pytest --seed {session_seed}")
    random = Random(session_seed)
    calls = [*BUSY, *LONG, *(random_call(random) for _ in range(2000))]
    assert_dealt_well(deal(tmp_path, shape, calls, []))


# Mistakes in the dealing: a tile is left out, or computed twice, or some CTAs have more to do.
WRONG_DEALS = {
    "nobody_takes_the_rest": ("p->ordered_rounds + (cta < p->ordered_rest)", "p->ordered_rounds"),
    "one_twin_only": ("(whole << p->twins) + second", "(whole << p->twins)"),
    "no_mirror_image": ("tile = second ? shorter :", "tile = 0 ? shorter :"),
    "list_begins_early": ("(in_order ? 0 : p->ordered_items)", "0"),
}


@needs_kernels
@needs_c
@pytest.mark.parametrize("wrong", WRONG_DEALS.values(), ids=WRONG_DEALS.keys())
def test_a_wrong_deal_is_found(tmp_path: Path, wrong: Substitution) -> None:
    # two warpgroups at head_dim 256 serve most of these calls with that head_dim
    assert_dealt_well(deal(tmp_path, SHAPES[-1], list(BUSY), []))
    said = deal(tmp_path, SHAPES[-1], list(BUSY), [wrong])
    with pytest.raises(AssertionError):
        assert_dealt_well(said)
