"""Attention on DTensors in two processes, and four: which placements run without communication, and that every one is
right, of results and of gradients."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
import torch
from harness import same_bits

import dhp_safe_fa
import dhp_safe_fa.integrations.dtensor

PROCESSES = 2
CAUSAL = {"is_causal": True, "scale": 0.3, "causal_offset": 2}


def check() -> None:
    check_placements()
    check_forms()
    check_gradients()
    check_gradients_of_sinks()
    check_packed()
    check_pages()


def check_placements() -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (PROCESSES,))
    rng = torch.Generator().manual_seed(7)
    batch, heads, rows, all_of_it = Shard(0), Shard(1), Shard(2), Replicate()
    # query heads, key heads, placement of q, placement of k and v, whether it runs without communication
    cases = [
        (4, 2, batch, batch, True),
        (4, 2, heads, heads, True),
        (4, 4, heads, heads, True),
        (5, 1, heads, all_of_it, True),  # three query heads here, two there, on one key head
        (4, 2, heads, all_of_it, True),  # each process takes its part of the key heads
        (4, 2, all_of_it, all_of_it, True),
        (6, 3, heads, heads, False),  # the second process has query heads 3 to 5, and 3 reads key head 1
        (4, 2, rows, rows, False),
    ]
    for query_heads, key_heads, place_q, place_k, silent in cases:
        q = torch.randn(3, query_heads, 5, 16, generator=rng)
        k, v = torch.randn(2, 3, key_heads, 7, 16, generator=rng)
        want, want_lse = dhp_safe_fa.attention_lse(q, k, v, **CAUSAL)
        sharded = [distribute_tensor(t, mesh, [p]) for t, p in zip((q, k, v), (place_q, place_k, place_k), strict=True)]
        with CommDebugMode() as communication:
            out, lse = dhp_safe_fa.attention_lse(*sharded, **CAUSAL)
            alone = torch.ops.dhp.attention(*sharded, **CAUSAL)
        case = f"{query_heads} and {key_heads} heads, q {place_q}, k and v {place_k}"
        assert (communication.get_total_counts() == 0) == silent, case
        for got, expected in ((out, want), (lse, want_lse), (alone, want)):
            assert isinstance(got, DTensor) and got.shape == expected.shape
            assert not silent or got.placements == (place_q,), case
            assert same_bits(got.full_tensor(), expected), case


def check_forms() -> None:
    """Sinks lie as the query heads do, and v may be narrower; soft caps are numbers like others."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (PROCESSES,))
    rng = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(2, heads, rows, d, generator=rng) for heads, rows, d in ((4, 5, 16), (2, 7, 16), (2, 7, 8)))
    sinks = torch.randn(4, generator=rng)
    want, want_lse = dhp_safe_fa.attention_lse(q, k, v, softcap=3.0, sinks=sinks, **CAUSAL)
    for placement, of_sinks in ((Shard(0), Replicate()), (Shard(1), Shard(0)), (Replicate(), Replicate())):
        sharded = [distribute_tensor(t, mesh, [placement]) for t in (q, k, v)]
        with CommDebugMode() as communication:
            shared = distribute_tensor(sinks, mesh, [of_sinks])
            before = communication.get_total_counts()
            out, lse = dhp_safe_fa.attention_lse(*sharded, softcap=3.0, sinks=shared, **CAUSAL)
            assert communication.get_total_counts() == before, placement
        for got, expected in ((out, want), (lse, want_lse)):
            assert isinstance(got, DTensor) and got.placements == (placement,)
            assert same_bits(got.full_tensor(), expected), placement


