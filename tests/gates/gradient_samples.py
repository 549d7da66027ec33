"""Gradients whose rows are their own to the last bit, for tests of the gates: sums go one element after another."""

from __future__ import annotations

import torch
from torch import Tensor

from dhp_safe_fa.gates.inputs import Inputs

OUTPUTS = ("dq", "dk", "dv")


def gradients(given: Inputs, is_causal: bool, causal_offset: int = 0) -> Inputs:
    """(dq, dk, dv) in float32 of what gates/gradients.py makes; a head of k and v serves neighbouring heads of q."""
    q, k, v, out, lse, grad_out, grad_lse = (tensor.double().contiguous() for tensor in given)
    group, scale = q.size(1) // k.size(1), q.size(3) ** -0.5
    wide_k, wide_v = (tensor.repeat_interleave(group, dim=1) for tensor in (k, v))
    scores, products = (_scores(a, b) for a, b in ((q, wide_k), (grad_out, wide_v)))
    delta = (_scores(grad_out, out).diagonal(dim1=2, dim2=3) - grad_lse)[..., None]
    rows, columns = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
    hidden = columns > rows + causal_offset if is_causal else torch.zeros(len(rows), len(columns), dtype=torch.bool)
    p = (scores * scale - lse[..., None]).contiguous().exp().masked_fill(hidden, 0.0)
    ds = p * (products - delta)
    dq, dk, dv = (torch.zeros_like(tensor) for tensor in (q, k, v))
    for j in range(k.size(2)):
        dq += scale * ds[..., j, None] * wide_k[:, :, j, None]
    for h in range(group):
        for i in range(q.size(2)):
            dk += scale * ds[:, h::group, i, :, None] * q[:, h::group, i, None]
            dv += p[:, h::group, i, :, None] * grad_out[:, h::group, i, None]
    return dq.float(), dk.float(), dv.float()


def _scores(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ, [B, H, Sa, Sb]."""
    result = torch.zeros(*a.shape[:3], b.size(2), dtype=a.dtype)
    for d in range(a.size(3)):
        result += a[..., d, None] * b[..., None, :, d]
    return result
