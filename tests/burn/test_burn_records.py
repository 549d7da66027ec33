"""The log: what is written is read back, and what is not whole or not true is refused in a sentence."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import samples

from dhp_safe_fa.burn import records
from dhp_safe_fa.burn.builds import ROOT
from dhp_safe_fa.burn.milestones import MILESTONES, answers
from dhp_safe_fa.burn.records import Gate, LogError, Record, append, load


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "iterations.jsonl"


@pytest.fixture
def filled(path: Path) -> Path:
    """A first iteration, a faster one, and one that a gate stopped."""
    rng = random.Random(1)
    append(path, samples.run("first", samples.alone(samples.shapes(rng))))
    append(path, samples.run("faster", samples.shapes(rng, 1.08), log=load(path)))
    leak = [Gate("sass", "FAIL", "address at 0x10")]
    append(path, samples.run("leak", [], log=load(path), gates=leak))
    return path


def rewrite(path: Path, line: int, change: Any) -> None:
    """Changes the data of one line in place."""
    lines = path.read_text().splitlines()
    data = json.loads(lines[line])
    change(data)
    lines[line] = json.dumps(data)
    path.write_text("\n".join(lines) + "\n")


def test_the_projects_own_log_is_true() -> None:
    """Reading checks every figure and verdict against the times, and every parent against its line."""
    log = load(ROOT / "audits" / "iterations.jsonl")
    assert {"run", "baseline", "imported"} == {record.kind for record in log.records}
    for shape in (shape for record in log.records for shape in record.shapes):
        assert shape.parsed.label == shape.case


def test_round_trip(filled: Path) -> None:
    log = load(filled)
    assert [record.decision for record in log.records] == ["proceed", "proceed", "roll back"]
    assert [records.to_line(record) for record in log.records] == log.lines
    best = log.best()
    assert best is not None and best.name == "faster"
    assert log.records[2].parent == log.parent(best)


def test_figures() -> None:
    shape = records.Shape(samples.CASES[0], {"ours": [10.0, 20.0, 40.0], "cudnn": [30.0, None, 40.0]})
    assert shape.median_us("ours") == 20
    assert shape.ratio("cudnn") == 2  # of 3 and 1: block by block
    assert shape.tflops("ours") == pytest.approx(4 * 8 * 512**2 * 64 / 20e6)
    assert shape.best_peer() == ("cudnn", 2)
    assert shape.ratio("fa3") is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["verdict"].update(decision="roll back"), "verdict does not follow"),
        (lambda d: d["verdict"]["ratio"].update(median=1.5), "verdict does not follow"),
        (lambda d: d["gates"][3].update(verdict="NOT RUN"), "verdict does not follow"),
        (lambda d: d["shapes"][0]["derived"]["tflops"].update(ours=999.0), "do not follow from its times"),
        (lambda d: d["shapes"][0]["derived"]["ratio"].update(cudnn=2.0), "do not follow from its times"),
        (lambda d: d["shapes"][0]["us"]["ours"].__setitem__(0, 1.0), "do not follow from its times"),
        (lambda d: d["shapes"][0]["us"]["ours"].__setitem__(0, None), "a block lacks a time"),
        (lambda d: d["shapes"][0]["us"]["again"].__setitem__(1, None), "not timed in the same blocks"),
        (lambda d: d["shapes"][0]["us"].pop("again"), "not timed in the same blocks"),
        (lambda d: d["shapes"][0]["us"]["ours"].pop(), "equally many blocks"),
        (lambda d: d["shapes"][0]["us"]["ours"].__setitem__(0, -1.0), "not above 0"),
        (lambda d: d["shapes"][0].update(launch={}), "what was launched"),
        (lambda d: d["shapes"][0].update(case="8 heads"), "not four positive numbers"),
        (lambda d: d.update(profiles=None), "counters, and times"),
        (lambda d: d.update(gates=d["gates"][1:]), "not the first of"),
        (lambda d: d.update(gates=[{"name": "sass", "verdict": "FAIL", "detail": ""}]), "nothing may have been timed"),
        (lambda d: d["milestones"].append("I5"), "do not reach the milestone I5"),
        (lambda d: d["milestones"].append("I99"), "milestone 'I99': there are"),
        (lambda d: d.update(commit=None), "names its commit"),
        (lambda d: d.update(schema="other/1"), "its schema is not"),
        (lambda d: d.pop("hypothesis"), "lacks hypothesis"),
        (lambda d: d.update(speed="fast"), "has unknown speed"),
        (lambda d: d["chip"].update(clock_mhz="1980"), "chip.clock_mhz: '1980' is not of type int"),
        (lambda d: d["kernels"][0].update(registers=True), "registers: True is not of type int"),
        (lambda d: d.update(kind="dream"), "'dream' is not one of run, baseline, imported"),
        (lambda d: d["parent"].update(sha256="0" * 64), "not an earlier, unchanged line"),
        (lambda d: d.update(name="first"), "a second iteration of this name"),
        (lambda d: d["chip"].update(gpu="NVIDIA H200"), "measured on NVIDIA H200, the lines before on NVIDIA H100"),
    ],
)
def test_lines_that_are_not_true(filled: Path, change: Any, told: str) -> None:
    def with_weak_tensor_pipe(data: Any) -> None:
        for profile in data["profiles"]:
            profile["tensor_percent"] = 35.0  # the milestone asks for more
        change(data)

    rewrite(filled, 1, with_weak_tensor_pipe)
    with pytest.raises(LogError, match=r"line 2: .*" + told):
        load(filled)


def test_a_changed_parent_is_noticed(filled: Path) -> None:
    rewrite(filled, 0, lambda data: data.update(hypothesis="I knew it all along"))
    with pytest.raises(LogError, match="line 2: faster: its parent 'first' is not an earlier, unchanged line"):
        load(filled)


def test_half_a_line(filled: Path) -> None:
    filled.write_text(filled.read_text()[:-100])
    with pytest.raises(LogError, match="line 3"):
        load(filled)


def test_append_is_all_or_nothing(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = filled.read_bytes()
    record = samples.run("next", samples.alone(samples.shapes(random.Random(2))))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            append(filled, record)
    assert filled.read_bytes() == before
    assert list(filled.parent.iterdir()) == [filled]
    broken = dataclasses.replace(record, profiles=None)
    with pytest.raises(LogError, match="not written: next: no gate failed"):
        append(filled, broken)
    assert filled.read_bytes() == before


@pytest.mark.parametrize("name", ["", " x", "x\n", "x" * 61])
def test_names(filled: Path, name: str) -> None:
    with pytest.raises(LogError, match="printable characters"):
        load(filled).check_new(name, samples.H100.gpu)


def test_a_name_or_gpu_that_does_not_fit(filled: Path) -> None:
    with pytest.raises(LogError, match="has an iteration of this name already"):
        load(filled).check_new("first", samples.H100.gpu)
    with pytest.raises(LogError, match="is a log of NVIDIA H100 80GB HBM3, and this is NVIDIA H200"):
        load(filled).check_new("new", "NVIDIA H200")
    with pytest.raises(LogError, match=r"no iteration 'second' in .*; there are: first, faster, leak"):
        load(filled).find("second")


# ---- milestones ------------------------------------------------------------------------------------------------------


def test_milestones(path: Path) -> None:
    assert {answer.text for answer in answers([])} == {"no record yet"}
    rng = random.Random(3)
    first = samples.run("first", samples.alone(samples.shapes(rng)), milestones=["I4", "I5", "registers"])
    append(path, first)
    slower = samples.run("slower", samples.shapes(rng, 0.9), log=load(path), milestones=["I7", "registers"])
    append(path, slower)
    found = {answer.milestone: answer for answer in answers(load(path).records)}
    assert list(found) == list(MILESTONES)
    assert found["I4"].record == "first"
    assert "134 MB of DRAM traffic" in found["I4"].text and "2147 MB" in found["I4"].text
    assert "58.2 %" in found["I5"].text
    assert found["I7"].record == "slower" and found["I7"].text.startswith("roll back")
    assert found["registers"].record == "first"  # the one that proceeded, though a later one tried
    assert "168 registers, 0 bytes spilled" in found["registers"].text
    assert found["I6"].record is None


def test_counted_milestones_need_their_counters() -> None:
    weak = [dataclasses.replace(profile, tensor_percent=35.0) for profile in samples.PROFILES]
    heavy = [dataclasses.replace(profile, dram_bytes=2**32) for profile in samples.PROFILES]
    record = samples.run("x", [])

    def reached(**changes: Any) -> list[str]:
        changed: Record = dataclasses.replace(record, **changes)
        return records.milestones.counted(changed)

    assert reached() == ["I4", "I5"]
    assert reached(profiles=weak) == ["I4"]
    assert reached(profiles=heavy) == ["I5"]
    assert reached(kernels=[dataclasses.replace(samples.KERNEL, tma=0)]) == ["I4"]
    assert reached(profiles=None) == []
