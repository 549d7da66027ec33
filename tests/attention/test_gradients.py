"""Gradients: by differences in float64, and against float64 in every dtype, shape and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import EXPANSIONS, LAYOUTS, Target, gradients, max_head_dim, normal, qkv, same_bits
from reference import assert_gradients_accurate, assert_gradients_match, reference_gradients
from torch import Tensor
from torch.autograd import gradcheck

import dhp_safe_fa

CAUSAL = {"is_causal": True}

# (B, Hq, Hk, Sq, Sk, D), options
CHECKED: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((1, 1, 1, 1, 1, 1), {}),
    ((1, 2, 1, 3, 2, 3), CAUSAL),
    ((1, 2, 2, 4, 3, 2), {**CAUSAL, "causal_offset": -2}),
    ((1, 1, 1, 3, 4, 4), {"scale": 0.0}),
    ((2, 4, 2, 5, 7, 3), {}),
    ((1, 3, 1, 6, 6, 9), CAUSAL),
    ((1, 2, 2, 4, 9, 17), {**CAUSAL, "causal_offset": 5}),
    ((1, 2, 1, 9, 4, 5), {**CAUSAL, "causal_offset": 2}),
    ((1, 2, 1, 6, 5, 8), {"scale": 0.7}),
    ((1, 1, 1, 67, 66, 2), {**CAUSAL, "causal_offset": -3}),
]


def double(rng: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize(("shape", "options"), CHECKED, ids=str)
def test_by_differences(rng: torch.Generator, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    """out and lse, of q, k and v, together and one at a time."""
    b, hq, hk, sq, sk, d = shape
    tensors = [double(rng, b, hq, sq, d), double(rng, b, hk, sk, d), double(rng, b, hk, sk, d)]
    keyless = options.get("causal_offset", 0) < 0  # their lse is -inf, which has no differences
    fast = b * hq * (sq + sk) * d > 40  # one random direction instead of every element

    def call(*given: Tensor) -> tuple[Tensor, ...]:
        out, lse = dhp_safe_fa.attention_lse(*given, **options)
        return (out, lse[:, :, -options["causal_offset"] :]) if keyless else (out, lse)

    assert gradcheck(call, tensors, fast_mode=fast)
    assert gradcheck(lambda *given: dhp_safe_fa.attention(*given, **options), tensors, fast_mode=fast)
    if not fast:
        for i in range(3):
            alone = [t if i == j else t.detach() for j, t in enumerate(tensors)]
            assert gradcheck(lambda *given: dhp_safe_fa.attention(*given, **options), alone)


# So many heads that no row that sees few keys has most of the error of all.
SHAPES = [
    (2, 4, 4, 128, 128, 64),
    (2, 4, 2, 150, 200, 64),
    (1, 6, 1, 130, 70, 128),
    (1, 8, 8, 65, 257, 256),
    (2, 4, 2, 200, 90, 40),
    (1, 8, 8, 1, 300, 64),
    (1, 2, 2, 300, 1, 64),
]


@pytest.mark.parametrize("options", [{}, CAUSAL, {**CAUSAL, "causal_offset": 40}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_float64(
    target: Target, rng: torch.Generator, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    q, k, v = qkv(rng, target, *shape)
    grad_out = normal(rng, tuple(q.shape), target)
    grad_lse = torch.randn(q.shape[:3], generator=rng).to(target.device)
    for gradient_of_lse in (None, grad_lse):
        got = gradients(q, k, v, grad_out, gradient_of_lse, **options)
        want = reference_gradients(q, k, v, grad_out, gradient_of_lse, **options)
        # With one query or key, or a large scale, gradients are what is left after cancellation.
        usual = min(q.shape[2], k.shape[2]) > 1 and "scale" not in options
        (assert_gradients_accurate if usual else assert_gradients_match)(got, want)


@pytest.mark.parametrize("d", [1, 3, 8, 24, 63, 72, 100, 136, 200, 256])
def test_head_dims(target: Target, rng: torch.Generator, d: int) -> None:
    if target.device == "cuda" and (d % 8 or d > max_head_dim("cuda")):
        pytest.skip("not served on CUDA")
    q, k, v = qkv(rng, target, 1, 2, 2, 70, 133, d)
    grad_out = normal(rng, tuple(q.shape), target)
    got = gradients(q, k, v, grad_out, is_causal=True, causal_offset=63)
    assert_gradients_match(got, reference_gradients(q, k, v, grad_out, is_causal=True, causal_offset=63))


@pytest.mark.parametrize("factor", [1e3, 1e-3, 1e-6])
@pytest.mark.parametrize("which", ["k", "v", "grad_out"])
def test_rows_of_another_size(target: Target, rng: torch.Generator, which: str, factor: float) -> None:
    """One row and one column much larger or smaller than the rest."""
    q, k, v = qkv(rng, target, 1, 2, 2, 130, 140, 64)
    tensors = {"q": q, "k": k, "v": v, "grad_out": normal(rng, tuple(q.shape), target)}
    tensors[which][:, :, 17] *= factor
    tensors[which][:, :, 18:, 5] *= factor
    if which == "k":
        tensors["q"] *= 1e-3  # or the softmax is one-hot, and what is left of its gradient is rounding
    assert_gradients_match(gradients(**tensors), reference_gradients(**tensors))


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPANSIONS])
@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out", "all"])
def test_layouts(target: Target, rng: torch.Generator, which: str, layout: str) -> None:
    """Any strides: the bits of contiguous tensors of the same values."""
    q, k, v = qkv(rng, target, 2, 2, 2, 33, 33, 64)
    tensors = {"q": q, "k": k, "v": v, "grad_out": normal(rng, tuple(q.shape), target)}
    for name in tensors if which == "all" else (which,):
        tensors[name] = (LAYOUTS | EXPANSIONS)[layout](tensors[name])
    want = gradients(**{name: tensor.contiguous() for name, tensor in tensors.items()})
    got = gradients(**tensors)
    assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


def test_what_autograd_hands_over(target: Target, rng: torch.Generator) -> None:
    """The gradient of a sum has stride 0, that of a transposed use is permuted; lse's may be either."""
    tensors = [t.requires_grad_() for t in qkv(rng, target, 2, 4, 2, 33, 70, 64)]
    out, lse = dhp_safe_fa.attention_lse(*tensors)
    found = torch.autograd.grad(out.sum() + lse.sum(), tensors, retain_graph=True)
    detached = [t.detach() for t in tensors]
    want = gradients(*detached, torch.ones_like(out), torch.ones_like(lse))
    assert all(same_bits(f, w) for f, w in zip(found, want, strict=True))
    weights = normal(rng, (2, 33, 4, 64), target)
    row_weights = torch.randn(4, 2, 33, generator=rng).to(target.device)
    loss = (out.transpose(1, 2) * weights).sum() + (lse.transpose(0, 1) * row_weights).sum().to(out.dtype)
    found = torch.autograd.grad(loss, tensors)
    want = gradients(*detached, weights.transpose(1, 2).contiguous(), row_weights.transpose(0, 1).contiguous())
    assert all(same_bits(f, w) for f, w in zip(found, want, strict=True))


