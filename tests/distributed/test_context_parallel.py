"""Attention over ranks: the bits of one process, whatever the placement, the number of ranks and the order of heads."""

from __future__ import annotations

import random
import time
from functools import partial
from typing import Any

import pytest
import torch
from harness import Target, normal, qkv, same_bits
from processes import Processes, first
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import dhp_safe_fa
from dhp_safe_fa.integrations.context_parallel import ContextParallel, arriving, mapped
from dhp_safe_fa.integrations.context_parallel.arriving import one_ahead
from dhp_safe_fa.integrations.context_parallel.placement import chunks, chunks_held

DTYPES = {
    "cpu": (torch.float32, torch.float16, torch.bfloat16, torch.float64),
    "cuda": (torch.float16, torch.bfloat16),
}


# ---- placement ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("length", [0, 1, 5, 16, 97])
def test_placement(ranks: int, length: int, multiple: int) -> None:
    """Every row once; two chunks a rank as documented, and what is found again from lengths alone."""
    for balanced in (False, True):
        together = torch.arange(length).split(multiple) if length else ()
        split = torch.arange(len(together)).tensor_split((2 if balanced else 1) * ranks)
        parts = [torch.cat([together[i] for i in part]) for part in split if len(part)]
        cut = chunks(length, ranks, balanced, multiple)
        assert [(c.start, c.stop) for c in cut if c.stop > c.start] == [
            (int(part[0]), int(part[-1]) + 1) for part in parts
        ]
        for rank in range(ranks):
            places = [rank, 2 * ranks - 1 - rank] if balanced else [rank]
            assert [i for i, c in enumerate(cut) if c.rank == rank] == places
            assert [cut[i].first for i in places] == [0, cut[rank].stop - cut[rank].start][: len(places)]
        lengths = [sum(c.stop - c.start for c in cut if c.rank == rank) for rank in range(ranks)]
        assert list(chunks_held(tuple(lengths), balanced, multiple)) == cut


def test_lengths_that_are_not_balanced() -> None:
    with pytest.raises(ValueError, match=r"\[7, 9\] rows on the ranks; balanced placement of 16 rows is \[8, 8\]"):
        chunks_held((7, 9), balanced=True)


