"""ContextParallel.policy(): SDPA calls of unmodified models over ranks, beside other policies, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from harness import Target, qkv, same_bits
from processes import Processes, first
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.utils.checkpoint import checkpoint

import dhp_safe_fa
from dhp_safe_fa.integrations.context_parallel import ContextParallel


def inputs(device: str) -> list[Tensor]:
    return list(qkv(torch.Generator().manual_seed(7), Target(device, torch.float16), 2, 4, 4, 75, 75, 16))


def sdpa(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, **options)


@contextmanager
def for_the_process(name: Any) -> Iterator[None]:
    dhp_safe_fa.set_policy(name)
    try:
        yield
    finally:
        dhp_safe_fa.set_policy(None)


# ---- served ---------------------------------------------------------------------------------------------------------


def beside_other_policies(device: str) -> None:
    whole = inputs(device)
    expected = dhp_safe_fa.attention(*whole, is_causal=True, scale=0.4)
    parallel = ContextParallel(balanced=True)
    mine = [parallel.shard(t, dim=2).requires_grad_() for t in whole]
    inside, outside, everywhere = (
        (lambda name: (parallel.policy(), dhp_safe_fa.policy(name))),
        (lambda name: (dhp_safe_fa.policy(name), parallel.policy())),
        (lambda name: (parallel.policy(), for_the_process(name))),
    )
    for name in ("secure", "hybrid", "audit"):
        for nested in (inside, outside, everywhere):
            with ExitStack() as stack:
                entered = [stack.enter_context(each) for each in nested(name)]
                out = sdpa(*mine, is_causal=True, scale=0.4)
                out.sum().backward()
            assert same_bits(out.detach(), parallel.shard(expected, dim=2)), name
            assert mine[0].grad is not None
            counts = {policy.name: sum(policy.calls.values()) for policy in entered if policy is not None}
            assert counts["context_parallel"] == 1
            if nested is inside:
                assert counts[name] == 1


def test_beside_other_policies(processes: Processes) -> None:
    processes.run(beside_other_policies)


def of_other_ranks_and_heads(device: str) -> None:
    q, k, v = inputs(device)
    parallel = ContextParallel()
    for given, options in (
        ((q[0], k[0], v[0]), {}),
        ((q[0, 0], k[0, 0], v[0, 0]), {"is_causal": True}),
        ((q[None], k[None], v[None]), {}),
        ((q, k[:, :2], v[:, :2]), {"enable_gqa": True}),
    ):
        with parallel.policy():
            out = sdpa(*(parallel.shard(t, dim=-2) for t in given), **options)
        assert same_bits(out, parallel.shard(dhp_safe_fa.sdpa(*given, **options), dim=-2))


def test_other_ranks_and_heads(processes: Processes) -> None:
    processes.run(of_other_ranks_and_heads)


def through_models(device: str) -> None:
    """An encoder layer of torch's in training, with a checkpoint and without, compiled and not."""
    torch.manual_seed(7)
    layer = torch.nn.TransformerEncoderLayer(64, 4, dim_feedforward=32, dropout=0.0, batch_first=True)
    layer = layer.to(device, torch.float16 if device == "cuda" else torch.float32)
    parameter = layer.self_attn.in_proj_weight
    tokens = torch.randn(2, 30, 64).to(parameter)
    parallel = ContextParallel()
    with dhp_safe_fa.policy("secure"):
        layer(tokens).sum().backward()
    assert parameter.grad is not None
    expected, tolerance = parameter.grad, {"rtol": 1e-2, "atol": 1e-1} if device == "cuda" else {}
    compiled = torch.compile(layer, fullgraph=True)
    ways: list[Callable[[Tensor], Tensor]] = [layer, lambda t: checkpoint(layer, t, use_reentrant=False), compiled]
    for way in ways:
        layer.zero_grad()
        with parallel.policy() as policy:
            way(parallel.shard(tokens, dim=1)).sum().backward()
        assert {call.backend for call in policy.calls} == {"dhp"}
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, expected, **tolerance)
    layer.eval()
    with torch.no_grad():
        whole = layer(tokens)
        with parallel.policy():
            mine = layer(parallel.shard(tokens, dim=1))
    torch.testing.assert_close(mine, parallel.shard(whole, dim=1), **tolerance)


