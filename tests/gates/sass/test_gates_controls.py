"""The planted leaks: each is caught as declared, each clean twin passes, and a wrong one is noticed."""

from __future__ import annotations

import json
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dhp_safe_fa.gates import controls, tools
from dhp_safe_fa.gates.sass.gate import Cubin, KernelReport, audit
from dhp_safe_fa.gates.sass.policy import Policy

SOURCES = sorted(controls.SOURCES.rglob("*.cu"))


@pytest.fixture(scope="module")
def reports(planted: controls.Controls) -> dict[str, KernelReport]:
    return {r.kernel: r for cubin in planted.cubins for r in audit(Cubin("", cubin), Policy())}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_control(source: Path, outcomes: dict[str, controls.Outcome]) -> None:
    assert outcomes[source.stem].problem == ""


def test_every_kind_is_planted(planted: controls.Controls) -> None:
    """Kinds without a control of their own: guarded-barrier shares its code with guarded-memory, and
    unresolved-control is no leak but a limit of the analysis."""
    kinds = {"branch", "indirect-branch", "exit", "call", "address", "descriptor", "barrier-operand", "shuffle-lane",
             "clock", "guarded-memory", "guarded-arithmetic", "mbarrier", "tensor-map", "constant",
             "latency", "declared-memory"}  # fmt: skip
    assert kinds | {controls.LITERAL, controls.BLIND} == set(planted.expects.values())


def test_the_documented_table_is_what_the_headers_say() -> None:
    text = (controls.SOURCES.parents[1] / "docs" / "gates.md").read_text()
    assert controls.markdown_table() in text, f"docs/gates.md needs this table:\n{controls.markdown_table()}"


def test_every_gate_catches_something_and_is_blind_to_something(planted: controls.Controls) -> None:
    for gate in controls.EXECUTING:
        assert {controls.CAUGHT, controls.BLIND} <= set(planted.expected_of(gate).values())


def test_a_gate_that_no_header_speaks_of(planted: controls.Controls) -> None:
    with pytest.raises(controls.ControlError, match=r"what odour sees: .*loop_bound"):
        planted.expected_of("odour")
    nothing = controls.Controls({"a": "branch"}, [], {"a": {"odour": controls.MAY}})
    with pytest.raises(controls.ControlError, match="no control has to be caught by odour"):
        nothing.expected_of("odour")
    with pytest.raises(controls.ControlError, match="there are none"):
        controls.Controls({}, []).expected_of("counters")


def chain_of(report: KernelReport, kind: str) -> list[str]:
    finding = next(finding for finding in report.secret_findings if finding["kind"] == kind)
    return [step["instruction"].split()[0].partition(".")[0] for step in finding["chain"]]


@pytest.mark.parametrize(
    ("control", "source", "way"),
    [
        ("through_shared", "LDS", ""),
        ("through_shuffle", "LDG", "SHFL"),
        ("through_spill", "LDG", "LDL"),
        ("through_uniform", "LDG", "R2UR"),
        ("through_wgmma", "HGMMA", ""),
    ],
)
def test_the_leak_went_the_planted_way(
    control: str, source: str, way: str, reports: dict[str, KernelReport], planted: controls.Controls
) -> None:
    chain = chain_of(reports[f"{control}_leak"], planted.expects[control])
    assert chain[0] == source
    assert not way or way in chain


def test_findings_name_the_source_line(reports: dict[str, KernelReport]) -> None:
    finding = next(f for f in reports["secret_gather_leak"].secret_findings if f["kind"] == "address")
    file, _, line = finding["source"].rpartition(":")
    assert "secret[128 + index]" in Path(file).read_text().splitlines()[int(line) - 1]


def test_spills_and_registers_are_those_that_ptxas_reports(reports: dict[str, KernelReport], tmp_path: Path) -> None:
    nvcc = controls.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found")
    source = controls.SOURCES / "laundering" / "through_spill.cu"
    command = [nvcc, "-arch=sm_90a", "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", "-o", tmp_path / "out", source]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    for twin in ("leak", "clean"):
        report = reports[f"through_spill_{twin}"]
        part = said.partition(f"Function properties for {twin}\n")[2]
        assert f" {report.spill_bytes} bytes spill stores" in part.splitlines()[0]
        assert f"Used {report.registers} registers" in part.splitlines()[1]


def test_the_build_step_hides_the_branch_from_the_literal_count(reports: dict[str, KernelReport]) -> None:
    leak = reports["indirect_branch_leak"]
    assert leak.predicated_branches == 0 < leak.indirect_branches


# ---- a gate that is wrong about a control says so --------------------------------------------------------------------


def made(kind: str = "", **figures: Any) -> KernelReport:
    report = KernelReport("k", "0", 1, 8, 0, predicated_branches=0, indirect_branches=0)
    return replace(report, secret_findings=[{"kind": kind}] if kind else [], **figures)


