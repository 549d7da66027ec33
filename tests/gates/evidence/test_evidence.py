"""Is the stored evidence about this build: fresh, stale, none, on made-up evidence. And: what the repository holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from evidence_samples import HELD, NOW, some_content

from dhp_safe_fa import _inspect, evidence
from dhp_safe_fa.gates import cli, provenance, registry
from dhp_safe_fa.gates.evidence import contracts

README = evidence.CHECKOUT.parents[1] / "README.md"


def loaded(content: Any, folder: Path) -> evidence.Evidence:
    path = folder / "evidence.json"
    path.write_text(json.dumps(content))
    return evidence.load(path)


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package's evidence file, which a test may write; the build holds the made-up kernels."""
    path = tmp_path / "audits" / "evidence.json"
    path.parent.mkdir()
    monkeypatch.setattr(evidence, "CHECKOUT", path)
    monkeypatch.setattr(evidence, "PACKAGED", tmp_path / "none.json")
    monkeypatch.setattr(evidence, "held", lambda: HELD)
    monkeypatch.setattr(provenance, "here", lambda: NOW)
    return path


def test_all_passed_on_these_bytes_is_fresh(tmp_path: Path) -> None:
    status = evidence.compare(loaded(some_content(), tmp_path), HELD, NOW)
    assert (status.state, status.reasons) == ("fresh", ())
    for part in ("all 2 kernels", "counters, bitwise, timing on NVIDIA H100", "580.1", "2026-01-02", "0123456"):
        assert part in status.line()


def test_evidence_may_hold_more_than_the_build(tmp_path: Path) -> None:
    assert evidence.compare(loaded(some_content(), tmp_path), {"abc": HELD["abc"]}, NOW).state == "fresh"


def test_other_bytes_are_stale_and_named(tmp_path: Path) -> None:
    status = evidence.compare(loaded(some_content(), tmp_path), {**HELD, "def": "e" * 64}, NOW)
    assert status.state == "stale"
    assert status.reasons == ("def: its machine code is eeeeeeeeeeee…, the evidence is about dddddddddddd…",)


def test_a_kernel_without_evidence_is_stale_and_named(tmp_path: Path) -> None:
    status = evidence.compare(loaded(some_content(), tmp_path), {**HELD, "ghi": "0" * 64}, NOW)
    assert status.state == "stale" and status.reasons == ("ghi: the evidence does not name this kernel",)
    assert "ghi" in status.line()


@pytest.mark.parametrize("gate", evidence.GATES)
@pytest.mark.parametrize("verdict", ["FAIL", "INVALID", "NOT RUN"])
def test_what_did_not_pass_is_not_fresh(gate: str, verdict: str, tmp_path: Path) -> None:
    content = some_content()
    content["kernels"]["abc"]["gates"][gate]["verdict"] = verdict
    status = evidence.compare(loaded(content, tmp_path), HELD, NOW)
    one = f"not run ({gate}; 1 of 2 kernels)" if verdict == "NOT RUN" else f"abc: {gate}: {verdict}"
    assert status.state == "stale" and status.reasons == (one,)


def test_a_gate_that_is_missing_was_not_run(tmp_path: Path) -> None:
    content = some_content()
    del content["kernels"]["abc"]["gates"]["timing"]
    assert evidence.compare(loaded(content, tmp_path), HELD, NOW).reasons == ("not run (timing; 1 of 2 kernels)",)


def test_a_build_without_kernels_has_none(tmp_path: Path) -> None:
    status = evidence.compare(loaded(some_content(), tmp_path), {}, NOW)
    assert status.state == "none" and "holds no GPU kernel" in status.line()


def test_no_file_is_none(stored: Path) -> None:
    assert evidence.status().state == "none" and "make evidence" in evidence.status().line()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"schema": "other/1", "environment": {}, "kernels": {}}',
     '{"schema": "dhp_safe_fa.evidence/2", "environment": {}, "digests": {}, "kernels": {}}',
     '{"schema": "dhp_safe_fa.evidence/3", "kernels": {}}',
     '{"schema": "dhp_safe_fa.evidence/3", "runs": [{}], "kernels": {}}',
     '{"schema": "dhp_safe_fa.evidence/3", "runs": [], "kernels": {"a": {}}}',
     '{"schema": "dhp_safe_fa.evidence/3", "runs": [], "kernels": {}, "failed": {"a": 5}}',
     '{"schema": "dhp_safe_fa.evidence/3", "runs": [], "kernels": {}, "failed": {"a": {"timing": ["b"]}}}',
     '{"schema": "dhp_safe_fa.evidence/3", "runs": [], "kernels": {"a": {"cubin_sha256": 5, "gates": {}}}}',
     '{"schema": "dhp_safe_fa.evidence/3", "runs": [], "kernels": {"a": {"cubin_sha256": "", "gates": []}}}',
     '{"schema": "dhp_safe_fa.evidence/3", "runs": [], "kernels": '
     '{"a": {"cubin_sha256": "", "family": "f", "gates": {"sass": {"verdict": "PASS", "run": 0}}}}}'],
)  # fmt: skip
def test_another_file_is_none_with_a_reason(text: str, stored: Path) -> None:
    stored.write_text(text)
    status = evidence.status()
    assert status.state == "none" and "evidence.json is no evidence file" in status.line()


