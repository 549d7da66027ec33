"""Fixtures of the benchmark's tests."""

import sys

import pytest
import torch
from fake_gpu import gpu

from dhp_safe_fa.bench import __main__ as command
from dhp_safe_fa.bench.cases import Case

__all__ = ["a_gpu", "gpu"]


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as the command sees: a Hopper GPU with every kernel, and FlashAttention-3 is not installed."""
    environment = {"device": "GPU", "torch": "2", "dhp_safe_fa": "1", "commit": None, "multiprocessors": 132}
    host = torch.Generator
    monkeypatch.setattr(command, "_device", lambda args: ("cuda", None))
    monkeypatch.setattr(command, "environment", lambda device: environment)
    monkeypatch.setattr(torch, "Generator", lambda device: host())
    monkeypatch.setattr(Case, "check_served", lambda case: None)
    monkeypatch.setattr(command, "host_overhead", lambda *_: {})
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
