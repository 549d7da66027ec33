"""v of a head_dim of its own on CUDA, whose kernels have one: the narrower of q, k and of v are filled up with zeros.

Zeros add nothing to a score, and the columns that they give are left out. It costs the copies, and the wider kernel.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

from dhp_safe_fa._operator.schema import CUDA_MAX_HEAD_DIM

# TMA's alignment of rows: 16 bytes, of two bytes each.
_STEP = 8


def is_fillable(head_dim: int) -> bool:
    """Whether kernels on CUDA take it, filled up or as it is."""
    return 0 < head_dim <= CUDA_MAX_HEAD_DIM and head_dim % _STEP == 0


def differ(q: object, k: object, v: object) -> bool:
    """Whether a call goes this way: on CUDA, if head_dims differ that can be filled up."""
    return (
        isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and q.is_cuda
        and q.dim() == k.dim() == v.dim() > 0
        and q.shape[-1] == k.shape[-1] != v.shape[-1]
        and is_fillable(q.shape[-1])
        and is_fillable(v.shape[-1])
    )


class Filled(NamedTuple):
    """q, k and v of one width, and the scale that they had."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float


def fill(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Filled:
    more = v.shape[-1] - q.shape[-1]
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if more < 0:
        return Filled(q, k, F.pad(v, (0, -more)), scale)
    return Filled(F.pad(q, (0, more)), F.pad(k, (0, more)), v, scale)


def narrow(out: Tensor, v: Tensor) -> Tensor:
    """As many columns as v has, contiguous."""
    return out[..., : v.shape[-1]].contiguous()
