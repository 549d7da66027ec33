"""The forward under test. Shapes are tried until the plan answers with the kernel, so a new one needs no word here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

from ..inputs import Inputs, Shape
from ..subjects import REFERENCE, Subject
from ..tools import NotRun


def _candidates(head_dim: int, dtype: str) -> Iterator[Shape]:
    """Self-attention with every mixture of powers of two, the nearest to the reference first."""
    sizes = product((1, 2, 4, 8), (1, 2, 4, 8, 16, 32, 64), (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192))

    def distance(size: tuple[int, int, int]) -> float:
        return sum(abs(math.log2(a / b)) for a, b in zip(size, REFERENCE, strict=True))

    for batch, heads, seqlen in sorted(sizes, key=distance):
        yield Shape(batch, heads, heads, seqlen, seqlen, head_dim, dtype, False)


def planned(shape: Shape) -> str:
    """The kernel that the shape launches."""
    plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal, 0)
    return str(plan["kernel"]) if plan else ""


def shapes_that(is_launched: Callable[[Shape], bool], kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """Four shapes that launch a kernel of ``_inspect.kernels()``: full; causal; grouped heads; lengths and head_dim
    that fill no tile. NotRun if none was found."""
    name, head_dim, dtype = str(kernel["name"]), int(kernel["head_dim"]), str(kernel["dtype"])
    for full in _candidates(head_dim, dtype):
        odd = replace(full, seqlen_q=full.seqlen_q + 13, seqlen_k=full.seqlen_k + 77, head_dim=head_dim - 8)
        grouped = replace(full, heads_k=max(1, full.heads_q // 4), is_causal=True)
        shapes = (full, replace(full, is_causal=True), grouped, replace(odd, is_causal=True))
        if all(map(is_launched, shapes)):
            return shapes
    raise NotRun(f"{name}: no shape was found whose plan chooses this kernel")


def shapes_of(kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """Of a kernel of the forward."""
    return shapes_that(lambda shape: planned(shape) == kernel["name"], kernel)


def attend(inputs: Inputs, is_causal: bool) -> tuple[Tensor, ...]:
    return dhp_safe_fa.attention_lse(*inputs, is_causal=is_causal)


def attend_offset(inputs: Inputs, causal_offset: int) -> tuple[Tensor, ...]:
    return dhp_safe_fa.attention_lse(*inputs, is_causal=True, causal_offset=causal_offset)


def subject(kernel: dict[str, Any]) -> Subject:
    if kernel["part"] == "packed out":
        from .packed import subject_of  # which looks for shapes as this file does

        return subject_of(kernel, kernel)
    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    return Subject(name, attend, nullcontext, (name,), shapes_of(kernel), sha256, attend_offset)
