"""The forward under test."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

from ..bitwise.forms import FORMS
from ..inputs import Inputs, Shape
from ..shapes import shapes_that
from ..subjects import Subject
from ..tools import NotRun
from . import windowed


def planned(shape: Shape) -> str:
    """The kernel that the shape launches."""
    plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal, 0)
    return str(plan["kernel"]) if plan else ""


# Key tiles of a shape without a mask, at least: what a kernel does from tile to tile is under test only where there are
# several, and what it does from segment to segment only where there are more than one has.
LEAST_TILES = 8


def keys_of_two_segments(kernel: dict[str, Any]) -> int:
    return (int(kernel["segment_tiles"]) + LEAST_TILES) * int(kernel["tile_k"])


def few_heads_of_two_segments(is_launched: Callable[[Shape], bool], kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """Of a kernel that the usual shapes do not launch, because it is for few query tiles with keys of several segments,
    four shapes that do: full; a causal head alone, whose last rows see keys of two; grouped heads; the causal one with
    lengths and head_dim that fill no tile."""
    head_dim, dtype, tile_k = int(kernel["head_dim"]), str(kernel["dtype"]), int(kernel["tile_k"])
    length = (int(kernel["segment_tiles"]) + 1) * tile_k
    alone = Shape(1, 1, 1, length, length, head_dim, dtype, True)
    odd = replace(alone, seqlen_q=length + 13, seqlen_k=length + 77, head_dim=head_dim - 8)
    for heads, rows in product((8, 4, 16, 32), (64, 128, 32, 256)):
        full = Shape(1, heads, heads, rows, keys_of_two_segments(kernel), head_dim, dtype, False)
        shapes = (full, alone, replace(full, heads_k=heads // 4), odd)
        if all(map(is_launched, shapes)):
            return shapes
    raise NotRun(f"{kernel['name']}: no shape was found whose plan chooses this kernel")


def shapes_of(kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """Of a kernel of the forward. Shapes without a mask have keys of two segments, if the plan then still takes this
    kernel, and one CTA for both; else more keys than queries, if it takes this kernel; causal ones would not see
    them."""
    name, tile_k = str(kernel["name"]), int(kernel["tile_k"])

    def is_whole(shape: Shape) -> bool:
        plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal, 0)
        return plan is not None and planned(shape) == name and plan["splits"] == 1

    def long(shape: Shape) -> Shape:
        lengths = (keys_of_two_segments(kernel), LEAST_TILES * tile_k)
        longer = [replace(shape, seqlen_k=max(shape.seqlen_k, keys)) for keys in lengths if not shape.is_causal]
        return next(filter(is_whole, longer), shape)

    for is_launched in (is_whole, lambda shape: planned(shape) == name):
        try:
            return tuple(map(long, shapes_that(is_launched, kernel)))
        except NotRun:
            pass
    return few_heads_of_two_segments(is_whole, kernel)


def attend(inputs: Inputs, is_causal: bool) -> tuple[Tensor, ...]:
    return dhp_safe_fa.attention_lse(*inputs, is_causal=is_causal)


def attend_offset(inputs: Inputs, causal_offset: int) -> tuple[Tensor, ...]:
    return dhp_safe_fa.attention_lse(*inputs, is_causal=True, causal_offset=causal_offset)


def subject(kernel: dict[str, Any]) -> Subject:
    if str(kernel["part"]).startswith("packed out"):
        from .packed import subject_of  # which looks for shapes as this file does

        return subject_of(kernel, kernel)
    if kernel["part"] == "window out":
        return windowed.subject_of(kernel)
    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    return Subject(name, attend, nullcontext, (name,), shapes_of(kernel), sha256, attend_offset, forms=FORMS)
