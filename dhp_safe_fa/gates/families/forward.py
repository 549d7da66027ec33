"""The forward under test."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

from ..bitwise.forms import FORMS
from ..inputs import Inputs, Shape
from ..shapes import shapes_that
from ..subjects import Subject


def planned(shape: Shape) -> str:
    """The kernel that the shape launches."""
    plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal, 0)
    return str(plan["kernel"]) if plan else ""


# Key tiles of a shape without a mask, at least: what a kernel does from tile to tile is under test only where there are
# several. A kernel that the plan takes for short sequences is given more keys than queries.
LEAST_TILES = 8


def shapes_of(kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """Of a kernel of the forward."""
    name, keys = str(kernel["name"]), LEAST_TILES * int(kernel["tile_k"])

    def long(shape: Shape) -> Shape:
        longer = replace(shape, seqlen_k=max(shape.seqlen_k, keys))
        return shape if shape.is_causal or planned(longer) != name else longer  # a causal one would not see them

    return tuple(map(long, shapes_that(lambda shape: planned(shape) == name, kernel)))


def attend(inputs: Inputs, is_causal: bool) -> tuple[Tensor, ...]:
    return dhp_safe_fa.attention_lse(*inputs, is_causal=is_causal)


def attend_offset(inputs: Inputs, causal_offset: int) -> tuple[Tensor, ...]:
    return dhp_safe_fa.attention_lse(*inputs, is_causal=True, causal_offset=causal_offset)


def subject(kernel: dict[str, Any]) -> Subject:
    if str(kernel["part"]).startswith("packed out"):
        from .packed import subject_of  # which looks for shapes as this file does

        return subject_of(kernel, kernel)
    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    return Subject(name, attend, nullcontext, (name,), shapes_of(kernel), sha256, attend_offset, forms=FORMS)
