"""The steps of an iteration, the GPU's part replaced by known numbers; and a planted leak through the real ones."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import samples

from dhp_safe_fa import evidence
from dhp_safe_fa.bench import WrongResult
from dhp_safe_fa.burn import loop
from dhp_safe_fa.burn.__main__ import main
from dhp_safe_fa.burn.builds import keeping
from dhp_safe_fa.burn.builds.library import Library, ShippedKernel
from dhp_safe_fa.burn.log.file import load
from dhp_safe_fa.burn.log.records import Gate, Profile, Record, Shape
from dhp_safe_fa.burn.measuring import blocks, chip, gating, profiling
from dhp_safe_fa.gates import controls, provenance, registry, tools

OPTIONS = ["--hypothesis", "why not", "--predict", "+5%"]


class Workshop:
    """What a run meets: gates, counters and times as told, and a list of the steps that were taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.steps: list[str] = []
        self.verdicts = {gate.name: gate for gate in samples.PASSED}
        self.times: Callable[[], list[Shape]] = lambda: samples.alone(samples.shapes(random.Random(1)))

    def run(self, name: str, *options: str) -> int:
        self.steps.clear()
        return main(["--log", str(self.path), "run", name, *OPTIONS, *options])

    @property
    def latest(self) -> Record:
        return load(self.path).records[-1]

    def gate(self, name: str, cubins: dict[str, str], quick: bool) -> Gate:
        self.steps.append(name)
        return self.verdicts[name]

    def profile(self, library: Library, family: str, cases: Sequence[object]) -> list[Profile]:
        self.steps.append("profile")
        return samples.PROFILES

    def measure(self, *arguments: object) -> list[Shape]:
        self.steps.append("times")
        return self.times()


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(tmp_path / "iterations.jsonl")
    shipped = ShippedKernel("fwd_float16_d64", b"", samples.KERNEL.cubin_sha256, 168, 0, 90000)

    class Built(Library):
        def __init__(self) -> None:
            self.path = tmp_path / "libdhp_fa.so"

        sha256 = "cd" * 32  # type: ignore[assignment]
        kernels = [shipped]  # type: ignore[assignment]  # noqa: RUF012

        def launch(self, case: object) -> str:
            return "cubin, grid"

    for target, name, value in (
        (loop, "missing_hopper", lambda: None),
        (chip, "here", lambda: samples.H100),
        (profiling, "find_ncu", lambda: "ncu"),
        (profiling, "profile", made.profile),
        (keeping, "commit", lambda: samples.COMMIT),
        (keeping, "build_current", lambda: made.steps.append("build")),
        (keeping, "current", Built),
        (keeping, "kept", lambda *_: Built()),
        (gating, "run_one", made.gate),
        (loop, "_kernel", lambda kernel: samples.KERNEL),
        (loop, "_measure", made.measure),
    ):
        monkeypatch.setattr(target, name, value)
    return made


def test_steps_and_decisions(workshop: Workshop, capsys: pytest.CaptureFixture[str]) -> None:
    assert workshop.run("first") == 0
    assert workshop.steps == ["build", "sass", "counters", "bitwise", "timing", "profile", "times"]
    assert workshop.latest.milestones == ["I4", "I5"]
    for name, gain, code in (("faster", 1.06, 0), ("same", 1.0, 3), ("slower", 1 / 1.05, 1)):
        workshop.times = lambda gain=gain: samples.shapes(random.Random(2), gain)  # type: ignore[misc]
        assert workshop.run(name) == code
        told = capsys.readouterr().out
        assert {0: "proceed", 3: "undecided", 1: "roll back"}[code] in told
    parents = [record.parent.name if record.parent else None for record in load(workshop.path).records]
    assert parents == [None, "first", "faster", "faster"]
    assert workshop.run("against", "--against", "first") == 1
    assert workshop.latest.parent is not None and workshop.latest.parent.name == "first"


@pytest.mark.parametrize("gate", ["sass", "counters", "bitwise", "timing"])
def test_a_failing_gate_ends_it_before_anything_is_timed(workshop: Workshop, gate: str) -> None:
    workshop.verdicts[gate] = Gate(gate, "FAIL", "a leak")
    assert workshop.run("leak") == 1
    assert workshop.steps[-1] == gate
    assert workshop.latest.decision == "roll back"
    assert workshop.latest.shapes == []
    assert workshop.latest.profiles is None


