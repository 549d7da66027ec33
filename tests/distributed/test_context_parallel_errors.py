"""What ranks do not agree on is refused on every one of them, and a rank that is gone or late is an error on the others
within torch.distributed's time-out."""

from __future__ import annotations

import datetime
import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import same_bits
from processes import Processes
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import dhp_safe_fa
from dhp_safe_fa.integrations.context_parallel import ContextParallel

# ---- ranks that do not agree ----------------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "batch": 2, "heads": 4, "key_heads": 2, "queries": 8, "keys": 8, "head_dim": 16, "dtype": torch.bfloat16,
    "v_keys": 0, "balanced": True, "heads_at_once": None, "records": "", "name": "attention",
}  # fmt: skip

# What rank 1 gives instead, and what every rank, or every other one, then says.
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"batch": 3}, "q: batch 2 here, on rank 0, and 3 on rank 1; all ranks must give the same"),
    ({"heads": 6}, "q: heads 4 here, on rank 0, and 6 on rank 1"),
    ({"key_heads": 4}, "k: heads 2 here, on rank 0, and 4 on rank 1"),
    ({"head_dim": 8}, "q: head_dim 16 here, on rank 0, and 8 on rank 1"),
    ({"dtype": torch.float16}, "q: dtype bfloat16 here, on rank 0, and float16 on rank 1"),
    ({"is_causal": True}, "is_causal: False here, on rank 0, and True on rank 1"),
    ({"scale": 0.5}, "scale: None here, on rank 0, and 0.5 on rank 1"),
    ({"balanced": False}, "balanced: True here, on rank 0, and False on rank 1"),
    ({"heads_at_once": 1}, "heads_at_once: 2 here, on rank 0, and 1 on rank 1"),
    ({"records": "v"}, "v: requires_grad False here, on rank 0, and True on rank 1"),
    ({"name": "attention_lse"}, "called here, on rank 0, while rank 1 called attention_lse"),
    ({"v_keys": 1}, "rank 1 refused its arguments, with an error of its own"),
    ({"causal_offset": 1}, "rank 1 refused its arguments, with an error of its own"),
    ({"scale": "a"}, "rank 1 refused its arguments, with an error of its own"),
    ({"window": None}, "rank 1 refused its arguments, with an error of its own"),
    ({"window": (3, 3)}, "window: left -1 here, on rank 0, and 3 on rank 1"),
    ({"softcap": 2.0}, "softcap: None here, on rank 0, and 2 on rank 1"),
    ({"queries": 9}, "q: [8, 9"),
    ({"keys": 7}, "k: [8, 7"),
]
OWN_ERRORS = {
    "v_keys": "v: shape [2, 2, 9, 16] differs from k's [2, 2, 8, 16]",
    "causal_offset": "causal_offset: 1 without is_causal",
    "scale": "scale: 'a'; expected a number, or None",
}


def call(device: str, given: dict[str, Any]) -> object:
    given = dict(given)
    batch, heads, key_heads, queries, keys, head_dim, dtype, v_keys, balanced, heads_at_once, records, name = (
        given.pop(argument) for argument in GOOD
    )
    shapes = {"q": (heads, queries), "k": (key_heads, keys), "v": (key_heads, keys + v_keys)}
    q, k, v = (
        torch.ones(batch, h, s, head_dim, dtype=dtype, device=device, requires_grad=n in records)
        for n, (h, s) in shapes.items()
    )
    return getattr(ContextParallel(balanced=balanced, heads_at_once=heads_at_once), name)(q, k, v, **given)


def disagreements(device: str) -> None:
    rank = dist.get_rank()
    for change, expected in MISTAKES:
        given = GOOD | change if rank == 1 else GOOD
        is_own = rank == 1 and "refused" in expected
        own = OWN_ERRORS.get(next(iter(change)), "expected") if is_own else None
        with pytest.raises(RuntimeError) as error:
            call(device, given)
        if own is not None:
            assert own in str(error.value), str(error.value)
        elif rank != 1:
            sentence = expected.replace("on rank 0", f"on rank {rank}")
            assert str(error.value).startswith(f"ContextParallel.attention: {sentence}"), str(error.value)
    call(device, GOOD)  # nobody is a step behind


def test_what_ranks_do_not_agree_on(processes: Processes) -> None:
    processes.run(disagreements)


