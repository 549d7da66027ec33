"""Fixtures of the gate tests: the planted controls, compiled once, and the tools that a test needs."""

from __future__ import annotations

import pytest

from dhp_safe_fa.gates import controls, subjects, tools


@pytest.fixture(scope="session")
def nvdisasm() -> None:
    """Skips where there is no disassembler, with the cause."""
    try:
        tools.find("nvdisasm")
    except tools.NotRun as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def planted(nvdisasm: None) -> controls.Controls:
    """The controls as the gate loads them; skips where there is no compiler."""
    try:
        return controls.load_controls()
    except tools.NotRun as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def outcomes(planted: controls.Controls) -> dict[str, controls.Outcome]:
    """What the gate says of each control."""
    return {outcome.name: outcome for outcome in controls.run_controls(planted)}


@pytest.fixture
def gpu() -> None:
    """Skips where there is no Hopper GPU, with the cause."""
    try:
        subjects.require_gpu()
    except tools.NotRun as error:
        pytest.skip(str(error))
