"""Autograd: which calls are recorded and what of them, checkpoints, subclasses and modes, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from harness import Target, as_tuple, both_operators, gradients, normal, qkv, same_bits, torch_jit_is_deprecated
from torch import Tensor
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import dhp_safe_fa

CAUSAL = {"is_causal": True, "scale": 0.3, "causal_offset": 7}


class Seen(TorchDispatchMode):
    """Our operators, as they are called below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dhp":
            self.calls.append((func._opname, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def leaves(tensors: tuple[Tensor, ...], which: str = "qkv") -> list[Tensor]:
    return [t.detach().clone().requires_grad_(name in which) for name, t in zip("qkv", tensors, strict=True)]


@pytest.fixture
def inputs(target: Target, rng: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    return qkv(rng, target, 2, 4, 2, 33, 70, 64)


@pytest.fixture
def grad_out(target: Target, rng: torch.Generator) -> Tensor:
    return normal(rng, (2, 4, 33, 64), target)


# ---- what is recorded -----------------------------------------------------------------------------------------------


@both_operators
@pytest.mark.parametrize("which", ["q", "k", "v", "qk", "kv", "qkv"])
def test_only_what_requires_grad_is_computed(
    operator: Any, inputs: tuple[Tensor, Tensor, Tensor], grad_out: Tensor, which: str
) -> None:
    want = gradients(*inputs, grad_out, None, *CAUSAL.values())
    tensors = leaves(inputs, which)
    with Seen() as seen:
        out = as_tuple(operator(*tensors, **CAUSAL))[0]
        out.backward(grad_out)
    assert seen.names == ["attention_lse", "attention_backward"]
    names = [argument.name for argument in torch.ops.dhp.attention_backward.default._schema.arguments]
    given = dict(zip(names, seen.calls[1][1], strict=False))  # defaults are left out
    assert [given.get(f"need_d{name}", True) for name in "qkv"] == [name in which for name in "qkv"]
    for name, tensor, gradient in zip("qkv", tensors, want, strict=True):
        assert (tensor.grad is None) == (name not in which)
        assert tensor.grad is None or same_bits(tensor.grad, gradient)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_gradients_no_lse_is_computed(inputs: tuple[Tensor, Tensor, Tensor], mode: Callable[[], Any]) -> None:
    with Seen() as seen:
        dhp_safe_fa.attention(*inputs)
        with mode():
            dhp_safe_fa.attention(*leaves(inputs))
            torch.ops.dhp.attention(*leaves(inputs))
    assert seen.names == ["attention"] * 3


@both_operators
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_runs_without_gradients(operator: Any, mode: Callable[[], Any], target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    want = as_tuple(operator(q, k, v))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    recorded = as_tuple(operator(q, k, v))
    assert all(same_bits(r, w) and r.requires_grad for r, w in zip(recorded, want, strict=True))
    with mode():
        got = as_tuple(operator(q, k, v))
    assert all(same_bits(g, w) and not g.requires_grad for g, w in zip(got, want, strict=True))
    detached = as_tuple(operator(q.detach(), k.detach(), v.detach()))
    assert all(same_bits(g, w) and not g.requires_grad for g, w in zip(detached, want, strict=True))


def test_inference_tensors_outside_of_inference_mode(target: Target, rng: torch.Generator) -> None:
    with torch.inference_mode():
        q, k, v = (t.clone() for t in qkv(rng, target, 2, 4, 2, 33, 70, 64))
        want = dhp_safe_fa.attention(q, k, v)
    assert want.is_inference()
    assert same_bits(dhp_safe_fa.attention(q, k, v), want)


def test_gradients_of_lse(inputs: tuple[Tensor, Tensor, Tensor], grad_out: Tensor, rng: torch.Generator) -> None:
    """Of out alone, of lse alone, of both."""
    grad_lse = torch.randn(2, 4, 33, generator=rng).to(grad_out.device)
    for of_out, of_lse in ((grad_out, None), (None, grad_lse), (grad_out, grad_lse)):
        tensors = leaves(inputs)
        outputs = dhp_safe_fa.attention_lse(*tensors, **CAUSAL)
        given = [(o, g) for o, g in zip(outputs, (of_out, of_lse), strict=True) if g is not None]
        found = torch.autograd.grad([o for o, _ in given], tensors, [g for _, g in given])
        want = gradients(*inputs, torch.zeros_like(grad_out) if of_out is None else of_out, of_lse, *CAUSAL.values())
        assert all(same_bits(f, w) for f, w in zip(found, want, strict=True))


def test_one_tensor_for_all(target: Target, rng: torch.Generator) -> None:
    x = normal(rng, (1, 2, 9, 64), target).requires_grad_()
    dhp_safe_fa.attention(x, x, x).sum().backward()
    apart = gradients(*[x.detach()] * 3, torch.ones_like(x))
    torch.testing.assert_close(x.grad, apart.dq + apart.dk + apart.dv, rtol=2e-2, atol=2e-2)


def test_saved_tensors_must_not_change(inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors = leaves(inputs)
    q = tensors[0] * 1
    out = dhp_safe_fa.attention(q, *tensors[1:])
    q.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# ---- checkpoints ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(inputs: tuple[Tensor, Tensor, Tensor], grad_out: Tensor, use_reentrant: bool) -> None:
    want = gradients(*inputs, grad_out, None, *CAUSAL.values())
    tensors = leaves(inputs)
    with Seen() as seen:
        out = checkpoint(lambda *given: dhp_safe_fa.attention(*given, **CAUSAL), *tensors, use_reentrant=use_reentrant)
        out.backward(grad_out)
    # A reentrant checkpoint runs without gradients first.
    first = "attention" if use_reentrant else "attention_lse"
    assert seen.names == [first, "attention_lse", "attention_backward"]
    assert all(same_bits(t.grad, w) for t, w in zip(tensors, want, strict=True) if t.grad is not None)
    assert all(t.grad is not None for t in tensors)


@pytest.mark.parametrize("save", [True, False])
def test_selective_checkpoint(inputs: tuple[Tensor, Tensor, Tensor], grad_out: Tensor, save: bool) -> None:
    """The name of what is recorded is attention_lse, whichever operator was called."""

    def chosen(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        ours = operator is torch.ops.dhp.attention_lse.default
        return CheckpointPolicy.MUST_SAVE if save and ours else CheckpointPolicy.PREFER_RECOMPUTE

    tensors = leaves(inputs)
    with Seen() as seen:
        out = checkpoint(
            lambda q, k, v: dhp_safe_fa.attention(q * 2, k, v).sin(),
            *tensors,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(chosen),
        )
        out.backward(grad_out)
    assert seen.names.count("attention_lse") == (1 if save else 2)
    plain = leaves(inputs)
    dhp_safe_fa.attention(plain[0] * 2, *plain[1:]).sin().backward(grad_out)
    for tensor, other in zip(tensors, plain, strict=True):
        assert tensor.grad is not None and other.grad is not None and same_bits(tensor.grad, other.grad)


# ---- modes and subclasses -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [dhp_safe_fa.attention, dhp_safe_fa.attention_lse])
def test_below_modes_and_inside_of_subclasses(
    function: Callable[..., Any], inputs: tuple[Tensor, Tensor, Tensor], grad_out: Tensor
) -> None:
    want = gradients(*inputs, grad_out)
    with FlopCounterMode(display=False):
        tensors = leaves(inputs)
        as_tuple(function(*tensors))[0].backward(grad_out)
    wrapped = [TwoTensor(t, t.clone()).requires_grad_() for t in inputs]
    as_tuple(function(*wrapped))[0].backward(TwoTensor(grad_out, grad_out.clone()))
    for tensor, twice, gradient in zip(tensors, wrapped, want, strict=True):
        assert tensor.grad is not None and same_bits(tensor.grad, gradient)
        assert isinstance(twice.grad, TwoTensor)
        assert same_bits(twice.grad.a, gradient) and same_bits(twice.grad.b, gradient)


@torch_jit_is_deprecated
def test_jit_trace(target: Target, rng: torch.Generator) -> None:
    """It checks itself, with gradients recorded, then without, and compares the lines that called the operator."""
    q, k, v = qkv(rng, target, 1, 2, 2, 5, 6, 8)
    traced = torch.jit.trace(lambda x: dhp_safe_fa.attention(x, k, v), (q,))
    assert same_bits(traced(2 * q), dhp_safe_fa.attention(2 * q, k, v))
    leaf = q.clone().requires_grad_()
    traced(leaf).sum().backward()
    assert leaf.grad is not None and same_bits(leaf.grad, gradients(q, k, v, torch.ones_like(q)).dq)


# ---- what is refused ------------------------------------------------------------------------------------------------


@both_operators
def test_double_backward(operator: Any, inputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """create_graph alone is no reason: only whoever differentiates a gradient is told."""
    tensors = leaves(inputs)
    out = as_tuple(operator(*tensors))[0]
    found = torch.autograd.grad(out.sum(), tensors, create_graph=True)
    assert all(one.grad_fn is not None and "DhpAttentionGradients" in one.grad_fn.name() for one in found)
    assert all(same_bits(f, w) for f, w in zip(found, gradients(*inputs, torch.ones_like(out)), strict=True))
    with pytest.raises(RuntimeError, match=r"dhp::attention_backward: gradients of gradients .* do not exist"):
        torch.autograd.grad(found[0].sum(), tensors)


@torch_jit_is_deprecated
@both_operators
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad], ids=["grad", "no_grad"])
def test_forward_mode(operator: Any, target: Target, rng: torch.Generator, which: int, mode: Any) -> None:
    """A tangent that is dropped without a word is a silently wrong gradient."""
    tensors = list(qkv(rng, target, 1, 2, 2, 3, 4, 64))
    with forward_ad.dual_level(), mode():
        want = as_tuple(operator(*tensors))
        tensors[which] = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
        with pytest.raises(RuntimeError, match=r"dhp::attention: forward-mode differentiation .* does not exist"):
            operator(*tensors)
    assert not want[0].requires_grad
