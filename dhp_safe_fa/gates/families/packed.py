"""The forward of packed sequences under test: a batch as sequences one behind the other, all as long as the others, so
that rows can be held to those of any other call.

The operator wants [tokens, H, D], so each call begins with copies of q, k and v, by kernels that are not ours.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

from ..bitwise.forms import FORMS
from ..inputs import Inputs, Shape
from ..shapes import shapes_that
from ..subjects import Subject


@lru_cache(maxsize=64)
def _lengths(batch: int, seqlen: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * seqlen, max(seqlen, 1), dtype=torch.int32, device=device)[: batch + 1]


def _packed(t: Tensor) -> Tensor:
    """[B, H, S, D] as [B S, H, D]."""
    b, h, s, d = t.shape
    return t.transpose(1, 2).reshape(b * s, h, d)


def attend(inputs: Inputs, is_causal: bool) -> tuple[Tensor, ...]:
    q, k, v = inputs
    b, h, sq, d = q.shape
    sk = k.shape[2]
    places = _lengths(b, sq, q.device), _lengths(b, sk, q.device), sq, sk
    out, lse = dhp_safe_fa.attention_varlen_lse(
        _packed(q), _packed(k), _packed(v), *places, is_causal=is_causal, alignment="top-left"
    )
    return out.reshape(b, sq, h, d).transpose(1, 2), lse.reshape(h, b, sq).transpose(0, 1)


def _planned(shape: Shape) -> str:
    """The kernel that goes through the list."""
    q, k = ((size[0] * size[2], size[1], size[3]) for size in (shape.q, shape.k))
    plan = _inspect.plan_packed(q, k, shape.dtype, shape.batch, shape.seqlen_q, shape.seqlen_k)
    return str(plan["kernel"]) if plan else ""


def subject_of(kernel: dict[str, Any], reader: dict[str, Any]) -> Subject:
    """A kernel of the calls that launch `reader`, which goes through their list."""
    entries = {str(one["name"]): str(one["entry"]) for one in _inspect.kernels()}
    first = next(str(one["name"]) for one in _inspect.kernels() if one["family"] == "tiles")
    launched = (first, str(reader["name"]))
    shapes = shapes_that(lambda shape: _planned(shape) == reader["name"], reader)

    def whole() -> Subject:
        call = Subject(" ".join(launched), attend, nullcontext, launched, shapes, forms=FORMS)
        return replace(call, launches=lambda shape: [(one, entries[one]) for one in (first, _planned(shape))])

    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    return Subject(name, attend, nullcontext, (name,), shapes, sha256, entry=str(kernel["entry"]), whole=whole)
