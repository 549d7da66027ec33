"""The schedules of the kernels, on the host: each family's source is compiled by the C++ compiler with stubs in place
of its instructions, and runs in the simulator under random schedules. What is checked, and what is not modelled, stands
in simulator.cpp and in the family's model.cpp.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from compiling import COMPILER, Substitution, families, needs_compiler, run
from simulated import SCHEDULE, VIOLATION, Mutation, Simulated, compile_kernel, compile_object
from simulated_backward import BACKWARD
from simulated_forward import FORMS, FORWARD, LISTED, WINDOWED
from simulated_one_pass import ONE_PASS
from simulated_segments import IN_SEGMENTS, SPLIT

SIMULATED = [FORWARD, WINDOWED, LISTED, *FORMS, *IN_SEGMENTS, SPLIT, BACKWARD, ONE_PASS]
MACHINE = ("simulator", "barriers", "products", "main")
# Kernels of clusters: the simulator has one CTA. tests/emulated runs all of a cluster, thread by thread, in random
# order, with stores, loads and reads that end late and tiles that never come (test_emulated_decode.py).
CLUSTERS = {("decode", "")}
SCHEDULES = 4  # random ones for each sequence of tiles

pytestmark = needs_compiler

Build = Callable[[Simulated, families.Kernel, Path, tuple[Substitution, ...]], Path]


def test_every_source_that_has_a_schedule_is_simulated() -> None:
    """One without barriers and loads of its own has none: its threads read, compute and store."""
    sources = {
        (one, kernel.source or one.source, kernel.source) for one in families.families() for kernel in one.kernels
    }
    scheduled = {
        (one.name, own_source)
        for one, source, own_source in sources
        if "mbarrier_wait" in (one.folder / source).read_text()
    }
    assert {(simulated.name, simulated.source) for simulated in SIMULATED} | CLUSTERS == scheduled


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Compiles what all kernels share; the function compiles a kernel, changed as told, and links a program."""
    shared = tmp_path_factory.mktemp("simulator")
    objects = [compile_object(SCHEDULE / f"{name}.cpp", shared / f"{name}.o") for name in MACHINE]
    models = {
        (name, file): compile_object(SCHEDULE / name / file, shared / f"{name}_{file}.o")
        for name, file in sorted({(simulated.name, file) for simulated in SIMULATED for file in simulated.model})
    }

    def build_program(
        simulated: Simulated, kernel: families.Kernel, folder: Path, changes: tuple[Substitution, ...]
    ) -> Path:
        folder.mkdir(exist_ok=True)
        # a changed kernel runs until its mistake shows: most of its time goes to compiling
        optimization = "-O0" if changes else "-O2"
        all_changes = (*simulated.scheduled, *changes)
        compiled = compile_kernel(simulated, kernel, "kernel.cpp", folder, all_changes, optimization)
        program = folder / "simulate"
        model = [models[simulated.name, file] for file in simulated.model]
        assert run(*COMPILER, compiled, *model, *objects, "-o", program).returncode == 0
        return program

    return build_program


def simulate(program: Path, seed: int, time_outs: bool, tiles: int, steps: int) -> subprocess.CompletedProcess[str]:
    return run(program, *map(str, (tiles, steps, SCHEDULES, seed, int(time_outs))))


@pytest.mark.parametrize(
    ("simulated", "kernel"),
    [
        pytest.param(simulated, kernel, id=simulated.label_of(kernel))
        for simulated in SIMULATED
        for kernel in simulated.kernels
    ],
)
def test_no_schedule_breaks_a_rule(
    tmp_path: Path, build: Build, session_seed: int, simulated: Simulated, kernel: families.Kernel
) -> None:
    print(f"to repeat these schedules: pytest --seed {session_seed}")
    program = build(simulated, kernel, tmp_path, ())
    for tiles, steps in simulated.tiles_and_steps:
        undisturbed = simulate(program, session_seed, False, tiles, steps)
        assert undisturbed.returncode == 0, undisturbed.stdout
        assert ", 0 poisoned" in undisturbed.stdout
        disturbed = simulate(program, session_seed, True, tiles, steps)
        assert disturbed.returncode == 0, disturbed.stdout
        assert ", 0 poisoned" not in disturbed.stdout, "no wait timed out"


@pytest.mark.parametrize(
    ("simulated", "mutation"),
    [
        pytest.param(simulated, mutation, id=f"{simulated.label}-{mutation.name}")
        for simulated in SIMULATED
        for mutation in simulated.mutations
    ],
)
def test_a_mistake_is_found(tmp_path: Path, build: Build, simulated: Simulated, mutation: Mutation) -> None:
    for kernel in reversed(simulated.kernels):
        program = build(simulated, kernel, tmp_path / kernel.name, mutation.substitutions)
        result = simulate(program, 0, mutation.time_outs, *simulated.tiles_and_steps[0])
        assert result.returncode in (0, VIOLATION), f"ended with status {result.returncode}"
        if result.returncode == VIOLATION:
            assert result.stdout.startswith("violation: ")
            return
    pytest.fail("the simulator finds nothing wrong with the changed kernel in any shape")
