"""Gradients over ranks by shares of dq: the bits of one process, wherever keys and queries are cut that may be. On the
CPU the kernels run on the emulated machine."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import parts_on_cpu
import pytest
import torch
import torch.distributed as dist
from compiling import needs_c, needs_compiler
from harness import Target, normal, qkv, same_bits
from parts_on_cpu import Libraries
from processes import Processes, first
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa.integrations.context_parallel import ContextParallel, shares
from dhp_safe_fa.integrations.context_parallel.parts import KEYS_OF_TILE, ROWS_OF_BLOCK, WIDEST, Part, Workspace

pytestmark = [needs_compiler, needs_c]

NAMES = ("dq", "dk", "dv")


@pytest.fixture(scope="module")
def libraries(device: str, tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    return {} if device == "cuda" else parts_on_cpu.build(tmp_path_factory.mktemp("parts"))


def cut(choose: random.Random, ranks: int, multiple: int) -> list[int]:
    """How many rows each rank has: a multiple of these, some none, the last one any number."""
    return [*(multiple * choose.choice([0, 1, 1, 2]) for _ in range(ranks - 1)), choose.randint(1, 2 * multiple)]


class Case(NamedTuple):
    """A call that a seed chooses, the same on all ranks.

    Attributes:
        whole: q, k, v, grad_out and grad_lse, which is None where lse has no gradient.
        rows: of each rank, of queries and of keys.
        options: of attention.
        heads_at_once: of ContextParallel.
        needed: which of q, k and v have gradients.
    """

    whole: list[Tensor | None]
    rows: tuple[list[int], list[int]]
    options: dict[str, Any]
    heads_at_once: int | None
    needed: tuple[bool, bool, bool]


def case_of(seed: int, ranks: int, balanced: bool, target: Target) -> Case:
    choose, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    if balanced:
        of_queries, of_keys = ([2 * m * choose.choice([1, 2])] * ranks for m in (ROWS_OF_BLOCK, KEYS_OF_TILE))
    else:
        of_queries, of_keys = (cut(choose, ranks, multiple) for multiple in (ROWS_OF_BLOCK, KEYS_OF_TILE))
    queries, keys = sum(of_queries), sum(of_keys)
    key_heads, group, head_dim = choose.choice([1, 3]), choose.choice([1, 2]), choose.choice([8, 64, 72, 128])
    q, k, v = qkv(rng, target, choose.choice([1, 2]), key_heads * group, key_heads, queries, keys, head_dim)
    grad_out, grad_lse = normal(rng, tuple(q.shape), target), torch.randn(q.shape[:3], generator=rng).to(target.device)
    if choose.random() < 0.4:  # it reaches rows and columns of other ranks
        spoilt, column = choose.choice([q, k, k, v, grad_out]), choose.randrange(head_dim)
        spoilt[:, :, choose.randrange(spoilt.shape[2]), column] = choose.choice([torch.inf, torch.nan])
        if spoilt is k:  # the key's scores are -inf: nothing but this column of dq becomes NaN
            q[..., column] = -q[..., column].abs()
    options: dict[str, Any] = {"scale": choose.choice([None, 0.3])}
    if choose.random() < 0.75:
        offset = choose.choice([0, keys - queries, 17, -40, 2**63 - 1, -(2**63)])
        options |= {"is_causal": True, "causal_offset": offset}
    return Case(
        [q, k, v, grad_out, choose.choice([grad_lse, None])],
        (of_queries, of_keys),
        options,
        choose.choice([None, 1]),
        choose.choice([(True, True, True), (True, True, False), (True, False, True)]),
    )


def small_case(
    rows: tuple[list[int], list[int]] = ([32, 32], [128, 128]), needed: tuple[bool, bool, bool] = (True, True, True)
) -> Case:
    """Of two ranks."""
    rng = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, 2, n, 64, generator=rng).bfloat16() for n in (64, 256, 256, 64)]
    return Case([*whole, None], rows, {"scale": None}, None, needed)


def given_q(case: Case) -> Tensor:
    q = case.whole[0]
    assert q is not None
    return q


def expected(libraries: Libraries, case: Case) -> list[Tensor]:
    """dq, dk and dv of one process."""
    q, k, v, grad_out, grad_lse = case.whole
    assert q is not None and k is not None and v is not None
    given = {"is_causal": False, "causal_offset": 0} | case.options
    out, lse = dhp_safe_fa.attention_lse(q, k, v, **given)
    if not libraries:
        return list(torch.ops.dhp.attention_backward(grad_out, q, k, v, out, lse, **given, grad_lse=grad_lse))
    found = [torch.empty_like(t) for t in (q, k, v)]
    emulator = parts_on_cpu.emulator_of(libraries, q)
    emulator.gradients(grad_out, q, k, v, out, lse, *found, **given, grad_lse=grad_lse)
    return found


def places_of(case: Case, parallel: ContextParallel, balanced: bool, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Which rows of q, k and v this rank has."""
    rank = dist.get_rank()

    def place(of_ranks: list[int]) -> Tensor:
        if balanced:
            return parallel.positions(sum(of_ranks), device)
        return torch.arange(sum(of_ranks[:rank]), sum(of_ranks[: rank + 1]), device=device)

    of_queries, of_keys = map(place, case.rows)
    return of_queries, of_keys, of_keys


