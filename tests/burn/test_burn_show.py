"""What a reader of the log sees: tables, roofline, comparison, picture; and the sentences of what is refused."""

from __future__ import annotations

import dataclasses
import random
import subprocess
from pathlib import Path

import pytest
import samples

from dhp_safe_fa.bench import Case
from dhp_safe_fa.burn.__main__ import main
from dhp_safe_fa.burn.builds.keeping import ROOT
from dhp_safe_fa.burn.log import lines, milestones, quoted
from dhp_safe_fa.burn.log.file import append, load
from dhp_safe_fa.burn.log.records import Gate, Record, Shape
from dhp_safe_fa.burn.measuring import chip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A baseline, two iterations with times, one stopped by a gate."""
    log = tmp_path / "iterations.jsonl"
    rng = random.Random(1)
    shapes = [Shape(case, {"flash": [150.0], "cudnn": [90.0]}) for case in samples.CASES]
    append(log, Record("zero", "baseline", "2026-11-21", None, samples.H100, {}, shapes=shapes))
    append(log, samples.run("first", samples.alone(samples.shapes(rng))))
    append(log, samples.run("faster", samples.shapes(rng, 1.08), log=load(log), milestones=["I5", "scheduling"]))
    append(log, samples.run("leak", [], log=load(log), gates=[Gate("sass", "FAIL", "k: address at 0x10")]))
    return log


def shown(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["--log", str(path), *arguments]) == 0
    return capsys.readouterr().out


def refused(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["--log", str(path), *arguments]) == 2
    sentence = capsys.readouterr().err
    assert sentence.startswith("dhp_safe_fa.burn: ") and len(sentence.splitlines()) == 1
    return sentence


def test_log(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(path, capsys, "log")
    lines = text.splitlines()
    rows = {name: next(line for line in lines if f"│ {name} " in line) for name in ("first", "faster", "leak")}
    assert "proceed" in rows["faster"] and "1.08" in rows["faster"] and "58.20" in rows["faster"]
    assert "roll back" in rows["leak"]
    for name in ("I4", "I5", "I7", "I8", "I9"):
        assert f"orig. {name}" in text
    assert "nothing of it was measured here" in text
    for explained in (milestones.ORIGINAL, "the name that its author gave it", "did not go through the loop"):
        assert explained in text


def test_quoted_rows() -> None:
    rows = {row.name: row for row in quoted.load()}
    assert rows["orig. I5"].us_per_head == 91.4
    assert rows["orig. unfused"].us_per_head == 13.0
    assert [name for name, row in rows.items() if row.wrong] == ["orig. I8", "orig. I9"]
    # a head is 4 S² D operations, and the case that they are drawn beside has 16 of them
    case = Case(1, 16, 1024, 64, False, "float16")
    assert case.label == quoted.CASE
    assert rows["orig. I5"].tflops == pytest.approx(case.flops / (16 * 91.4) / 1e6)


def test_one_iteration(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(path, capsys, "log", "faster")
    for part in (samples.COMMIT, "gate timing: PASS", "168", "134.0", "10,000,000", "faster than the previous best"):
        assert part in text
    assert "k: address at 0x10" in shown(path, capsys, "log", "leak")


def test_milestones(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(path, capsys, "log", "--milestones")
    assert "58.2" in text and "no record yet" in text and milestones.ORIGINAL in text


def test_compare(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert samples.CASES[2] in shown(path, capsys, "compare", "first", "faster")
    assert "'leak' has no times" in refused(path, capsys, "compare", "first", "leak")
    assert "no iteration 'x'" in refused(path, capsys, "compare", "first", "x")
    newer = dataclasses.replace(samples.H100, driver="600.1")
    append(path, samples.run("newer", samples.shapes(random.Random(2)), log=load(path), chip=newer))
    assert "with driver 580.1, 'newer' with 600.1" in refused(path, capsys, "compare", "first", "newer")
    other = samples.run("other", samples.shapes(random.Random(2), cases=["2,2,64,64:full:float16"]), log=load(path))
    append(path, other)
    assert "no shape in common" in refused(path, capsys, "compare", "first", "other")
    backward = samples.run("dq", samples.alone(samples.shapes(random.Random(2))))
    append(path, dataclasses.replace(backward, family="backward", milestones=[]))
    assert "'dq' about backward: no comparison" in refused(path, capsys, "compare", "first", "dq")


def test_floors() -> None:
    """By hand: 132 multiprocessors at 1980 MHz, 3352 GB/s."""
    floors = chip.floors(Case(4, 16, 4096, 128, False, "float16"), samples.H100)
    assert floors.tensor == pytest.approx(4 * 64 * 4096**2 * 128 / (4096 * 132 * 1980e6) * 1e6)
    assert floors.exponentials == pytest.approx(64 * 4096**2 / (16 * 132 * 1980e6) * 1e6)
    assert floors.memory == pytest.approx(4 * 64 * 4096 * 128 * 2 / 3352e9 * 1e6)
    assert (floors.name, floors.highest) == ("tensor", floors.tensor)
    causal = chip.floors(Case(4, 16, 4096, 128, True, "float16"), samples.H100)
    assert causal.tensor == floors.tensor / 2 and causal.exponentials == floors.exponentials / 2
    small = chip.floors(Case(64, 16, 64, 64, False, "float16"), samples.H100)
    assert small.name == "memory"


def test_roofline(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "exponentials" in shown(path, capsys, "roofline")
    assert "'zero' has no times of ours" in refused(path, capsys, "roofline", "zero")
    assert "'leak' has no times of ours" in refused(path, capsys, "roofline", "leak")


def test_plot(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "journey.png"
    assert str(picture) in shown(path, capsys, "plot", "--out", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "unknown ending" in refused(path, capsys, "plot", "--out", str(tmp_path / "journey.exe"))


def test_a_log_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_bytes(b"\xff\xfe")
    assert f"{log}: is no text" in refused(log, capsys, "log")


def test_an_empty_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "none.jsonl"
    for command in (["log"], ["log", "x"], ["roofline"]):
        assert f"--log {empty}: there is no such log" in refused(empty, capsys, *command)
    empty.touch()
    assert "orig. I4" in shown(empty, capsys, "log")
    assert "no iteration has times yet" in refused(empty, capsys, "roofline")
    assert "no iteration in the log has times" in refused(empty, capsys, "plot", "--out", str(tmp_path / "x.png"))
    assert "there are: the log is empty" in refused(empty, capsys, "log", "x")


def test_milestones_are_of_no_iteration(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "--milestones: given with an iteration (x)" in refused(path, capsys, "log", "--milestones", "x")


def test_a_log_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("{}\n")
    assert "line 1: its schema is none of dhp_safe_fa.burn/1, dhp_safe_fa.burn/2" in refused(wrong, capsys, "log")


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="imports read git history, and this copy has none")
@pytest.mark.parametrize(("file", "gpu"), [("iterations.jsonl", "h100"), ("iterations_h200.jsonl", "h200")])
def test_import(file: str, gpu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stored results of the project's own history, if this clone is deep enough; and commits that have none."""
    log = tmp_path / "iterations.jsonl"
    assert "git rev-parse failed" in refused(log, capsys, "import", "x", "no-such-commit")
    imported = [record for record in load(ROOT / "audits" / file).records if record.kind == "imported"]
    assert imported
    for original in imported:
        commit = str(original.source)
        known = subprocess.run(["git", "-C", str(ROOT), "cat-file", "-e", f"{commit}^{{commit}}"], capture_output=True)
        if known.returncode:
            pytest.skip(f"this clone does not reach back to {commit}")
        shown(log, capsys, "import", original.name, commit, "--family", original.family, "--gpu", gpu)
        record = load(log).records[-1]
        assert record.kind == "imported" and record.source == commit and record.decision is None
        assert record.kernels[0].registers is None and record.chip is not None and record.chip.dram_gbs is None
        assert lines.to_line(dataclasses.replace(record, schema=original.schema)) == lines.to_line(original)
        if original.name == "stored-19e3867":
            assert record.commit is None  # its sources differed from every commit


def test_the_picture_is_of_one_family(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TFLOP/s of two kinds of work are no journey."""
    backward = samples.run("dq", samples.alone(samples.shapes(random.Random(2))))
    append(path, dataclasses.replace(backward, family="backward"))
    drawn: list[str] = []
    monkeypatch.setattr(
        "dhp_safe_fa.burn.showing.plot.save", lambda records, *_: drawn.extend(record.name for record in records)
    )
    assert main(["--log", str(path), "plot", "--out", str(tmp_path / "x.png")]) == 0
    assert drawn == ["zero", "first", "faster", "leak"]