def sharding(device: str) -> None:
    whole = torch.arange(2 * 11 * 3, device=device).reshape(2, 11, 3)
    for balanced in (False, True):
        parallel = ContextParallel(balanced=balanced)
        mine = parallel.shard(whole, dim=1)
        assert torch.equal(mine[0, :, 0] // 3, parallel.positions(11, device))
        assert torch.equal(parallel.unshard(mine, dim=-2), whole)


def test_shard_and_unshard(processes: Processes) -> None:
    processes.run(sharding)


# ---- bits -----------------------------------------------------------------------------------------------------------


def whole_call(seed: int, device: str) -> tuple[list[Tensor], dict[str, object]]:
    """q, k, v, grad_out and grad_lse, and the options, of a call that the seed chooses; the same on every rank."""
    choose, rng = random.Random(seed), torch.Generator().manual_seed(seed)
    target = Target(device, DTYPES[device][seed % len(DTYPES[device])])
    head_dim = choose.choice([1, 7, 16, 33, 64, 80, 128, 200, 256])
    if device == "cuda":
        head_dim = -(-head_dim // 8) * 8
    batch, key_heads, group = choose.choice([1, 2]), choose.choice([1, 2, 3]), choose.choice([1, 2, 3])
    queries, keys = choose.choice([1, 5, 97, 130, 260]), choose.choice([3, 64, 131, 290])
    q, k, v = qkv(rng, target, batch, key_heads * group, key_heads, queries, keys, head_dim)
    grad_lse = torch.randn(q.shape[:3], generator=rng).to(device)
    if q.dtype == torch.float64:
        grad_lse = grad_lse.double()
    options: dict[str, object] = {"scale": choose.choice([None, 0.3])}
    if choose.random() < 0.75:
        options |= {"is_causal": True, "causal_offset": choose.choice([0, keys - queries, 17, -40, -300, 10**6])}
    if device == "cpu" and choose.random() < 0.5:  # CUDA has gradients of neither
        options |= choose.choice([{"window": (30, 0)}, {"window": (-1, 100)}, {"window": (7, 3), "softcap": 3.0}])
    return [q, k, v, normal(rng, q.shape, target), grad_lse], options


def same_as_one_process(device: str, ranks: int, seeds: range) -> None:
    group = first(ranks)
    if group is None:
        return
    for seed in seeds:
        (q, k, v, grad_out, grad_lse), options = whole_call(seed, device)
        whole = [t.requires_grad_() for t in (q, k, v)]
        out, lse = dhp_safe_fa.attention_lse(q, k, v, **options)
        expected = torch.autograd.grad((out, lse), whole, (grad_out, grad_lse), retain_graph=True)
        without_lse = torch.autograd.grad(out, whole, grad_out)
        for balanced in (False, True):
            heads_at_once = random.Random(seed).choice([None, 1, 2])
            parallel = ContextParallel(group, balanced=balanced, heads_at_once=heads_at_once)

            def shard(t: Tensor, parallel: ContextParallel = parallel) -> Tensor:
                return parallel.shard(t.detach(), dim=2)

            mine = [shard(t).requires_grad_() for t in whole]
            my_out, my_lse = parallel.attention_lse(*mine, **options)
            got = torch.autograd.grad((my_out, my_lse), mine, (shard(grad_out), shard(grad_lse)))
            alone = parallel.attention(*mine, **options)
            got_alone = torch.autograd.grad(alone, mine, shard(grad_out))
            case = f"seed {seed}, {ranks} ranks, balanced {balanced}, heads_at_once {heads_at_once}, {options}"
            pairs = {"out": (my_out, out), "lse": (my_lse, lse), "out alone": (alone, out)}
            pairs |= {f"d{n}": pair for n, pair in zip("qkv", zip(got, expected, strict=True), strict=True)}
            pairs |= {
                f"d{n} of out alone": p for n, p in zip("qkv", zip(got_alone, without_lse, strict=True), strict=True)
            }
            for name, (here, there) in pairs.items():
                assert same_bits(here.detach(), shard(there)), f"{name}: {case}, {whole[0].dtype} {list(q.shape)}"


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bits_are_those_of_one_process(processes: Processes, ranks: int, session_seed: int) -> None:
    if ranks > processes.count:
        pytest.skip(f"torch sees {processes.count} GPUs")
    print(f"to repeat these inputs: pytest --seed {session_seed}")
    start = session_seed % 2**20 * 16
    processes.run(same_as_one_process, ranks, range(start, start + 16))


def of_any_lengths(device: str) -> None:
    """Plain placement of what ranks happen to have, none at all included; and who needs which gradient."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    rng = torch.Generator().manual_seed(7)
    q, k, v = (t.transpose(1, 2) for t in normal_bshd(rng, device))
    of_queries, of_keys = uneven(q.shape[2], ranks), uneven(k.shape[2], ranks)[::-1]
    options = {"is_causal": True, "causal_offset": 3}
    for needed in [(True, False, False), (False, True, False), (False, False, True), (False, True, True), (False,) * 3]:
        whole = [t.detach().requires_grad_(need) for t, need in zip((q, k, v), needed, strict=True)]
        out = dhp_safe_fa.attention(*whole, **options)
        mine = [
            t.detach().split(lengths, dim=2)[rank].requires_grad_(need)
            for t, lengths, need in zip((q, k, v), (of_queries, of_keys, of_keys), needed, strict=True)
        ]
        got = ContextParallel().attention(*mine, **options)
        assert same_bits(got.detach(), out.detach().split(of_queries, dim=2)[rank])
        assert got.requires_grad == any(needed)
        if any(needed):
            out.sum().backward()
            got.sum().backward()
        for here, there, lengths in zip(mine, whole, (of_queries, of_keys, of_keys), strict=True):
            assert (here.grad is None) == (there.grad is None)
            if here.grad is not None and there.grad is not None:
                assert same_bits(here.grad, there.grad.split(lengths, dim=2)[rank]), needed


def normal_bshd(rng: torch.Generator, device: str) -> list[Tensor]:
    target = Target(device, torch.bfloat16)
    return [normal(rng, (2, length, heads, 40), target) for length, heads in ((150, 4), (201, 2), (201, 2))]


def uneven(length: int, ranks: int) -> list[int]:
    """Lengths for the ranks; the second has nothing."""
    rest = length - 11 if ranks > 2 else length
    return [rest, 0, *([11] if ranks > 2 else []), *[0] * (ranks - 3)]


def test_uneven_shards(processes: Processes) -> None:
    processes.run(of_any_lengths)


def where_one_result_is_unused(device: str) -> None:
    """out and lse of a rank need not both be in the loss, though other ranks' are."""
    rank = torch.distributed.get_rank()
    rng = torch.Generator().manual_seed(7)
    q, k, v = (t.requires_grad_() for t in qkv(rng, Target(device, torch.float16), 1, 2, 1, 90, 90, 16))
    parallel = ContextParallel()
    mine = [parallel.shard(t.detach(), dim=2).requires_grad_() for t in (q, k, v)]
    my_out, my_lse = parallel.attention_lse(*mine)
    got = torch.autograd.grad(my_lse.sum() if rank == 0 else my_out.sum(), mine)

    of_out = parallel.unshard(torch.full(my_lse.shape, float(rank != 0), device=device), dim=2)
    out, lse = dhp_safe_fa.attention_lse(q, k, v)
    expected = torch.autograd.grad((out, lse), (q, k, v), (of_out[..., None].expand_as(out).to(out.dtype), 1 - of_out))
    for here, there in zip(got, expected, strict=True):
        assert same_bits(here, parallel.shard(there, dim=2))


def test_results_that_some_ranks_do_not_use(processes: Processes) -> None:
    processes.run(where_one_result_is_unused)


def under_autocast(device: str) -> None:
    rng = torch.Generator().manual_seed(7)
    q, k, v = qkv(rng, Target("cpu", torch.float32), 1, 2, 1, 50, 50, 16)
    parallel = ContextParallel(balanced=True)
    mine = [parallel.shard(t.to(device), dim=2) for t in (q, k, v)]
    with torch.autocast(device, dtype=torch.bfloat16):
        got = parallel.attention(*mine, is_causal=True)
    whole = [t.to(device, torch.bfloat16) for t in (q, k, v)]
    assert same_bits(got, parallel.shard(dhp_safe_fa.attention(*whole, is_causal=True), dim=2))


def test_autocast(processes: Processes) -> None:
    processes.run(under_autocast)


def in_a_compiled_function(device: str) -> None:
    torch.compiler.reset()
    parallel = ContextParallel()

    def function(q: Tensor) -> Tensor:
        return parallel.attention(2 * q, q, q, is_causal=True) + 1

    q = torch.randn(1, 2, 9, 16, device=device).half().requires_grad_()
    expected = torch.autograd.grad(function(q).sum(), q)
    compiled = torch.compile(function, backend="aot_eager")
    assert same_bits(compiled(q).detach(), function(q).detach())
    assert same_bits(torch.autograd.grad(compiled(q).sum(), q)[0], expected[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="ContextParallel waits for other ranks"):
        torch.compile(function, fullgraph=True)(q)
    balanced = ContextParallel(balanced=True)
    place = torch.compile(
        lambda t: (balanced.shard(t, 1), balanced.positions(t.shape[1])), backend="eager", dynamic=True, fullgraph=True
    )
    for length in (9, 10, 23):
        tokens = torch.arange(3 * length).view(3, length)
        shard, positions = place(tokens)
        assert torch.equal(shard, balanced.shard(tokens, 1))
        assert torch.equal(positions, balanced.positions(length))


def test_compiled(processes: Processes) -> None:
    processes.run(in_a_compiled_function)


# ---- a few heads at a time ------------------------------------------------------------------------------------------


def test_one_ahead() -> None:
    steps: list[str] = []

    class Step:
        def __init__(self, i: int) -> None:
            self._i = i
            steps.append(f"start {i}")

        def begin(self) -> None:
            steps.append(f"begin {self._i}")

        def wait(self) -> list[Tensor]:
            steps.append(f"use {self._i}")
            return []

    for one in one_ahead(partial(Step, i) for i in range(3)):
        one.wait()
    assert steps == ["start 0", "begin 0", "start 1", "use 0", "begin 1", "start 2", "use 1", "begin 2", "use 2"]
    assert list(one_ahead([])) == []


def what_is_held(device: str) -> None:
    """Of whole sequences, no more at a time than the present and the next step's."""
    started: list[StorageWeakRef] = []
    bound = 2 * 2  # keys and values

    def assert_held(bound: int) -> None:
        deadline = time.monotonic() + 5  # a thread of gloo's may hold what has arrived a moment longer
        while sum(not each.expired() for each in started) > bound:
            assert time.monotonic() < deadline, f"more than {bound} whole tensors are held"

    def counted(kind: type[Any]) -> type[Any]:
        class Counted(kind):  # type: ignore[misc]
            def __init__(self, *arguments: Any) -> None:
                super().__init__(*arguments)
                # [rows, B, heads, ...] or, of several tensors, [rows, tensors, B, heads, ...]
                wholes = [self._whole.unsqueeze(1)] if hasattr(self, "_whole") else self._wholes
                assert all(whole.shape[3] == 1 for whole in wholes), "one key head, which one query head reads"
                started.extend(StorageWeakRef(w.untyped_storage()) for w in wholes for _ in range(w.shape[1]))
                assert_held(bound)

        return Counted

    q, k, v = (t.requires_grad_() for t in qkv(torch.Generator(), Target(device, torch.float16), 1, 5, 5, 9, 9, 16))
    before = arriving.Broadcast, mapped.Read
    arriving.Broadcast, mapped.Read = map(counted, before)  # type: ignore[misc]
    try:
        out, lse = ContextParallel(heads_at_once=1).attention_lse(q, k, v)
        assert len(started) == 5 * 2
        bound = 2 + 5  # those, and q, grad_out, out, lse, grad_lse
        (out.sum() + lse.sum()).backward()
        assert len(started) == 5 * 2 + 5 * 7
        assert_held(0)
    finally:
        arriving.Broadcast, mapped.Read = before  # type: ignore[misc]


def test_memory(processes: Processes) -> None:
    processes.run(what_is_held)
