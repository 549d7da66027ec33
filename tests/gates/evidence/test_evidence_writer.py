"""What `make evidence` stores of the gates' runs, when it refuses to, and that no failure leaves half a file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evidence_samples import FAMILIES, HELD, KERNELS, LISTINGS, NOW, gate_result, some_content, some_run

from dhp_safe_fa import _inspect, evidence
from dhp_safe_fa.gates import cli, provenance, registry, tools
from dhp_safe_fa.gates.evidence import commands as audits
from dhp_safe_fa.gates.evidence import writer as evidence_writer
from dhp_safe_fa.gates.evidence.writer import Refused, assemble, require_clean_build


def test_every_kernel_has_its_hashes_and_gates() -> None:
    content = some_content()
    assert list(content["kernels"]) == ["abc", "def"]
    kernel = content["kernels"]["abc"]
    assert (kernel["cubin_sha256"], kernel["listing_sha256"]) == (HELD["abc"], LISTINGS["abc"])
    assert (kernel["registers"], kernel["spill_bytes"]) == (168, 0)
    assert list(kernel["gates"]) == list(evidence.GATES)
    assert kernel["gates"]["sass"]["figures"]["indirect_branches"] == 3
    assert kernel["gates"]["timing"]["figures"] == {"runs": 7}
    assert kernel["gates"]["timing"]["controls"] == {"right": 1, "of": 1}
    (run,) = content["runs"]
    assert run["environment"]["driver"] == "580.1" and "kernels" not in run["environment"]
    took_part = {part for gate in registry.GATES for name in HELD for part in gate.took_part(name, FAMILIES[name])}
    assert run["digests"] == {part: NOW[part] for part in took_part}
    assert {gate["run"] for entry in content["kernels"].values() for gate in entry["gates"].values()} == {0}


def test_the_same_runs_make_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        evidence_writer.write(some_content(), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_one_run_for_each_kernel() -> None:
    runs = [some_run(("abc",)), some_run(("def",), driver="581.0", commit="another")]
    merged = assemble(runs, KERNELS, LISTINGS, NOW)
    assert [run["environment"]["driver"] for run in merged["runs"]] == ["580.1", "581.0"]
    for number, name in enumerate(("abc", "def")):
        whole, part = some_content()["kernels"][name]["gates"], merged["kernels"][name]["gates"]
        assert part == {gate: {**result, "run": number} for gate, result in whole.items()}


def only(gates: tuple[str, ...], names: tuple[str, ...] = ("abc", "def"), **environment: Any) -> dict[str, Any]:
    """A run of some gates."""
    run = some_run(names, **environment)
    run["how"]["gates"] = list(gates)
    return {key: value for key, value in run.items() if key not in registry.NAMES or key in gates}


def loaded(content: dict[str, Any], folder: Path) -> evidence.Evidence:
    path = folder / "before.json"
    evidence_writer.write(content, path)
    return evidence.load(path)


def test_what_is_stored_is_kept_and_what_is_new_takes_its_place(tmp_path: Path) -> None:
    """Machine code without a GPU; later one kernel on one GPU; later the other on another."""
    first = assemble([only(("sass",), gpu=None)], KERNELS, LISTINGS, NOW)
    assert evidence.compare(loaded(first, tmp_path), HELD, NOW).reasons == (
        "not run (counters, bitwise, timing; 2 of 2 kernels)",
    )
    then = assemble([only(registry.EXECUTING, ("abc",))], KERNELS, LISTINGS, NOW, loaded(first, tmp_path))
    assert evidence.compare(loaded(then, tmp_path), HELD, NOW).reasons == (
        "not run (counters, bitwise, timing; 1 of 2 kernels)",
    )
    now = {**NOW, "launch forward": "another"}  # which is not the other kernel's
    last = only(registry.EXECUTING, ("def",), gpu="NVIDIA H200", device="NVIDIA H200")
    last["how"]["digests"] = now
    whole = assemble([last], KERNELS, {}, now, loaded(then, tmp_path))
    known = loaded(whole, tmp_path)
    assert [run["environment"]["gpu"] for run in whole["runs"]] == ["NVIDIA H200", "NVIDIA H100", None]
    assert [known.kernels["abc"]["gates"][gate]["run"] for gate in ("sass", "timing")] == [2, 1]
    assert [known.kernels["def"]["gates"][gate]["run"] for gate in ("sass", "timing")] == [2, 0]
    assert known.kernels["def"]["listing_sha256"] == LISTINGS["def"]
    assert evidence.compare(known, HELD, now).reasons == (
        "launch path changed since (counters, bitwise, timing; 1 of 2 kernels)",
    )
    again = assemble([only(evidence.GATES)], KERNELS, LISTINGS, NOW, known)
    assert len(again["runs"]) == 1, "a run of which nothing is left is not kept"


def test_other_bytes_keep_nothing(tmp_path: Path) -> None:
    before = loaded(some_content(), tmp_path)
    kernels = [KERNELS[0], {**KERNELS[1], "cubin_sha256": "e" * 64}]
    held = {str(kernel["name"]): kernel["cubin_sha256"] for kernel in kernels}
    content = assemble([some_run(("abc",), kernels=held)], kernels, LISTINGS, NOW, before)
    assert list(content["kernels"]) == ["abc"]


@pytest.mark.parametrize("between", ["INVALID", "PASS"])
def test_a_finding_comes_back_with_what_took_part(between: str, tmp_path: Path) -> None:
    """A gate is changed and changed back: the FAIL is not forgotten in between."""
    failed = some_run()
    failed["timing"][0] = gate_result("timing", "abc", "FAIL")
    before = loaded(assemble([failed], KERNELS, LISTINGS, NOW), tmp_path)
    now = {**NOW, "gate timing": "another"}
    run = some_run()
    run["how"]["digests"] = now
    run["timing"][0] = gate_result("timing", "abc", between)
    content = assemble([run], KERNELS, LISTINGS, now, before)
    assert content["kernels"]["abc"]["gates"]["timing"]["verdict"] == ("PASS" if between == "PASS" else "FAIL")
    after = loaded(content, tmp_path)
    assert evidence_writer.not_taken_back([some_run()], KERNELS, NOW, after) == [("abc", "timing")]
    again = loaded(assemble([some_run()], KERNELS, LISTINGS, NOW, after), tmp_path)
    assert evidence.compare(again, HELD, NOW).state == "stale", "what is stored is of the changed gate, or the FAIL"


@pytest.mark.parametrize("between", ["a build without the kernel", "one with other bytes", "a gate that needs more"])
def test_a_finding_outlives(between: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = only(("timing",))
    failed["timing"][0] = gate_result("timing", "abc", "FAIL")
    content = assemble([failed], KERNELS, LISTINGS, NOW)
    if between == "a gate that needs more":
        assert "kernels" not in registry.gate("timing").needs
        more = [replace(gate, needs=(*gate.needs, "kernels")) for gate in registry.GATES if gate.name == "timing"]
        others = [gate for gate in registry.GATES if gate.name != "timing"]
        monkeypatch.setattr(registry, "GATES", (*others, *more))
    else:
        kernels = KERNELS[1:] + ([{**KERNELS[0], "cubin_sha256": "e" * 64}] if "bytes" in between else [])
        content = assemble([], kernels, LISTINGS, NOW, loaded(content, tmp_path))
        assert "abc" not in content["kernels"]
    before = loaded(content, tmp_path)
    assert evidence_writer.not_taken_back([only(("timing",))], KERNELS, NOW, before) == [("abc", "timing")]
    after = loaded(assemble([only(("timing",))], KERNELS, LISTINGS, NOW, before), tmp_path)
    stored = after.kernels.get("abc", {}).get("gates", {}).get("timing", {}).get("verdict", "none")
    assert stored == ("FAIL" if between == "a gate that needs more" else "none")


@pytest.mark.parametrize("verdict", ["INVALID", "NOT RUN"])
def test_what_is_no_verdict_takes_no_place(verdict: str, tmp_path: Path) -> None:
    """Unless the stored one is out of date."""
    before = loaded(some_content(), tmp_path)
    run = some_run()
    run["timing"][0] = gate_result("timing", "abc", verdict)
    kept = assemble([run], KERNELS, LISTINGS, NOW, before)["kernels"]["abc"]["gates"]["timing"]
    assert (kept["verdict"], kept["run"]) == ("PASS", 1)
    now = {**NOW, "gate timing": "another"}
    run["how"]["digests"] = now
    assert assemble([run], KERNELS, LISTINGS, now, before)["kernels"]["abc"]["gates"]["timing"]["verdict"] == verdict


def test_a_finding_is_not_taken_back(tmp_path: Path) -> None:
    failed = some_run()
    failed["timing"][0] = gate_result("timing", "abc", "FAIL")
    before = loaded(assemble([failed], KERNELS, LISTINGS, NOW), tmp_path)
    again = assemble([some_run()], KERNELS, LISTINGS, NOW, before)
    assert evidence_writer.not_taken_back([some_run()], KERNELS, NOW, before) == [("abc", "timing")]
    verdicts = {name: entry["gates"]["timing"]["verdict"] for name, entry in again["kernels"].items()}
    assert verdicts == {"abc": "FAIL", "def": "PASS"}
    assert again["kernels"]["abc"]["gates"]["bitwise"]["run"] == 0, "all else is stored of the new run"
    assert assemble([only(("timing",), ("def",))], KERNELS, LISTINGS, NOW, before)["kernels"] == before.kernels | {
        "def": {**before.kernels["def"], "gates": {gate: {**result, "run": int(gate != "timing")}
                for gate, result in before.kernels["def"]["gates"].items()}},
        "abc": {**before.kernels["abc"], "gates": {gate: {**result, "run": 1}
                for gate, result in before.kernels["abc"]["gates"].items()}},
    }  # fmt: skip
    now = {**NOW, "launch forward": "mended"}
    mended = some_run()
    mended["how"]["digests"] = now
    assert evidence_writer.verdict([mended]) == "PASS" and assemble([mended], KERNELS, LISTINGS, now, before)


def test_a_verdict_that_is_no_pass_is_stored() -> None:
    run = some_run()
    run["counters"][0] = gate_result("counters", "abc", "FAIL")
    content = assemble([run], KERNELS, LISTINGS, NOW)
    assert evidence_writer.verdict([run]) == "FAIL"
    assert content["kernels"]["abc"]["gates"]["counters"]["problems"] == ["counters found something"]


def test_a_gate_that_could_not_run_is_so_for_every_kernel() -> None:
    run = some_run()
    run["timing"] = [gate_result("timing", "shipped kernels", "NOT RUN")]
    content = assemble([run], KERNELS, LISTINGS, NOW)
    assert {kernel["gates"]["timing"]["verdict"] for kernel in content["kernels"].values()} == {"NOT RUN"}


def test_bulk_is_left_out_by_name(tmp_path: Path) -> None:
    run = some_run()
    run["timing"][0] = gate_result("timing", "abc", "FAIL", samples=list(range(10_000)), classes={"a": 1})
    run["timing"][0]["problems"] *= 30
    short = assemble([run], KERNELS, LISTINGS, NOW)["kernels"]["abc"]["gates"]["timing"]
    assert short["figures"] == {"runs": 7, "classes": {"a": 1}} and short["left_out"] == ["samples"]
    assert len(short["problems"]) == 8 and short["more_problems"] == 22


def test_counts_are_kept_whole_and_opcodes_are_not(tmp_path: Path) -> None:
    spread = {"value": 1.25, "aa_percent": 0.123456789}
    seen = {"inst": {"value": 123456789.0}, "inst:FADD": {"value": 5.0}, "l2": spread}
    figures = {"counted": {"1,16": seen}, "studies": [{"study": "s", "percentiles_ns": {"a": [1.0] * 101}}]}
    kept = evidence_writer.compact(gate_result("counters", "abc", **figures))["figures"]
    assert kept["counted"] == {"1,16": {"inst": 123456789, "l2": {"value": 1.25, "aa_percent": 0.12346}}}
    assert kept["studies"] == [{"study": "s"}]


def test_more_is_left_out_until_the_file_is_small_enough(tmp_path: Path) -> None:
    run = some_run()
    for gate in registry.EXECUTING:
        for result in run[gate]:
            result["figures"] |= {f"table {n}": [n] * (300 * n) for n in range(1, 12)}
    content = assemble([run], KERNELS, LISTINGS, NOW)
    evidence_writer.write(content, tmp_path / "e.json")
    assert 20_000 < (tmp_path / "e.json").stat().st_size < evidence_writer.MAX_BYTES
    kept = content["kernels"]["abc"]["gates"]["timing"]
    assert "table 1" in kept["figures"] and "table 11" in kept["left_out"]


def test_numbers_that_json_lacks_are_words(tmp_path: Path) -> None:
    run = some_run()
    run["timing"][0]["figures"]["effect"] = float("nan")
    evidence_writer.write(assemble([run], KERNELS, LISTINGS, NOW), tmp_path / "e.json")
    assert evidence.load(tmp_path / "e.json").kernels["abc"]["gates"]["timing"]["figures"]["effect"] == "NaN"


# ---- refused ---------------------------------------------------------------------------------------------------------


def broken(what: str) -> list[dict[str, Any]]:
    run = some_run()
    if what == "gpu":
        return [some_run(gpu=None)]
    if what == "timing in two runs":
        return [some_run(), only(("timing",), ("abc",))]
    if what == "a peer":
        run["how"] |= {"subjects": "sdpa-flash", "kernels": []}
        return [run]
    if what == "kernels":
        return [some_run(kernels={**HELD, "def": "e" * 64})]
    if what == "sass of another cubin":
        run["sass"][1]["cubin_sha256"] = "e" * 64
    elif what == "timing twice":
        run["timing"] += [gate_result("timing", "abc")]
    else:
        run["bitwise"].pop()
    return [run]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("gpu", "without a GPU"),
        ("timing in two runs", "abc: the gate timing has 2 results"),
        ("a peer", "a run is about sdpa-flash"),
        ("kernels", "other kernels than this build holds"),
        ("sass of another cubin", "def: 1 results of the gate sass about this cubin"),
        ("timing twice", "abc: 2 results of the gate timing"),
        ("no bitwise", "def: 0 results of the gate bitwise"),
    ],
)
def test_refused(what: str, sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        assemble(broken(what), KERNELS, LISTINGS, NOW)


def test_too_large_is_refused_and_nothing_written(tmp_path: Path) -> None:
    path = tmp_path / "evidence.json"
    path.write_text("old")
    content = some_content()
    content["runs"][0]["environment"]["note"] = "x" * evidence_writer.MAX_BYTES
    with pytest.raises(Refused, match="at most 600000 are stored"):
        evidence_writer.write(content, path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_failure_while_writing_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "evidence.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError("disk is full")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="disk is full"):
        evidence_writer.write(some_content(), path)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A build folder whose one cubin is what the library holds."""
    monkeypatch.setattr(evidence_writer, "ROOT", tmp_path)
    folder = tmp_path / "build" / "cubins"
    folder.mkdir(parents=True)
    (folder / "abc.cubin").write_bytes(b"code")
    (tmp_path / "csrc" / "kernels").mkdir(parents=True)
    (tmp_path / "csrc" / "kernels" / "fwd.cu").write_text("one")
    (tmp_path / "setup.py").write_text("two")
    return {"abc": "5694d08a2e53ffcae0c3103e5ad6f6076abd960eb1f8a56577040bc1028f702b"}  # sha256sum of "code"