def test_models(processes: Processes) -> None:
    processes.run(through_models)


def placed_by_torch(device: str) -> None:
    """Rows as torch's context_parallel leaves them behind."""
    count = dist.get_world_size()
    mesh = init_device_mesh(device, (count,))
    parallel = ContextParallel(mesh, balanced=True)
    whole = torch.arange(2 * 4 * count, device=device).reshape(1, 8 * count, 1)
    buffer = whole.clone()
    with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1], no_restore_buffers={buffer}):
        q = torch.ones(1, 1, 8, 16, dtype=torch.float16, device=device)
        with (
            parallel.policy(),
            pytest.raises(RuntimeError, match="query: a DTensor, as inside of torch's"),
        ):
            sdpa(q, q, q, is_causal=True)
    assert torch.equal(buffer, parallel.shard(whole, dim=1))


def test_torchs_placement(processes: Processes) -> None:
    processes.run(placed_by_torch)


def through_llama(device: str) -> None:
    """transformers' sdpa, which needs to be told the positions."""
    if first(2) is None:
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "sdpa"}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    model = model.to(device, torch.float16 if device == "cuda" else torch.float32)
    ids = torch.randint(100, (1, 41)).to(device)
    with torch.no_grad():
        whole = model(ids).logits
        for balanced in (False, True):
            parallel = ContextParallel(first(2), balanced=balanced)
            where = parallel.positions(41, device)[None]
            with parallel.policy() as policy:
                mine = model(parallel.shard(ids, dim=1), position_ids=where, use_cache=True).logits
                assert sum(policy.calls.values()) == 2
                if balanced:  # positions that jump are packed sequences to transformers, if there is no cache
                    reason = "attn_mask: given" if dist.get_rank() == 0 else "rank 0 refused its arguments"
                    with pytest.raises(RuntimeError, match=reason):
                        model(parallel.shard(ids, dim=1), position_ids=where, use_cache=False)
            torch.testing.assert_close(
                mine, parallel.shard(whole, dim=1), rtol=1e-3, atol=1e-2 if device == "cuda" else 1e-5
            )


def test_llama(processes: Processes) -> None:
    processes.run(through_llama)


# ---- refused --------------------------------------------------------------------------------------------------------


def what_is_refused(device: str) -> None:
    q, k, v = inputs(device)
    parallel = ContextParallel()
    heads = torch.nn.MultiheadAttention(64, 4, batch_first=True, device=device)
    tokens = torch.randn(2, 5, 64, device=device)
    mask = torch.ones(75, 75, dtype=torch.bool, device=device)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: sdpa(q, k, v, attn_mask=mask), "attn_mask: given, shape"),
        (lambda: sdpa(q, k, v, dropout_p=0.5), "dropout_p: 0.5"),
        (lambda: heads(tokens, tokens, tokens), "need_weights: True"),
        (lambda: dhp_safe_fa.attention(q, k, v), "called directly, over the local shard alone"),
        (lambda: torch.ops.dhp.attention_lse(q, k, v), "called directly, over the local shard alone"),
        (lambda: ContextParallel().policy().__enter__(), "inside of another one"),
    ]
    for under in (nullcontext(), dhp_safe_fa.policy("hybrid")):
        for call, reason in refused:
            with parallel.policy(), under, pytest.raises(RuntimeError, match=f"ContextParallel.policy: .*{reason}"):
                call()
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    dtensor = DTensor.from_local(q, mesh, [Shard(2)])
    for call, reason in (refused[3], (lambda: sdpa(dtensor, k, v), "query: a DTensor")):
        is_wrong = dist.get_rank() == 1
        said = f"ContextParallel.policy: .*{reason}" if is_wrong else "rank 1 refused its arguments"
        with parallel.policy(), pytest.raises(RuntimeError, match=said):
            call() if is_wrong else sdpa(q, k, v)
    with parallel.policy():
        parallel.attention(q, k, v)  # is served, and so is what comes after all that was refused
        sdpa(q, k, v)
    dhp_safe_fa.attention(q, k, v)


def test_what_is_refused(processes: Processes) -> None:
    processes.run(what_is_refused)
