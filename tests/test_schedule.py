"""The schedule of the forward kernel, on the host: csrc/kernels/attention_fwd.cu is compiled by the C++ compiler with
stubs in place of its instructions, and runs in the simulator of tests/schedule under random schedules.

`CXX` names the compiler (default `c++`). What is checked, and what is not modelled, stands in schedule/simulator.cpp.
"""

from __future__ import annotations

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "csrc" / "kernels"
SCHEDULE = ROOT / "tests" / "schedule"

sys.path.insert(0, str(KERNELS))
build_script = importlib.import_module("build")  # not `import build`: mypy would look into the folder build/

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]

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


SHAPES = [Shape(*shape[:6]) for shape in build_script.SHAPES]

# All sequences of up to this many walks of 1 to this many key tiles, each under so many schedules.
WALKS, KEY_TILES, SCHEDULES = 4, 4, 4
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


Build = Callable[[Path, Shape, tuple[Substitution, ...]], Path]


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles what all kernels share; the function compiles a kernel, changed as told, and links a program."""
    folder = tmp_path_factory.mktemp("simulator")
    shared = [compile_object(SCHEDULE / f"{name}.cpp", folder / f"{name}.o") for name in ("simulator", "main")]

    def build_program(folder: Path, shape: Shape, changes: tuple[Substitution, ...]) -> Path:
        folder.mkdir(exist_ok=True)
        text = (KERNELS / "attention_fwd.cu").read_text()
        (folder / "attention_fwd.cu").write_text(substitute(text, [*SCHEDULED_WORK, *changes]))
        # In this order: the copy of the kernel, what shadows its headers, and the headers that are not shadowed.
        includes = [folder, SCHEDULE / "stubs", SCHEDULE, KERNELS]
        options = [
            *(f"-D{name.upper()}={value}" for name, value in shape._asdict().items()),
            *(f"-I{path}" for path in includes),
        ]
        compiled = compile_object(SCHEDULE / "kernel.cpp", folder / "kernel.o", *options)
        program = folder / "simulate"
        assert run(*COMPILER, compiled, *shared, "-o", program).returncode == 0
        return program

    return build_program


def simulate(program: Path, seed: int, time_outs: bool) -> subprocess.CompletedProcess[str]:
    return run(program, *map(str, (WALKS, KEY_TILES, SCHEDULES, seed, int(time_outs))))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_schedule_breaks_a_rule(tmp_path: Path, build: Build, session_seed: int, shape: Shape) -> None:
    print(f"to repeat these schedules: pytest --seed {session_seed}")
    program = build(tmp_path, shape, ())
    undisturbed = simulate(program, session_seed, time_outs=False)
    assert undisturbed.returncode == 0, undisturbed.stdout
    assert ", 0 poisoned" in undisturbed.stdout
    disturbed = simulate(program, session_seed, time_outs=True)
    assert disturbed.returncode == 0, disturbed.stdout
    assert ", 0 poisoned" not in disturbed.stdout, "no wait timed out"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mistake_is_found(tmp_path: Path, build: Build, mutation: Mutation) -> None:
    for shape in reversed(SHAPES):
        program = build(tmp_path / str(shape), shape, mutation.substitutions)
        result = simulate(program, seed=0, time_outs=mutation.time_outs)
        assert result.returncode in (0, VIOLATION), f"ended with status {result.returncode}"
        if result.returncode == VIOLATION:
            assert result.stdout.startswith("violation: ")
            return
    pytest.fail("the simulator finds nothing wrong with the changed kernel in any shape")