# ---- edges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(0, 2, 2, 5, 6, 64), (2, 0, 2, 5, 6, 64), (2, 2, 2, 0, 6, 64), (2, 2, 2, 5, 0, 64)], ids=str
)
def test_empty(target: Target, rng: torch.Generator, shape: tuple[int, ...]) -> None:
    """What nobody reads, or what sees nothing, has gradient 0."""
    q, k, v = qkv(rng, target, *shape)
    for gradient in gradients(q, k, v, torch.ones_like(q)):
        assert same_bits(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("offset", [-1, -70, -99, -100, -1000])
def test_rows_without_keys(target: Target, rng: torch.Generator, offset: int) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 100, 100, 64)
    grad_out = normal(rng, tuple(q.shape), target)
    got = gradients(q, k, v, grad_out, is_causal=True, causal_offset=offset)
    keyless, unseen = min(-offset, 100), max(100 + offset, 0)
    assert same_bits(got.dq[:, :, :keyless], torch.zeros_like(got.dq[:, :, :keyless]))
    for gradient in (got.dk, got.dv):
        assert same_bits(gradient[:, :, unseen:], torch.zeros_like(gradient[:, :, unseen:]))
    assert_gradients_match(got, reference_gradients(q, k, v, grad_out, is_causal=True, causal_offset=offset))