def test_clean_build(build: dict[str, str]) -> None:
    built = provenance.of_sources(evidence_writer.ROOT)["all"]
    require_clean_build(build, False, built)
    require_clean_build(build, None, built)


def test_a_kernel_edit_that_was_not_built_is_refused(build: dict[str, str]) -> None:
    """Committed, so that nothing is dirty; the library and build/cubins/ agree, but both are of the old source."""
    built = provenance.of_sources(evidence_writer.ROOT)["all"]
    (evidence_writer.ROOT / "csrc" / "kernels" / "fwd.cu").write_text("one, edited")
    with pytest.raises(Refused, match="have changed since the library was built"):
        require_clean_build(build, False, built)


@pytest.mark.parametrize(
    ("kernels", "dirty", "sentence"),
    [
        ({}, False, "holds no GPU kernel"),
        ({"abc": "0" * 64}, False, "abc: the library holds another cubin"),
        ({"xyz": "0" * 64}, None, "xyz: the library holds another cubin"),
    ],
)
def test_other_builds_are_refused(
    build: dict[str, str], kernels: dict[str, str], dirty: bool | None, sentence: str
) -> None:
    with pytest.raises(Refused, match=sentence):
        require_clean_build(kernels, dirty, provenance.of_sources(evidence_writer.ROOT)["all"])


