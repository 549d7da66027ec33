"""The kernel that a call launches last if its key segments go to different CTAs: rows out of their parts.

What is looked at is the call's output, whose rows packed sequences, a form of the call, compute otherwise: there one
CTA goes through all segments.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from dhp_safe_fa import _inspect

from ..bitwise.forms import FORMS
from ..inputs import Shape
from ..shapes import few_queries_that
from ..subjects import Subject
from . import forward


def _is_split(shape: Shape, kernel: dict[str, Any]) -> bool:
    """Whether the shape launches this kernel: its call splits segments, for kernels of the same head_dim."""
    plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal, 0)
    made_by = {str(one["name"]): one for one in _inspect.kernels()}
    return plan is not None and plan["splits"] > 1 and made_by[plan["kernel"]]["head_dim"] == kernel["head_dim"]


def shapes_of(kernel: dict[str, Any]) -> tuple[Shape, ...]:
    """Of two segments or three."""
    return few_queries_that(lambda shape: _is_split(shape, kernel), kernel, (2, 1, 4), (10000, 20000, 25000))


def subject(kernel: dict[str, Any]) -> Subject:
    name, sha256, entry = str(kernel["name"]), str(kernel["cubin_sha256"]), str(kernel["entry"])
    shapes, offset = shapes_of(kernel), forward.attend_offset
    return Subject(name, forward.attend, nullcontext, (name,), shapes, sha256, offset, forms=FORMS, entry=entry)