def test_gates_from_stored_evidence(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "evidence.json"
    monkeypatch.setattr(evidence, "CHECKOUT", path)
    now = {**provenance.here(), "kernels fwd_float16_d64": "digest"}
    monkeypatch.setattr(provenance, "here", lambda: now)

    def store(sha256: str, gpu: str = samples.H100.gpu, timing: str = "PASS", changed: Any = None) -> None:
        gates = {gate: {"verdict": "PASS", "run": 0} for gate in registry.NAMES}
        gates["timing"] = {"verdict": timing, "run": 0}
        kernels = {"fwd_float16_d64": {"family": "forward", "cubin_sha256": sha256, "gates": gates}}
        environment = {"gpu": gpu, "driver": samples.H100.driver, "commit": samples.COMMIT}
        run = {"environment": environment, "quick": [], "digests": now | (changed or {})}
        content = {"schema": evidence.SCHEMA, "runs": [run], "kernels": kernels}
        path.write_text(json.dumps(content))

    ours = samples.KERNEL.cubin_sha256
    for problem, arguments in (
        ("its machine code is abababababab", ("ef" * 32,)),
        ("timing: INVALID", (ours, samples.H100.gpu, "INVALID")),
        ("it is of NVIDIA H200", (ours, "NVIDIA H200")),
        ("launch path changed since", (ours, samples.H100.gpu, "PASS", {"launch forward": "another"})),
    ):
        store(*arguments)
        assert workshop.run("first", "--evidence") == 2
        assert problem in capsys.readouterr().err
        assert not workshop.path.exists()
    path.unlink()
    assert workshop.run("first", "--evidence") == 2
    assert "no audits/evidence.json" in capsys.readouterr().err

    store(ours)
    assert workshop.run("first", "--evidence") == 0
    assert workshop.steps == ["build", "sass", "profile", "times"]
    assert [gate.verdict for gate in workshop.latest.gates] == ["PASS"] * 4
    assert "commit 0123456" in workshop.latest.gates[1].detail


def test_a_gate_without_a_verdict(workshop: Workshop) -> None:
    workshop.verdicts["timing"] = Gate("timing", "NOT RUN", "no such gate yet")
    assert workshop.run("early") == 3
    assert workshop.steps[-1] == "times"
    assert load(workshop.path).best("forward") is None


def test_a_wrong_output(workshop: Workshop) -> None:
    def wrong() -> list[Shape]:
        raise WrongResult("ours is wrong: relative error 0.3")

    workshop.times = wrong
    assert workshop.run("wrong") == 1
    assert workshop.latest.wrong == "ours is wrong: relative error 0.3"


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), RuntimeError("CUDA error"), profiling.NoCounters("no counters")])
def test_interrupted_half_way(workshop: Workshop, stop: BaseException, capsys: pytest.CaptureFixture[str]) -> None:
    assert workshop.run("first") == 0
    before = workshop.path.read_bytes()

    def interrupted() -> list[Shape]:
        raise stop

    workshop.times = interrupted
    assert workshop.run("second") == 2
    assert workshop.path.read_bytes() == before
    assert str(stop) in capsys.readouterr().err


