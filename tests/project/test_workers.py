"""How `make test` spreads the tests: into how many processes, which stay together, and that no test is left out."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import workers

ROOT = Path(__file__).resolve().parents[2]


def test_cores_are_those_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    for limit, cores in (("max 100000", 64), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 64)):
        monkeypatch.setattr(Path, "read_text", lambda _, limit=limit: limit)
        assert workers.cores() == cores


@pytest.mark.parametrize(
    ("arguments", "marks", "processes"),
    [
        (["tests"], "not long", 5),
        (["tests/attention"], "not long", 5),
        (["tests/use/test_api.py", "tests/use/test_sdpa.py"], "", 5),
        (["tests/use/test_api.py"], "not long", 0),
        (["tests/use/test_api.py::test_version"], "not long", 0),
        (["tests"], "long", 0),
    ],
)
def test_processes(monkeypatch: pytest.MonkeyPatch, arguments: list[str], marks: str, processes: int) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 5)
    assert workers.count(arguments, marks) == processes


def test_a_machine_with_very_many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "cores", lambda: 200)
    assert workers.count(["tests"], "") == workers.MAX_WORKERS


def test_what_one_target_leaves_out_the_other_runs() -> None:
    """And what CI runs is both, the longer list last: its summary is the last line."""
    recipe = re.compile(r"^(test[a-z-]*):.*\n\t@\$\(PYTHON\) -m pytest (.*) \$\(ARGS\)$", re.M)
    commands = dict(recipe.findall((ROOT / "Makefile").read_text()))
    marks = {target: re.findall(r'-m ("[^"]+"|\S+)', command) for target, command in commands.items()}
    assert marks == {"test": ['"not long"'], "test-long": ["long"]}
    assert (ROOT / ".ci" / "run").read_text().split("\n")[-3:] == ["make test-long", "make test", ""]


# ---- groups ---------------------------------------------------------------------------------------------------------

TESTS = """
import pytest
from harness import Target, needs_hopper

@pytest.fixture(scope="module")
def built(): ...

def test_alone(): ...

def test_shares(built): ...

def test_cheap(session_seed, tmp_path_factory): ...

@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_device(device): ...

@pytest.mark.parametrize("target", [Target("cpu", None), Target("cuda", None)], ids=["c", "g"])
def test_target(target): ...

@needs_hopper
def test_marked(): ...
"""


def test_groups(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path = tmp_path / "test_groups_sample.py"
    path.write_text(TESTS)
    module = pytest.Module.from_parent(request.session, path=path)
    items = [item for item in module.collect() if isinstance(item, pytest.Function)]
    workers.assign(items)
    got = {item.name: [mark.args[0] for mark in item.iter_markers("xdist_group")] for item in items}
    assert got == {
        "test_alone": [],
        "test_shares": [module.nodeid],
        "test_cheap": [],
        "test_device[cpu]": [],
        "test_device[cuda]": ["gpu-0"],
        "test_target[c]": [],
        "test_target[g]": ["gpu-1"],
        "test_marked": ["gpu-2"],
    }
