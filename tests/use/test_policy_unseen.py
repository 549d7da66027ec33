"""Ways to attention that are not calls of scaled_dot_product_attention from Python: "secure" refuses each."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import require_ahead_of_time, same_bits
from torch import Tensor

# How a model may have imported it; set_policy has to find this name.
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import dhp_safe_fa

pytestmark = [
    pytest.mark.usefixtures("no_policy_left"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]
block_or_setting = pytest.mark.parametrize("setting", [False, True], ids=["block", "setting"])


@pytest.fixture
def q(rng: torch.Generator) -> Tensor:
    return torch.randn(1, 2, 128, 16, generator=rng)


def attend(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


class Attend(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q)


class Twice(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return q * 2


class secured:
    """Under "secure", as a block or as the setting of the process."""

    def __init__(self, setting: bool) -> None:
        self.block = None if setting else dhp_safe_fa.policy("secure")

    def __enter__(self) -> dhp_safe_fa.Policy:
        policy = dhp_safe_fa.set_policy("secure") if self.block is None else self.block.__enter__()
        assert policy is not None
        return policy

    def __exit__(self, *exception: object) -> None:
        if self.block is None:
            dhp_safe_fa.set_policy(None)
        else:
            self.block.__exit__(*exception)


def refused(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words) as caught:
        call()
    assert "dhp_safe_fa.policy('secure'): " in str(caught.value)


# ---- flex_attention -------------------------------------------------------------------------------------------------


@block_or_setting
@pytest.mark.parametrize("how", ["eager", "compiled", "fullgraph", "warm"])
def test_flex_attention(q: Tensor, how: str, setting: bool) -> None:
    function = flex_attention
    if how != "eager":
        function = torch.compile(lambda *qkv: flex_attention(*qkv), fullgraph=how == "fullgraph", backend="eager")
    if how == "warm":
        function(q, q, q)
    with secured(setting):
        # By the name of this module, which set_policy has replaced.
        refused(lambda: (flex_attention if how == "eager" else function)(q, q, q), "flex_attention computes attention")
    assert function(q, q, q).shape == q.shape


@pytest.mark.parametrize("name", ["hybrid", "audit"])
def test_flex_attention_is_listed(q: Tensor, name: str) -> None:
    with warnings.catch_warnings(), dhp_safe_fa.policy(name) as policy:
        warnings.simplefilter("ignore")
        flex_attention(q, q, q)
    assert [(call.query, call.backend) for call in policy.calls] == [(tuple(q.shape), "torch")]
    assert "flex_attention" in str(next(iter(policy.calls)).reason)


# ---- TorchScript ----------------------------------------------------------------------------------------------------


def saved_and_loaded(script: Any) -> Any:
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


SCRIPTS: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "traced_function": lambda q: torch.jit.trace(attend, (q,)),
    "traced_module": lambda q: torch.jit.trace(Attend(), (q,)),
    "scripted_function": lambda q: torch.jit.script(attend),
    "scripted_module": lambda q: torch.jit.script(Attend()),
    "a_module_inside_of_a_module": lambda q: torch.jit.trace(torch.nn.Sequential(Twice(), Attend()), (q,)),
    "loaded": lambda q: saved_and_loaded(torch.jit.script(Attend())),
    "frozen": lambda q: torch.jit.freeze(torch.jit.script(Attend()).eval()),
    "method": lambda q: torch.jit.script(Attend()).forward,
    "kernel": lambda q: torch.jit.trace(lambda q: torch._scaled_dot_product_attention_math(q, q, q)[0], (q,)),
}


@block_or_setting
@pytest.mark.parametrize("case", SCRIPTS)
def test_torchscript(q: Tensor, case: str, setting: bool) -> None:
    script = SCRIPTS[case](q)
    want = script(q)
    with secured(setting):
        refused(lambda: script(q), "TorchScript: the graph of .* calls aten::_?scaled_dot_product_attention")
    with dhp_safe_fa.policy("hybrid"), dhp_safe_fa.policy("audit"):
        assert same_bits(script(q), want)
    assert same_bits(script(q), want)


@block_or_setting
def test_torchscript_without_attention_and_with_ours(q: Tensor, setting: bool) -> None:
    twice, ours = torch.jit.script(Twice()), torch.jit.trace(lambda q: dhp_safe_fa.attention(q, q, q), (q,))
    with secured(setting):
        assert same_bits(twice(q), 2 * q)
        assert same_bits(ours(q), dhp_safe_fa.attention(q, q, q))


def test_torchscript_from_a_compiled_function(q: Tensor) -> None:
    """torch.compile goes back to the Python of a traced function; a loaded one has none."""
    traced, loaded = torch.jit.trace(attend, (q,)), saved_and_loaded(torch.jit.script(Attend()))
    compiled = torch.compile(lambda q: traced(q) + 1, backend="eager")
    compiled(q)
    with dhp_safe_fa.policy("secure"):
        assert same_bits(compiled(q), dhp_safe_fa.attention(q, q, q) + 1)
        refused(lambda: torch.compile(lambda q: loaded(q) + 1, backend="eager")(q), "TorchScript")


def test_torchscript_in_other_threads(q: Tensor) -> None:
    """A block closes TorchScript to its own thread; the setting of the process to every thread."""
    script, outcomes = torch.jit.script(attend), []

    def elsewhere() -> None:
        try:
            with torch.no_grad():
                script(q)
            outcomes.append("ran")
        except RuntimeError:
            outcomes.append("refused")

    for setting in (False, True):
        with secured(setting):
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
    assert outcomes == ["ran", "refused"]


def test_everything_is_as_before_after_a_policy() -> None:
    places = [(torch._C.ScriptFunction, "__call__"), (torch._C.ScriptMethod, "__call__")]
    places += [(torch.autograd, "_engine_run_backward"), (torch.nn.parallel, "parallel_apply")]
    before = [vars(owner)[name] for owner, name in places]
    with dhp_safe_fa.policy("secure"), dhp_safe_fa.policy("secure"):
        assert all(now is not then for now, then in zip([vars(o)[n] for o, n in places], before, strict=True))
    assert all(now is then for now, then in zip([vars(o)[n] for o, n in places], before, strict=True))


# ---- compiled ahead of time, exported -------------------------------------------------------------------------------


@pytest.mark.long
def test_programs_compiled_ahead_of_time(q: Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    require_ahead_of_time(tmp_path, "cpu")
    program = torch.export.export(Attend(), (q,))
    loaded = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
    )
    want = loaded(q)
    for setting in (False, True):
        with secured(setting):
            refused(lambda: loaded(q), "compiled ahead of time, into which nobody can look")
    assert same_bits(loaded(q), want)


class WithoutGradients(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        with torch.no_grad():
            out = F.scaled_dot_product_attention(q, q, q)
        return out + q


def test_blocks_of_exported_programs(q: Tensor) -> None:
    """torch.export makes an operator of the block, which runs a graph."""
    with torch.enable_grad():
        program = torch.export.export(WithoutGradients(), (q,))
        assert "wrap_with_set_grad_enabled" in str(program)
        with dhp_safe_fa.policy("secure") as policy:
            assert same_bits(program.module()(q), dhp_safe_fa.attention(q, q, q) + q)
    assert sum(policy.calls.values()) == 1


# ---- operators ------------------------------------------------------------------------------------------------------


def every_kernel() -> list[Any]:
    """All operators of torch that are called attention, but for SDPA itself and what only chooses."""
    words = ("attention", "transformer_encoder_layer")
    harmless = ("aten::scaled_dot_product_attention", "dhp::")
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    found = [name for name in sorted(names) if any(word in name for word in words) and not name.startswith(harmless)]
    packets = [getattr(getattr(torch.ops, name.split("::")[0]), name.split("::")[1]) for name in found]
    return [getattr(packet, overload) for packet in packets for overload in packet.overloads()]


@pytest.mark.parametrize("operator", every_kernel(), ids=str)
def test_every_operator_that_is_called_attention(q: Tensor, operator: Any) -> None:
    """Before torch looks at the arguments."""
    with dhp_safe_fa.policy("secure"):
        name = str(operator).split(".")[1]
        refused(lambda: operator(*[q] * len(operator._schema.arguments)), f"{name}|fused encoder layer")


def test_operators_of_other_libraries(q: Tensor) -> None:
    with torch.library._scoped_library("policytest", "DEF") as library:
        for name in ("flash_attn_fwd", "softmax_of_something"):
            library.define(f"{name}(Tensor q) -> Tensor")
            library.impl(name, lambda q: q * 2, "CPU")
        with dhp_safe_fa.policy("secure"):
            refused(lambda: torch.ops.policytest.flash_attn_fwd(q), "an operator that is called attention")
            refused(lambda: torch.ops.policytest.flash_attn_fwd.default(q), "an operator that is called attention")
            refused(lambda: torch.compile(torch.ops.policytest.flash_attn_fwd, backend="eager")(q), "called attention")
            torch.ops.policytest.softmax_of_something(q)


def test_varlen_attn(q: Tensor) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    lengths = torch.tensor([0, 128], dtype=torch.int32)
    rows = q[0].transpose(0, 1).contiguous().half()
    with dhp_safe_fa.policy("secure"):
        refused(lambda: varlen.varlen_attn(rows, rows, rows, lengths, lengths, 128, 128), "_varlen_attn: an operator")


def test_nested_tensors(q: Tensor) -> None:
    rows = [torch.randn(length, 2, 16) for length in (4, 6)]
    nested = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    with dhp_safe_fa.policy("secure"):
        refused(lambda: attend(nested), "nested tensor")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:dhp_safe_fa.policy")
def test_nested_tensors_without_a_shape() -> None:
    """torch serves them where a policy does not refuse; of their sizes only the batch is known."""
    nested = torch.nested.nested_tensor([torch.randn(2, length, 16) for length in (4, 6)])
    want = attend(nested).unbind()
    for name in ("audit", "hybrid"):
        with dhp_safe_fa.policy(name) as policy:
            assert all(map(torch.equal, attend(nested).unbind(), want))
        (call,) = policy.calls
        assert call.query == call.key == (2, "?", "?", "?") and "nested tensor" in str(call.reason)
    with dhp_safe_fa.policy("secure"):
        refused(lambda: attend(nested), "nested tensor")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_control_flow(q: Tensor, compiled: bool) -> None:
    def branches(q: Tensor) -> Tensor:
        return torch.cond(q.sum() > 0, attend, lambda q: q * 1, (q,))

    call = torch.compile(branches, backend="eager") if compiled else branches
    call(q)
    with dhp_safe_fa.policy("secure"):
        refused(lambda: call(q), "cond runs functions where their attention is not seen")


# ---- autograd -------------------------------------------------------------------------------------------------------

BACKWARDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "Tensor.backward": lambda loss, q: loss.backward(),
    "torch.autograd.backward": lambda loss, q: torch.autograd.backward(loss),
    "torch.autograd.grad": lambda loss, q: torch.autograd.grad(loss, q),
}


@block_or_setting
@pytest.mark.parametrize("how", BACKWARDS)
def test_backward_of_attention_from_outside(q: Tensor, how: str, setting: bool) -> None:
    with torch.enable_grad():
        leaf = q.clone().requires_grad_()
        attention, other = (attend(leaf) * 2).sum(), (leaf * 2).sum()
        with secured(setting):
            refused(lambda: BACKWARDS[how](attention, leaf), "gradients: the backward pass runs ScaledDotProduct")
            BACKWARDS[how](other, leaf)
        BACKWARDS[how](attention, leaf)


def test_recomputed_in_the_backward_pass(q: Tensor) -> None:
    with torch.enable_grad():
        leaf = q.clone().requires_grad_()
        loss = checkpoint(lambda q: attend(q) * 2, leaf, use_reentrant=True).sum()
        with dhp_safe_fa.policy("secure") as policy:
            loss.backward()
        assert [call.backend for call in policy.calls.elements()] == ["dhp"]
        assert leaf.grad is not None and same_bits(leaf.grad, gradient_of_attention(q))


def gradient_of_attention(q: Tensor) -> Tensor:
    """Of (2 * attention(q, q, q)).sum()."""
    leaf = q.detach().clone().requires_grad_()
    return torch.autograd.grad((2 * dhp_safe_fa.attention(leaf, leaf, leaf)).sum(), leaf)[0]


TRAINING: dict[str, Callable[[Tensor], Any]] = {
    "backward": lambda q: (attend(q) * 2).sum().backward(),
    "reentrant checkpoint": lambda q: (checkpoint(attend, q, use_reentrant=True) * 2).sum().backward(),
    "checkpoint": lambda q: (checkpoint(attend, q, use_reentrant=False) * 2).sum().backward(),
    "compiled": lambda q: (torch.compile(attend, fullgraph=True, backend="aot_eager")(q) * 2).sum().backward(),
    "grad": lambda q: setattr(q, "grad", torch.func.grad(lambda q: (attend(q) * 2).sum())(q.detach())),
}


@block_or_setting
@pytest.mark.parametrize("how", TRAINING)
def test_training(q: Tensor, how: str, setting: bool) -> None:
    with torch.enable_grad():
        want, leaf = gradient_of_attention(q), q.clone().requires_grad_()
        with secured(setting):
            TRAINING[how](leaf)
        assert leaf.grad is not None and same_bits(leaf.grad, want)


def test_backward_passes_meet_policies(q: Tensor) -> None:
    """What a policy served is no attention from outside, for it and for another; its own calls are counted once."""
    with torch.enable_grad():
        leaf = q.clone().requires_grad_()
        with dhp_safe_fa.policy("secure") as policy:
            loss = (attend(leaf) * 2).sum()
        with dhp_safe_fa.policy("secure") as other, dhp_safe_fa.policy("audit") as audit:
            loss.backward()
        assert [call.backend for call in policy.calls.elements()] == ["dhp"] and not other.calls and not audit.calls
        assert leaf.grad is not None and same_bits(leaf.grad, gradient_of_attention(q))


def test_the_backward_called_by_itself(q: Tensor) -> None:
    out, lse = dhp_safe_fa.attention_lse(q, q, q)
    with dhp_safe_fa.policy("secure"):
        torch.ops.dhp.attention_backward.default(out, q, q, q, out, lse)
        if not q.is_cuda:
            torch.ops.dhp.attention_sinks_backward.default(out, out, lse, lse[0, :, 0])


# ---- threads that torch starts --------------------------------------------------------------------------------------


def test_data_parallel(q: Tensor) -> None:
    with dhp_safe_fa.policy("secure"):
        refused(lambda: torch.nn.parallel.parallel_apply([Attend()] * 2, [(q,)] * 2), "threads of its own")
        data_parallel = torch.nn.parallel.data_parallel.__globals__["parallel_apply"]
        refused(lambda: data_parallel([Attend()] * 2, [(q,)] * 2), "threads of its own")


# ---- compiled functions that are warm -------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_warm_graph_is_counted(q: Tensor, backend: str) -> None:
    compiled = torch.compile(lambda q: attend(q) + attend(q[:, :1]), fullgraph=True, backend=backend)
    with dhp_safe_fa.policy("secure") as cold:
        compiled(q)
    with torch.compiler.set_stance("fail_on_recompile"):
        with dhp_safe_fa.policy("secure") as warm:
            compiled(q)
            compiled(q)
        with dhp_safe_fa.policy("secure") as idle:
            pass
    assert sum(cold.calls.values()) == 2 and warm.calls == cold.calls and not idle.calls
    assert "secure: dhp serves 2 of 2 calls" in str(warm)


def test_a_warm_graph_that_is_not_served_is_counted(q: Tensor) -> None:
    mask = torch.ones(128, 128, dtype=torch.bool)
    compiled = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q, attn_mask=mask), backend="aot_eager")
    with dhp_safe_fa.policy("hybrid") as cold, pytest.warns(UserWarning, match="attn_mask"):
        compiled(q)
    with dhp_safe_fa.policy("hybrid") as warm:
        compiled(q)
    assert warm.calls == cold.calls and [call.reason is None for call in warm.calls] == [False]


@pytest.mark.parametrize("region", ["checkpoint", "nested_compile_region"])
def test_regions_of_a_compiled_function(q: Tensor, region: str) -> None:
    """torch.compile makes operators of them, which it traces without the mode; eagerly they are served."""
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        "checkpoint": lambda q: checkpoint(attend, q, use_reentrant=False),
        "nested_compile_region": torch.compiler.nested_compile_region(attend),
    }
    run = runs[region]
    with dhp_safe_fa.policy("secure"):
        assert same_bits(run(q), dhp_safe_fa.attention(q, q, q))
        refused(lambda: torch.compile(run, backend="aot_eager")(q), "runs functions where their attention is not seen")
