"""The kernel that a call launches last if its key segments go to different CTAs: rows out of their parts.

What is looked at is the call's output, whose rows packed sequences, a form of the call, compute otherwise: there one
CTA goes through all segments.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

from dhp_safe_fa import _inspect

from ..bitwise.forms import FORMS
from ..inputs import Shape
from ..subjects import Subject
from ..tools import NotRun
from . import forward


def _is_split(shape: Shape, kernel: dict[str, Any]) -> bool:
    """Whether the shape launches this kernel: its call splits segments, for kernels of the same head_dim."""
    plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal, 0)
    made_by = {str(one["name"]): one for one in _inspect.kernels()}
    return plan is not None and plan["splits"] > 1 and made_by[plan["kernel"]]["head_dim"] == kernel["head_dim"]


def shapes_of(kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """Four shapes that launch the kernel: a head alone; grouped heads; several queries; lengths and head_dim that fill
    no tile. None is causal: a mask without an offset would leave the queries few keys. NotRun if none was found."""
    name, head_dim, dtype = str(kernel["name"]), int(kernel["head_dim"]), str(kernel["dtype"])
    for heads, seqlen in product((2, 1, 4), (10000, 20000, 25000)):  # two segments, or three
        full = Shape(1, heads, heads, 1, seqlen, head_dim, dtype, False)
        grouped = replace(full, heads_q=8 * heads)
        odd = replace(full, seqlen_k=seqlen - 77, head_dim=head_dim - 8)
        shapes = (full, grouped, replace(grouped, seqlen_q=3), odd)
        if all(_is_split(shape, kernel) for shape in shapes):
            return shapes
    raise NotRun(f"{name}: no shape was found whose plan splits its keys")


def subject(kernel: dict[str, Any]) -> Subject:
    name, sha256, entry = str(kernel["name"]), str(kernel["cubin_sha256"]), str(kernel["entry"])
    shapes, offset = shapes_of(kernel), forward.attend_offset
    return Subject(name, forward.attend, nullcontext, (name,), shapes, sha256, offset, forms=FORMS, entry=entry)
