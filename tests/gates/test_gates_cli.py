"""The command line: verdicts, exit codes, JSON, and that whatever is missing is a reason, never a pass."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dhp_safe_fa.gates import cli, controls, provenance, registry, targets, tools
from dhp_safe_fa.gates.sass.policy import PolicyError, load
from dhp_safe_fa.gates.verdict import ControlOutcome, GateResult, Progress, conclude, worst

KEYS = ["kernel", "cubin_sha256", "instructions", "registers", "spill_bytes", "predicated_branches",
        "indirect_branches", "secret_findings", "unknown_opcodes", "public_memory", "verdict"]  # fmt: skip


COMPILED: dict[tuple[str, ...], bytes] = {}


def compile_cubin(folder: Path, text: str, *flags: str) -> Path:
    """A cubin of these kernels (or what the flags ask for), each text compiled once."""
    nvcc = controls.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found")
    out = folder / "out"
    if (text, *flags) not in COMPILED:
        (folder / "kernels.cu").write_text(text)
        tools.run([nvcc, "-arch=sm_90a", *(flags or ("-cubin",)), "-o", out, folder / "kernels.cu"])
        COMPILED[(text, *flags)] = out.read_bytes()
    out.write_bytes(COMPILED[(text, *flags)])
    return out


CLEAN = 'extern "C" __global__ void copy(const float *x, float *y) { y[threadIdx.x] = x[threadIdx.x]; }\n'
LEAKY = 'extern "C" __global__ void gather(const int *x, int *y) { y[threadIdx.x] = x[x[threadIdx.x]]; }\n'
LOOP = """extern "C" __global__ void sum(const float *x, float *y, int n) {
  float s = 0.f;
#pragma unroll 1
  for (int i = 0; i < n; i++) s += x[i];
  y[threadIdx.x] = s;
}
"""


@pytest.fixture(autouse=True)
def controls_ran(
    planted: controls.Controls, outcomes: dict[str, controls.Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted controls are judged once for all tests here, other ones whenever they are asked for."""
    judge = controls.run_controls
    known = list(outcomes.values())
    monkeypatch.setattr(controls, "run_controls", lambda given: known if given == planted else judge(given))


def gate(*arguments: str | Path, json_file: Path | None = None) -> tuple[int, list[dict[str, Any]]]:
    extra = ["--json", str(json_file)] if json_file else []
    code = cli.main(["sass", *map(str, arguments), *extra])
    return code, json.loads(json_file.read_text()) if json_file else []


def test_clean_cubin_passes(tmp_path: Path) -> None:
    code, (report,) = gate("--cubin", compile_cubin(tmp_path, CLEAN), json_file=tmp_path / "o.json")
    assert (code, report["verdict"], report["kernel"]) == (0, "PASS", "copy")
    assert list(report) == KEYS
    assert 0 < report["registers"] <= 255 and report["spill_bytes"] == 0


def test_leaky_cubin_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, (report,) = gate("--cubin", compile_cubin(tmp_path, LEAKY), json_file=tmp_path / "o.json")
    assert (code, report["verdict"]) == (1, "FAIL")
    assert {f["kind"] for f in report["secret_findings"]} == {"address"}
    assert "gather: address at" in capsys.readouterr().out


def test_public_loop_fails_the_literal_part_only(tmp_path: Path) -> None:
    code, (report,) = gate("--cubin", compile_cubin(tmp_path, LOOP), json_file=tmp_path / "o.json")
    assert (code, report["secret_findings"]) == (1, [])
    assert report["predicated_branches"] > 0


def test_one_leak_among_several_kernels(tmp_path: Path) -> None:
    code, reports = gate("--cubin", compile_cubin(tmp_path, CLEAN + LEAKY), json_file=tmp_path / "o.json")
    assert code == 1
    assert {r["kernel"]: r["verdict"] for r in reports} == {"copy": "PASS", "gather": "FAIL"}


def test_json_on_standard_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sass", "--cubin", str(compile_cubin(tmp_path, CLEAN)), "--json", "-"]) == 0
    assert [r["kernel"] for r in json.loads(capsys.readouterr().out)] == ["copy"]


def test_library(tmp_path: Path) -> None:
    flags = ("-cudart", "none", "-shared", "-Xcompiler", "-fPIC")
    try:
        library = compile_cubin(tmp_path, LEAKY, *flags)
        tools.find("cuobjdump")
    except tools.NotRun as error:
        pytest.skip(str(error))
    code, (report,) = gate("--library", library, json_file=tmp_path / "o.json")
    assert (code, report["kernel"]) == (1, "gather")


