"""Gradients are refused, in whatever way they are asked for; without gradients the operators run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from harness import Target, as_tuple, both_operators, qkv, same_bits, torch_jit_is_deprecated
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import dhp_safe_fa


@pytest.mark.parametrize("function", [dhp_safe_fa.attention, dhp_safe_fa.attention_lse])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_refuses_gradients_that_operators_do_not_see(
    function: Callable[..., Any], name: str, target: Target, rng: torch.Generator
) -> None:
    """Below a dispatch mode, and inside a wrapper subclass, gradients would be dropped in silence."""
    tensors = dict(zip("qkv", qkv(rng, target, 1, 2, 2, 5, 6, 8), strict=True))
    wrapped = {n: TwoTensor(t, t).requires_grad_(n == name) for n, t in tensors.items()}
    tensors[name].requires_grad_()
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match=f"{name} requires grad"):
        function(**tensors)
    with pytest.raises(RuntimeError, match=f"{name} requires grad"):
        function(**wrapped)
    with torch.no_grad(), FlopCounterMode(display=False):
        function(**tensors)


@torch_jit_is_deprecated
def test_jit_trace_checks_itself(target: Target, rng: torch.Generator) -> None:
    """With gradients recorded, then without: it compares the lines from which the operator was called."""
    q, k, v = qkv(rng, target, 1, 2, 2, 5, 6, 8)
    traced = torch.jit.trace(lambda x: dhp_safe_fa.attention(x, k, v), (q,))
    assert same_bits(traced(2 * q), dhp_safe_fa.attention(2 * q, k, v))


@both_operators
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_runs_without_gradients(operator: Any, mode: Callable[[], Any], target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    want = as_tuple(operator(q, k, v))
    for tensor in (q, k, v):
        tensor.requires_grad_()
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


@both_operators
def test_functional_gradients_are_refused(operator: Any, target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 3, 4, 64)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: as_tuple(operator(x, k, v))[0].float().sum())(q)


@torch_jit_is_deprecated
@both_operators
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_forward_mode_gradients_are_refused(operator: Any, target: Target, rng: torch.Generator, which: int) -> None:
    """A tangent that is dropped without a word is a silently wrong gradient."""
    tensors = list(qkv(rng, target, 1, 2, 2, 3, 4, 64))
    with forward_ad.dual_level():
        tensors[which] = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
        with pytest.raises(RuntimeError):
            operator(*tensors)