def check_gradients() -> None:
    """Each has the bits that it has in one process, whichever are needed; silent means the backward alone."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (PROCESSES,))
    rng = torch.Generator().manual_seed(7)
    batch, heads, rows, all_of_it = Shard(0), Shard(1), Shard(2), Replicate()
    cases = [
        (4, 2, batch, batch, True),
        (4, 2, heads, heads, True),
        (4, 4, heads, heads, True),
        (5, 1, heads, all_of_it, False),  # dk and dv are sums over all query heads, in one order
        (4, 2, all_of_it, all_of_it, True),
        (6, 3, heads, heads, False),
        (4, 2, rows, rows, False),
    ]
    for query_heads, key_heads, place_q, place_k, silent in cases:
        q = torch.randn(3, query_heads, 5, 16, generator=rng)
        k, v = torch.randn(2, 3, key_heads, 7, 16, generator=rng)
        placements = (place_q, place_k, place_k)
        for needed in ((True, True, True), (True, False, False), (False, True, True)):
            leaves = [t.clone().requires_grad_(need) for t, need in zip((q, k, v), needed, strict=True)]
            out, lse = dhp_safe_fa.attention_lse(*leaves, **CAUSAL)
            ((out * out).sum() + lse.sum()).backward()
            sharded = [distribute_tensor(t, mesh, [p]) for t, p in zip((q, k, v), placements, strict=True)]
            sharded = [t.requires_grad_(need) for t, need in zip(sharded, needed, strict=True)]
            out, lse = dhp_safe_fa.attention_lse(*sharded, **CAUSAL)
            loss = (out * out).sum() + lse.sum()
            with CommDebugMode() as communication:
                loss.backward()
            case = f"{query_heads} and {key_heads} heads, q {place_q}, k and v {place_k}, needed {needed}"
            assert (communication.get_total_counts() == 0) == silent, case
            for got, want, placement in zip(sharded, leaves, placements, strict=True):
                assert (got.grad is None) == (want.grad is None)
                if got.grad is not None and want.grad is not None:
                    assert not silent or got.grad.placements == (placement,), case
                    assert same_bits(got.grad.full_tensor(), want.grad), case


def check_gradients_of_sinks() -> None:
    """As those of q, k and v; a sum over the batch is silent only where each process has all of a head."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (PROCESSES,))
    rng = torch.Generator().manual_seed(7)
    tensors = [torch.randn(3, heads, rows, 16, generator=rng) for heads, rows in ((4, 5), (2, 7), (2, 7))]
    tensors.append(torch.randn(4, generator=rng))
    cases = [(Shard(1), Shard(0), True), (Replicate(), Replicate(), True), (Shard(0), Replicate(), False)]
    for with_lse in (False, True):

        def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
            out, lse = dhp_safe_fa.attention_lse(q, k, v, sinks=sinks, **CAUSAL)
            return (out * out).sum() + (lse.sum() if with_lse else 0.0)  # noqa: B023 (called within the loop)

        leaves = [t.clone().requires_grad_() for t in tensors]
        loss(*leaves).backward()
        for rows, of_sinks, silent in cases:
            placements = [rows, rows, rows, of_sinks]
            sharded = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, placements, strict=True)]
            sharded = [t.requires_grad_() for t in sharded]
            result = loss(*sharded)
            with CommDebugMode() as communication:
                result.backward()
            assert (communication.get_total_counts() == 0) == silent, rows
            for got, want in zip(sharded, leaves, strict=True):
                assert same_bits(got.grad.full_tensor(), want.grad), rows