def test_refusals_come_before_the_build(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert workshop.run("first") == 0
    other = dataclasses.replace(samples.H100, gpu="NVIDIA H200")
    for arguments, told in (
        (["first"], "has an iteration of this name already"),
        (["x", "--shapes", "1,2,3"], "not four positive numbers"),
        (["x", "--against", "nobody"], "no iteration 'nobody'"),
    ):
        assert workshop.run(*arguments) == 2
        assert told in capsys.readouterr().err
        assert workshop.steps == []
    with monkeypatch.context() as patch:
        patch.setattr(chip, "here", lambda: other)
        assert workshop.run("x") == 2
        assert "is a log of NVIDIA H100 80GB HBM3, and this is NVIDIA H200" in capsys.readouterr().err
    assert workshop.steps == []
    with pytest.raises(SystemExit):
        workshop.run("x", "--milestone", "I99")


@pytest.mark.parametrize("option", ["--hypothesis", "--predict"])
def test_a_run_without_a_reason_is_refused_at_once(
    option: str, workshop: Workshop, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        workshop.run("x", option, " ")
    assert f"argument {option}: is empty" in capsys.readouterr().err and workshop.steps == []


def test_a_log_that_cannot_be_written_is_found_out_before_anything_is_built(
    workshop: Workshop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = str(tmp_path / "none" / "log.jsonl")
    for command in (["run", "x", *OPTIONS], ["baseline", "x"], ["import", "x", "HEAD"]):
        assert main(["--log", nowhere, *command]) == 2
        assert f"--log {nowhere}: cannot write there" in capsys.readouterr().err
    assert workshop.steps == []


def test_without_a_gpu(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Machine code can be judged anywhere; nothing else can."""
    monkeypatch.setattr(loop, "missing_hopper", lambda: "torch sees no GPU")
    assert workshop.run("x") == 2
    assert workshop.steps == ["build", "sass"]
    assert "a Hopper GPU is needed: torch sees no GPU" in capsys.readouterr().err
    assert not workshop.path.exists()
    workshop.verdicts["sass"] = Gate("sass", "FAIL", "a leak")
    assert workshop.run("x") == 1
    assert workshop.latest.chip is None
    assert main(["--log", str(workshop.path), "baseline", "zero"]) == 2
    assert "the baseline needs a Hopper GPU" in capsys.readouterr().err


def test_baseline(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(samples.CASES[0], {"flash": [10.0] * 3, "cudnn": [9.0] * 3})
    forward = loop.FAMILIES["forward"]
    direction = dataclasses.replace(forward.direction, candidates=lambda device: ([None, *measuring_peers()], []))
    monkeypatch.setitem(loop.FAMILIES, "forward", dataclasses.replace(forward, direction=direction))
    monkeypatch.setattr(blocks, "measure_all", lambda *_: [shape])
    assert main(["--log", str(workshop.path), "baseline", "zero"]) == 0
    assert workshop.latest.kind == "baseline"
    assert workshop.latest.decision is None
    assert load(workshop.path).best("forward") is None


def measuring_peers() -> list[object]:
    return [type("Peer", (), {"name": name})() for name in ("flash", "cudnn")]


# ---- gates, as commands ----------------------------------------------------------------------------------------------


def gate_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str, code: int, said: str = "") -> Gate:
    """What the loop makes of a gate that writes this report, says this and exits with this code."""
    program = tmp_path / "gate"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nopen(sys.argv[sys.argv.index('--json') + 1], 'w').write({report!r})\n"
        f"print({said!r})\nsys.exit({code})\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    return gating.run_one("counters", {"k": "aa"}, quick=True)


@pytest.mark.parametrize(
    ("report", "code", "said", "expected"),
    [
        ('[{"subject": "k", "verdict": "PASS"}]', 0, "", Gate("counters", "PASS")),
        ('[{"kernel": "other", "cubin_sha256": "aa", "verdict": "PASS"}]', 0, "", Gate("counters", "PASS")),
        ("[]", 0, "", Gate("counters", "INVALID", "it judged 0 kernels, not the 1 of this build")),
        (
            '[{"kernel": "k", "cubin_sha256": "bb", "verdict": "PASS"}]',
            0,
            "",
            Gate("counters", "INVALID", "it judged 1 kernels, not the 1 of this build"),
        ),
        (
            '[{"subject": "k", "verdict": "FAIL", "problems": ["inst differs", "more"]}]',
            1,
            "",
            Gate("counters", "FAIL", "k: inst differs; k: more"),
        ),
        (
            '[{"kernel": "k", "verdict": "FAIL", "secret_findings": [{"kind": "address", "address": "0x10"}]}]',
            1,
            "",
            Gate("counters", "FAIL", "k: address at 0x10"),
        ),
        (
            '[{"subject": "k", "verdict": "NOT RUN", "problems": ["no ncu"]}]',
            2,
            "",
            Gate("counters", "NOT RUN", "k: no ncu"),
        ),
        ('[{"subject": "k", "verdict": "INVALID"}]', 2, "INVALID: x", Gate("counters", "INVALID", "INVALID: x")),
        ("[]", 2, "unknown gate", Gate("counters", "NOT RUN", "unknown gate")),
        ("[]", 77, "", Gate("counters", "NOT RUN", "")),
    ],
)
def test_what_a_gate_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: str, code: int, said: str, expected: Gate
) -> None:
    assert gate_that(tmp_path, monkeypatch, report, code, said) == expected


# ---- counters, as ncu prints them ------------------------------------------------------------------------------------

CSV = (
    '==PROF== Connected\n"ID","Kernel Name",' + ",".join(f'"{m}"' for m in profiling.METRICS.values()) + "\n"
    '"","","ns","%","%","byte","byte","inst","inst"\n'
    '"0","dhp_attention_fwd","12,345","60.5","51.25","1,000,000","24","5,000","4,900"\n'
)


ENTRIES = ("dhp_attention_fwd",)


def test_counters_of_a_call_of_several_launches() -> None:
    """They are added up, from the first one's name on; what others launch is left out."""
    case = loop.select([samples.CASES[0]], None, "cuda", quick=True)
    head, units, row = CSV.splitlines()[1:4]
    first, second = (row.replace("dhp_attention_fwd", name) for name in ("delta", "bwd"))
    second = second.replace("12,345", "37,035").replace("60.5", "100.5")
    text = "\n".join([head, units, row, first, second, second, row, first, second])
    one, other = profiling.parse(text, case * 2, ("delta", "bwd"))
    assert (one.us, one.dram_bytes, one.executed_instructions) == (86.415, 3_000_072, 14700)
    assert (other.us, other.dram_bytes, other.issued_instructions) == (49.38, 2_000_048, 10000)
    assert other.sm_percent == pytest.approx(90.5) and other.tensor_percent == pytest.approx(51.25)


def test_calls_that_begin_with_another_launch() -> None:
    """What not every call launches first does not cut the others in two."""
    head, units, row = CSV.splitlines()[1:4]
    names = ["bounds", "delta", "bwd", "out", "delta", "bwd", "bwd", "bounds", "delta", "bwd", "delta", "bwd"]
    text = "\n".join([head, units, *(row.replace("dhp_attention_fwd", name) for name in names)])
    case = loop.select([samples.CASES[0]], None, "cuda", quick=True)
    found = profiling.parse(text, case * 4, ("bounds", "delta", "bwd", "out"))
    assert [profile.issued_instructions for profile in found] == [20000, 15000, 15000, 10000]


def test_counters() -> None:
    case = loop.select([samples.CASES[0]], None, "cuda", quick=True)
    expected = Profile(samples.CASES[0], 12.345, 60.5, 51.25, 1_000_024, 5000, 4900)
    assert profiling.parse(CSV, case, ENTRIES) == [expected]
    with pytest.raises(profiling.NoCounters, match="ncu reported 1 launches; 2 were made"):
        profiling.parse(CSV, case * 2, ENTRIES)
    with pytest.raises(profiling.NoCounters, match="no usable value for 1,8,512,64:full:float16"):
        profiling.parse(CSV.replace('"51.25"', '"n/a"'), case, ENTRIES)
    with pytest.raises(profiling.NoCounters, match="no usable value"):
        profiling.parse(CSV.replace("sm__pipe_tensor", "sm__other"), case, ENTRIES)


def test_ncu_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(profiling.NoCounters, match="a record needs counters, and ncu is neither"):
        profiling.find_ncu()


# ---- the real thing --------------------------------------------------------------------------------------------------

# Stores to an address that a score decides.
LEAK = "  if (p->lse) p->lse[(unsigned)(int)s[0] & 127u] = 0.f;\n"
BEFORE = "  if (masked == COMPARED) {\n"


@pytest.mark.long
def test_a_planted_leak_is_rejected_before_it_is_timed(tmp_path: Path) -> None:
    """A copy of the sources with a leak in its softmax goes through build, gate and log as a user's change would."""
    if controls.find_nvcc() is None:
        pytest.skip("nvcc was not found")
    try:
        tools.find("nvdisasm")
    except tools.NotRun as error:
        pytest.skip(str(error))
    copy = tmp_path / "copy"
    ignore = shutil.ignore_patterns(".git", ".venv", "burn", "__pycache__", ".*cache", ".exp", "benchmarks", "docs")
    copy.mkdir()
    for name in ("csrc", "build", "audits", "setup.py", "build_backend.py", "build_record.py", "pyproject.toml"):
        source = keeping.ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        else:
            shutil.copy2(source, copy / name)
    shutil.copytree(keeping.ROOT / "dhp_safe_fa", copy / "dhp_safe_fa")
    shutil.copytree(keeping.ROOT / "tests" / "controls", copy / "tests" / "controls")
    kernel = copy / "csrc" / "hopper" / "softmax.cuh"
    clean = kernel.read_text()
    assert clean.count(BEFORE) == 1
    kernel.write_text(clean.replace(BEFORE, LEAK + BEFORE))
    # one kernel is enough, and quick to build: of rows of any number of segments, or some calls would have none
    for name, kept in (("forward", "[one for one in FAMILY.kernels if not one.is_short][:1]"), ("decode", "()")):
        with (copy / "csrc" / "families" / name / "family.py").open("a") as family:
            family.write(f"import dataclasses\nFAMILY = dataclasses.replace(FAMILY, kernels=tuple({kept}))\n")

    log = tmp_path / "log.jsonl"  # without a previous best, which would have to be built again
    result = subprocess.run(
        [sys.executable, "-m", "dhp_safe_fa.burn", "--log", str(log), "run", "leak", *OPTIONS],
        cwd=copy,
        env={**os.environ, "DHP_SAFE_FA_COMMIT": samples.COMMIT, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    print(result.stdout, result.stderr)
    assert result.returncode == 1
    (record,) = load(log).records
    assert record.name == "leak"
    assert record.decision == "roll back"
    assert [(gate.name, gate.verdict) for gate in record.gates] == [("sass", "FAIL")]
    assert "address at" in record.gates[0].detail
    assert record.shapes == [] and record.profiles is None