def different_backwards(device: str) -> None:
    rank = dist.get_rank()
    q, k, v = (torch.ones(1, 1, 8, 16, dtype=torch.float16, device=device, requires_grad=True) for _ in range(3))
    parallel = ContextParallel()
    one, two = (parallel.attention(q, k, v).sum() for _ in range(2))
    with pytest.raises(RuntimeError, match="backward: of call number"):
        torch.autograd.grad(two if rank == 1 else one, (q, k, v), retain_graph=True)
    torch.autograd.grad(one, (q,) if rank == 1 else (q, k, v), retain_graph=True)  # makes no difference
    torch.autograd.grad(one + two, (q, k, v))
    parallels = [ContextParallel(), ContextParallel()]  # of two objects, too
    outs = [each.attention(q, k, v).sum() for each in parallels]
    with pytest.raises(RuntimeError, match="backward: of call number"):
        torch.autograd.grad(outs[rank == 1], (q, k, v))


def test_different_backwards(processes: Processes) -> None:
    processes.run(different_backwards)


def shards_that_do_not_fit(device: str) -> None:
    rank = dist.get_rank()
    parallel = ContextParallel()
    for mine, expected in (
        (torch.zeros(3, 2 + (rank == 1)), "local: size of dimension 1 "),
        (torch.zeros(3, dtype=torch.int32 if rank == 1 else torch.int64), "local: dtype int"),
        (torch.zeros((3, 1) if rank == 1 else (3,)), "local: rank "),
    ):
        with pytest.raises(RuntimeError, match=f"ContextParallel.unshard: {expected}"):
            parallel.unshard(mine.to(device), 0)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    mine = torch.full((2, 3), 1.0 + rank, device=device)
    for wrong, dim, reason in (
        (mine, 5, "dim: 5; supported for local, of rank 2: -2 to 1"),
        (None, 1, "local: NoneType; expected a tensor of rank 1 or more"),
        (mine.to(torch.complex64), 1, "local: torch.complex64, rank 2; supported: real dtypes"),
        (mine.to_sparse(), 1, "local: a sparse tensor; supported: strided tensors"),
        (DTensor.from_local(mine, mesh, [Shard(1)]), 1, "local: a DTensor; supported: the local shard"),
    ):
        reason = reason if rank == 1 else "rank 1 refused its arguments"
        with pytest.raises(RuntimeError, match=re.escape(f"ContextParallel.unshard: {reason}")):
            parallel.unshard(*((wrong, dim) if rank == 1 else (mine, 1)))  # type: ignore[arg-type]
        assert torch.equal(parallel.unshard(mine, 1), torch.cat([mine - rank + r for r in range(mesh.size())], 1))


def test_unshard_of_what_does_not_fit(processes: Processes) -> None:
    processes.run(shards_that_do_not_fit)


