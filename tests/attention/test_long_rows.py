"""Rows of several key segments: what they are, and that a row's bits stay whoever goes through its segments, one CTA,
several, or clusters, and whatever the rows beside it see.

Lengths are those of the Hopper kernels' segments. Those of the CPU, of 4096 keys, are no longer, so the same rows have
several there, too.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from harness import DTYPE_NAMES, Target, attend, needs_hopper, normal, poisoned_memory, qkv, same_bits
from reference import assert_matches, reference
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

SEGMENT = {64: 8192, 128: 4096, 256: 10240}
ROWS = 70  # more than a tile of the smallest kernels
HALF = ROWS // 2

head_dims = pytest.mark.parametrize("d", SEGMENT)


def long_qkv(rng: torch.Generator, target: Target, d: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of two full segments and an odd part of another; four heads of q, two of k and v.

    Two columns of v are zeros, one of them -0: a sum of it must not change its sign with the parts that are folded.
    """
    q, k, v = qkv(rng, target, 1, 4, 2, rows, 2 * SEGMENT[d] + 77, d)
    v[..., 0], v[..., 1] = -0.0, 0.0
    return q, k, v


def assert_same(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], what: object) -> None:
    assert all(same_bits(mine, its) for mine, its in zip(got, want, strict=True)), what


def test_segments_are_those_of_the_kernels() -> None:
    shipped = {k["head_dim"]: k["tile_k"] * k["segment_tiles"] for k in _inspect.kernels() if k["family"] == "forward"}
    assert shipped in ({}, SEGMENT)


@head_dims
def test_values(target: Target, rng: torch.Generator, d: int) -> None:
    """Full rows; causal ones that end before and behind the end of a segment; and some that see no key."""
    q, k, v = long_qkv(rng, target, d)
    for is_causal, offset in ((False, 0), (True, SEGMENT[d] - HALF), (True, k.shape[2] - ROWS), (True, -HALF)):
        out, lse = attend(q, k, v, is_causal, causal_offset=offset)
        assert_matches(out, lse, reference(q, k, v, is_causal, causal_offset=offset))


@head_dims
@pytest.mark.parametrize("ends", [1, 2])
def test_steps_and_chunks(target: Target, rng: torch.Generator, d: int, ends: int) -> None:
    """Of a prefill whose diagonal crosses the end of a segment: row HALF - 1 sees all of it, and no more."""
    q, k, v = long_qkv(rng, target, d)
    offset = ends * SEGMENT[d] - HALF
    out, lse = attend(q, k, v, True, causal_offset=offset)
    for first, last in ((HALF - 1, HALF), (HALF, HALF + 1), (ROWS - 1, ROWS), (HALF - 2, HALF + 1), (9, ROWS)):
        rows = (slice(None), slice(None), slice(first, last))
        for keys in (last + offset, k.shape[2]):
            got = attend(q[rows], k[:, :, :keys], v[:, :, :keys], True, causal_offset=first + offset)
            assert_same(got, (out[rows], lse[rows]), (first, last, keys))


@head_dims
def test_heads(target: Target, rng: torch.Generator, d: int) -> None:
    """A lone row, of a head alone and of heads that share their keys: of two key heads, and of one."""
    q, k, v = long_qkv(rng, target, d)
    out, lse = attend(q, k, v)
    step, of_step = q[:, :, -1:], (out[:, :, -1:], lse[:, :, -1:])
    assert_same(attend(step, k, v), of_step, "four heads")
    for heads in (slice(0, 1), slice(2, 4)):
        keys = slice(heads.start // 2, heads.start // 2 + 1)
        got = attend(step[:, heads], k[:, keys], v[:, keys])
        assert_same(got, (of_step[0][:, heads], of_step[1][:, heads]), heads)


@needs_hopper
@head_dims
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_split_or_not(rng: torch.Generator, d: int, dtype: torch.dtype) -> None:
    """Few rows, whose segments go to different CTAs, among many, of whose rows a CTA goes through all segments."""
    target, many = Target("cuda", dtype), 3000
    q, k, v = long_qkv(rng, target, d, many)

    def splits(rows: int) -> int:
        plan = _inspect.plan((1, 4, rows, d), tuple(k.shape), DTYPE_NAMES[dtype])
        assert plan is not None
        return int(plan["splits"])

    assert splits(many) == 1 and splits(ROWS) == splits(1) == 3
    out, lse = attend(q, k, v)
    for rows in (slice(0, ROWS), slice(many - 1, many)):
        assert_same(attend(q[:, :, rows], k, v), (out[:, :, rows], lse[:, :, rows]), rows)


@head_dims
@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_sequences(target: Target, rng: torch.Generator, d: int, is_causal: bool) -> None:
    """Long ones and short ones in one call: each row has the bits of a call for its sequence alone."""
    queries, keys = [1, ROWS, 3, 5], [SEGMENT[d] + 1, 2 * SEGMENT[d] + 33, SEGMENT[d], 9]
    q = normal(rng, (sum(queries), 4, d), target)
    k, v = (normal(rng, (sum(keys), 2, d), target) for _ in range(2))
    v[..., 0] = -0.0
    starts = [torch.tensor([0, *accumulate(n)], dtype=torch.int32, device=q.device) for n in (queries, keys)]
    with poisoned_memory():
        options: dict[str, Any] = {"is_causal": is_causal}
        out, lse = dhp_safe_fa.attention_varlen_lse(q, k, v, *starts, max(queries), max(keys), **options)
    parts = zip(*(t.split(n) for t, n in ((q, queries), (k, keys), (v, keys), (out, queries))), strict=True)
    for b, ((*tensors, got), got_lse) in enumerate(zip(parts, lse.split(queries, dim=1), strict=True)):
        alone = [t.transpose(0, 1)[None] for t in tensors]
        offset = keys[b] - queries[b] if is_causal else 0
        want = attend(*alone, is_causal=is_causal, causal_offset=offset)
        assert_same((got.transpose(0, 1)[None], got_lse[None]), want, b)


@head_dims
@pytest.mark.parametrize(
    "form",
    [
        {"window": (100, 0)},
        {"window": (4095, 0)},  # as wide as a segment at head_dim 128: one chain there, and above
        {"window": (4500, 0)},  # from within a segment, and at 128 over all of another
        {"window": (10300, 0)},  # wider than any segment
        {"softcap": 20.0},
        {"sinks": True},
        {"sinks": True, "window": (50, 0)},
    ],
    ids=str,
)
def test_forms(target: Target, rng: torch.Generator, d: int, form: dict[str, Any]) -> None:
    """Windows that cross the end of a segment, soft caps and sinks: values, and the bits of rows alone."""
    q, k, v = long_qkv(rng, target, d)
    given = {**form, "sinks": normal(rng, (4,), Target(target.device, torch.float32))} if "sinks" in form else form
    offset = 2 * SEGMENT[d] - HALF
    out, lse = attend(q, k, v, True, causal_offset=offset, **given)
    assert_matches(out, lse, reference(q, k, v, True, causal_offset=offset, **given))
    for first, last in ((HALF - 1, HALF), (HALF, HALF + 1), (HALF - 3, ROWS)):
        rows = (slice(None), slice(None), slice(first, last))
        got = attend(q[rows], k, v, True, causal_offset=first + offset, **given)
        assert_same(got, (out[rows], lse[rows]), (first, last))
