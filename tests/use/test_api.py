"""What the package shows to its users: names, docstrings, types, and `python -m dhp_safe_fa`."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import HOPPER_MISSING

import dhp_safe_fa
import dhp_safe_fa.__main__ as report
from dhp_safe_fa import _inspect, _sdpa, evidence

FUNCTIONS = [
    value for name in dhp_safe_fa.__all__ if isinstance(value := getattr(dhp_safe_fa, name), types.FunctionType)
]


def test_public_names() -> None:
    values = {name: value for name, value in vars(dhp_safe_fa).items() if not name.startswith("_")}
    public = {name for name, value in values.items() if not inspect.ismodule(value)}
    assert public | {"__version__"} == set(dhp_safe_fa.__all__)
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", dhp_safe_fa.__version__)
    assert _inspect.build_info()["version"] == dhp_safe_fa.__version__


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_docstrings_of_functions(function: Callable[..., Any]) -> None:
    """What every parameter means, what comes back, and which errors."""
    text = inspect.getdoc(function) or ""
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^ +[\w, ]*\b{parameter}\b[\w, ]*: ", text, re.M), f"{parameter} is not explained"
    assert "Returns:" in text and "Raises:" in text


@pytest.mark.parametrize("name", ["Policy", "Call"])
def test_docstrings_of_classes(name: str) -> None:
    assert len(inspect.getdoc(getattr(dhp_safe_fa, name)) or "") > 40


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_types(function: Callable[..., Any]) -> None:
    hints = typing.get_type_hints(function)
    assert set(hints) == {*inspect.signature(function).parameters, "return"}


# ---- python -m dhp_safe_fa ------------------------------------------------------------------------------------------


def run(*arguments: str) -> str:
    command = [sys.executable, "-m", "dhp_safe_fa", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_report() -> None:
    text = run()
    assert text.startswith(f"dhp_safe_fa {dhp_safe_fa.__version__} in ")
    assert torch.__version__ in text
    for kernel in _inspect.kernels():
        assert kernel["name"] in text and kernel["cubin_sha256"][:16] in text
    said = evidence.status().line().removeprefix("stored evidence: ")
    assert f"\nevidence\n  {said}\n" in text
    assert ("runs the GPU kernels" in text) == (HOPPER_MISSING is None)


def test_report_as_json() -> None:
    found = json.loads(run("--json"))
    assert found["kernels"] == _inspect.kernels() and found["build"] == _inspect.build_info()
    assert [gpu["why_not"] is None for gpu in found["gpus"]] == [HOPPER_MISSING is None] * torch.cuda.device_count()


def test_version() -> None:
    assert run("--version").strip() == dhp_safe_fa.__version__


def test_report_on_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence says what the GPU is, what is supported."""
    other = types.SimpleNamespace(name="NVIDIA A100", major=8, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: other)
    monkeypatch.setattr(_sdpa, "HAS_GPU_KERNELS", True)
    text = "\n".join(report.lines(report.report()))
    assert "NVIDIA A100 (compute capability 8.0): not used: " in text
    assert "NVIDIA A100 has compute capability 8.0; supported: Hopper (9.0)" in text


def test_report_of_a_build_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inspect, "kernels", list)
    text = "\n".join(report.lines(report.report()))
    assert "no GPU kernels: nvcc was not found" in text
