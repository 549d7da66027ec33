"""The float64 reference under every kind of mask, against torch's attention with the mask written out."""

from __future__ import annotations

import math

import pytest
import torch
from reference import Mask, reference

MASKS = {
    "full": Mask(),
    "causal": Mask.of_call(True, 5),
    "causal, early rows without keys": Mask.of_call(True, -9),
    "window": Mask(-20, 3),
    "window, late rows without keys": Mask(30, 45),
    "no key": Mask(3, 2),
}


@pytest.mark.parametrize("poison", [0.0, math.nan, math.inf], ids=["numbers", "nan", "inf"])
@pytest.mark.parametrize("name", MASKS)
def test_reference_against_torch(name: str, poison: float) -> None:
    """More rows than the reference takes at once; a bad value reaches the rows that see it, and no other."""
    rng = torch.Generator().manual_seed(1)
    sq, sk, bad, mask = 150, 110, 40, MASKS[name]
    q = torch.randn(1, 2, sq, 5, generator=rng, dtype=torch.float64)
    k, v = torch.randn(2, 1, 1, sk, 5, generator=rng, dtype=torch.float64)
    distance = torch.arange(sk) - torch.arange(sq)[:, None]
    seen = (distance >= mask.lowest) & (distance <= mask.highest)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
    expected = expected.masked_fill(~seen.any(dim=1)[:, None], 0.0)
    if poison:
        v[0, 0, bad, 2] = poison
        expected[:, :, seen[:, bad], 2] = poison
    got = reference(q, k, v, mask=mask)
    torch.testing.assert_close(got.out, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    scores = (q @ k.mT / math.sqrt(5)).masked_fill(~seen, -math.inf)
    torch.testing.assert_close(got.lse, scores.logsumexp(dim=-1), rtol=1e-12, atol=1e-12)
    weights = (seen.double() @ v.abs().nan_to_num(0.0, 0.0)) / (got.lse - scores.amax(dim=-1)).exp()[..., None]
    finite = got.out.isfinite() & seen.any(dim=1)[:, None]
    torch.testing.assert_close(got.tail[finite], weights[finite], rtol=1e-9, atol=1e-9)
