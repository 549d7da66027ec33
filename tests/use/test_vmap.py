"""The operators under torch.func.vmap."""

from __future__ import annotations

import pytest
import torch
from harness import Target, normal, qkv, same_bits

import dhp_safe_fa


def test_vmap(target: Target, rng: torch.Generator) -> None:
    """Any dimension may be mapped over, of any of the inputs; the rows have the bits of separate calls."""
    q, k, v = (normal(rng, (3, *t), target) for t in ((2, 4, 33, 64), (2, 2, 70, 64), (2, 2, 70, 64)))
    want = [dhp_safe_fa.attention(q[i], k[i], v[i], is_causal=True) for i in range(3)]
    for d in range(5):
        mapped = torch.func.vmap(lambda *t: dhp_safe_fa.attention(*t, is_causal=True), in_dims=(0, d, -1), out_dims=d)
        out = mapped(q, k.movedim(0, d), v.movedim(0, -1))
        assert same_bits(out.movedim(d, 0), torch.stack(want))
    shared = torch.func.vmap(dhp_safe_fa.attention, in_dims=(0, None, None))(q, k[0], v[0])
    assert same_bits(shared, torch.stack([dhp_safe_fa.attention(q[i], k[0], v[0]) for i in range(3)]))


def test_nested_vmap(target: Target, rng: torch.Generator) -> None:
    """Every query set with every key set."""
    q, k, v = (normal(rng, (n, *t), target) for n, t in ((3, (2, 4, 9, 64)), (2, (2, 2, 7, 64)), (2, (2, 2, 7, 64))))
    over_q = torch.func.vmap(dhp_safe_fa.attention_lse, in_dims=(0, None, None))
    out, lse = torch.func.vmap(over_q, in_dims=(None, 0, 0))(q, k, v)
    for i in range(2):
        for j in range(3):
            want, want_lse = dhp_safe_fa.attention_lse(q[j], k[i], v[i])
            assert same_bits(out[i, j], want) and same_bits(lse[i, j], want_lse)


def test_vmap_over_something_else(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    want = dhp_safe_fa.attention(q, k, v)
    added = torch.func.vmap(lambda x: dhp_safe_fa.attention(q, k, v) + x)(torch.zeros(3, device=q.device).to(q.dtype))
    assert same_bits(added, (want + 0).expand(3, *want.shape))


def test_vmap_of_nothing(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    mapped = torch.func.vmap(dhp_safe_fa.attention, in_dims=(0, None, None))
    out = mapped(q[None, :0].expand(3, 0, 4, 9, 64), k[:0], v[:0])
    assert out.shape == (3, 0, 4, 9, 64)


def test_vmap_refusals(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    with pytest.raises(RuntimeError, match=r"rank 3 inside of vmap; expected 4 dimensions \[B, H, S, D\]"):
        torch.func.vmap(dhp_safe_fa.attention)(q, k, v)
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.vmap(torch.func.grad(lambda x: dhp_safe_fa.attention(x, k, v).float().sum()))(q[None])
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.grad(lambda x: torch.func.vmap(lambda y: dhp_safe_fa.attention(y, k, v))(x).float().sum())(q[None])
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.jvp(lambda x: dhp_safe_fa.attention(x, k, v), (q,), (q,))
    x = q[None].requires_grad_()  # what vmap hands on does not say so
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.vmap(lambda y: dhp_safe_fa.attention(y, k, v))(x)
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.vmap(lambda y: dhp_safe_fa.attention_lse(y * 2, k, v))(x)
