"""NaN and Inf in q, k, v: they go where float64 arithmetic over the visible keys takes them, and nowhere else."""

from __future__ import annotations

import math

import pytest
import torch
from harness import DTYPE_NAMES, Target, attend, qkv, same_bits
from reference import assert_matches, reference
from torch import Tensor

from dhp_safe_fa import _inspect

SPECIALS = [math.nan, math.inf, -math.inf]

# First and last key, either side of tile edges, inside a tile.
POSITIONS = [0, 1, 63, 64, 65, 127, 128, 200, 299]


def tile_start(q: Tensor, k: Tensor, position: int) -> int:
    """The first query that a GPU kernel multiplies with the tile of keys that holds this position, under a causal mask:
    the first of the query tile that holds the first query to see a key of that tile."""
    plan = _inspect.plan(tuple(q.shape), tuple(k.shape), DTYPE_NAMES[q.dtype], True)
    kernel = next(kernel for kernel in _inspect.kernels() if kernel["name"] == plan["kernel"])
    rows: int = kernel["tile_q"] // plan["heads_per_tile"]
    return position // kernel["tile_k"] * kernel["tile_k"] // rows * rows


# ---- what a row does not see cannot touch it ------------------------------------------------------------------------


@pytest.mark.parametrize("special", [*SPECIALS, "largest"], ids=str)
@pytest.mark.parametrize("which", ["k", "v"])
@pytest.mark.parametrize("position", POSITIONS)
def test_invisible_key_leaves_the_bits(
    target: Target, rng: torch.Generator, which: str, special: float | str, position: int
) -> None:
    """Whatever it holds. One exception, documented in the README: a GPU kernel multiplies the tile of keys that the
    diagonal crosses as a whole, and there 0 times a NaN or Inf value is NaN."""
    tensors = dict(zip("qkv", qkv(rng, target, 1, 2, 2, 300, 300, 64), strict=True))
    clean, clean_lse = attend(*tensors.values(), is_causal=True)
    tensors[which][:, :, position] = torch.finfo(target.dtype).max if special == "largest" else float(special)
    out, lse = attend(*tensors.values(), is_causal=True)
    spoils_tile = target.device == "cuda" and which == "v" and special != "largest"
    untouched = tile_start(tensors["q"], tensors["k"], position) if spoils_tile else position
    assert same_bits(out[:, :, :untouched], clean[:, :, :untouched])
    assert same_bits(lse[:, :, :position], clean_lse[:, :, :position])
    between, was = out[:, :, untouched:position], clean[:, :, untouched:position]
    assert bool(((between == was) | between.isnan()).all())


@pytest.mark.parametrize("special", SPECIALS)
def test_keyless_rows_stay_zero(target: Target, rng: torch.Generator, special: float) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 100, 100, 64)
    for tensor in (q, k, v):
        tensor.fill_(special)
    out, lse = attend(q, k, v, True, causal_offset=-70)
    assert same_bits(out[:, :, :70], torch.zeros_like(out[:, :, :70]))
    assert (lse[:, :, :70] == -math.inf).all()
    assert out[:, :, 70:].isnan().all()


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("row", [0, 17, 64, 129])
def test_other_query_rows_keep_their_bits(target: Target, rng: torch.Generator, row: int, special: float) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 130, 200, 64)
    clean, clean_lse = attend(q, k, v)
    q[:, :, row] = special
    out, lse = attend(q, k, v)
    others = [i for i in range(130) if i != row]
    assert same_bits(out[:, :, others], clean[:, :, others])
    assert same_bits(lse[:, :, others], clean_lse[:, :, others])
    assert out[:, :, row].isnan().all() and not lse[:, :, row].isfinite().any()


@pytest.mark.parametrize("which", ["k", "v"])
def test_other_heads_and_batches_keep_their_bits(target: Target, rng: torch.Generator, which: str) -> None:
    tensors = dict(zip("qkv", qkv(rng, target, 2, 4, 2, 70, 133, 64), strict=True))
    clean, clean_lse = attend(*tensors.values())
    tensors[which][1, 0] = math.nan
    out, lse = attend(*tensors.values())
    assert same_bits(out[0], clean[0]) and same_bits(lse[0], clean_lse[0])
    assert same_bits(out[1, 2:], clean[1, 2:]) and same_bits(lse[1, 2:], clean_lse[1, 2:])
    assert out[1, :2].isnan().all()