def test_policy_accepts_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule = {"effect": "accepted", "kernel": "gather", "instruction": "LDG*", "reason": "the table is public"}
    unused = {**rule, "kernel": "nothing"}
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"declassifications": [rule, unused]}))
    assert gate("--cubin", compile_cubin(tmp_path, LEAKY), "--policy", policy)[0] == 0
    said = capsys.readouterr().out
    assert "policy: used: accepted gather" in said and "policy: unused: accepted nothing" in said


def test_policy_makes_a_load_public(tmp_path: Path) -> None:
    rule = {"effect": "public-result", "kernel": "gather", "instruction": "LDG*", "reason": "the table is public"}
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"declassifications": [rule]}))
    assert gate("--cubin", compile_cubin(tmp_path, LEAKY), "--policy", policy)[0] == 0


PAGED = """
extern "C" __global__ void paged(const int *table, const float *cache, float *out) {
  out[threadIdx.x] = cache[table[blockIdx.x] * 128 + threadIdx.x];
}
"""


def test_policy_declares_memory_public(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What steers through a declared pointer is public, and through its neighbour secret; the report says which."""
    cubin, policy = compile_cubin(tmp_path, PAGED), tmp_path / "policy.json"
    rule = {"kernel": "pag*", "parameter": 0, "name": "page_table", "reason": "the host's page numbers"}
    for parameter, code, state in ((0, 0, "used"), (8, 1, "used")):
        policy.write_text(json.dumps({"declassifications": [], "public_memory": [{**rule, "parameter": parameter}]}))
        found, (report,) = gate("--cubin", cubin, "--policy", policy, json_file=tmp_path / "o.json")
        assert (found, report["public_memory"]) == (code, ["page_table"])
        said = capsys.readouterr().out
        assert f"policy: {state}: public memory pag*: page_table, parameter at {parameter}" in said
    assert gate("--cubin", cubin)[0] == 1


MADE = """
extern "C" __global__ void make(const int *lengths, const int *others, int *table) {
  table[threadIdx.x] = lengths[threadIdx.x] ^ (others[threadIdx.x] & MASK);
}
extern "C" __global__ void use(const int *table, const float *cache, float *out) {
  WAIT
  out[threadIdx.x] = cache[table[blockIdx.x] * 128 + threadIdx.x];
}
"""
WAIT = 'asm volatile("griddepcontrol.wait;" ::: "memory");'


@pytest.mark.parametrize(("mask", "wait", "code"), [("0", WAIT, 0), ("127", WAIT, 1), ("0", "", 1)])
def test_policy_says_who_writes_public_memory(mask: str, wait: str, code: int, tmp_path: Path) -> None:
    """It may hold nothing secret, and is read after the launch that writes it."""
    cubin, path = compile_cubin(tmp_path, MADE.replace("MASK", mask).replace("WAIT", wait)), tmp_path / "policy.json"
    lengths = {"kernel": "make", "parameter": 0, "name": "lengths", "reason": "lengths are public"}
    table = {"kernel": "use", "parameter": 0, "name": "table", "reason": "made of public lengths", "made_by": "make"}
    path.write_text(json.dumps({"declassifications": [], "public_memory": [lengths, table]}))
    assert gate("--cubin", cubin, "--policy", path)[0] == code


def test_the_shipped_policy_is_for_shipped_kernels(tmp_path: Path) -> None:
    """Its patterns are names, and anybody may give a kernel the name tiles."""
    cubin = compile_cubin(tmp_path, LEAKY.replace("gather", "tiles"))
    code, (report,) = gate("--cubin", cubin, json_file=tmp_path / "o.json")
    assert (code, report["kernel"], report["public_memory"]) == (1, "tiles", [])
    rule = {"kernel": "tiles", "parameter": 0, "name": "places", "reason": "the places are public"}
    (own := tmp_path / "policy.json").write_text(json.dumps({"public_memory": [rule]}))
    assert gate("--cubin", cubin, "--policy", own)[0] == 0, "a policy of one's own is for whatever it names"


def test_a_shipped_kernel_is_itself_in_a_file(tmp_path: Path) -> None:
    cubins = {cubin.name: cubin.data for cubin in targets.shipped()}
    (path := tmp_path / "unnamed.cubin").write_bytes(cubins["tiles"])
    code, (report,) = gate("--cubin", path, json_file=tmp_path / "o.json")
    assert (code, report["kernel"], len(report["public_memory"])) == (0, "tiles", 5)


def test_a_cubin_without_kernels_is_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As every file of the host alone has one in a library."""
    assert gate("--cubin", compile_cubin(tmp_path, "__constant__ int table[4];"))[0] == 2
    assert "holds no kernel" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"declassifications": [{"effect": "accepted"}]}', "declassification 1: kernel is missing"),
        (
            '{"declassifications": [{"effect": "x", "kernel": "*", "instruction": "*", "reason": "long enough"}]}',
            "effect is 'x'; supported: public-result, accepted",
        ),
        (
            '{"declassifications": [{"effect": "accepted", "kernel": "*", "instruction": "*", "reason": "public"}]}',
            "reason is 'public'; supported: 10 letters or more",
        ),
        ('{"public_memory": [{"parametr": 8}]}', "public memory 1: parametr is unknown; there are kernel, parameter"),
        ('{"public_memory": {}}', "public_memory is no list"),
        ('{"public": []}', "no list called declassifications or public_memory"),
        ('{"public_memory": [7]}', "public memory 1: is no object with kernel, parameter"),
    ],
)
def test_a_bad_policy_is_told_what_is_wrong(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(PolicyError, match=re.escape(said)):
        load(path)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"declassifications": [], "public_memory": [{"kernel": "*"}]}',
        '{"declassifications": [], "public_memory":'
        ' [{"kernel": "*", "parameter": 4, "name": "t", "reason": "half a pointer"}]}',
        '{"declassifications": [], "public_memory": [{"kernel": "*", "parameter": 8, "name": "t", "reason": ""}]}',
        '{"declassifications": [], "public_memory":'
        ' [{"kernel": "*", "parameter": 8, "name": "t", "reason": "a long enough one", "made_by": 1}]}',
        "[]",
        '{"declassifications": [{}]}',
        '{"declassifications": [{"effect": "accepted", "kernel": "*", "instruction": "*", "reason": ""}]}',
        '{"declassifications": [{"effect": "x", "kernel": "*", "instruction": "*", "reason": "a long enough one"}]}',
    ],
)
def test_bad_policy(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(PolicyError):
        load(path)
    assert gate("--policy", path)[0] == 2


def test_the_reviewed_policy_says_who_writes_the_list_of_query_tiles() -> None:
    policy = load(provenance.POLICY)
    kernel = "fwd_float16_d64_k128_w3_listed"
    made = policy.made_before(kernel)
    assert [policy.declared(kernel)[parameter] for parameter in made] == ["list"]
    assert policy.is_maker("tiles") and not policy.is_maker(kernel)


# ---- not run, invalid ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", ["nvdisasm", "cuobjdump"])
def test_missing_tool(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = compile_cubin(tmp_path, CLEAN)
    candidates = tools._candidates
    monkeypatch.setattr(tools, "_candidates", lambda name: iter(()) if name == tool else candidates(name))
    assert gate("--cubin" if tool == "nvdisasm" else "--library", file)[0] == 2
    assert f"NOT RUN: {tool} was not found" in capsys.readouterr().err


def test_missing_controls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = compile_cubin(tmp_path, CLEAN)
    monkeypatch.setattr(controls, "SOURCES", tmp_path / "none")
    monkeypatch.setattr(controls, "PACKAGED", tmp_path / "none")
    assert gate("--cubin", file)[0] == 2


def test_wrong_control_makes_it_invalid(
    planted: controls.Controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = controls.Controls({**planted.expects, "clock_read": "branch"}, planted.cubins)
    monkeypatch.setattr(controls, "load_controls", lambda _: wrong)
    code, (report,) = gate("--cubin", compile_cubin(tmp_path, CLEAN), json_file=tmp_path / "o.json")
    assert (code, report["verdict"]) == (2, "INVALID")
    assert "control clock_read (expects branch)" in capsys.readouterr().out


@pytest.mark.parametrize("expects", [{}, {"row_variance": "blind"}], ids=["none", "nothing to catch"])
def test_without_a_leak_to_catch_it_is_invalid(
    expects: dict[str, str], planted: controls.Controls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "load_controls", lambda _: controls.Controls(expects, planted.cubins))
    code, (report,) = gate("--cubin", compile_cubin(tmp_path, CLEAN), json_file=tmp_path / "o.json")
    assert (code, report["verdict"]) == (2, "INVALID")


@pytest.mark.parametrize("content", [b"", b"not an ELF file at all", b"\x7fELF\x02" + bytes(200)])
def test_no_cubin(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.cubin"
    path.write_bytes(content)
    assert gate("--cubin", path)[0] == 2
    assert "NOT RUN" in capsys.readouterr().out


def test_damaged_cubin(tmp_path: Path) -> None:
    path = tmp_path / "x.cubin"
    path.write_bytes(compile_cubin(tmp_path, CLEAN).read_bytes()[:600])
    assert gate("--cubin", path)[0] == 2


def test_a_bad_cubin_beside_a_leaky_one_fails(tmp_path: Path) -> None:
    (tmp_path / "x.cubin").write_bytes(b"")
    assert gate("--cubin", tmp_path / "x.cubin", compile_cubin(tmp_path, LEAKY))[0] == 1


@pytest.mark.parametrize("option", [("--kernel", "nope"), ("--cubin", "nope"), ("--library", "nope"),
                                    ("--peer", "sdpa-cudnn"), ("--peer", "fa3")])  # fmt: skip
def test_nothing_to_look_at(option: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert gate(*option)[0] == 2
    assert "NOT RUN" in capsys.readouterr().err


def test_peer_is_found_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "torch" / "lib"
    folder.mkdir(parents=True)
    (folder / "libtorch_cuda.so").touch()
    monkeypatch.setattr(targets, "_libraries", lambda pattern: iter(tmp_path.glob(pattern)))
    asked: list[tuple[Path, str, str]] = []
    monkeypatch.setattr(targets, "from_library", lambda *given: asked.append(given) or [])
    targets.from_peer("sdpa-flash")
    assert asked == [(folder / "libtorch_cuda.so", "sm_90", "flash_fwd")]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["frobnicate"],
        ["sass", "--kernel", "a", "--cubin", "b"],
        ["counters", "--cubin", "b"],
        ["counters", "--kernel", "a", "--peer", "fa3"],
        ["all", "--library", "b"],
        ["bitwise", "--plot", "p.png"],
        ["all", "--quick", "--full"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(arguments)
    assert caught.value.code == 2


def test_without_rich_it_is_not_run() -> None:
    block = "import runpy, sys; sys.modules['rich'] = None; runpy.run_module('dhp_safe_fa.gates')"
    done = subprocess.run([sys.executable, "-c", block, "sass"], capture_output=True, text=True)
    assert done.returncode == 2 and "NOT RUN" in done.stderr


# ---- the gates that execute kernels, and all of them -----------------------------------------------------------------


RIGHT = ControlOutcome("loop_bound", "caught", "something")
WRONG = ControlOutcome("loop_bound", "caught", "nothing", "the planted leak was not seen")


def pretend(monkeypatch: pytest.MonkeyPatch, gate: str, *results: GateResult) -> list[tuple[object, ...]]:
    """Put a module in the place of a gate, and subjects in the place of those that need a GPU; returns its calls."""
    calls: list[tuple[object, ...]] = []

    def run(subjects: list[object], quick: bool, progress: Progress) -> list[GateResult]:
        calls.append((subjects, quick))
        progress("kernels", 1, 2)
        return list(results)

    def choose(kernels: list[str] | None, peer: str | None) -> list[object]:
        return [SimpleNamespace(name=name, peer=peer, why_not="") for name in kernels or ["one"]]

    module = SimpleNamespace(run=run, choose=choose)
    monkeypatch.setitem(sys.modules, f"dhp_safe_fa.gates.{gate}.gate", module)
    monkeypatch.setitem(sys.modules, "dhp_safe_fa.gates.subjects", module)
    return calls


@pytest.mark.parametrize(
    ("problems", "seen", "verdict", "code"),
    [([], [RIGHT], "PASS", 0), (["it leaks"], [RIGHT], "FAIL", 1), (["it leaks"], [WRONG], "INVALID", 2)],
)
def test_an_executing_gate(
    problems: list[str],
    seen: list[ControlOutcome],
    verdict: str,
    code: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    figures = {"calls": 3, "time": 1.5, "not shown": [1]}
    calls = pretend(monkeypatch, "counters", conclude("counters", "attn", figures, problems, seen))
    file = tmp_path / "o.json"
    assert cli.main(["counters", "--quick", "--kernel", "attn", "--json", str(file)]) == code
    assert calls == [([SimpleNamespace(name="attn", peer=None, why_not="")], True)]
    (result,) = json.loads(file.read_text())
    assert list(result) == ["gate", "subject", "verdict", "figures", "problems", "controls"]
    assert (result["verdict"], result["problems"], result["figures"]) == (verdict, problems, figures)
    said = capsys.readouterr().out
    assert "calls" in said and "not shown" not in said
    assert all(f"{verdict}: attn: {problem}" in said for problem in problems)
    assert ("control loop_bound (expects caught)" in said) == (seen == [WRONG])


def test_a_subject_that_cannot_be_run_does_not_stop_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = pretend(monkeypatch, "counters", conclude("counters", "attn", {}, [], [RIGHT]))
    able, unable = (SimpleNamespace(name=name, why_not=why) for name, why in (("attn", ""), ("new", "no shape")))
    monkeypatch.setattr(sys.modules["dhp_safe_fa.gates.subjects"], "choose", lambda *_: [able, unable])
    assert cli.main(["counters"]) == 2
    assert calls == [([able], False)]
    said = capsys.readouterr().out
    assert "NOT RUN" in said and "no shape" in said and "PASS" in said


def test_an_executing_gate_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, "counters", conclude("counters", "attn", {}, [], [RIGHT]))
    assert cli.main(["counters", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["subject"] == "attn"


@pytest.mark.parametrize("gate", registry.EXECUTING)
def test_an_executing_gate_without_a_gpu(
    gate: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    file = tmp_path / "o.json"
    assert cli.main([gate, "--json", str(file)]) == 2
    (result,) = json.loads(file.read_text())
    assert (result["gate"], result["verdict"]) == (gate, "NOT RUN")
    assert "no CUDA GPU" in result["problems"][0] and "no CUDA GPU" in capsys.readouterr().out


def run_all(file: Path, verdicts: dict[str, str], monkeypatch: pytest.MonkeyPatch, *quick: str) -> int:
    """`all`, with the verdicts of the executing gates given."""

    def run_executing(gate: str, *_: object) -> tuple[str, list[dict[str, Any]]]:
        return verdicts[gate], [{"gate": gate}]

    monkeypatch.setattr(cli, "run_executing", run_executing)
    return cli.main(["all", "--quick", *quick, "--json", str(file)])


@pytest.mark.parametrize(
    ("counters", "bitwise", "timing", "code"),
    [
        ("PASS", "PASS", "PASS", 0),
        ("PASS", "NOT RUN", "PASS", 2),
        ("INVALID", "NOT RUN", "PASS", 2),
        ("NOT RUN", "FAIL", "INVALID", 1),
    ],
)
def test_all(
    counters: str, bitwise: str, timing: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = targets.Cubin("copy", compile_cubin(tmp_path, CLEAN).read_bytes())
    monkeypatch.setattr(targets, "shipped", lambda: [copy])
    file = tmp_path / "o.json"
    verdicts = {"counters": counters, "bitwise": bitwise, "timing": timing}
    assert run_all(file, verdicts, monkeypatch) == code
    content = json.loads(file.read_text())
    assert list(content) == ["environment", "how", "sass", "counters", "bitwise", "timing"]
    quick = ["counters", "bitwise", "timing"]
    sources = {**provenance.built_and_here(), "dirty": cli.report.sources_dirty(cli.SOURCES)}
    assert content["how"] == {
        "subjects": "shipped kernels", "kernels": ["copy"], "gates": list(registry.NAMES), "quick": quick,
        "sources": sources, "digests": provenance.here()
    }  # fmt: skip
    assert sources["built"] == sources["here"], "the sources have changed since the build: make build"
    assert {"gpu", "driver", "cuda", "torch", "commit", "version"} <= set(content["environment"])
    assert [report["kernel"] for report in content["sass"]] == ["copy"]
    assert content["timing"] == [{"gate": "timing"}]


def test_all_says_which_policy_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest, and not that of the reviewed one: `evidence --from` refuses it by that."""
    copy = targets.Cubin("copy", compile_cubin(tmp_path, LEAKY).read_bytes())
    monkeypatch.setattr(targets, "shipped", lambda: [copy])
    monkeypatch.setattr(cli, "run_executing", lambda gate, *_: ("PASS", []))
    rule = {"effect": "accepted", "kernel": "*", "instruction": "*", "reason": "everything is accepted"}
    policy, file = tmp_path / "policy.json", tmp_path / "o.json"
    policy.write_text(json.dumps({"declassifications": [rule]}))
    assert cli.main(["all", "--policy", str(policy), "--json", str(file)]) == 0
    how = json.loads(file.read_text())["how"]
    assert how["digests"]["policy"] == hashlib.sha256(policy.read_bytes()).hexdigest() != provenance.of_policy()
    assert how["quick"] == []


def test_some_gates_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `make evidence` runs them, on some kernels or all."""
    copies = [targets.Cubin(name, compile_cubin(tmp_path, CLEAN).read_bytes()) for name in ("a", "b", "c")]
    monkeypatch.setattr(targets, "shipped", lambda: copies)
    file = tmp_path / "o.json"
    quick = ("timing", "counters", "--kernel", "a", "c")
    assert run_all(file, dict.fromkeys(registry.EXECUTING, "PASS"), monkeypatch, *quick) == 0
    content = json.loads(file.read_text())
    assert (content["how"]["quick"], content["how"]["subjects"]) == (["counters", "timing"], "a, c")
    assert content["how"]["kernels"] == ["a", "c"]
    assert [report["kernel"] for report in content["sass"]] == ["a", "c"]


def test_all_goes_on_where_sass_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_candidates", lambda name: iter(()))
    file = tmp_path / "o.json"
    assert run_all(file, dict.fromkeys(registry.EXECUTING, "PASS"), monkeypatch) == 2
    (sass,) = json.loads(file.read_text())["sass"]
    assert sass["verdict"] == "NOT RUN" and "nvdisasm was not found" in sass["problems"][0]


def test_a_check_stands_in_for_no_planted_leak() -> None:
    """What a run says of itself (that a load was running, say) does not show that a leak would have been found."""
    assert conclude("bitwise", "attn", {}, [], [], [RIGHT]).verdict == "INVALID"
    blind = ControlOutcome("row_variance", "blind", "nothing")
    assert conclude("bitwise", "attn", {}, [], [blind]).verdict == "INVALID"
    assert conclude("bitwise", "attn", {}, [], [RIGHT], [WRONG]).verdict == "INVALID"
    found = conclude("bitwise", "attn", {}, [], [RIGHT], [RIGHT])
    assert (found.verdict, found.controls) == ("PASS", [RIGHT, RIGHT])


def test_worst() -> None:
    assert worst([]) == "NOT RUN"
    assert worst(["PASS", "PASS"]) == "PASS"
    assert worst(["PASS", "NOT RUN"]) == "NOT RUN"
    assert worst(["INVALID", "NOT RUN"]) == "INVALID"
    assert worst(["FAIL", "INVALID", "PASS"]) == "FAIL"


# ---- the shipped kernels ---------------------------------------------------------------------------------------------


@pytest.mark.gates
def test_shipped_kernels_pass(tmp_path: Path) -> None:
    try:
        shipped = targets.shipped()
    except tools.NotRun as error:
        pytest.skip(str(error))
    code, reports = gate(json_file=tmp_path / "o.json")
    assert [r["kernel"] for r in reports] == [cubin.name for cubin in shipped]
    assert code == 0
    for report in reports:
        found = (report["predicated_branches"], report["secret_findings"], report["unknown_opcodes"])
        assert found == (0, [], []), report["kernel"]


def test_a_file_that_cannot_be_written_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "run_sass", lambda *_: pytest.fail("the gate was run"))
    path = tmp_path / "nowhere" / "o.json"
    assert cli.main(["sass", "--json", str(path)]) == 2
    assert f"--json {path}: cannot write there" in capsys.readouterr().err.replace("\n", "")


def test_a_verdict_outlives_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(text: str, path: Path) -> None:
        raise OSError("no space")

    monkeypatch.setattr(cli, "write_whole", fail)
    cubin, path = compile_cubin(tmp_path, LEAKY), tmp_path / "o.json"
    assert cli.main(["sass", "--cubin", str(cubin), "--json", str(path)]) == 1
    captured = capsys.readouterr()
    assert "not written: no space" in captured.err.replace("\n", "") and "FAIL" in captured.out
