"""How `make test` spreads the tests over processes (pytest-xdist): how many there are, and which tests stay together.

Tests on the GPU share a few processes, because kernels of different processes take turns on one GPU. Tests that need a
fixture of their module or folder stay in one process, where it is made once. Every other test goes where there is room.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness import needs_hopper

# Beyond this many, starting a worker (seconds, and a copy of torch) takes longer than what it would run.
MAX_WORKERS = 16
GPU_PROCESSES = 3


def cores() -> int:
    """Processor cores that this process may use: its affinity, and the limit of its container (control groups v2)."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no control groups, or "max": no limit
        return allowed


def count(arguments: Sequence[str], marks: str) -> int:
    """Processes for `-n auto`, given pytest's paths and its -m; 0 is the process that was started and no other.

    One file is over before the workers have started, and long tests need the machine for themselves.
    """
    one_file = len(arguments) == 1 and ".py" in arguments[0]
    return 0 if one_file or marks == "long" else min(cores(), MAX_WORKERS)


def divide_cores(workers: int) -> None:
    """In a worker: its part of the cores for torch's threads, and no processes beside it that compile.

    torch's threads spin while they wait for one another: with two to a core a test took seven times as long. How the
    CPU kernel divides its work is tested by setting the number of threads (tests/attention/test_row_invariance.py).
    """
    torch.set_num_threads(max(1, cores() // workers))
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"


def uses_gpu(item: pytest.Item) -> bool:
    """By its parameters device and target, the fixture `gpu`, or the mark needs_hopper."""
    assert isinstance(item, pytest.Function)
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    devices = (parameters.get("device"), getattr(parameters.get("target"), "device", None))
    return "cuda" in devices or "gpu" in item.fixturenames or needs_hopper.mark in item.iter_markers()


def shared_fixtures(item: pytest.Item) -> str | None:
    """The file or folder whose fixtures, made once for all of its tests, this one uses; None if there are none.

    Those of tests/conftest.py do not count: they cost nothing.
    """
    assert isinstance(item, pytest.Function)
    # pytest has no public way to ask for the scope of a test's fixtures.
    fixtures = [definitions[-1] for definitions in item._fixtureinfo.name2fixturedefs.values()]
    owners = {fixture.baseid for fixture in fixtures if fixture.scope in ("module", "package", "session")}
    return min(owners - {"", "tests"}, key=len, default=None)


def assign(items: Sequence[pytest.Item]) -> None:
    """Marks each test that may not go just anywhere with the group that stays in one process."""
    on_gpu = 0
    for item in items:
        if uses_gpu(item):
            group: str | None = f"gpu-{on_gpu % GPU_PROCESSES}"
            on_gpu += 1
        else:
            group = shared_fixtures(item)
        if group:
            item.add_marker(pytest.mark.xdist_group(group))
