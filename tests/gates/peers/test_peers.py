"""The peers' audit: which machine code is looked at, what a run collects, and the page made of stored results."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from evidence_samples import gate_result, some_run
from gradient_samples import gradients as sample_gradients

from dhp_safe_fa.bench.gradients import reference
from dhp_safe_fa.bench.gradients.peers import flash_on_cpu
from dhp_safe_fa.bench.peers import Candidate, sdpa
from dhp_safe_fa.gates import cli, controls, gradients, inputs, registry, subjects, targets, tools
from dhp_safe_fa.gates.bitwise.rows import rows_of_shape
from dhp_safe_fa.gates.evidence import writer as evidence_writer
from dhp_safe_fa.gates.peers import code as peer_code
from dhp_safe_fa.gates.peers import conventions
from dhp_safe_fa.gates.peers import page as peers_page
from dhp_safe_fa.gates.peers import run as peers
from dhp_safe_fa.gates.peers.conventions import as_meant
from dhp_safe_fa.gates.peers.process import Ended, in_a_process
from dhp_safe_fa.gates.peers.run import kernels_seen
from dhp_safe_fa.gates.sass import policy
from dhp_safe_fa.gates.sass.gate import Cubin, KernelReport
from dhp_safe_fa.gates.sass.policy import Policy
from dhp_safe_fa.gates.subjects import Subject, peer
from dhp_safe_fa.gates.verdict import GateResult

# ---- machine code ----------------------------------------------------------------------------------------------------


def test_demangled_as_a_profiler_prints_it() -> None:
    mangled = "_Z4fmhaIN7cutlass6half_tELi64ELb1EEvN1m6ParamsE"
    assert peer_code.demangle(mangled) == "void fmha<cutlass::half_t, 64, true>(m::Params)"
    assert peer_code.demangle("fmha_cutlassF") == "fmha_cutlassF"


def test_only_kernels_that_were_seen() -> None:
    names = ["_Z1av", "_Z1bv", "plain"]
    assert peer_code.matching(names, {"a()", "plain", "elementwise"}) == {"_Z1av": "a()", "plain": "plain"}
    assert peer_code.matching(names, {"_Z1bv"}) == {"_Z1bv": "b()"}


def finding(kind: str, *chain: str) -> dict[str, Any]:
    return {"kind": kind, "instruction": chain[-1], "chain": [{"instruction": text} for text in chain]}


def test_findings_are_counted_and_the_shortest_way_is_shown() -> None:
    findings = [
        finding("branch", "LDS R0", "FADD R1", "@P0 BRA `(x)"),
        finding("branch", "LDS R0", "@P1 BRA `(x)"),
        finding("guarded-arithmetic", "LDS R0", "@!P5 FMUL R1, R1, R1"),
        finding("guarded-arithmetic", *(f"MOV R{n}" for n in range(9)), "@!P5 FMUL R1, R1, R1"),
        finding("guarded-arithmetic", "LDS R0", "@P1 UIADD3 UR4"),
    ]
    report = KernelReport("k", "ab" * 32, 50, 128, 4, 7, 0, findings, [])
    found = peer_code.summary(report, "void k()", "lib.so: 1.cubin")
    assert found["findings"] == {"branch": 2, "guarded-arithmetic": 3}
    assert found["guarded_opcodes"] == {"FMUL": 2, "UIADD3": 1}
    assert found["examples"]["branch"] == ["LDS R0", "@P1 BRA `(x)"]
    assert (found["kernel"], found["predicated_branches"], found["verdict"]) == ("void k()", 7, "FAIL")


TWO = """extern "C" __global__ void other(const int *x, int *y) { y[threadIdx.x] = x[threadIdx.x]; }
__global__ void fmha_cutlassF_gather(const int *x, int *y) { y[threadIdx.x] = x[x[threadIdx.x]]; }
"""


def compiled(folder: Path) -> bytes:
    nvcc = controls.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found")
    (folder / "two.cu").write_text(TWO)
    tools.run([nvcc, "-arch=sm_90a", "-cubin", "-o", folder / "two.cubin", folder / "two.cu"])
    return (folder / "two.cubin").read_bytes()


def test_a_peer_is_audited_by_what_it_ran(tmp_path: Path, nvdisasm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cubin = Cubin("", compiled(tmp_path), "lib.so: 7.cubin")
    monkeypatch.setattr(targets, "from_peer", lambda name: [cubin])
    seen = ["fmha_cutlassF_gather(int const*, int*)", "void at::native::fill<int>(int)"]
    found = peer_code.audit_peer("sdpa-efficient", seen, Policy())
    assert [(k["kernel"], k["cubin"]) for k in found["kernels"]] == [(seen[0], "lib.so: 7.cubin")]
    assert found["verdict"] == "FAIL" and found["kernels"][0]["findings"] == {"address": 1}
    public = policy.load(peers.POLICY)
    assert peer_code.audit_peer("sdpa-efficient", ["other"], public)["verdict"] == "PASS"
    with pytest.raises(tools.NotRun, match=r"none of the kernels seen to run.*void at::native"):
        peer_code.audit_peer("sdpa-efficient", seen[1:], Policy())


def test_cubins_are_chosen_by_the_kernels_in_them(tmp_path: Path, nvdisasm: None) -> None:
    nvcc = controls.find_nvcc()
    if nvcc is None:
        pytest.skip("nvcc was not found")
    (tmp_path / "two.cu").write_text(TWO)
    library = tmp_path / "lib.so"
    shared = ["-shared", "-cudart", "none", "-Xcompiler", "-fPIC"]
    try:
        tools.find("cuobjdump")
        tools.run([nvcc, "-arch=sm_90a", *shared, "-o", library, tmp_path / "two.cu"])
    except tools.NotRun as error:
        pytest.skip(str(error))
    assert len(targets.from_library(library, "sm_90", "fmha_cutlassF")) == 1
    with pytest.raises(tools.NotRun, match="no cubin with a kernel that has flash_fwd in its name"):
        targets.from_library(library, "sm_90", "flash_fwd")


def test_a_package_outside_this_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "somewhere" / "lib" / "lib.so"
    library.parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "somewhere" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert list(targets._libraries("somewhere/lib/lib.so")) == [library]
    assert list(targets._libraries("nowhere_at_all/lib.so")) == []


# ---- gradients -------------------------------------------------------------------------------------------------------


def test_gradients_of_a_peer_are_a_subject(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient"):
        found = subjects.by_name(f"{name}{targets.BACKWARD}")
        assert (found.outputs, found.kernels, found.entry) == (("dq", "dk", "dv"), (), "")
        assert found.classes == gradients.CLASSES and len(found.shapes) == 4
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(tools.NotRun, match="fa3-backward: flash_attn_interface cannot be imported"):
        subjects.by_name("fa3-backward")


def test_peers_read_dense_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the gate computes again are parts of tensors."""
    seen: list[bool] = []

    def operator(*given: Any) -> Any:
        seen.extend(tensor.is_contiguous() for tensor in given[:-1])
        return given[:3]

    monkeypatch.setitem(subjects.gradient_peers.OPERATORS, "flash", (None, operator))
    found = as_meant(subjects.by_name("sdpa-flash-backward"))
    given = gradients.make("normal", inputs.Shape(1, 2, 2, 20, 20, 16, "bfloat16", False), 1, "cpu")
    found.attend(tuple(tensor[:, :, 3:9] for tensor in given), False)
    assert len(seen) == 6 and all(seen)


