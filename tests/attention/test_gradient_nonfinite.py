"""NaN and Inf: in gradients they go where float64 arithmetic over visible pairs takes them, and never across the mask.

One exception, documented in the README: a GPU kernel multiplies a tile that the causal diagonal crosses as a whole, and
there 0 times NaN or Inf is NaN. NEAR is wider than any tile.
"""

from __future__ import annotations

import math

import pytest
import torch
from harness import Gradients, Target, gradients, normal, qkv, same_bits
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