# ---- what a row sees acts as in float64 -----------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_single_elements(target: Target, rng: torch.Generator, which: str, special: float, is_causal: bool) -> None:
    """One element in each of a few rows: -inf scores drop out, +inf and NaN take the row, v spoils only its column."""
    tensors = dict(zip("qkv", qkv(rng, target, 1, 2, 2, 150, 150, 64), strict=True))
    spots = ((20, 0), (64, 13), (128, 63))
    for row, column in spots:
        tensors[which][:, :, row, column] = special
    out, lse = attend(*tensors.values(), is_causal=is_causal)
    expected = reference(*tensors.values(), is_causal=is_causal)
    if target.device == "cuda" and which == "v" and is_causal:  # the exception of test_invisible_key_leaves_the_bits
        for row, column in spots:
            before = (..., slice(tile_start(tensors["q"], tensors["k"], row), row), column)
            out[before] = torch.where(out[before].isnan(), expected.out[before].to(out.dtype), out[before])
    assert_matches(out, lse, expected)


@pytest.mark.parametrize("special", SPECIALS)
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_whole_tensors(target: Target, rng: torch.Generator, which: str, special: float) -> None:
    tensors = dict(zip("qkv", qkv(rng, target, 1, 2, 2, 70, 150, 64), strict=True))
    tensors[which].fill_(special)
    out, lse = attend(*tensors.values())
    assert_matches(out, lse, reference(*tensors.values()))


def test_infinities_of_both_signs_in_one_value_column(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 70, 150, 64)
    v[:, :, 3, 5], v[:, :, 140, 5] = math.inf, -math.inf
    out, lse = attend(q, k, v)
    assert out[..., 5].isnan().all() and out[..., :5].isfinite().all() and out[..., 6:].isfinite().all()
    assert_matches(out, lse, reference(q, k, v))


@pytest.mark.parametrize("first_finite", [1, 63, 64, 65, 128, 192, 256, 299])
def test_scores_of_minus_infinity_before_the_first_finite_one(
    target: Target, rng: torch.Generator, first_finite: int
) -> None:
    """A running maximum of -inf over whole tiles must not become NaN when a finite score follows."""
    q, k, v = qkv(rng, target, 1, 2, 2, 70, 300, 64)
    q = q.abs() + 0.5
    k[:, :, :first_finite] = -math.inf
    out, lse = attend(q, k, v)
    alone, alone_lse = attend(q, k[:, :, first_finite:], v[:, :, first_finite:])
    assert out.isfinite().all() and lse.isfinite().all()
    assert_matches(out, lse, reference(q, k, v))
    assert_matches(alone, alone_lse, reference(q, k, v))


@pytest.mark.parametrize("last_finite", [0, 63, 64, 128, 298])
def test_scores_of_minus_infinity_after_the_last_finite_one(
    target: Target, rng: torch.Generator, last_finite: int
) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 70, 300, 64)
    q = q.abs() + 0.5
    k[:, :, last_finite + 1 :] = -math.inf
    out, lse = attend(q, k, v)
    assert out.isfinite().all() and lse.isfinite().all()
    assert_matches(out, lse, reference(q, k, v))


@pytest.mark.parametrize("sk", [1, 64, 300])
def test_all_scores_minus_infinity(target: Target, rng: torch.Generator, sk: int) -> None:
    """0 / 0, unlike a row without a key, which is 0."""
    q, k, v = qkv(rng, target, 1, 2, 2, 70, sk, 64)
    out, lse = attend(q.abs() + 0.5, torch.full_like(k, -math.inf), v)
    assert out.isnan().all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("position", POSITIONS)
def test_score_of_plus_infinity(target: Target, rng: torch.Generator, position: int) -> None:
    """inf / inf in out; log(inf) in lse."""
    q, k, v = qkv(rng, target, 1, 2, 2, 300, 300, 64)
    k[:, :, position] = math.inf
    out, lse = attend(q.abs() + 0.5, k, v, True)
    assert out[:, :, position:].isnan().all()
    assert (lse[:, :, position:] == math.inf).all()
    assert out[:, :, :position].isfinite().all() and lse[:, :, :position].isfinite().all()