def test_an_installed_package_is_refused(build: dict[str, str]) -> None:
    (evidence_writer.ROOT / "setup.py").unlink()
    with pytest.raises(Refused, match="use a checkout"):
        require_clean_build(build, None, "a digest")


def test_uncommitted_sources_are_refused(build: dict[str, str]) -> None:
    with pytest.raises(Refused, match="sources differ from the commit"):
        require_clean_build(build, True, provenance.of_sources(evidence_writer.ROOT)["all"])


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is clean and holds the made-up kernels."""
    monkeypatch.setattr(evidence_writer, "require_clean_build", lambda *_: None)
    monkeypatch.setattr(provenance, "here", lambda: NOW)
    monkeypatch.setattr(_inspect, "kernels", lambda: KERNELS)
    monkeypatch.setattr(_inspect, "cubin", lambda name: name.encode())
    monkeypatch.setattr(evidence_writer, "listing_digest", lambda cubin: LISTINGS[cubin.decode()])


@pytest.mark.parametrize(("verdict", "code"), [("PASS", 0), ("FAIL", 1), ("INVALID", 2)])
def test_command_stores_a_run(anywhere: None, verdict: str, code: int, tmp_path: Path) -> None:
    run = some_run()
    run["counters"][0] = gate_result("counters", "abc", verdict)
    (tmp_path / "run.json").write_text(json.dumps(run))
    out = tmp_path / "evidence.json"
    assert cli.main(["evidence", "--from", str(tmp_path / "run.json"), "--output", str(out)]) == code
    status = evidence.compare(evidence.load(out), HELD, NOW)
    assert status.state == ("fresh" if verdict == "PASS" else "stale")


def test_command_stores_all_but_what_would_take_a_finding_back(
    anywhere: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, file = tmp_path / "evidence.json", tmp_path / "run.json"
    failed = some_run()
    failed["timing"][0] = gate_result("timing", "abc", "FAIL")
    for run in (failed, some_run()):
        file.write_text(json.dumps(run))
        assert cli.main(["evidence", "--from", str(file), "--output", str(out)]) == 1
    said = capsys.readouterr().out
    assert said.count("abc: timing has failed on these bytes") == 1 and "that stands" in said
    stored = evidence.load(out)
    assert [stored.verdict(name, "timing") for name in ("abc", "def")] == ["FAIL", "PASS"]
    assert len(stored.runs) == 2


def test_command_runs_all_gates(anywhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("dhp_safe_fa.gates.subjects.require_gpu", lambda: None)
    monkeypatch.setattr(audits, "LAST_RUN", tmp_path / "build" / "run.json")
    made = some_run()
    made["how"]["quick"] = ["timing"]
    monkeypatch.setattr(
        cli, "run_all", lambda how, screen, gates, keep: (asked.append((how, gates)), keep(made), ("PASS", made))[2]
    )
    out = tmp_path / "evidence.json"
    assert cli.main(["evidence", "--output", str(out), "--quick", "timing"]) == 0
    assert [(how.quick, how.kernel, how.peer, gates) for how, gates in asked] == [
        (["timing"], ["abc", "def"], None, list(registry.NAMES))
    ]
    assert json.loads(out.read_text())["runs"][0]["quick"] == ["timing"]
    assert evidence.load(out).kernels == some_content()["kernels"]
    assert json.loads(audits.LAST_RUN.read_text()) == made


def test_what_was_found_before_a_run_ended_early_is_kept(
    anywhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dhp_safe_fa.gates.subjects.require_gpu", lambda: None)
    monkeypatch.setattr(audits, "LAST_RUN", tmp_path / "build" / "run.json")

    found = some_run()
    found["counters"][0] = gate_result("counters", "abc", "FAIL")
    del found["bitwise"], found["timing"]

    def run_all(arguments: object, screen: object, gates: object, keep: Any) -> None:
        keep(found)
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run_all", run_all)
    out = tmp_path / "evidence.json"
    with pytest.raises(KeyboardInterrupt):
        cli.main(["evidence", "--output", str(out)])
    assert json.loads(audits.LAST_RUN.read_text()) == found
    stored = evidence.load(out)
    assert [stored.verdict("abc", gate) for gate in evidence.GATES] == ["PASS", "FAIL", "NOT RUN", "NOT RUN"]


def test_what_another_run_stored_meanwhile_is_kept(
    anywhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dhp_safe_fa.gates.subjects.require_gpu", lambda: None)
    monkeypatch.setattr(audits, "LAST_RUN", tmp_path / "build" / "run.json")
    out = tmp_path / "evidence.json"

    def run_all(arguments: object, screen: object, gates: object, keep: Any) -> tuple[str, Any]:
        evidence_writer.write(assemble([only(("timing",), ("abc",))], KERNELS, LISTINGS, NOW), out)
        return "PASS", only(("counters",), ("def",))

    monkeypatch.setattr(cli, "run_all", run_all)
    assert cli.main(["evidence", "--output", str(out)]) == 0
    assert {name: list(kernel["gates"]) for name, kernel in evidence.load(out).kernels.items()} == {
        "abc": ["timing"], "def": ["counters"]
    }  # fmt: skip


@pytest.mark.parametrize("text", ["<<<<<<< HEAD", "{}", json.dumps({"schema": "another", "kernels": {}})])
def test_a_file_that_cannot_be_read_is_not_replaced(
    anywhere: None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A merge that went wrong, say: what it holds would be lost. Of an older version nothing is kept."""
    out, run = tmp_path / "evidence.json", tmp_path / "run.json"
    run.write_text(json.dumps(some_run()))
    out.write_text(text)
    assert cli.main(["evidence", "--from", str(run), "--output", str(out)]) == 2
    assert "mend it, or take it away" in " ".join(capsys.readouterr().err.split()) and out.read_text() == text
    monkeypatch.setattr(evidence, "PACKAGED", out)
    (tmp_path / "README.md").write_text("")
    assert cli.main(["status", "--write", str(tmp_path / "README.md")]) == 2
    out.write_text('{"schema": "dhp_safe_fa.evidence/2"}')
    assert cli.main(["evidence", "--from", str(run), "--output", str(out)]) == 0


