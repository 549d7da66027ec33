"""`evidence --again`: what gave no verdict is run again, what failed is not."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from evidence_samples import KERNELS, LISTINGS, NOW, gate_result, some_run

from dhp_safe_fa.gates import cli, registry
from dhp_safe_fa.gates.evidence import again, commands, writer
from dhp_safe_fa.gates.evidence.writer import Refused
from dhp_safe_fa.gates.verdict import FAIL, INVALID, NOT_RUN, PASS, GateResult


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the gates, which pass here, are asked for."""
    calls: list[Any] = []
    for gate in registry.EXECUTING:

        def run(subjects: list[Any], quick: bool, tell: object, gate: str = gate) -> list[GateResult]:
            names = [subject.name for subject in subjects]
            calls.append((gate, names, quick))
            return [GateResult(gate, name, PASS) for name in names]

        monkeypatch.setitem(sys.modules, f"dhp_safe_fa.gates.{gate}.gate", SimpleNamespace(run=run))

    def by_name(name: str) -> Any:
        return SimpleNamespace(name=name, why_not="it launches nothing" if name == "idle" else "")

    monkeypatch.setitem(sys.modules, "dhp_safe_fa.gates.subjects", SimpleNamespace(by_name=by_name))
    return calls


def test_one_that_cannot_run_does_not_stop_the_others(asked: list[Any]) -> None:
    run = some_run()
    run["bitwise"][1:] = [gate_result("bitwise", name, INVALID) for name in ("def", "idle")]
    renewed = again.run_again(run, run["environment"], lambda *_: None)
    assert asked == [("bitwise", ["def"], False)]
    assert [result["verdict"] for result in renewed["bitwise"]] == [PASS, PASS, NOT_RUN]


def test_machine_code_is_not_looked_at_again(asked: list[Any]) -> None:
    """And does not stop the others: nvdisasm was missing."""
    run = some_run()
    run["sass"] = [gate_result("sass", "shipped kernels", NOT_RUN)]
    run["timing"][0] = gate_result("timing", "abc", INVALID)
    renewed = again.run_again(run, run["environment"], lambda *_: None)
    assert asked == [("timing", ["abc"], False)]
    kernels = writer.assemble([renewed], KERNELS, LISTINGS, NOW)["kernels"]
    assert [kernels["abc"]["gates"][gate]["verdict"] for gate in ("sass", "timing")] == [NOT_RUN, PASS]


@pytest.mark.parametrize("verdict", [INVALID, NOT_RUN])
def test_what_gave_no_verdict_is_run_again(verdict: str, asked: list[Any]) -> None:
    run = some_run()
    run["how"]["quick"] = ["timing"]
    run["bitwise"][1] = gate_result("bitwise", "def", verdict)
    run["timing"][0] = gate_result("timing", "abc", verdict)
    renewed = again.run_again(run, run["environment"], lambda *_: None)
    assert asked == [("bitwise", ["def"], False), ("timing", ["abc"], True)]
    assert [result["verdict"] for gate in registry.EXECUTING for result in renewed[gate]] == [PASS] * 6
    assert run["bitwise"][1]["verdict"] == verdict
    content = writer.assemble([renewed], KERNELS, LISTINGS, NOW)
    assert writer.verdict([renewed]) == PASS and content["runs"][0]["again"] == ["bitwise def", "timing abc"]


def test_what_failed_is_not(asked: list[Any]) -> None:
    run = some_run()
    run["timing"][0] = gate_result("timing", "abc", FAIL)
    with pytest.raises(Refused, match="has a verdict of every gate on every kernel"):
        again.run_again(run, run["environment"], lambda *_: None)
    run["bitwise"][1] = gate_result("bitwise", "def", INVALID)
    renewed = again.run_again(run, run["environment"], lambda *_: None)
    assert renewed["timing"][0]["verdict"] == FAIL and asked == [("bitwise", ["def"], False)]


def test_a_run_that_ended_early_is_gone_on_with(asked: list[Any]) -> None:
    run = some_run()
    del run["bitwise"], run["timing"]
    kept: list[list[str]] = []
    renewed = again.run_again(run, run["environment"], lambda *_: None, lambda found: kept.append([*found]))
    assert [gate for gate, *_ in asked] == ["bitwise", "timing"] and asked[0][1] == ["abc", "def"]
    assert "bitwise" in kept[0] and "timing" not in kept[0] and "timing" in kept[1]
    content = writer.assemble([renewed], KERNELS, LISTINGS, NOW)
    assert writer.verdict([renewed]) == PASS and content["runs"][0]["again"] == []


def test_refusals(asked: list[Any]) -> None:
    run = some_run()
    run["bitwise"] = [gate_result("bitwise", name, INVALID) for name in ("abc", "def")]
    with pytest.raises(Refused, match="the gate bitwise gave no verdict on any kernel"):
        again.run_again(run, run["environment"], lambda *_: None)
    run = some_run()
    run["bitwise"][1] = gate_result("bitwise", "def", INVALID)
    with pytest.raises(Refused, match="differ in driver"):
        again.run_again(run, {**run["environment"], "driver": "600.0"}, lambda *_: None)
    assert asked == []


def test_the_command_says_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(commands, "LAST_RUN", tmp_path / "run.json")
    assert cli.main(["evidence", "--again"]) == 2
    assert "no run is stored in" in capsys.readouterr().err
    assert cli.main(["evidence", "--again", "--from", "run.json"]) == 2
    assert "does not go with --from" in capsys.readouterr().err