def check_packed() -> None:
    """Packed sequences over the heads, with sinks and without, and their gradients: silent where each process has the
    key heads of its query heads, and no sum crosses processes."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (PROCESSES,))
    rng = torch.Generator().manual_seed(7)
    lengths = torch.tensor([0, 4, 4, 11], dtype=torch.int32)
    tokens, heads, all_of_it = Shard(0), Shard(1), Replicate()
    cases = [
        (4, 2, heads, heads, True, True),
        (4, 2, all_of_it, all_of_it, True, True),
        (5, 1, heads, all_of_it, True, False),
        (6, 3, heads, heads, False, False),
        (4, 2, tokens, tokens, False, False),
    ]
    for query_heads, key_heads, place_q, place_k, silent, silent_backward in cases:
        leaves = [torch.randn(12, h, 16, generator=rng) for h in (query_heads, key_heads, key_heads)]
        placements = (place_q, place_k, place_k)
        sharded = [distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in zip(leaves, placements, strict=True)]
        begins = distribute_tensor(lengths, mesh, [all_of_it])
        leaves = [t.requires_grad_() for t in leaves]
        want, want_lse = dhp_safe_fa.attention_varlen_lse(*leaves, lengths, lengths, 7, 7, is_causal=True)
        with CommDebugMode() as communication:
            out, lse = dhp_safe_fa.attention_varlen_lse(*sharded, begins, begins, 7, 7, is_causal=True)
        case = f"{query_heads} and {key_heads} heads, q {place_q}, k and v {place_k}"
        assert (communication.get_total_counts() == 0) == silent, case
        for got, expected in ((out, want), (lse, want_lse)):
            assert isinstance(got, DTensor) and same_bits(got.full_tensor(), expected), case
        assert not silent or out.placements == (place_q,)
        of = torch.randn(want.shape, generator=rng)
        want.backward(of)
        of_sharded = distribute_tensor(of, mesh, [*out.placements])
        with CommDebugMode() as communication:
            out.backward(of_sharded)
        assert (communication.get_total_counts() == 0) == silent_backward, case
        for mine, whole in zip(sharded, leaves, strict=True):
            assert mine.grad is not None and whole.grad is not None
            assert same_bits(mine.grad.full_tensor(), whole.grad), case


def check_pages() -> None:
    """A cache in pages, divided by its heads; sinks lie as the query heads do."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (PROCESSES,))
    rng = torch.Generator().manual_seed(7)
    q, sinks = torch.randn(5, 4, 16, generator=rng), torch.randn(4, generator=rng)
    k, v = torch.randn(2, 3, 16, 2, 16, generator=rng)
    begins, used = torch.tensor([0, 2, 5], dtype=torch.int32), torch.tensor([9, 30], dtype=torch.int32)
    table = torch.tensor([[2, 0], [1, 0]], dtype=torch.int32)
    options = {"is_causal": True, "softcap": 3.0}
    want = dhp_safe_fa.attention_varlen(
        q, k, v, begins, None, 3, 30, seqused_k=used, page_table=table, sinks=sinks, **options
    )
    given = ((q, Shard(1)), (k, Shard(2)), (v, Shard(2)), (sinks, Shard(0)))
    mine_q, mine_k, mine_v, mine_sinks = (distribute_tensor(t, mesh, [p]) for t, p in given)
    whole = [distribute_tensor(t, mesh, [Replicate()]) for t in (begins, used, table)]
    with CommDebugMode() as communication:
        out = dhp_safe_fa.attention_varlen(
            mine_q, mine_k, mine_v, whole[0], None, 3, 30,
            seqused_k=whole[1], page_table=whole[2], sinks=mine_sinks, **options,
        )  # fmt: skip
    assert communication.get_total_counts() == 0 and out.placements == (Shard(1),)
    assert same_bits(out.full_tensor(), want)


def test_two_processes(tmp_path: Path) -> None:
    launch.run(check, PROCESSES, tmp_path)


def check_two_dimensions() -> None:
    """Batch over one dimension of the mesh and heads over the other: silent where all ranks divide the key heads."""
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.debug import CommDebugMode

    mesh = init_device_mesh("cpu", (2, 2))
    rng = torch.Generator().manual_seed(7)
    for query_heads, key_heads, silent in ((8, 4, True), (4, 2, False)):
        q = torch.randn(3, query_heads, 5, 16, generator=rng)
        leaves = [q, *torch.randn(2, 3, key_heads, 7, 16, generator=rng)]
        sharded = [distribute_tensor(t, mesh, [Shard(0), Shard(1)]).requires_grad_() for t in leaves]
        leaves = [t.requires_grad_() for t in leaves]
        want = dhp_safe_fa.attention(*leaves, **CAUSAL)
        want.square().sum().backward()
        with CommDebugMode() as communication:
            got = dhp_safe_fa.attention(*sharded, **CAUSAL)
        assert (communication.get_total_counts() == 0) == silent
        got.square().sum().backward()
        assert same_bits(got.full_tensor(), want)
        for one, other in zip(sharded, leaves, strict=True):
            assert one.grad is not None and other.grad is not None
            assert same_bits(one.grad.full_tensor(), other.grad)


@pytest.mark.long
def test_two_dimensions(tmp_path: Path) -> None:
    launch.run(check_two_dimensions, 4, tmp_path)
