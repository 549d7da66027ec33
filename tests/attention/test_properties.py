"""Property tests: what holds for every shape, dtype, mask, scale and memory layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from harness import EXPANSIONS, LAYOUTS, Target, attend, max_head_dim, qkv, same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import ROUNDOFF, Mask, assert_matches, reference, visible_keys
from torch import Tensor

# No deadline: the first example on a GPU loads its kernel.
PROPERTY = settings(max_examples=60, deadline=None)

HEAD_DIM = st.sampled_from([1, 3, 8, 16, 40, 64, 72, 100, 128, 256]) | st.integers(1, 256)
LENGTH = st.integers(0, 40) | st.sampled_from([63, 64, 65, 127, 128, 129, 192, 257])
OFFSET = st.integers(-300, 300) | st.sampled_from([-(2**63), -(2**40), 2**31, 2**40, 2**63 - 1])
SCALE = st.none() | st.just(0.0) | st.floats(1e-6, 2.0)
LAYOUT = st.sampled_from([*LAYOUTS, *EXPANSIONS])


class Problem(NamedTuple):
    """Public parameters of one call; the values come from the seed."""

    b: int
    hk: int
    group: int
    sq: int
    sk: int
    d: int
    is_causal: bool
    scale: float | None
    any_offset: int
    seed: int

    @property
    def causal_offset(self) -> int:
        """Without a causal mask there is none."""
        return self.any_offset if self.is_causal else 0

    def tensors(self, target: Target) -> tuple[Tensor, Tensor, Tensor]:
        rng = torch.Generator().manual_seed(self.seed)
        return qkv(rng, target, self.b, self.hk * self.group, self.hk, self.sq, self.sk, self.head_dim(target))

    def head_dim(self, target: Target) -> int:
        """d, brought to the next one that the device serves."""
        return self.d if target.device == "cpu" else min(-(-self.d // 8) * 8, max_head_dim(target.device))

    def seen(self, row: int) -> int:
        return len(visible_keys(row, self.sk, Mask.of_call(self.is_causal, self.causal_offset)))


PROBLEM = st.builds(
    Problem,
    b=st.integers(0, 3),
    hk=st.integers(1, 3),
    group=st.integers(1, 4),
    sq=LENGTH,
    sk=LENGTH,
    d=HEAD_DIM,
    is_causal=st.booleans(),
    scale=SCALE,
    any_offset=OFFSET,
    seed=st.integers(0, 2**32 - 1),
)


@PROPERTY
@given(problem=PROBLEM, layouts=st.tuples(LAYOUT, LAYOUT, LAYOUT))
def test_matches_float64(target: Target, problem: Problem, layouts: tuple[str, str, str]) -> None:
    q, k, v = (
        (LAYOUTS | EXPANSIONS)[layout](tensor) for layout, tensor in zip(layouts, problem.tensors(target), strict=True)
    )
    mask = (problem.is_causal, problem.scale, problem.causal_offset)
    out, lse = attend(q, k, v, *mask)
    assert_matches(out, lse, reference(q, k, v, *mask))


@PROPERTY
@given(problem=PROBLEM, layouts=st.tuples(LAYOUT, LAYOUT, LAYOUT))
def test_layout_changes_no_bit(target: Target, problem: Problem, layouts: tuple[str, str, str]) -> None:
    moved = [
        (LAYOUTS | EXPANSIONS)[layout](tensor) for layout, tensor in zip(layouts, problem.tensors(target), strict=True)
    ]
    mask = (problem.is_causal, problem.scale, problem.causal_offset)
    out, lse = attend(*moved, *mask)
    plain, plain_lse = attend(*(tensor.contiguous() for tensor in moved), *mask)
    assert same_bits(out, plain) and same_bits(lse, plain_lse)


@PROPERTY
@given(problem=PROBLEM, data=st.data())
def test_row_alone_has_the_same_bits(target: Target, problem: Problem, data: st.DataObject) -> None:
    problem = problem._replace(b=max(problem.b, 1), sq=max(problem.sq, 1))
    row = data.draw(st.integers(0, problem.sq - 1), label="row")
    batch = data.draw(st.integers(0, problem.b - 1), label="batch")
    head = data.draw(st.integers(0, problem.hk * problem.group - 1), label="head")
    q, k, v = problem.tensors(target)
    out, lse = attend(q, k, v, problem.is_causal, problem.scale, problem.causal_offset)

    key_head, keys = head // problem.group, problem.seen(row)
    alone, alone_lse = attend(
        q[batch, head, row][None, None, None],
        k[batch, key_head, :keys][None, None],
        v[batch, key_head, :keys][None, None],
        scale=problem.scale,
    )
    assert same_bits(alone[0, 0, 0], out[batch, head, row])
    assert same_bits(alone_lse[0, 0, 0], lse[batch, head, row])


@PROPERTY
@given(problem=PROBLEM, special=st.sampled_from([float("nan"), float("inf"), float("-inf")]), data=st.data())
def test_unseen_keys_and_values_change_no_bit(
    target: Target, problem: Problem, special: float, data: st.DataObject
) -> None:
    problem = problem._replace(is_causal=True, sq=max(problem.sq, 1), sk=max(problem.sk, 1))
    first = data.draw(st.integers(0, problem.sk - 1), label="first spoilt key")
    q, k, v = problem.tensors(target)
    mask = (True, problem.scale, problem.causal_offset)
    out, lse = attend(q, k, v, *mask)
    # On a GPU a non-finite value reaches the tile of queries that the diagonal crosses: README, support matrix.
    seen_by_some = max(problem.seen(row) for row in range(problem.sq))
    k[:, :, first:], v[:, :, max(first, seen_by_some if target.device == "cuda" else 0) :] = special, special
    spoilt, spoilt_lse = attend(q, k, v, *mask)
    unaware = [row for row in range(problem.sq) if problem.seen(row) <= first]
    assert same_bits(spoilt[:, :, unaware], out[:, :, unaware])
    assert same_bits(spoilt_lse[:, :, unaware], lse[:, :, unaware])


@PROPERTY
@given(problem=PROBLEM, data=st.data())
def test_non_finite_queries_and_keys(target: Target, problem: Problem, data: st.DataObject) -> None:
    """Anywhere, in any number; finite scores stay moderate so that no probability underflows on the way to a value."""
    problem = problem._replace(scale=None)
    tensors = problem.tensors(target)
    for tensor in tensors[:2]:
        spots = data.draw(st.lists(st.integers(0, max(tensor.numel() - 1, 0)), max_size=4))
        specials = data.draw(
            st.lists(st.sampled_from([torch.nan, torch.inf, -torch.inf]), min_size=len(spots), max_size=len(spots))
        )
        for spot, special in zip(spots if tensor.numel() else [], specials, strict=False):
            tensor.view(-1)[spot] = special
    mask = (problem.is_causal, problem.scale, problem.causal_offset)
    out, lse = attend(*tensors, *mask)
    assert_matches(out, lse, reference(*tensors, *mask))


@PROPERTY
@given(problem=PROBLEM)
def test_output_lies_between_the_values_seen(target: Target, problem: Problem) -> None:
    q, k, v = problem.tensors(target)
    out, _ = attend(q, k, v, problem.is_causal, problem.scale, problem.causal_offset)
    # Weights and their sum are rounded to the input dtype at most: the mean of values in [lo, hi] leaves it by that.
    slack = 4 * ROUNDOFF[target.dtype]
    rows = [row for row in range(problem.sq) if problem.seen(row) > 0]
    if out.numel() == 0 or not rows:
        return
    # Keys seen are the first ones: running extrema over the keys hold those of every row.
    last = [problem.seen(row) - 1 for row in rows]
    values = v.double().repeat_interleave(problem.group, dim=1)
    lo, hi = values.cummin(dim=2).values[:, :, last], values.cummax(dim=2).values[:, :, last]
    room = slack * values.abs().cummax(dim=2).values[:, :, last] + 1e-6
    assert ((lo - room <= out[:, :, rows]) & (out[:, :, rows] <= hi + room)).all()


@PROPERTY
@given(problem=PROBLEM, data=st.data())
def test_batches_and_heads_are_interchangeable(target: Target, problem: Problem, data: st.DataObject) -> None:
    q, k, v = problem.tensors(target)
    batches = data.draw(st.permutations(range(problem.b)), label="batches")
    key_heads = data.draw(st.permutations(range(problem.hk)), label="key heads")
    heads = [head * problem.group + i for head in key_heads for i in range(problem.group)]
    mask = (problem.is_causal, problem.scale, problem.causal_offset)
    out, lse = attend(q, k, v, *mask)
    moved, moved_lse = attend(q[batches][:, heads], k[batches][:, key_heads], v[batches][:, key_heads], *mask)
    assert same_bits(moved, out[batches][:, heads]) and same_bits(moved_lse, lse[batches][:, heads])
