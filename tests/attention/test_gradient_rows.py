"""Bits of a row of dq depend on its own q, grad_out, out and lse, and on the keys and values it sees; bits of a row of
dk and dv on its own key and value, and on the query rows that see it. On nothing else, and on no run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from harness import Gradients, Target, gradients, normal, qkv, same_bits
from torch import Tensor

SQ, SK, D = 150, 200, 64
OFFSET = SK - SQ
CAUSAL = {"is_causal": True, "causal_offset": OFFSET}


class Case(NamedTuple):
    """A causal call with the gradients of its out and lse, and its gradients, to be found again by other means."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor
    found: Gradients

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v, self.grad_out, self.grad_lse


@pytest.fixture
def case(target: Target, rng: torch.Generator) -> Case:
    q, k, v = qkv(rng, target, 2, 4, 2, SQ, SK, D)
    grad_out = normal(rng, tuple(q.shape), target)
    grad_lse = torch.randn(q.shape[:3], generator=rng).to(q.device)
    return Case(q, k, v, grad_out, grad_lse, gradients(q, k, v, grad_out, grad_lse, **CAUSAL))


def other(rng: torch.Generator, like: Tensor) -> Tensor:
    """Other values of the same shape, some of them large."""
    return (torch.randn(like.shape, generator=rng) * 8).to(like.dtype).to(like.device)


def assert_same(got: Gradients, want: Gradients) -> None:
    for name, g, w in zip(Gradients._fields, got, want, strict=True):
        assert same_bits(g, w), name


# ---- batch and heads ------------------------------------------------------------------------------------------------


def test_other_batch(case: Case, rng: torch.Generator) -> None:
    around = [torch.cat((other(rng, t), t[1:], other(rng, t)), dim=0) for t in case.inputs]
    got = gradients(*around, **CAUSAL)
    assert_same(Gradients(*(t[2:3] for t in got)), Gradients(*(t[1:] for t in case.found)))
    assert_same(gradients(*(t[1:] for t in case.inputs), **CAUSAL), Gradients(*(t[1:] for t in case.found)))


def test_other_heads(case: Case, rng: torch.Generator) -> None:
    """Other positions and counts of heads; the query heads of a key head stay together and in order."""
    alone = gradients(*(t[:, n:] for t, n in zip(case.inputs, (2, 1, 1, 2, 2), strict=True)), **CAUSAL)
    want = Gradients(case.found.dq[:, 2:], case.found.dk[:, 1:], case.found.dv[:, 1:])
    assert_same(alone, want)
    swapped = gradients(*(torch.cat(t.chunk(2, dim=1)[::-1], dim=1) for t in case.inputs), **CAUSAL)
    assert_same(Gradients(*(torch.cat(t.chunk(2, dim=1)[::-1], dim=1) for t in swapped)), case.found)
    many = gradients(*(torch.cat([other(rng, t)] * 5 + [t], dim=1) for t in case.inputs), **CAUSAL)
    assert_same(Gradients(many.dq[:, -4:], many.dk[:, -2:], many.dv[:, -2:]), case.found)


def test_query_gradients_of_expanded_key_heads(case: Case) -> None:
    """A query row does not see how many others share its key head."""
    q, k, v, grad_out, grad_lse = case.inputs
    expanded = (t.repeat_interleave(2, dim=1) for t in (k, v))
    assert same_bits(gradients(q, *expanded, grad_out, grad_lse, **CAUSAL).dq, case.found.dq)


@pytest.mark.parametrize("d", [64, 128, 256])
def test_among_much_more_work(target: Target, rng: torch.Generator, d: int) -> None:
    """Another amount of work may be another schedule; the bits stay."""
    q, k, v = qkv(rng, target, 1, 2, 1, 70, 150, d)
    grad_out = normal(rng, tuple(q.shape), target)
    want = gradients(q, k, v, grad_out, is_causal=True, causal_offset=80)
    many = gradients(*(t.repeat(6, 8, 1, 1) for t in (q, k, v, grad_out)), is_causal=True, causal_offset=80)
    for b, group in ((0, 0), (3, 5), (5, 7)):
        assert same_bits(many.dq[b, 2 * group : 2 * group + 2], want.dq[0])
        assert same_bits(many.dk[b, group], want.dk[0, 0]) and same_bits(many.dv[b, group], want.dv[0, 0])


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [0, 1, 63, 64, 127, 149])
def test_query_row_alone(case: Case, row: int) -> None:
    one = slice(row, row + 1)
    for keys in (SK, row + OFFSET + 1):
        alone = gradients(
            case.q[:, :, one],
            case.k[:, :, :keys],
            case.v[:, :, :keys],
            case.grad_out[:, :, one],
            case.grad_lse[:, :, one],
            is_causal=True,
            causal_offset=row + OFFSET,
        )
        assert same_bits(alone.dq, case.found.dq[:, :, one])


