"""The log: what is written is read back, and what is not whole or not true is refused in a sentence."""

from __future__ import annotations

import ast
import dataclasses
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import samples

from dhp_safe_fa.burn.builds.keeping import ROOT
from dhp_safe_fa.burn.log import lines, records
from dhp_safe_fa.burn.log.file import LogError, append, load
from dhp_safe_fa.burn.log.milestones import MILESTONES, answers, counted
from dhp_safe_fa.burn.log.records import Gate, Record, Shape
from dhp_safe_fa.gates import registry


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


def test_times_of_gradients_count_their_work() -> None:
    forward, backward = (Shape(f"2,4,512,64:causal:bfloat16{of}", {"ours": [10.0]}) for of in ("", ":backward"))
    assert backward.parsed.label == backward.case and backward.parsed != forward.parsed
    assert backward.tflops("ours") == pytest.approx(2.5 * (forward.tflops("ours") or 0))


def test_round_trip(filled: Path) -> None:
    log = load(filled)
    assert [record.decision for record in log.records] == ["proceed", "proceed", "roll back"]
    assert [lines.to_line(record) for record in log.records] == log.lines
    best = log.best("forward")
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
        (lambda d: d.update(schema="other/1"), "its schema is none of"),
        (lambda d: d.update(required=d["required"][:3]), "timing: not among the gates that it had to pass"),
        (lambda d: d.pop("required"), "lacks required"),
        (lambda d: d.pop("family"), "lacks family"),
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
        return counted(changed)

    assert reached() == ["I4", "I5"]
    assert reached(profiles=weak) == ["I4"]
    assert reached(profiles=heavy) == ["I5"]
    assert reached(kernels=[dataclasses.replace(samples.KERNEL, tma=0)]) == ["I4"]
    assert reached(profiles=None) == []


# ---- gates and families to come --------------------------------------------------------------------------------------


def test_another_gate_leaves_old_lines_as_they_are(filled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line says which gates it had to pass. A new one has to pass all of today's."""
    before = load(filled)
    monkeypatch.setattr(registry, "NAMES", (*registry.NAMES, "odour"))
    assert load(filled) == before
    assert load(ROOT / "audits" / "iterations.jsonl").records
    late = dataclasses.replace(samples.run("late", samples.alone(samples.shapes(random.Random(2)))), parent=None)
    assert late.required[-1] == "odour" and late.decision == "undecided"
    assert late.verdict is not None and "gate odour: NOT RUN" in late.verdict.reasons
    with pytest.raises(LogError, match="has to name all gates of today: sass, counters, bitwise, timing, odour"):
        append(filled, dataclasses.replace(late, required=list(registry.NAMES[:4])))
    append(filled, late)
    monkeypatch.undo()
    assert load(filled).records[-1] == late


def test_lines_of_the_first_schema(filled: Path) -> None:
    """They name neither family nor required gates: there was one of the former, and four of the latter."""
    text = (ROOT / "audits" / "iterations.jsonl").read_text().splitlines()
    first = [line for line in text if '"dhp_safe_fa.burn/1"' in line]
    assert first
    for line in first:
        record = lines.from_line(line)
        assert (record.family, record.required) == ("forward", ["sass", "counters", "bitwise", "timing"])
        assert lines.to_line(record) == line


def test_the_best_is_one_of_the_same_family(filled: Path) -> None:
    record = samples.run("dq", samples.alone(samples.shapes(random.Random(2))))
    append(filled, dataclasses.replace(record, family="backward"))
    found = {family: load(filled).best(family) for family in ("forward", "backward", "decode")}
    assert {family: best and best.name for family, best in found.items()} == {
        "forward": "faster", "backward": "dq", "decode": None
    }  # fmt: skip


# ---- imports ---------------------------------------------------------------------------------------------------------


def imported(path: Path) -> set[str]:
    """The modules that a file imports, wherever in it: also in functions, and for the types alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_two_modules_import_each_other() -> None:
    """Neither directly nor in a circle."""
    folder = Path(records.__file__).parents[1]
    names = {path: ".".join(("dhp_safe_fa.burn", *path.relative_to(folder).with_suffix("").parts))
             for path in folder.rglob("*.py") if path.name != "__init__.py"}  # fmt: skip
    needs = {name: imported(path) & set(names.values()) - {name} for path, name in names.items()}
    assert len(needs) > 15
    while leaves := [name for name, needed in needs.items() if not needed]:
        needs = {name: needed - set(leaves) for name, needed in needs.items() if name not in leaves}
    assert not needs, f"in a circle: {needs}"
