"""The operators under torch.autocast."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Target, as_tuple, both_operators, gradients, qkv, same_bits

import dhp_safe_fa


@both_operators
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", ["float32", "other_half", "mixed"])
def test_autocast(operator: Any, device: str, rng: torch.Generator, dtype: torch.dtype, given: str) -> None:
    """Everything in the autocast dtype, as SDPA does it."""
    float32 = Target(device, torch.float32)
    other_half = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    dtypes = {
        "float32": (torch.float32,) * 3,
        "other_half": (other_half,) * 3,
        "mixed": (dtype, torch.float32, other_half),
    }[given]
    q, k, v = (t.to(d) for t, d in zip(qkv(rng, float32, 2, 4, 4, 33, 70, 64), dtypes, strict=True))
    want = as_tuple(operator(q.to(dtype), k.to(dtype), v.to(dtype), True, 0.3, 7))
    with torch.autocast(device, dtype=dtype):
        got = as_tuple(operator(q, k, v, True, 0.3, 7))
        by_name = as_tuple(operator(q, k, v, is_causal=True, scale=0.3, causal_offset=7))
        sdpa = F.scaled_dot_product_attention(q, k, v)
    assert got[0].dtype == sdpa.dtype == dtype
    for tensors in (got, by_name):
        assert all(same_bits(g, w) for g, w in zip(tensors, want, strict=True))


def test_autocast_that_is_off_casts_nothing(device: str, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target(device, torch.float16), 2, 4, 2, 33, 70, 64)
    with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
        assert dhp_safe_fa.attention(q, k, v).dtype == torch.float16
        with pytest.raises(RuntimeError, match="dtype"):
            dhp_safe_fa.attention(q, k.float(), v)


def test_gradients_under_autocast(device: str, rng: torch.Generator) -> None:
    """In the dtype of the inputs, computed in the autocast dtype, as the forward was."""
    q, k, v = (t.float() for t in qkv(rng, Target(device, torch.bfloat16), 2, 4, 2, 33, 70, 64))
    grad_out = q.bfloat16()
    want = gradients(*(t.bfloat16() for t in (q, k, v)), grad_out, is_causal=True)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    with torch.autocast(device, dtype=torch.bfloat16):
        out = dhp_safe_fa.attention(*leaves, is_causal=True)
    found = torch.autograd.grad(out, leaves, grad_out, retain_graph=True)
    assert all(same_bits(f, w.float()) for f, w in zip(found, want, strict=True))
    with torch.autocast(device, dtype=torch.float16):  # whatever a backward pass stands in
        found = torch.autograd.grad(out, leaves, grad_out)
    assert all(same_bits(f, w.float()) for f, w in zip(found, want, strict=True))


def test_autocast_does_not_take_double(device: str, rng: torch.Generator) -> None:
    """As everywhere in torch, autocast leaves float64 alone."""
    q, k, v = (t.double() for t in qkv(rng, Target(device, torch.bfloat16), 2, 4, 2, 33, 70, 64))
    with torch.autocast(device, dtype=torch.bfloat16):
        if device == "cpu":
            assert dhp_safe_fa.attention(q, k, v).dtype == torch.float64
        else:
            with pytest.raises(RuntimeError, match="dtype float64"):
                dhp_safe_fa.attention(q, k, v)
        with pytest.raises(RuntimeError, match="dtype"):
            dhp_safe_fa.attention(q, k.bfloat16(), v)
