"""NaN and Inf: in gradients they go where float64 arithmetic over visible pairs takes them, and never across the mask.

One exception, documented in the README: a GPU kernel multiplies a tile that the causal diagonal crosses as a whole, and
there 0 times NaN or Inf is NaN. NEAR is wider than any tile.
"""

from __future__ import annotations

import math

import pytest
import torch
from harness import Gradients, Target, gradients, needs_hopper, normal, qkv, same_bits
from reference import ReferenceGradients, assert_gradients_match, reference_gradients
from torch import Tensor

SPECIALS = [math.nan, math.inf, -math.inf]
NEAR = 256


def without_the_exception(got: Gradients, want: ReferenceGradients, spots: list[int]) -> Gradients:
    """On CUDA: NaN near the diagonal, next to what is not finite, counts as what it should be."""
    for gradient, expected in zip(got, want[:3], strict=True):
        for spot in spots:
            near = (..., slice(max(spot - NEAR, 0), spot + NEAR), slice(None))
            gradient[near] = torch.where(gradient[near].isnan(), expected[near].to(gradient.dtype), gradient[near])
    return got


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
def test_single_elements(target: Target, rng: torch.Generator, which: str, special: float, is_causal: bool) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 150, 150, 64)
    tensors = {"q": q, "k": k, "v": v, "grad_out": normal(rng, tuple(q.shape), target)}
    spots = [20, 128]
    for row in spots:
        tensors[which][:, :, row, row % 64] = special
    got = gradients(**tensors, is_causal=is_causal)
    want = reference_gradients(**tensors, is_causal=is_causal)
    if target.device == "cuda" and is_causal:
        got = without_the_exception(got, want, spots)
    assert_gradients_match(got, want)


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
def test_never_across_the_mask(target: Target, rng: torch.Generator, which: str, special: float) -> None:
    """A query that sees no key, or a key that no query sees, leaves the bits of all the others."""
    q, k, v = qkv(rng, target, 1, 2, 2, 900, 900, 64)
    tensors = {"q": q, "k": k, "v": v, "grad_out": normal(rng, tuple(q.shape), target)}
    options = {"is_causal": True, "causal_offset": -450}
    clean = gradients(**tensors, **options)
    rows = slice(0, 450 - NEAR) if which in ("q", "grad_out") else slice(450 + NEAR, None)
    tensors[which][:, :, rows] = special
    got = gradients(**tensors, **options)
    assert all(same_bits(g, c) for g, c in zip(got, clean, strict=True))
    if target.device == "cpu":  # and without the exception right up to the mask
        rows = slice(0, 450) if which in ("q", "grad_out") else slice(450, None)
        tensors[which][:, :, rows] = special
        assert all(same_bits(g, c) for g, c in zip(gradients(**tensors, **options), clean, strict=True))


@pytest.mark.parametrize("which", ["q", "k", "v", "grad_out"])
def test_other_heads_and_batches_keep_their_bits(target: Target, rng: torch.Generator, which: str) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 70, 133, 64)
    tensors: dict[str, Tensor] = {"q": q, "k": k, "v": v, "grad_out": normal(rng, tuple(q.shape), target)}
    clean = gradients(**tensors)
    tensors[which][1, 0] = math.nan
    got = gradients(**tensors)
    for g, c in zip(got, clean, strict=True):
        half = g.shape[1] // 2  # query heads 0 and 1 read key head 0
        assert same_bits(g[0], c[0]) and same_bits(g[1, half:], c[1, half:])
    spoiled = {"q": (got.dq, got.dk, got.dv), "k": got, "v": (got.dq, got.dk), "grad_out": got}[which]
    assert all(bool(t[1, 0].isnan().all()) for t in spoiled)


@pytest.mark.parametrize("special", SPECIALS)
def test_whole_tensors(target: Target, rng: torch.Generator, special: float) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 70, 150, 64)
    grad_out = normal(rng, tuple(q.shape), target)
    for tensor in (v, grad_out):
        tensor.fill_(special)
        assert_gradients_match(gradients(q, k, v, grad_out), reference_gradients(q, k, v, grad_out))


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [1000, 1001, 1003])
def test_score_gradients_beyond_float16(rng: torch.Generator, head_dim: int, length: int) -> None:
    """dS of a pair is a float16 on the way to dq; where it does not fit, its row of dq is NaN, and no other row is.
    Heads of these lengths begin at every place in a word of units."""
    target = Target("cuda", torch.float16)
    q, k, v = qkv(rng, target, 2, 3, 3, length, length, head_dim)
    v = v * 30
    grad_out = normal(rng, tuple(q.shape), target)
    for batch, head, row in [(0, 0, 0), (0, 1, 500), (1, 0, length - 1), (1, 2, 3), (1, 2, 5), (1, 2, 6)]:
        grad_out[batch, head, row] = 6e4
    scores = q.double() @ k.double().mT / head_dim**0.5
    p, dp = scores.softmax(-1), grad_out.double() @ v.double().mT
    largest = (p * (dp - (p * dp).sum(-1, keepdim=True))).abs().amax(-1)
    assert ((largest > 7e4) | (largest < 6e4)).all() and (largest > 7e4).sum() == 6
    found = gradients(q, k, v, grad_out).dq.isnan()
    assert torch.equal(found.all(-1), largest > 7e4) and torch.equal(found.any(-1), largest > 7e4)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("heads", "head_dim"), [(32, 64), (16, 128)])
def test_many_at_the_same_rows(rng: torch.Generator, dtype: torch.dtype, heads: int, head_dim: int) -> None:
    """64 CTAs of a head add to the same rows of dq at the same time: none of them waits so long that it gives up."""
    target = Target("cuda", dtype)
    q, k, v = qkv(rng, target, 1, heads, heads, 8192, 8192, head_dim)
    grad_out = normal(rng, tuple(q.shape), target)
    first = gradients(q, k, v, grad_out)
    assert all(bool(gradient.isfinite().all()) for gradient in first)
    for _ in range(5):
        assert all(map(same_bits, gradients(q, k, v, grad_out), first))