@pytest.mark.parametrize("options", [["--kernel", "abc"], ["--family", "forward"], ["--quick", "timing"]])
def test_what_belongs_to_a_new_run(
    anywhere: None, options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run.json"
    run.write_text(json.dumps(some_run()))
    assert cli.main(["evidence", "--from", str(run), "--output", str(tmp_path / "e.json"), *options]) == 2
    assert "are of a new run" in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "e.json").exists()


def test_all_kernels_fit_with_a_run_for_each(tmp_path: Path) -> None:
    """With every figure and digest that a run has now, and without what may be left out."""
    names = [f"{letter}{number:02}_a_kernel_of_usual_length" for letter in "abcdefg" for number in range(12)]
    kernels = [{**KERNELS[0], "name": name} for name in names]
    held = {str(kernel["name"]): kernel["cubin_sha256"] for kernel in kernels}
    figures = {f"a figure of usual length {n}": 12345.678 for n in range(12)}
    runs = []
    for name in names:
        run = some_run(("abc",), kernels=held)
        run["how"]["kernels"] = [name]
        run["how"]["digests"] = {part: "0" * 64 for part in (*NOW, *provenance.here())}
        run["sass"][0]["kernel"] = name
        for gate in registry.EXECUTING:
            run[gate] = [gate_result(gate, name, **figures)]
        runs.append(run)
    now: dict[str, str | None] = dict(runs[0]["how"]["digests"])
    evidence_writer.write(assemble(runs, kernels, LISTINGS, now), tmp_path / "e.json")


