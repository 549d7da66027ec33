"""The operator against float64 arithmetic and against torch SDPA: shapes, masks, heads, scales, memory layouts."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from harness import (
    CPU_MAX_HEAD_DIM,
    EXPANSIONS,
    LAYOUTS,
    Target,
    attend,
    max_head_dim,
    normal,
    poisoned_memory,
    qkv,
    same_bits,
)
from reference import ROUNDOFF, assert_accurate, assert_matches, reference
from torch import Tensor

START_SHAPES = [(1, 8, 512, 64), (1, 16, 1024, 64), (4, 16, 1024, 64)]

# Around every tile edge that a kernel may have, and far from one.
ODD_LENGTHS = [1, 17, 63, 64, 65, 127, 129, 900, 2500]


def test_uninitialised_memory_is_poisoned(device: str) -> None:
    """The other tests rely on it to see unwritten outputs."""
    with poisoned_memory():
        assert torch.empty(1000, device=device).isnan().all()


def assert_near(out: Tensor, want: Tensor, magnitude: Tensor | None = None) -> None:
    """Equal but for a few roundings of numbers of this magnitude, where the result is known without a softmax."""
    magnitude = want.abs() if magnitude is None else magnitude
    assert ((out.double() - want).abs() <= 4 * ROUNDOFF[out.dtype] * magnitude).all()


# ---- accuracy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", START_SHAPES, ids=str)
def test_start_shapes(target: Target, rng: torch.Generator, shape: tuple[int, int, int, int], is_causal: bool) -> None:
    b, h, s, d = shape
    q, k, v = qkv(rng, target, b, h, h, s, s, d)
    out, lse = attend(q, k, v, is_causal)
    # float64 is slow: one batch, a different one every run. All of them are compared with SDPA below.
    batch = int(torch.randint(b, (1,), generator=rng))
    one = slice(batch, batch + 1)
    assert_accurate(out[one], lse[one], reference(q[one], k[one], v[one], is_causal))


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", START_SHAPES, ids=str)
def test_start_shapes_against_sdpa(
    device: str, rng: torch.Generator, shape: tuple[int, int, int, int], is_causal: bool
) -> None:
    b, h, s, d = shape
    q, k, v = qkv(rng, Target(device, torch.float16), b, h, h, s, s, d)
    out, _ = attend(q, k, v, is_causal)
    sdpa = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal).float()
    # First rows of a causal mask are nearly single values of v, and may be so large that one rounding is more.
    assert ((out.float() - sdpa).abs() <= (2 * ROUNDOFF[out.dtype] * sdpa.abs()).clamp(min=2e-3)).all()


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("s", ODD_LENGTHS)
def test_odd_lengths(target: Target, rng: torch.Generator, s: int, is_causal: bool) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, s, s, 64)
    out, lse = attend(q, k, v, is_causal)
    ref = reference(q, k, v, is_causal)
    if s >= 63:
        assert_accurate(out, lse, ref)
    else:
        assert_matches(out, lse, ref)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("sq", "sk"), [(1, 2500), (17, 900), (65, 64), (129, 1), (900, 127), (300, 1025)])
def test_query_and_key_lengths_differ(target: Target, rng: torch.Generator, sq: int, sk: int, is_causal: bool) -> None:
    q, k, v = qkv(rng, target, 2, 2, 2, sq, sk, 64)
    for causal_offset in (0, sk - sq) if is_causal else (0,):
        out, lse = attend(q, k, v, is_causal, causal_offset=causal_offset)
        assert_matches(out, lse, reference(q, k, v, is_causal, causal_offset=causal_offset))


HEAD_DIMS = [1, 2, 3, 7, 8, 15, 16, 24, 40, 63, 64, 65, 72, 80, 96, 100, 104, 120, 127, 128, 200, 256]


@pytest.mark.parametrize("d", HEAD_DIMS)
def test_head_dims(target: Target, rng: torch.Generator, d: int) -> None:
    if target.device == "cuda" and (d % 8 != 0 or d > max_head_dim("cuda")):
        pytest.skip(f"head_dim {d} is not served on CUDA; test_errors.py checks that it is refused")
    q, k, v = qkv(rng, target, 2, 3, 3, 80, 150, d)
    for is_causal in (False, True):
        out, lse = attend(q, k, v, is_causal)
        assert_matches(out, lse, reference(q, k, v, is_causal))


def test_every_head_dim_to_the_largest(device: str, rng: torch.Generator) -> None:
    step, largest = (1, CPU_MAX_HEAD_DIM) if device == "cpu" else (8, max_head_dim(device))
    for d in range(step, largest + 1, step):
        q, k, v = qkv(rng, Target(device, torch.float16), 1, 1, 1, 5, 9, d)
        out, lse = attend(q, k, v)
        assert_matches(out, lse, reference(q, k, v))


# ---- heads ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("hq", "hk"), [(4, 2), (6, 2), (8, 1), (7, 7), (15, 5), (12, 4)])
def test_grouped_query_heads(target: Target, rng: torch.Generator, hq: int, hk: int, is_causal: bool) -> None:
    q, k, v = qkv(rng, target, 2, hq, hk, 70, 133, 64)
    offset = 20 if is_causal else 0
    out, lse = attend(q, k, v, is_causal, causal_offset=offset)
    assert_matches(out, lse, reference(q, k, v, is_causal, causal_offset=offset))


def test_many_batches_and_heads(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 37, 22, 11, 3, 5, 16)
    out, lse = attend(q, k, v)
    assert_accurate(out, lse, reference(q, k, v))


# ---- masks ----------------------------------------------------------------------------------------------------------

OFFSETS = [-(2**63), -(2**40), -200, -150, -64, -1, 0, 1, 63, 64, 99, 100, 129, 300, 2**31, 2**40, sys.maxsize]


@pytest.mark.parametrize("causal_offset", OFFSETS)
def test_causal_offset(target: Target, rng: torch.Generator, causal_offset: int) -> None:
    q, k, v = qkv(rng, target, 1, 2, 1, 150, 200, 32)
    out, lse = attend(q, k, v, True, causal_offset=causal_offset)
    assert_matches(out, lse, reference(q, k, v, True, causal_offset=causal_offset))


def test_row_without_a_key_is_zero_with_lse_minus_infinity(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 2, 2, 100, 100, 64)
    out, lse = attend(q, k, v, True, causal_offset=-70)
    assert same_bits(out[:, :, :70], torch.zeros_like(out[:, :, :70]))
    assert (lse[:, :, :70] == -math.inf).all()
    assert lse[:, :, 70:].isfinite().all() and (out[:, :, 70:] != 0).any(dim=-1).all()


def test_one_visible_key_gives_its_value(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 3, 3, 1, 70, 64)
    out, lse = attend(q, k, v, True)
    assert_matches(out, lse, reference(q, k, v, True))
    assert_near(out, v[:, :, :1].double())


# ---- empty ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("b", "hq", "hk", "sq", "sk"),
    [(0, 2, 2, 5, 7), (2, 0, 2, 5, 7), (2, 2, 2, 0, 7), (0, 0, 1, 0, 0), (2, 2, 1, 0, 0)],
    ids=["no_batch", "no_query_head", "no_query", "nothing", "no_query_no_key"],
)
def test_empty_result(target: Target, b: int, hq: int, hk: int, sq: int, sk: int, is_causal: bool) -> None:
    q, k, v = qkv(torch.Generator(), target, b, hq, hk, sq, sk, 64)
    out, lse = attend(q, k, v, is_causal)
    assert out.numel() == 0 and lse.numel() == 0


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_no_keys_gives_zeros(target: Target, rng: torch.Generator, is_causal: bool) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 130, 0, 64)
    out, lse = attend(q, k, v, is_causal)
    assert same_bits(out, torch.zeros_like(out))
    assert (lse == -math.inf).all()


# ---- scale ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-3, 0.125, 0.3, 1.0, 3.0])
def test_scale(target: Target, rng: torch.Generator, scale: float) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 90, 140, 64)
    out, lse = attend(q, k, v, True, scale=scale, causal_offset=50)
    assert_matches(out, lse, reference(q, k, v, True, scale=scale, causal_offset=50))


@pytest.mark.parametrize("d", [8, 40, 64])
def test_default_scale_is_one_over_the_root_of_head_dim(target: Target, rng: torch.Generator, d: int) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 90, 140, d)
    default, given = attend(q, k, v), attend(q, k, v, scale=1.0 / math.sqrt(d))
    assert same_bits(default[0], given[0]) and same_bits(default[1], given[1])


def test_scale_zero_is_the_mean_of_the_visible_values(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 1, 1, 200, 200, 64)
    _, lse = attend(q, k, v, True, scale=0.0)
    counts = torch.arange(1, 201, dtype=torch.float64, device=target.device)
    assert float((lse[0, 0].double() - counts.log()).abs().max()) <= 2e-5


# ---- hard numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ascending", "descending"])
def test_running_maximum(target: Target, rng: torch.Generator, order: str) -> None:
    """Scores that rise over all tiles make an online softmax rescale at every step; falling ones never."""
    q, k, v = qkv(rng, target, 1, 2, 2, 65, 700, 64)
    q = torch.ones_like(q)
    ramp = torch.linspace(-5, 5, 700, device=target.device).to(target.dtype)
    k = (ramp if order == "ascending" else ramp.flip(0))[None, None, :, None].expand(k.shape)
    out, lse = attend(q, k, v)
    assert_matches(out, lse, reference(q, k, v))


@pytest.mark.parametrize("winner", [0, 100, 129, 299])
def test_one_key_far_above_the_rest(target: Target, rng: torch.Generator, winner: int) -> None:
    """The largest scores that float16 inputs can have; every other probability is zero."""
    q, k, v = qkv(rng, target, 1, 2, 2, 70, 300, 64)
    largest = torch.finfo(torch.float16).max
    q = torch.full_like(q, largest)
    k = torch.full_like(k, -largest)
    k[:, :, winner] = largest
    out, lse = attend(q, k, v)
    assert_near(out, v[:, :, winner : winner + 1].double())
    score = 64 * float(q[0, 0, 0, 0]) * float(k[0, 0, winner, 0]) / 8
    assert float((lse.double() - score).abs().max()) <= 1e-6 * score


def test_two_equal_winners_share(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 1, 1, 70, 300, 64)
    q, k = torch.full_like(q, 100.0), torch.full_like(k, -100.0)
    k[:, :, (3, 290)] = 100.0
    out, _ = attend(q, k, v)
    pair = v[:, :, (3, 290)].double()
    assert_near(out, pair.mean(dim=2, keepdim=True), pair.abs().mean(dim=2, keepdim=True))


def test_float16_subnormals_are_kept(device: str, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target(device, torch.float16), 1, 2, 2, 70, 140, 64)
    v = torch.full_like(v, 2.0**-20)
    out, lse = attend(q, k, v)
    assert_matches(out, lse, reference(q, k, v))
    assert_near(out, v[:, :, :70].double())


def test_zeros(target: Target) -> None:
    zeros = torch.zeros(1, 2, 130, 64, dtype=target.dtype, device=target.device)
    out, lse = attend(zeros, zeros, zeros)
    assert (out == 0).all()
    assert float((lse - math.log(130)).abs().max()) <= 2e-5


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(target: Target, rng: torch.Generator, layout: str, which: str) -> None:
    """Bits depend on values, not on where they lie; what lies between them (NaN) is not read as theirs."""
    tensors = dict(zip("qkv", qkv(rng, target, 2, 4, 2, 70, 133, 40), strict=True))
    out, lse = attend(*tensors.values(), is_causal=True, causal_offset=30)
    for name in which:
        tensors[name] = LAYOUTS[layout](tensors[name])
    moved, moved_lse = attend(*tensors.values(), is_causal=True, causal_offset=30)
    assert same_bits(out, moved) and same_bits(lse, moved_lse)
    assert_matches(moved, moved_lse, reference(*tensors.values(), is_causal=True, causal_offset=30))


@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_stride_zero(target: Target, rng: torch.Generator, expansion: str, which: str) -> None:
    tensors = dict(zip("qkv", qkv(rng, target, 3, 4, 2, 70, 133, 64), strict=True))
    for name in which:
        tensors[name] = EXPANSIONS[expansion](tensors[name])
    out, lse = attend(*tensors.values())
    assert_matches(out, lse, reference(*tensors.values()))


def test_inputs_stay_as_they_were(target: Target, rng: torch.Generator) -> None:
    tensors = qkv(rng, target, 2, 4, 2, 70, 133, 64)
    copies = [t.clone() for t in tensors]
    attend(*tensors, is_causal=True)
    assert all(same_bits(t, c) for t, c in zip(tensors, copies, strict=True))


def test_one_tensor_as_query_key_and_value(target: Target, rng: torch.Generator) -> None:
    x = normal(rng, (2, 3, 100, 64), target)
    out, lse = attend(x, x, x, True)
    assert_matches(out, lse, reference(x, x, x, True))


def test_result_shares_no_memory_with_inputs(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 1, 1, 64)
    out, _ = attend(q, k, v)
    assert out.untyped_storage().data_ptr() not in {t.untyped_storage().data_ptr() for t in (q, k, v)}