def test_a_wheel_has_its_own_copy(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = some_content()
    stored.write_text(json.dumps({**content, "kernels": {}}))  # which names no kernel
    packaged = stored.parent / "packaged.json"
    packaged.write_text(json.dumps(content))
    assert evidence.status().state == "stale"
    monkeypatch.setattr(evidence, "PACKAGED", packaged)
    assert evidence.status().state == "fresh"
    stored.unlink()
    assert evidence.status().state == "fresh"


@pytest.mark.parametrize(("change", "code"), [("nothing", 0), ("hash", 1), ("file", 2)])
def test_command_status(change: str, code: int, stored: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = some_content()
    if change == "hash":
        content["kernels"]["abc"]["cubin_sha256"] = "0" * 64
    if change != "file":
        stored.write_text(json.dumps(content))
    assert cli.main(["status"]) == code
    said = capsys.readouterr().out
    assert said.startswith(f"evidence: {['fresh', 'stale', 'none'][code]}")
    assert ("abc: its machine code is" in said) == (change == "hash")


def test_importing_it_imports_nothing_of_the_gates() -> None:
    """But for the list of gates and what is compared, which import none themselves."""
    names = "sorted(m for m in sys.modules if 'gates' in m or m == 'rich')"
    block = f"import sys; from dhp_safe_fa import evidence; print({names})"
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=True)
    of_gates = ("", ".provenance", ".registry", ".without_comments")
    assert done.stdout.strip() == str([f"dhp_safe_fa.gates{name}" for name in of_gates])


# ---- what took part --------------------------------------------------------------------------------------------------

EVERY = ("sass", "counters", "bitwise", "timing")


@pytest.mark.parametrize(
    ("part", "words", "gates", "kernels"),
    [
        ("launch forward", "launch path", EVERY[1:], 1),
        ("launch backward", "launch path", EVERY[1:], 1),
        ("family forward", "how it is put under test", EVERY[1:], 1),
        ("family tiles", "", (), 0),  # there is no kernel of that family
        ("controls", "controls", EVERY, 2),
        ("policy", "policy", ("sass",), 2),
        ("shared", "what all gates share", EVERY, 2),
        *((f"gate {gate}", f"gate {gate}", (gate,), 2) for gate in EVERY),
    ],
)
def test_each_part_makes_its_gates_stale(
    part: str, words: str, gates: tuple[str, ...], kernels: int, tmp_path: Path
) -> None:
    """The same cubins with the same verdicts, measured through something else or judged by something else."""
    known, now = loaded(some_content(), tmp_path), {**NOW, part: "another"}
    status = evidence.compare(known, HELD, now)
    states = contracts.states(known, HELD, now)
    if not gates:
        assert status.state == "fresh"
        return
    assert status.state == "stale"
    assert status.reasons == (f"{words} changed since ({', '.join(gates)}; {kernels} of 2 kernels)",)
    assert f"stale: {words} changed since" in status.line()
    resting = {contract for gate in gates for contract in registry.gate(gate).contracts} | {"C9"}
    of_gradients = states.pop("C10")  # which is about one kernel of the two
    reaches_them = "C10" in resting and not part.endswith("forward")
    assert of_gradients == ("stale (1 of 1)" if reaches_them else "PASS (1 of 1)")
    resting -= {"C10"}
    assert {contract for contract, state in states.items() if f"stale ({kernels} of 2)" in state} == resting
    assert f"Evidence: **stale**:\n\n- {words} changed since" in contracts.summary(known, HELD, now)


def test_readme_names_every_part_and_counts_the_kernels(tmp_path: Path) -> None:
    known = loaded(some_content(), tmp_path)
    said = contracts.summary(known, {**HELD, "def": "e" * 64}, {**NOW, "launch forward": "x", "gate timing": "x"})
    assert "\n- launch path changed since (counters, bitwise, timing; 1 of 2 kernels)\n" in said
    assert "\n- gate timing changed since" in said
    assert "about single kernels: not of this machine code (1); `gates status` lists all" in said


@pytest.mark.parametrize("verdict", ["FAIL", "INVALID"])
def test_readme_says_what_gates_said_of_single_kernels(verdict: str, tmp_path: Path) -> None:
    content = some_content()
    content["kernels"]["def"]["gates"]["timing"]["verdict"] = verdict
    said = contracts.summary(loaded(content, tmp_path), HELD, NOW)
    assert f"about single kernels: timing: {verdict} (1); `gates status` lists all" in said


def test_what_is_not_here_is_said_and_not_compared(tmp_path: Path) -> None:
    status = evidence.compare(loaded(some_content(), tmp_path), HELD, {**NOW, "controls": None})
    assert status.state == "fresh" and status.not_compared == ("controls",)
    assert status.line().endswith("not compared here: controls")


# ---- README ----------------------------------------------------------------------------------------------------------

TABLE = """# x
<!-- evidence -->
old words,
two lines
<!-- /evidence -->
| | contract | shown by | state |
|---|---|---|---|
""" + "".join(f"| C{n} | **Thing**: words. | gate | old |\n" for n in range(1, 11))


def rows(text: str) -> dict[str, str]:
    cells = [line.split("|") for line in text.splitlines() if line.startswith("| C")]
    return {row[1].strip(): row[4].strip() for row in cells}


def test_states_when_all_passed(tmp_path: Path) -> None:
    text = contracts.rewrite(TABLE, loaded(some_content(), tmp_path), HELD, NOW)
    gated = {f"C{n}": "PASS (2 of 2)" for n in range(1, 7)} | {"C10": "PASS (1 of 1)"}
    assert rows(text) == {**gated, "C7": "old", "C8": "old", "C9": "bound (2 of 2)"}
    assert "Evidence: **fresh**" in text and "old words" not in text and "NVIDIA H100" in text
    assert contracts.rewrite(text, loaded(some_content(), tmp_path), HELD, NOW) == text


def test_states_tell_what_did_not_pass_and_what_is_stale(tmp_path: Path) -> None:
    content = some_content()
    content["kernels"]["abc"]["gates"]["timing"]["verdict"] = "FAIL"
    text = contracts.rewrite(TABLE, loaded(content, tmp_path), {**HELD, "def": "e" * 64}, NOW)
    assert "Evidence: **stale**" in text
    assert rows(text)["C3"] == "PASS (1 of 2), stale (1 of 2)"
    assert rows(text)["C6"] == "FAIL (1 of 2), stale (1 of 2)"
    assert rows(text)["C9"] == "bound (1 of 2), stale (1 of 2)"


def test_what_was_never_said_is_not_stale(tmp_path: Path) -> None:
    """Of one kernel a gate could not run, and has changed since; of the other it passed."""
    content = some_content()
    content["kernels"]["abc"]["gates"]["counters"]["verdict"] = "NOT RUN"
    known, now = loaded(content, tmp_path), {**NOW, "gate counters": "another"}
    status = evidence.compare(known, HELD, now)
    assert status.common == (
        "not run (counters; 1 of 2 kernels)",
        "gate counters changed since (counters; 1 of 2 kernels)",
    )
    assert contracts.states(known, HELD, now)["C3"] == "not run (1 of 2), stale (1 of 2)"
    content["kernels"]["def"]["gates"]["counters"]["verdict"] = "NOT RUN"
    known = loaded(content, tmp_path)
    assert contracts.states(known, HELD, now)["C3"] == "not run (2 of 2)"
    assert "counters" not in known.where(), "no run has said anything of it"


def test_gates_of_the_same_kernels_are_told_together(tmp_path: Path) -> None:
    content = some_content()
    for name, gate in (("abc", "bitwise"), ("abc", "timing"), ("abc", "counters"), ("def", "counters")):
        del content["kernels"][name]["gates"][gate]
    status = evidence.compare(loaded(content, tmp_path), HELD, NOW)
    assert status.common == ("not run (counters; 2 of 2 kernels)", "not run (bitwise, timing; 1 of 2 kernels)")


def test_states_without_evidence() -> None:
    text = contracts.rewrite(TABLE, None, HELD, NOW)
    assert "Evidence: **none**" in text and rows(text)["C1"] == "no evidence" and rows(text)["C8"] == "old"


@pytest.mark.parametrize(("cut", "sentence"), [("<!-- evidence -->", "no lines"), ("| C4 |", "no row for C4")])
def test_a_readme_without_a_place_for_them(cut: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        contracts.rewrite(TABLE.replace(cut, ""), None, HELD, NOW)


def test_command_writes_the_readme(stored: Path, tmp_path: Path) -> None:
    stored.write_text(json.dumps(some_content()))
    readme = tmp_path / "README.md"
    readme.write_text(TABLE)
    assert cli.main(["status", "--write", str(readme)]) == 0
    assert rows(readme.read_text())["C1"] == "PASS (2 of 2)"


def test_command_says_what_the_readme_lacks(stored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored.write_text(json.dumps(some_content()))
    other = tmp_path / "LICENSE"
    other.write_text("a licence")
    assert cli.main(["status", "--write", str(other)]) == 2
    assert f"--write {other}: there are no lines {contracts.BEGIN} and {contracts.END}" in capsys.readouterr().err
    assert other.read_text() == "a licence"


def test_readme_says_what_the_evidence_says() -> None:
    """For this build's cubins if the evidence's nvcc made them, else for those that the evidence names."""
    path = evidence.find()
    known = evidence.load(path) if path else None
    kernels, now = evidence.held(), provenance.here()
    text = README.read_text(encoding="utf-8")
    correct = [contracts.rewrite(text, known, kernels, now)]
    if known and _inspect.build_info()["cuda"] not in {run["environment"].get("nvcc") for run in known.runs}:
        named = {name: kernel["cubin_sha256"] for name, kernel in known.kernels.items()}
        correct = [contracts.rewrite(text, known, named, now)]
        if "**stale**" in text:  # of cubins that this build does not have, so there is nothing to compare it with
            correct.append(text)
    assert text in correct, "python -m dhp_safe_fa.gates status --write README.md"