@pytest.mark.parametrize(
    ("part", "sentence"),
    [
        (None, "bitwise: run with --quick"),
        ("policy", "another policy than audits/sass_policy.json"),
        ("launch forward", "another launch forward than this checkout has"),
        ("family backward", "another family backward than this checkout has"),
        ("gate timing", "another gate timing than this checkout has"),
        ("controls", "another controls than this checkout has"),
    ],
)
def test_command_refuses_what_it_would_not_make(
    anywhere: None, part: str | None, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`gates all --quick` and `gates all --policy FILE` are runs, and no evidence."""
    run = some_run()
    if part is None:
        run["how"]["quick"] = ["counters", "bitwise", "timing"]
    else:
        run["how"]["digests"][part] = "another"
    (tmp_path / "run.json").write_text(json.dumps(run))
    out = tmp_path / "evidence.json"
    assert cli.main(["evidence", "--from", str(tmp_path / "run.json"), "--output", str(out)]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split()) and not out.exists()


@pytest.mark.parametrize("how", [None, {}, {"quick": []}, {"digests": {}, "quick": "timing"}])
def test_a_run_that_does_not_say_how_it_was_made(how: Any) -> None:
    with pytest.raises(Refused, match="does not say how it was made"):
        assemble([{**some_run(), "how": how}], KERNELS, LISTINGS, NOW)


@pytest.mark.parametrize("here", ["another", None])
def test_a_run_of_a_library_that_was_not_built_anew_is_refused(here: str | None) -> None:
    """It names a commit whose kernels it has never seen. None: of an installed package, which knows no commit."""
    run = some_run()
    run["how"]["sources"]["here"] = here
    with pytest.raises(Refused, match="not built from the sources of the commit"):
        assemble([run], KERNELS, LISTINGS, NOW)


def test_a_run_of_uncommitted_sources_is_refused() -> None:
    dirty = some_run()
    dirty["how"]["sources"]["dirty"] = True
    with pytest.raises(Refused, match="sources that differ from the commit"):
        assemble([dirty], KERNELS, LISTINGS, NOW)


@pytest.mark.parametrize(
    ("options", "names", "gates"),
    [
        (["--family", "backward"], ["def"], registry.NAMES),
        (["--kernel", "def", "abc", "--gate", "timing", "counters"], ["abc", "def"], ["counters", "timing"]),
        (["--gate", "sass"], ["abc", "def"], ["sass"]),
    ],
)
def test_command_on_some(
    anywhere: None, options: list[str], names: list[str], gates: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU is asked for where a gate needs one."""
    asked: list[Any] = []
    monkeypatch.setattr("dhp_safe_fa.gates.subjects.require_gpu", lambda: asked.append("a GPU"))
    monkeypatch.setattr(audits, "LAST_RUN", tmp_path / "build" / "run.json")
    made = only(tuple(gates), tuple(names))
    monkeypatch.setattr(
        cli, "run_all", lambda how, screen, gates, keep: (asked.append((how.kernel, gates)), ("PASS", made))[1]
    )
    assert cli.main(["evidence", "--output", str(tmp_path / "evidence.json"), *options]) == 0
    assert asked == [*(["a GPU"] if gates != ["sass"] else []), (names, list(gates))]
    assert list(evidence.load(tmp_path / "evidence.json").kernels) == names


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--family", "sideways"], "--family sideways: there is no such family; there are backward, forward"),
        (["--kernel", "xyz"], "--kernel xyz: there is no such kernel; shipped are abc, def"),
    ],
)
def test_command_on_what_there_is_not(
    anywhere: None, options: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evidence", "--output", str(tmp_path / "evidence.json"), *options]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split()) and list(tmp_path.iterdir()) == []


def test_command_without_a_gpu(
    anywhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["evidence", "--output", str(tmp_path / "evidence.json")]) == 2
    assert "NOT RUN: no CUDA GPU" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_command_with_something_else(
    anywhere: None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert cli.main(["evidence", "--from", str(path), "--output", str(tmp_path / "evidence.json")]) == 2
    assert "x.json: is no" in capsys.readouterr().err.replace("\n", "") and list(tmp_path.iterdir()) == [path]


def test_listing_digest_is_stable(nvdisasm: None) -> None:
    kernels = _inspect.kernels()
    if not kernels:
        pytest.skip("this build has no GPU kernels (no nvcc was found)")
    cubin = _inspect.cubin(kernels[0]["name"])
    assert evidence_writer.listing_digest(cubin) == evidence_writer.listing_digest(cubin)
    assert str(tools.tempfile.gettempdir()) not in tools.disassemble(cubin)


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        ([], 0, ""),
        (["--quick"], 2, "bitwise: run with --quick, and evidence needs all of its repeats"),
        (["--policy", "all.json"], 2, "another policy than audits/sass_policy.json"),
    ],
)
def test_from_a_run_of_all(
    anywhere: None,
    options: list[str],
    code: int,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """`gates all` and then `gates evidence --from`, as they are typed; the gates themselves pass."""
    made = some_run()
    monkeypatch.chdir(tmp_path)
    Path("all.json").write_text('{"declassifications": []}')
    monkeypatch.setattr(provenance, "here", lambda: {**NOW, "policy": provenance.of_policy()})
    monkeypatch.setattr(cli.report, "environment", lambda: made["environment"])
    monkeypatch.setattr(cli, "_names", lambda asked_for: list(HELD))
    monkeypatch.setattr(cli.report, "sources_dirty", lambda paths: False)
    monkeypatch.setattr(cli, "run_sass", lambda arguments, screen: ("PASS", made["sass"]))
    monkeypatch.setattr(cli, "run_executing", lambda gate, arguments, screen: ("PASS", made[gate]))
    assert cli.main(["all", *options, "--json", "run.json"]) == 0
    capsys.readouterr()
    assert cli.main(["evidence", "--from", "run.json", "--output", "evidence.json"]) == code
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert Path("evidence.json").exists() == (code == 0)
