"""Runs of the gate `counters` without a GPU: metrics that stand for their kind, and controls that come out right."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from dhp_safe_fa.gates import controls
from dhp_safe_fa.gates.counters import gate, hardware, looks, ncu
from dhp_safe_fa.gates.counters.counting import Count, Request
from dhp_safe_fa.gates.verdict import ControlOutcome

EXACT = "idc__requests.sum"
WITHIN = "lts__t_sectors_srcunit_tex_op_write.sum"
Measure = Callable[[Request, Callable[[int, str], None]], list[Count]]
RIGHT = [ControlOutcome("loop_bound", "caught", "something")]


def right_controls(monkeypatch: pytest.MonkeyPatch, expected: dict[str, str]) -> None:
    """A run without a GPU: these controls are there, and come out right."""
    monkeypatch.setattr(controls, "load_controls", lambda tell: SimpleNamespace(expected_of=lambda gate: expected))
    monkeypatch.setattr(gate, "judge_controls", lambda *_: RIGHT)
    monkeypatch.setattr(looks, "controls_in_doubt", lambda *_: {})


def counted_by(monkeypatch: pytest.MonkeyPatch, measure: Measure) -> None:
    """Whoever counts: this function."""
    monkeypatch.setattr(hardware, "measure", measure)
    monkeypatch.setattr(ncu, "measure", measure)
    monkeypatch.setattr(ncu, "find_ncu", lambda: None)