@pytest.mark.parametrize(
    ("expects", "leak", "clean", "problem"),
    [
        ("branch", made("branch"), made(), ""),
        ("branch", made(), made(), "was not found"),
        ("branch", made("address"), made(), "found: address"),
        ("branch", made("branch"), made("address"), "clean twin failed: address"),
        ("branch", made("branch"), made(predicated_branches=1), "1 predicated transfers"),
        ("branch", made("branch"), made(unknown_opcodes=["FOO"]), "clean twin failed: FOO"),
        ("branch", made("branch", unknown_opcodes=["FOO"]), made(), "unknown opcodes: FOO"),
        ("branch", None, made(), "does not hold"),
        ("literal", made(predicated_branches=1), made(), ""),
        ("literal", made(), made(), "not caught"),
        ("blind", made(), made(), ""),
        ("blind", made("address"), made(), "found address"),
    ],
)
def test_judge(expects: str, leak: KernelReport | None, clean: KernelReport | None, problem: str) -> None:
    said = controls.judge(expects, leak, clean)
    assert problem in said and bool(said) == bool(problem)


@pytest.mark.parametrize(
    "header",
    [
        "// no header",
        "// control: expects sass=branch",
        "// control: expects sass=branch counters=perhaps bitwise=blind timing=blind",
        "// control: expects sass=branch counters=caught bitwise=blind timing=blind build=unknown",
    ],
)
def test_header_is_required(header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bad.cu").write_text(f"{header}\n")
    monkeypatch.setattr(controls, "SOURCES", tmp_path)
    with pytest.raises(controls.ControlError, match=r"bad\.cu"):
        controls.build_controls(tmp_path / "out")


def test_no_control_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "SOURCES", tmp_path)
    with pytest.raises(controls.ControlError, match="no control"):
        controls.build_controls(tmp_path / "out")


def test_a_control_that_does_not_compile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a reason to skip: with the control goes what it shows."""
    if controls.find_nvcc() is None:
        pytest.skip("nvcc was not found")
    text = (controls.SOURCES / "other" / "clock_read.cu").read_text()
    (tmp_path / "bad.cu").write_text(text + "this is no C\n")
    monkeypatch.setattr(controls, "SOURCES", tmp_path)
    with pytest.raises(controls.ControlError, match=r"cannot be built.*nvcc failed"):
        controls.build_controls(tmp_path / "out")


def test_without_compiler_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controls, "find_nvcc", lambda: None)
    with pytest.raises(tools.NotRun, match="nvcc"):
        controls.build_controls(tmp_path)


def test_without_sources_the_packaged_ones_are_used(
    planted: controls.Controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "SOURCES", tmp_path / "none")
    monkeypatch.setattr(controls, "PACKAGED", tmp_path)
    with pytest.raises(tools.NotRun, match="no controls"):
        controls.load_controls()
    (tmp_path / controls.MANIFEST).write_text(json.dumps({"expects": {"a": "branch"}, "cubins": ["a.cubin"]}))
    (tmp_path / "a.cubin").write_bytes(planted.cubins[0])
    assert controls.load_controls() == controls.Controls({"a": "branch"}, [planted.cubins[0]])


def test_a_changed_source_is_compiled_again(
    planted: controls.Controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if controls.find_nvcc() is None:
        pytest.skip("nvcc was not found")
    sources, out = tmp_path / "sources", tmp_path / "out"
    sources.mkdir()
    text = (controls.SOURCES / "other" / "clock_read.cu").read_text()
    (sources / "one.cu").write_text(text)
    monkeypatch.setattr(controls, "SOURCES", sources)
    said: list[str] = []
    controls.build_controls(out, said.append)
    controls.build_controls(out, said.append)
    assert said == ["compiling 1 controls"]
    (sources / "one.cu").write_text(text.replace("sass=clock", "sass=branch"))
    controls.build_controls(out, said.append)
    assert len(said) == 2
    content = json.loads((out / controls.MANIFEST).read_text())
    assert content["expects"] == {"one": "branch"}
    assert content["executing"] == {"one": controls.read_header(sources / "one.cu").executing}


def test_who_comes_second_waits_for_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gates that run beside each other, as tests do, compile into the same folder."""
    building, most = [], []

    def build(folder: Path, progress: object) -> None:
        building.append(folder)
        most.append(len(building))
        time.sleep(0.05)  # in which the others would come in
        building.pop()
        raise controls.ControlError("not further")

    monkeypatch.setattr(controls, "build_controls", build)
    monkeypatch.setattr(controls, "CACHE", tmp_path / "controls")
    with ThreadPoolExecutor(max_workers=4) as threads:
        waiting = [threads.submit(controls.load_controls) for _ in range(4)]
    assert all(isinstance(each.exception(), controls.ControlError) for each in waiting)
    assert most == [1, 1, 1, 1]