def arguments_of_one_process(device: str) -> None:
    """Refused on every rank alike."""
    count = dist.get_world_size()
    mesh = init_device_mesh(device, (count,))
    q = torch.ones(1, 1, 4, 16, device=device, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="q: a DTensor; supported: the local shard"):
        ContextParallel(mesh).attention(DTensor.from_local(q, mesh, [Shard(2)]), q, q)
    with pytest.raises(RuntimeError, match="q: rank 3; expected 4 dimensions"):
        ContextParallel(mesh).attention(q[0], q, q)
    with pytest.raises(RuntimeError, match="a mesh of 2 dimensions; supported: one"):
        ContextParallel(init_device_mesh(device, (1, count)))
    for heads in (0, 1.5, "1"):
        with pytest.raises(RuntimeError, match=f"heads_at_once: {heads}; supported: 1 or more, or None"):
            ContextParallel(mesh, heads_at_once=heads)  # type: ignore[arg-type]
    whole = DTensor.from_local(q, mesh, [Shard(2)])
    for wrong, sentence in (
        (lambda: ContextParallel([0, 1]), "ContextParallel: ranks: list; supported: a ProcessGroup"),  # type: ignore[arg-type]
        (lambda: ContextParallel(mesh, balanced="no"), "balanced: 'no'; supported: True or False"),  # type: ignore[arg-type]
        (lambda: ContextParallel(mesh).shard([1, 2], 0), "shard: whole: list; expected a tensor of rank 1 or more"),  # type: ignore[arg-type]
        (lambda: ContextParallel(mesh).shard(whole, 0), "whole: a DTensor; supported: the whole, a plain"),
        (lambda: ContextParallel(mesh).shard(q, 4), "shard: dim: 4; supported for whole, of rank 4: -4 to 3"),
        (lambda: ContextParallel(mesh).unshard(q, -5), "unshard: dim: -5; supported for local, of rank 4: -4 to 3"),
        (lambda: ContextParallel(mesh).shard(q, 2.0), "shard: dim: 2.0; supported"),  # type: ignore[arg-type]
        (lambda: ContextParallel(mesh).positions(-1), "positions: length: -1; supported: whole numbers from 0"),
        (lambda: ContextParallel(mesh, multiple=2**63), f"multiple: {2**63}; supported: 1 to 2147483647"),
        (lambda: ContextParallel(mesh).attention(q, q, q, scale=10**400), "scale: a number of 1329 bits; supported"),
        (lambda: ContextParallel(mesh).attention(q.to_sparse(), q, q), "q: a sparse tensor; supported: strided"),
        (lambda: ContextParallel(mesh).positions(7.5), "positions: length: 7.5; supported"),  # type: ignore[arg-type]
    ):
        with pytest.raises(RuntimeError, match=re.escape(sentence)):
            wrong()
    for given in ({"scale": 0.5}, {"causal_offset": 1, "is_causal": True}):  # also in tensors, as elsewhere
        in_tensors = {name: torch.tensor(value) for name, value in given.items()}
        out = ContextParallel(mesh).attention(q, q, q, **in_tensors)  # type: ignore[arg-type]
        assert same_bits(out, ContextParallel(mesh).attention(q, q, q, **given))  # type: ignore[arg-type]
    for far in (2**63 - 1, -(2**63)):
        q.grad = None
        out = ContextParallel(mesh).attention(q.requires_grad_(), q, q, is_causal=True, causal_offset=far)
        out.sum().backward()
        assert (out == 0).all() == (far < 0) and q.grad is not None
    q = q.detach()
    if device == "cpu":
        with pytest.raises(RuntimeError, match="q: on meta, where the group has no backend; it has gloo"):
            meta = q.to("meta")
            ContextParallel(mesh).attention(meta, meta, meta)
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        q = q.detach().requires_grad_()
        (dq,) = torch.autograd.grad(ContextParallel(mesh).attention(q, q, q).sum(), q, create_graph=True)
        dq.sum().backward()
    other = dist.new_group([0])
    if dist.get_rank() != 0:
        with pytest.raises(RuntimeError, match="a group that this process is no member of"):
            ContextParallel(other)


def test_arguments(processes: Processes) -> None:
    processes.run(arguments_of_one_process)


def test_without_torch_distributed() -> None:
    with pytest.raises(RuntimeError, match="ranks: None, and torch"):
        ContextParallel()


# ---- ranks that fail ------------------------------------------------------------------------------------------------

# NCCL's watchdog ends the process instead, from which no test returns: gloo alone.
PATIENCE = 3.0  # seconds
FAILED = re.compile("timed out|connection|timeout", re.I)  # gloo's words


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    running = Processes(2, "cpu", tmp_path_factory.mktemp("pair"))
    yield running
    running.end()


def late(device: str) -> None:
    groups = [dist.new_group() for _ in range(2)]
    first, second = map(ContextParallel, groups)
    q = torch.ones(1, 1, 4, 16, device=device, requires_grad=True)
    outs = [parallel.attention(q, q, q) for parallel in (first, second)]
    assert same_bits(outs[0].detach(), dhp_safe_fa.attention(q, q, q).detach())
    for group in groups:  # not before: on a loaded machine groups take long to begin
        _set_pg_timeout(datetime.timedelta(seconds=PATIENCE), group)
    start = time.monotonic()
    if dist.get_rank() == 1:
        time.sleep(4 * PATIENCE)
    with pytest.raises(RuntimeError, match=FAILED):
        first.attention(q, q, q)
    with pytest.raises(RuntimeError, match=FAILED):
        outs[1].sum().backward()
    assert q.grad is None
    assert dist.get_rank() == 1 or time.monotonic() - start < 4 * PATIENCE, "before the other one comes"


def test_a_late_rank(pair: Processes) -> None:
    pair.run(late)


def deserted(device: str) -> None:
    parallel = ContextParallel()
    q = torch.ones(1, 1, 4, 16, device=device, requires_grad=True)
    out = parallel.attention(q, q, q)
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError, match=FAILED):
        out.sum().backward()
    with pytest.raises(RuntimeError, match=FAILED):
        parallel.attention(q, q, q)


def test_a_rank_that_dies(pair: Processes) -> None:
    """Last of this file: there is one rank less from then on."""
    start = time.monotonic()
    pair.begin(deserted)
    assert pair.outcome(0) is None
    assert pair.outcome(1) == "died"
    assert time.monotonic() - start < 30