@contextlib.contextmanager
def taken() -> Iterator[list[bool]]:
    """Of each backward in this process, within the block, whether it goes by shares."""
    answers: list[bool] = []
    are_possible = shares.are_possible
    shares.are_possible = lambda *given: answers.append(are_possible(*given)) or answers[-1]  # type: ignore[func-returns-value]
    try:
        yield answers
    finally:
        shares.are_possible = are_possible


def gradients(
    case: Case, parallel: ContextParallel, places: tuple[Tensor, ...], libraries: Libraries
) -> tuple[Tensor | None, ...]:
    """Of the local rows; None where they are not needed."""
    local = [t[:, :, at] for t, at in zip(case.whole, places, strict=False) if t is not None]
    q, k, v = (t.requires_grad_(need) for t, need in zip(local, case.needed, strict=True))
    results = parallel.attention_lse(q, k, v, **case.options)
    of_results = [t[:, :, places[0]] for t in case.whole[3:] if t is not None]
    with taken() as answers, parts_on_cpu.on_cpu(libraries) if libraries else contextlib.nullcontext():
        torch.autograd.backward(results[: len(of_results)], of_results)
    assert answers == [True]
    return q.grad, k.grad, v.grad


def same_as_one_process(device: str, ranks: int, libraries: Libraries, seeds: range) -> None:
    group = first(ranks)
    if group is None:
        return
    for seed in seeds:
        balanced = seed % 2 == 1
        target = Target(device, torch.float16 if device == "cuda" and seed % 4 < 2 else torch.bfloat16)
        case = case_of(seed, ranks, balanced, target)
        parallel = ContextParallel(group, balanced=balanced, heads_at_once=case.heads_at_once)
        places = places_of(case, parallel, balanced, device)
        found = gradients(case, parallel, places, libraries)
        for name, mine, at, one in zip(NAMES, found, places, expected(libraries, case), strict=True):
            told = f"{name}: seed {seed}, {ranks} ranks, {target.dtype}, {case[1:]}"
            assert mine is None or same_bits(mine, one[:, :, at]), told


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bits_are_those_of_one_process(
    processes: Processes, ranks: int, libraries: Libraries, session_seed: int
) -> None:
    if ranks > processes.count:
        pytest.skip(f"torch sees {processes.count} GPUs")
    print(f"to repeat these inputs: pytest --seed {session_seed}")
    start = session_seed % 2**20 * 16
    processes.run(same_as_one_process, ranks, libraries, range(start, start + 8))