@pytest.mark.parametrize("is_causal", [True, False])
def test_peers_are_asked_for_what_they_mean_too(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right gradients with masks aligned to the last key, whose out and lse are given or computed again, pass."""
    asked: list[str] = []

    def right(q: Any, k: Any, v: Any, out: Any, lse: Any, grad_out: Any, masked: bool) -> Any:
        offset = k.size(2) - q.size(2)
        found = sample_gradients((q, k, v, out, lse, grad_out, torch.zeros_like(lse)), masked, offset)
        return tuple(found)

    def again(q: Any, k: Any, v: Any, out: Any, lse: Any, grad_out: Any, masked: bool) -> Any:
        shape = inputs.Shape(*q.shape[:2], k.size(1), q.size(2), k.size(2), q.size(3), "bfloat16", masked)
        out, lse = gradients.complete(shape, (q, k, v), ())[3:]
        return right(q, k, v, out, lse, grad_out, masked)

    shape = inputs.Shape(2, 2, 2, 19, 19, 8, "bfloat16", is_causal)
    monkeypatch.setitem(subjects.gradient_peers.OPERATORS, "flash", (None, right))
    monkeypatch.setattr(subjects.gradient_peers, "flash_attention_3", lambda deterministic: None)
    monkeypatch.setattr(subjects.gradient_peers, "at_once", lambda attend: again)
    for name in ("sdpa-flash-backward", "fa3-backward"):
        of = as_meant(subjects.by_name(name))
        given, stranger = (gradients.make("normal", shape, seed, "cpu") for seed in (1, 2))
        asked = [way.name for way in of.ways(of, given, stranger, is_causal) if way.names == ("dk", "dv")]
        is_given = name.startswith("sdpa")
        assert ("other keys beside" in asked) == is_given
        assert ("the first 17 keys" in asked) == ("1 more keys" in asked) == (is_given and not is_causal)
        assert ("1 more queries that add nothing" in asked) == (not is_causal)
        assert ("other queries that do not see it" in asked) == is_causal
        assert "other batches beside" in asked and "other heads beside" in asked
        found = rows_of_shape(of, shape, "normal", "large", seed=1, device="cpu")
        assert (found.differing, found.refused) == ([], [])


@pytest.mark.parametrize("is_causal", [True, False])
def test_cudnn_is_not_asked_for_a_single_key(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which others are."""
    fewest: list[int] = []

    def operator(q: Any, k: Any, v: Any, *given: Any) -> Any:
        fewest.append(k.size(2))
        return q, k, v

    shape = inputs.Shape(2, 2, 2, 19, 19, 8, "bfloat16", is_causal)
    own, stranger = (gradients.make("normal", shape, seed, "cpu") for seed in (1, 2))
    for name, is_asked in (("cudnn", False), ("flash", True)):
        monkeypatch.setitem(subjects.gradient_peers.OPERATORS, name, (None, operator))
        of = as_meant(subjects.by_name(f"sdpa-{name}-backward"))
        fewest.clear()
        for way in of.ways(of, own, stranger, is_causal):
            way.compute()
        assert (min(fewest) == 1) == is_asked


def test_the_ways_that_peers_are_not_asked_for_exist() -> None:
    """By their names in the gate `bitwise`; every way with other keys or other lengths is among them."""
    shape = inputs.Shape(1, 2, 2, 130, 130, 8, "bfloat16", False)
    own, stranger = (gradients.make("normal", shape, seed, "cpu") for seed in (1, 2))
    of = replace(subjects.by_name("sdpa-flash-backward"), attend=lambda given, is_causal: given[:3])
    keyed = [way.name for way in of.ways(of, own, stranger, False) if way.names == ("dk", "dv")]
    company = {"other batches beside", "its batch alone", "other heads beside", "its key head alone"}
    others = conventions.OTHER_KEYS, conventions.OTHER_LENGTHS
    excluded = {name for name in keyed if any(pattern.fullmatch(name) for pattern in others)}
    assert excluded == set(keyed) - company and len(excluded) == 9
    assert sum(bool(conventions.ONE_KEY.fullmatch(name)) for name in keyed) == 1
    rows = [way.name for way in of.ways(of, own, stranger, True) if way.names == ("dq",)]
    assert sum(bool(conventions.FIRST_ROW.fullmatch(name)) for name in rows) == 1


def test_forwards_are_asked_for_everything() -> None:
    of = SimpleNamespace(name="sdpa-flash")
    assert as_meant(cast(subjects.Subject, of)) is of


def test_gradients_through_autograd_run_in_the_calling_thread() -> None:
    """Where the range of a profiler is; on CUDA the engine has threads of its own."""
    seen: list[bool] = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            return q + k + v

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
            seen.append(torch._C._is_multithreading_enabled())
            return grad, grad, grad

    tensor = torch.ones(1, 1, 2, 2)
    differentiate = subjects.gradient_peers.at_once(lambda q, k, v, is_causal: Attention.apply(q, k, v))
    differentiate(tensor, tensor, tensor, tensor, tensor, tensor, False)
    assert seen == [False]


def test_every_peer_has_gradients() -> None:
    forward = [name for name in targets.PEERS if not name.endswith(targets.BACKWARD)]
    assert {f"{name}{targets.BACKWARD}" for name in forward} < set(targets.PEERS)


def test_gradients_through_autograd_are_right_and_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an attention of torch's in place of FlashAttention-3."""

    def attention(q: Any, k: Any, v: Any, causal: bool, deterministic: bool) -> Any:
        assert deterministic
        return sdpa(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal).transpose(1, 2)

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=attention))
    found = subjects.by_name("fa3-det-backward")
    shape = inputs.Shape(1, 2, 2, 20, 20, 16, "bfloat16", True)
    given = gradients.make("normal", shape, 1, "cpu")
    with torch.no_grad():
        dq, dk, dv = found.attend(given, True)
    for mine, right in zip((dq, dk, dv), reference.gradients(*given[:3], given[5], True), strict=True):
        torch.testing.assert_close(mine.double(), right, rtol=0.1, atol=0.05)
    ways = found.ways(found, given, gradients.make("large", shape, 2, "cpu"), True)
    assert {way.names for way in ways} == {("dq",), ("dk", "dv")}


