"""Which soft caps are served, as csrc/check.c says it."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from dhp_safe_fa._operator.schema import LARGEST, NUMBERS


def refusal(softcap: float | None, scale: float | None, q: Tensor) -> str | None:
    """What is wrong with it, in a sentence. Of a head_dim that torch.compile does not know the usual scale is not asked
    for: the operator does that."""
    if softcap is None or softcap == 0:
        return None
    if not all(isinstance(number, NUMBERS) for number in (softcap, scale or 0)):
        return f"softcap: {softcap!r} beside scale {scale!r}; expected numbers"
    is_wide = q.dtype == torch.float64
    most = sys.float_info.max if is_wide else LARGEST
    if scale is None:
        scale = q.shape[-1] ** -0.5 if isinstance(q.shape[-1], int) and q.shape[-1] > 0 else 0.0
    # in this order: of a soft cap that is no number the quotient may not exist
    if sys.float_info.min <= softcap <= most and scale / softcap <= most:
        return None
    bounds = "finite" if is_wide else "no more than 2^100"
    positive = f"positive and normal, with softcap and scale / softcap {bounds}"
    return f"softcap: {softcap:g}; supported: 0 for none, or {positive}"