def one_fails(device: str, libraries: Libraries) -> None:
    """A load that never comes, on one rank: dq of its key head is NaN on all, and what is not NaN is right."""
    group, rank = first(2), dist.get_rank()
    if group is None:
        return
    case, parallel = small_case(), ContextParallel(group)
    places = places_of(case, parallel, False, device)
    if rank == 1:
        parts_on_cpu.emulator_of(libraries, given_q(case)).disturb(0, 3)
    found = gradients(case, parallel, places, libraries)
    parts_on_cpu.emulator_of(libraries, given_q(case)).disturb(0)
    right = [t[:, :, at] for t, at in zip(expected(libraries, case), places, strict=True)]
    dq, dk, dv = (t for t in found if t is not None)
    spoilt = dq.isnan()
    assert spoilt.any() and torch.equal(spoilt.flatten(2).all(-1), spoilt.flatten(2).any(-1))
    assert same_bits(dq[~spoilt], right[0][~spoilt])
    assert rank == 1 or (same_bits(dk, right[1]) and same_bits(dv, right[2]))


def test_a_wait_in_vain_is_known_to_all(processes: Processes, libraries: Libraries) -> None:
    if not libraries:
        pytest.skip("loads are lost on the emulated machine alone")
    processes.run(one_fails, libraries)


def marked(device: str, libraries: Libraries) -> None:
    """A rank finds a row of dq to be NaN, as it does of float16: it is, wherever it lies."""
    group, rank = first(2), dist.get_rank()
    if group is None:
        return
    run = Workspace.run

    def marking(self: Workspace, part: Part, *given: Any, **tensors: Any) -> None:
        run(self, part, *given, **tensors)
        if part == Part.SHARES and rank == 1:
            self.units[:, :, 5] = 255  # of rank 0

    case, parallel = small_case(), ContextParallel(group)
    places = places_of(case, parallel, False, device)
    Workspace.run = marking  # type: ignore[method-assign]
    try:
        dq = gradients(case, parallel, places, libraries)[0]
    finally:
        Workspace.run = run  # type: ignore[method-assign]
    right = expected(libraries, case)[0][:, :, places[0]]
    spoilt = torch.arange(32) == (5 if rank == 0 else -1)
    assert dq is not None and dq[:, :, spoilt].isnan().all() and same_bits(dq[:, :, ~spoilt], right[:, :, ~spoilt])


def test_a_row_that_one_rank_finds_to_be_nan(processes: Processes, libraries: Libraries) -> None:
    if not libraries:
        pytest.skip("by the emulated machine")
    processes.run(marked, libraries)


def test_places_are_those_of_the_core(libraries: Libraries) -> None:
    """Each ends where the next begins, but for a boundary of 128 bytes; and one pass serves no wider head_dim."""
    if not libraries:
        pytest.skip("by the emulated machine")
    assert max(libraries) == WIDEST
    with parts_on_cpu.on_cpu(libraries):
        for rows, keys, head_dim in ((1, 1, 8), (37, 300, 64), (256, 129, 72), (5, 128, 128)):
            q, k = (torch.zeros(2, heads, n, head_dim).bfloat16() for heads, n in ((6, rows), (3, keys)))
            here = Workspace(q, k)
            end = 0
            for place in (here.statistics, here.failed, here.sums, here.units, here.bounds, here.columns):
                assert place.data_ptr() - here.memory.data_ptr() == end
                end = -(-(end + place.numel() * place.element_size()) // 128) * 128
            assert end == here.memory.numel()


def test_what_goes_the_other_way(processes: Processes, libraries: Libraries) -> None:
    """Cut elsewhere, without dq, or dq alone: never by shares."""
    if not libraries:
        pytest.skip("by the emulated machine")
    processes.run(not_by_shares, libraries)


def not_by_shares(device: str, libraries: Libraries) -> None:
    group = first(2)
    if group is None:
        return
    for case, asked in (
        (small_case(needed=(False, True, True)), []),
        (small_case(needed=(True, False, False)), []),
        (small_case(rows=([33, 31], [128, 128])), [False]),
        (small_case(rows=([32, 32], [127, 129])), [False]),
    ):
        parallel = ContextParallel(group)
        places = places_of(case, parallel, False, device)
        local = [t[:, :, at] for t, at in zip(case.whole, places, strict=False) if t is not None]
        q, k, v = (t.requires_grad_(need) for t, need in zip(local, case.needed, strict=True))
        with taken() as answers, parts_on_cpu.on_cpu(libraries):
            parallel.attention(q, k, v).sum().backward()
        assert answers == asked