# ---- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """A machine with a GPU, flash and efficient, but no FlashAttention-3, and a gate timing that cannot run."""
    asked: dict[str, list[Any]] = {"gates": []}

    def peer(name: str) -> Any:
        if name == "fa3":
            raise tools.NotRun("flash_attn_interface cannot be imported")
        return SimpleNamespace(name=name, shapes=("1,16,1024,128:full:float16",))

    class Gate:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, present: Sequence[Any], quick: bool, tell: object) -> list[GateResult]:
            asked["gates"].append((self.name, [s.name for s in present], quick))
            if self.name == "timing":
                raise tools.NotRun("the clock is broken")
            return [GateResult(self.name, s.name, "FAIL", {"runs": 3}, ["rows differ"]) for s in present]

    monkeypatch.setattr(subjects, "require_gpu", lambda: None)
    monkeypatch.setattr(subjects, "peer", peer)
    monkeypatch.setattr(peers.report, "environment", lambda: some_run()["environment"])
    monkeypatch.setattr(peers, "in_a_process", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(peers, "kernels_seen", lambda subject: [f"{subject.name}_kernel"])
    monkeypatch.setattr(peers, "importlib", SimpleNamespace(import_module=lambda name: Gate(name.split(".")[2])))
    monkeypatch.setattr(controls, "load_controls", lambda: None)
    monkeypatch.setattr(controls, "run_controls", lambda loaded: [controls.Outcome("spin_loop", "literal", "")])
    audited = {"verdict": "FAIL", "kernels": [kernel(["k"])]}
    monkeypatch.setattr(peer_code, "audit_peer", lambda name, seen, rules: audited)
    return asked


def kernel(seen: Sequence[str]) -> dict[str, Any]:
    return {"kernel": seen[0], "cubin": "lib.so: 1", "cubin_sha256": "ab" * 32, "instructions": 4504, "registers": 255,
            "spill_bytes": 152, "predicated_branches": 25, "indirect_branches": 0,
            "findings": {"branch": 10, "guarded-arithmetic": 537}, "guarded_opcodes": {"FMUL": 524},
            "examples": {"branch": ["LDSM R0", "@!P0 BRA `(.L_x_12)"]}, "unknown_opcodes": [],
            "verdict": "FAIL"}  # fmt: skip


def test_a_run_asks_every_gate_once_and_each_peer_alone_where_that_has_nothing_to_say(
    hopper: dict[str, list[Any]],
) -> None:
    found = peers.run(["sdpa-flash", "sdpa-efficient", "fa3"], lambda *_: None)
    both = ["sdpa-flash", "sdpa-efficient"]
    alone = [("timing", [name], True) for name in both]
    assert hopper["gates"] == [(gate, both, True) for gate in ("counters", "bitwise", "timing")] + alone
    verdicts = {name: [peer[gate]["verdict"] for gate in registry.NAMES] for name, peer in found["peers"].items()}
    ran = ["FAIL", "FAIL", "FAIL", "NOT RUN"]
    assert verdicts == {"sdpa-flash": ran, "sdpa-efficient": ran, "fa3": ["NOT RUN"] * 4}
    assert found["peers"]["fa3"]["sass"]["problems"] == ["flash_attn_interface cannot be imported"]
    assert found["peers"]["sdpa-flash"]["timing"]["problems"] == ["the clock is broken"]
    assert found["peers"]["sdpa-flash"]["sass"]["kernels_seen"] == ["sdpa-flash_kernel"]
    assert found["peers"]["sdpa-flash"]["counters"]["shapes"] == ["1,16,1024,128:full:float16"]
    assert json.loads(json.dumps(found)) == found


def test_no_peer_at_all(hopper: dict[str, list[Any]]) -> None:
    found = peers.run(["fa3"], lambda *_: None)
    assert hopper["gates"] == [] and "none were run" in peers_page.page(found)


def test_machine_code_that_cannot_be_had(hopper: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    def jit(*_: object) -> None:
        raise tools.NotRun("it generates its kernels when it runs")

    monkeypatch.setattr(peer_code, "audit_peer", jit)
    sass = peers.run(["sdpa-cudnn"], lambda *_: None)["peers"]["sdpa-cudnn"]["sass"]
    assert (sass["verdict"], sass["problems"]) == ("NOT RUN", ["it generates its kernels when it runs"])


def test_a_wrong_control_makes_the_machine_code_invalid(
    hopper: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = controls.Outcome("spin_loop", "literal", "not caught")
    monkeypatch.setattr(controls, "run_controls", lambda loaded: [wrong])
    sass = peers.run(["sdpa-flash"], lambda *_: None)["peers"]["sdpa-flash"]["sass"]
    assert (sass["verdict"], sass["problems"]) == ("INVALID", ["control spin_loop: not caught"])


def test_no_control_makes_the_machine_code_invalid(
    hopper: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controls, "run_controls", lambda loaded: [])
    sass = peers.run(["sdpa-flash"], lambda *_: None)["peers"]["sdpa-flash"]["sass"]
    assert (sass["verdict"], sass["problems"]) == ("INVALID", ["no control had to be caught"])


@pytest.mark.parametrize("error", [RuntimeError, ValueError])
def test_a_peer_that_refuses_its_shapes_is_not_run(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(*_: object) -> None:
        raise error("No available kernel.\nmore")

    shape = SimpleNamespace(is_causal=False)
    subject: Any = SimpleNamespace(
        name="sdpa-cudnn", shapes=(shape,), attend=attend, context=nullcontext, make=lambda *_: ()
    )
    monkeypatch.setattr("torch.profiler.profile", lambda **_: nullcontext())
    with pytest.raises(tools.NotRun, match=r"sdpa-cudnn does not serve the shapes of this audit: No available k.*\.$"):
        peers.kernels_seen(subject)


def test_the_reviewed_policy_can_be_read() -> None:
    assert all("lengths" in entry.reason for entry in policy.load(peers.POLICY).entries)


# ---- whether a peer computes attention -------------------------------------------------------------------------------


def other_rows(tensor: torch.Tensor) -> torch.Tensor:
    """What is read of a dense [B, H, S, D] that is taken for [B, S, H, D]."""
    b, h, s, d = tensor.shape
    return tensor.contiguous().view(b, s, h, d).transpose(1, 2)


def wrong_gradients(q: Any, k: Any, v: Any, out: Any, lse: Any, grad_out: Any, is_causal: bool) -> Any:
    return flash_on_cpu(q, k, v, other_rows(out), lse, grad_out, is_causal)


def wrong_attention(q: Any, k: Any, v: Any, is_causal: bool) -> Any:
    return other_rows(sdpa(q, k, v, is_causal))


@pytest.fixture
def peer_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Subject]:
    """The peer of a name, on its own shapes, with this function in the place of its own; and no profiler."""
    event = SimpleNamespace(name="k", device_type=SimpleNamespace(name="CUDA"))
    monkeypatch.setattr("torch.profiler.profile", lambda **_: nullcontext(SimpleNamespace(events=lambda: [event])))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)

    def stand_in(name: str, function: Callable[..., Any]) -> Subject:
        monkeypatch.setitem(subjects.gradient_peers.OPERATORS, "flash", (None, function))
        monkeypatch.setattr(subjects.peers, "candidates", lambda device: ([Candidate("flash", function)], []))
        found = peer(name)
        return replace(found, make=lambda of, shape, seed, device: found.make(of, shape, seed, "cpu"))

    return stand_in


RIGHT = {"sdpa-flash": sdpa, "sdpa-flash-backward": flash_on_cpu}


@pytest.mark.parametrize("name", RIGHT)
def test_a_peer_that_is_right_goes_through(name: str, peer_on_cpu: Callable[..., Subject]) -> None:
    assert kernels_seen(peer_on_cpu(name, RIGHT[name])) == ["k"]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize(
    ("name", "wrong", "output"),
    [("sdpa-flash", wrong_attention, "out"), ("sdpa-flash-backward", wrong_gradients, "dq")],
)
def test_a_peer_that_takes_another_layout_is_wrong_on_each_shape(
    name: str, wrong: Any, output: str, at: int, peer_on_cpu: Callable[..., Subject]
) -> None:
    subject = peer_on_cpu(name, wrong)
    shape = subject.shapes[at]
    problem = rf"{name} is wrong on {shape}: {output} has relative error [01]\.\d+ against ours, allowed 0\.02$"
    with pytest.raises(tools.NotRun, match=problem):
        kernels_seen(replace(subject, shapes=(shape,)))


def test_each_output_of_a_peer_is_compared(peer_on_cpu: Callable[..., Subject]) -> None:
    """NaN and another shape are wrong, too."""

    def spoilt(at: int, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
        return lambda *given: [how(one) if i == at else one for i, one in enumerate(flash_on_cpu(*given))]

    shape = inputs.Shape(1, 2, 2, 40, 40, 16, "bfloat16", False)
    for at, name in enumerate(("dq", "dk", "dv")):
        for how, problem in (
            (lambda one: one * torch.nan, "has relative error nan against ours"),
            (lambda one: one * 1.03, r"has relative error 0\.03 against ours"),
            (lambda one: one.transpose(1, 2), r"is \[1, 40, 2, 16\] where it should be \[1, 2, 40, 16\]"),
        ):
            subject = peer_on_cpu("sdpa-flash-backward", spoilt(at, how))
            with pytest.raises(tools.NotRun, match=f": {name} {problem}"):
                kernels_seen(replace(subject, shapes=(shape,)))


def test_a_peer_that_is_wrong_is_run_by_no_gate(
    peer_on_cpu: Callable[..., Subject], hopper: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = peer_on_cpu("sdpa-flash", wrong_attention)
    monkeypatch.setattr(subjects, "peer", lambda name: wrong)
    monkeypatch.setattr(peers, "kernels_seen", kernels_seen)
    found = peers.run(["sdpa-flash"], lambda *_: None)["peers"]["sdpa-flash"]
    assert hopper["gates"] == [] and {found[gate]["verdict"] for gate in registry.NAMES} == {"NOT RUN"}
    assert all("sdpa-flash is wrong on" in found[gate]["problems"][0] for gate in registry.NAMES)


# ---- the page --------------------------------------------------------------------------------------------------------


def stored_content() -> dict[str, Any]:
    result = evidence_writer.compact(gate_result("counters", "sdpa-flash", "FAIL", differing=3, spread=0.25))
    many = {**result, "problems": [f"metric {n}: 471 on zeros, 538 on large" for n in range(8)], "more_problems": 5}
    absent = evidence_writer.compact(gate_result("bitwise", "sdpa-flash", "NOT RUN"))
    sass = {"verdict": "FAIL", "kernels": [kernel(["void k<int | bool>()"])], "problems": []}
    none = {"verdict": "NOT RUN", "kernels": [], "problems": ["it generates its kernels when it runs"]}
    gates = {"counters": many, "bitwise": absent, "timing": result}
    where = {"run": 0, "shapes": ["1,16,1024,128:full:float16"]}
    gates = {name: {**of, **where} for name, of in gates.items()}
    sass, none = {**sass, "kernels_seen": ["k"], **where}, {**none, **where}
    return {
        "schema": peers.SCHEMA,
        "runs": [some_run()["environment"]],
        "peers": {
            "sdpa-flash": {"sass": sass, **gates},
            "sdpa-cudnn": {"sass": none, **gates},
        },
    }


def test_every_figure_is_on_the_page() -> None:
    page = peers_page.page(stored_content())
    assert "- sdpa-flash (1), sdpa-cudnn (1): 1,16,1024,128:full:float16\n" in page
    assert "\n1. Machine: NVIDIA H100, driver 580.1, CUDA 13.0, torch 2.11.0, cuDNN 91900, commit 0123456789" in page
    assert "| sdpa-flash | FAIL (1) | FAIL (1) | NOT RUN (1) | FAIL (1) |" in page
    assert "| sdpa-cudnn | NOT RUN (1) | FAIL (1) | NOT RUN (1) | FAIL (1) |" in page
    assert "| 1 | 4504 | 255 | 152 | 25 | 10 branch, 537 guarded-arithmetic | 0 |" in page
    assert "- branch: `LDSM R0` → `@!P0 BRA (.L_x_12)`" in page and "524 FMUL" in page
    assert "| sdpa-flash | 7 | 3 | 0.25 | FAIL |" in page
    assert "metric 5: 471 on zeros" in page and "metric 6" not in page and "and 7 more" in page
    assert "- it generates its kernels when it runs" in page


def test_tables_have_as_many_cells_as_heads() -> None:
    content = stored_content()
    content["peers"]["a | b"] = content["peers"]["sdpa-flash"]
    tables = re.findall(r"(?:^\|.*\|\n)+", peers_page.page(content), re.MULTILINE)
    assert len(tables) == 6
    for table in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1


def test_command_merges_stored_runs(tmp_path: Path) -> None:
    content = stored_content()
    for number, name in enumerate(content["peers"]):
        (tmp_path / f"{number}.json").write_text(json.dumps({**content, "peers": {name: content["peers"][name]}}))
    arguments = ["peers", "--from", str(tmp_path / "0.json"), str(tmp_path / "1.json"), "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    stored = json.loads((tmp_path / "peers.json").read_text())
    assert stored["runs"] == content["runs"] * 2 and list(stored["peers"]) == list(content["peers"])
    assert stored["peers"]["sdpa-flash"] == content["peers"]["sdpa-flash"]
    assert {stored["peers"]["sdpa-cudnn"][gate]["run"] for gate in registry.NAMES} == {1}
    assert (tmp_path / "peers.md").read_text() == peers_page.page(stored)


def test_the_last_word_on_a_peer_in_a_gate_counts() -> None:
    first, later = stored_content(), stored_content()
    later["runs"] = [some_run(driver="581.0")["environment"]]
    result = {**later["peers"]["sdpa-flash"]["counters"], "verdict": "PASS"}
    other = {"sass": {**later["peers"]["sdpa-flash"]["sass"], "verdict": "INVALID"}}
    later["peers"] = {"sdpa-flash": {"counters": {**result, "shapes": ["s"]}, **other}}
    found = peers.merge([first, later])
    flash = found["peers"]["sdpa-flash"]
    assert {gate: (flash[gate]["verdict"], flash[gate]["run"]) for gate in registry.NAMES} == {
        "sass": ("FAIL", 0),
        "counters": ("PASS", 1),
        "bitwise": ("NOT RUN", 0),
        "timing": ("FAIL", 0),
    }
    assert found["runs"] == [*first["runs"], *later["runs"]]
    page = peers_page.page(found)
    assert "2. Machine: NVIDIA H100, driver 581.0" in page and "- sdpa-flash (2): s\n" in page
    of_flash = {**first, "peers": {"sdpa-flash": first["peers"]["sdpa-flash"]}}
    assert peers.merge([later, of_flash])["runs"] == first["runs"], "a run of which nothing is left"


def test_what_is_stored_of_other_gates_stays(hopper: dict[str, list[Any]], tmp_path: Path) -> None:
    to = ["--output", str(tmp_path)]
    assert cli.main(["peers", "--peer", "sdpa-flash", "--gate", "bitwise", *to]) == 0
    assert "| sdpa-flash | – | – | FAIL (1) | – |" in (tmp_path / "peers.md").read_text()
    assert cli.main(["peers", "--peer", "sdpa-flash", "--gate", "counters", *to]) == 0
    assert [name for name, *_ in hopper["gates"]] == ["bitwise", "counters"]
    assert "| sdpa-flash | – | FAIL (2) | FAIL (1) | – |" in (tmp_path / "peers.md").read_text()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no JSON file"),
        ("[]", "is no JSON object"),
        ('{"environment": {}}', "is no run on the peers; expected is dhp_safe_fa.peers/2"),
        ('{"schema": "dhp_safe_fa.peers/1"}', "is dhp_safe_fa.peers/1; expected is dhp_safe_fa.peers/2"),
        ('{"schema": "dhp_safe_fa.peers/2"}', "is damaged (KeyError: 'peers'): mend it, or take it away"),
    ],
)
@pytest.mark.parametrize("stored", [True, False])
def test_files_that_hold_no_run_are_refused_first(
    text: str, problem: str, stored: bool, hopper: dict[str, list[Any]], tmp_path: Path, capsys: Any
) -> None:
    file = tmp_path / ("peers.json" if stored else "other.json")
    file.write_text(text)
    given = [] if stored else ["--from", str(file)]
    assert cli.main(["peers", *given, "--output", str(tmp_path)]) == 2
    # lines end where the file's long name lets them
    assert "".join(f"{file}: {problem}".split()) in "".join(capsys.readouterr().err.split())
    assert hopper["gates"] == [] and file.read_text() == text


def test_what_is_of_a_new_run_is_refused_beside_old_ones(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["peers", "--gate", "sass", "--from", "x.json", "--output", str(tmp_path)]) == 2
    assert "--peer and --gate are of a new run" in capsys.readouterr().err


def test_what_is_stored_while_a_run_goes_on_stays(
    hopper: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    to = ["--output", str(tmp_path)]

    def meanwhile(subject: Any) -> list[str]:
        if not (tmp_path / "peers.json").exists():
            (tmp_path / "peers.json").write_text(json.dumps(stored_content()))
        return ["k"]

    monkeypatch.setattr(peers, "kernels_seen", meanwhile)
    assert cli.main(["peers", "--peer", "sdpa-efficient", "--gate", "counters", *to]) == 0
    stored = json.loads((tmp_path / "peers.json").read_text())
    assert {*stored["peers"]} == {*stored_content()["peers"], "sdpa-efficient"}


def test_a_peer_that_fails_in_a_gate_does_not_stop_the_others(
    hopper: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(present: Sequence[Any], quick: bool, tell: object) -> list[GateResult]:
        if any(subject.name == "sdpa-cudnn" for subject in present):
            raise RuntimeError("no engine for this length\nmore")
        return [GateResult("bitwise", subject.name, "PASS") for subject in present]

    monkeypatch.setattr(peers, "importlib", SimpleNamespace(import_module=lambda name: SimpleNamespace(run=run)))
    found = peers.run(["sdpa-flash", "sdpa-cudnn"], lambda *_: None)["peers"]
    assert found["sdpa-flash"]["bitwise"]["verdict"] == "PASS"
    cudnn = found["sdpa-cudnn"]["bitwise"]
    assert (cudnn["verdict"], cudnn["problems"]) == ("NOT RUN", ["RuntimeError: no engine for this length"])


def crash_on(name: str, given: Sequence[str]) -> dict[str, Any]:
    """A gate, in its own process, whose peer ends that."""
    if name in given:
        os.kill(os.getpid(), signal.SIGSEGV)
    return {one: {"verdict": "PASS"} for one in given}


def test_what_a_call_in_a_process_of_its_own_returns_or_ends_with() -> None:
    assert in_a_process(crash_on, "none", ["a"]) == {"a": {"verdict": "PASS"}}
    for function, arguments, problem in (
        (crash_on, ("a", ["a"]), "its process ended with SIGSEGV"),
        (sys.exit, (3,), "its process ended with exit code 3"),
        (int, ("x",), "ValueError: invalid literal for int"),
        (tools.find, ("no such tool",), "^no such tool was not found"),
    ):
        with pytest.raises(Ended, match=problem):
            in_a_process(cast(Any, function), *arguments)


def test_a_peer_that_ends_its_process_does_not_end_the_run(
    hopper: dict[str, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        peers, "in_a_process", lambda function, gate, names: in_a_process(crash_on, "sdpa-cudnn", names)
    )
    found = peers.run(["sdpa-flash", "sdpa-cudnn"], lambda *_: None)["peers"]
    assert found["sdpa-flash"]["bitwise"]["verdict"] == "PASS"
    assert found["sdpa-cudnn"]["bitwise"]["problems"] == ["its process ended with SIGSEGV"]


def test_command_runs(hopper: dict[str, list[Any]], tmp_path: Path) -> None:
    assert cli.main(["peers", "--peer", "sdpa-flash", "--output", str(tmp_path)]) == 0
    content = json.loads((tmp_path / "peers.json").read_text())
    assert list(content["peers"]) == ["sdpa-flash"]
    assert (tmp_path / "peers.md").read_text() == peers_page.page(content)


@pytest.mark.parametrize("arguments", [["peers", "--output"], ["evidence", "--output"]])
def test_commands_look_for_their_folder_first(
    hopper: dict[str, list[Any]], arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments, str(tmp_path / "nowhere" / "x")]) == 2
    assert "--output: cannot write into" in capsys.readouterr().err and hopper["gates"] == []


def test_command_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["peers", "--output", str(tmp_path)]) == 2
    assert "NOT RUN: no CUDA GPU" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_stored_page_is_made_of_the_stored_run() -> None:
    """What the repository holds; before the first run it holds neither."""
    folder = peers.POLICY.parent
    stored = {path.name for path in folder.glob("peers.*")}
    assert stored in (set(), {"peers.json", "peers.md"})
    if stored:
        content = json.loads((folder / "peers.json").read_text(encoding="utf-8"))
        assert (folder / "peers.md").read_text(encoding="utf-8") == peers_page.page(content)
