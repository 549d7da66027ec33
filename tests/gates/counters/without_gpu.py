"""Runs of the gate `counters` without a GPU: metrics that stand for their kind, and controls that come out right."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dhp_safe_fa.gates import controls
from dhp_safe_fa.gates.counters import gate, looks
from dhp_safe_fa.gates.verdict import ControlOutcome

EXACT = "smsp__thread_inst_executed_pred_on.sum"
WITHIN = "lts__t_sectors_srcunit_tex_op_write.sum"
RIGHT = [ControlOutcome("loop_bound", "caught", "something")]


def right_controls(monkeypatch: pytest.MonkeyPatch, expected: dict[str, str]) -> None:
    """A run without a GPU: these controls are there, and come out right."""
    monkeypatch.setattr(controls, "load_controls", lambda tell: SimpleNamespace(expected_of=lambda gate: expected))
    monkeypatch.setattr(gate, "judge_controls", lambda *_: RIGHT)
    monkeypatch.setattr(looks, "controls_in_doubt", lambda *_: {})
    monkeypatch.setattr(gate, "judge_controls_once", lambda *_: [])
