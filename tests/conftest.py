"""Fixtures: the device, the target (device and dtype), and a fresh random generator for every test; and the hooks that
spread the tests over processes (workers.py)."""

from __future__ import annotations

import secrets
import zlib

import pytest
import torch
import workers
from harness import DEVICES, TARGETS, Target


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="repeat a run: the seed that a failed test printed")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = secrets.randbits(32)  # workers are given the options, and so all have this one
    if hasattr(config, "workerinput"):
        workers.divide_cores(config.workerinput["workercount"])


def pytest_report_header(config: pytest.Config) -> str:
    return f"devices: {', '.join(DEVICES)}; seed: {config.option.seed}"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    return workers.count(config.args, config.option.markexpr)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        workers.assign(items)


@pytest.fixture(scope="session")
def session_seed(request: pytest.FixtureRequest) -> int:
    seed: int = request.config.option.seed
    return seed


@pytest.fixture
def rng(request: pytest.FixtureRequest, session_seed: int) -> torch.Generator:
    """Fresh random numbers every run; pytest shows the printed line beside a failure."""
    print(f"to repeat these inputs: pytest --seed {session_seed}")
    # Not the node's id: in a worker that has the name of its group at the end.
    name = f"{request.path.relative_to(request.config.rootpath).as_posix()}::{request.node.name}"
    return torch.Generator().manual_seed(session_seed ^ zlib.crc32(name.encode()))


# Session scope, so that hypothesis may use them.
@pytest.fixture(scope="session", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Every device the operator runs on here."""
    return str(request.param)


@pytest.fixture(scope="session", params=TARGETS, ids=str)
def target(request: pytest.FixtureRequest) -> Target:
    """Every (device, dtype) the operator serves here."""
    param: Target = request.param
    return param