@pytest.mark.parametrize("padding", [1, 56, 57, 300])
def test_more_keys_that_nobody_sees(case: Case, rng: torch.Generator, padding: int) -> None:
    q, k, v, grad_out, grad_lse = case.inputs
    longer = (torch.cat((t, other(rng, t)[:, :, :1].expand(-1, -1, padding, -1)), dim=2) for t in (k, v))
    got = gradients(q, *longer, grad_out, grad_lse, **CAUSAL)
    assert_same(Gradients(got.dq, got.dk[:, :, :SK], got.dv[:, :, :SK]), case.found)
    assert not got.dk[:, :, SK:].any() and not got.dv[:, :, SK:].any()


@pytest.mark.parametrize("padding", [1, 42, 43, 300])
def test_more_queries_without_a_gradient(case: Case, rng: torch.Generator, padding: int) -> None:
    """Padding behind the queries, of which a loss takes nothing, adds nothing."""
    longer_q = torch.cat((case.q, other(rng, case.q)[:, :, :1].expand(-1, -1, padding, -1)), dim=2)
    grads = [torch.cat((t, torch.zeros_like(t[:, :, :1]).expand(-1, -1, padding, *t.shape[3:])), dim=2)
             for t in (case.grad_out, case.grad_lse)]
    got = gradients(longer_q, case.k, case.v, *grads, **CAUSAL)
    assert_same(Gradients(got.dq[:, :, :SQ], got.dk, got.dv), case.found)


@pytest.mark.parametrize("first", [1, 16, 64, 100])
def test_queries_that_do_not_see_a_key(case: Case, rng: torch.Generator, first: int) -> None:
    """Rows before the first one that sees a key may hold anything."""
    changed = [t.clone() for t in case.inputs]
    for i in (0, 3, 4):
        changed[i][:, :, :first] = other(rng, changed[i][:, :, :first])
    got = gradients(*changed, **CAUSAL)
    later = slice(first + OFFSET, None)  # keys that no row before `first` sees
    assert same_bits(got.dq[:, :, first:], case.found.dq[:, :, first:])
    assert same_bits(got.dk[:, :, later], case.found.dk[:, :, later])
    assert same_bits(got.dv[:, :, later], case.found.dv[:, :, later])
    assert not same_bits(got.dk, case.found.dk)


def test_other_keys_and_values(case: Case, rng: torch.Generator) -> None:
    """Keys that a row does not see, changed: its dq stays. Values, changed: no other row's dv does."""
    changed = case.k.clone(), case.v.clone()
    for t in changed:
        t[:, :, 100:] = other(rng, t[:, :, 100:])
    got = gradients(case.q, *changed, case.grad_out, case.grad_lse, **CAUSAL)
    assert same_bits(got.dq[:, :, : 100 - OFFSET], case.found.dq[:, :, : 100 - OFFSET])
    values = gradients(case.q, case.k, changed[1], case.grad_out, case.grad_lse, **CAUSAL)
    assert same_bits(values.dv, case.found.dv)


# ---- and not on when or by whom -------------------------------------------------------------------------------------


def test_repeats(case: Case, target: Target) -> None:
    for _ in range(3 if target.device == "cpu" else 50):
        assert_same(gradients(*case.inputs, **CAUSAL), case.found)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 8, 2, 1, 2500, 64), (1, 64, 1, 1, 8192, 64), (2, 16, 1, 5, 4096, 128)], ids=str)
def test_few_queries_and_many_keys(target: Target, rng: torch.Generator, shape: tuple[int, ...]) -> None:
    """All CTAs of a key head then write next to each other, and loads may wait behind them: for too long, they once did
    in one call of a hundred."""
    q, k, v = qkv(rng, target, *shape)
    grad_out = normal(rng, tuple(q.shape), target)
    found = gradients(q, k, v, grad_out)
    assert all(bool(gradient.isfinite().all()) for gradient in found)
    for _ in range(200 if target.device == "cuda" else 1):
        again = gradients(q, k, v, grad_out)
        assert all(same_bits(a, f) for a, f in zip(again, found, strict=True))



@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_thread_count(rng: torch.Generator, threads: Callable[[int], None], dtype: torch.dtype) -> None:
    q, k, v = qkv(rng, Target("cpu", dtype), 1, 4, 2, 260, 300, D)
    threads(1)
    want = gradients(q, k, v, q, is_causal=True)
    for count in (2, 3, 8):
        threads(count)
        assert_same(gradients(q, k, v, q, is_causal=True), want)
