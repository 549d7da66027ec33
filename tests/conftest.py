"""Fixtures: the device, the target (device and dtype), and a fresh random generator for every test."""

from __future__ import annotations

import secrets
import zlib

import pytest
import torch
from harness import DEVICES, TARGETS, Target


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="repeat a run: the seed that a failed test printed")


def pytest_report_header(config: pytest.Config) -> str:
    return f"devices: {', '.join(DEVICES)}"


@pytest.fixture(scope="session")
def session_seed(request: pytest.FixtureRequest) -> int:
    given: int | None = request.config.getoption("--seed")
    return secrets.randbits(32) if given is None else given


@pytest.fixture
def rng(request: pytest.FixtureRequest, session_seed: int) -> torch.Generator:
    """Fresh random numbers every run; pytest shows the printed line beside a failure."""
    print(f"to repeat these inputs: pytest --seed {session_seed}")
    return torch.Generator().manual_seed(session_seed ^ zlib.crc32(request.node.nodeid.encode()))


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
