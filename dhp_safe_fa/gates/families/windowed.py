"""The forward within a sliding window under test: calls whose window hides the first keys from their last rows."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

from ..bitwise.forms import FORMS
from ..bitwise.rows import Way
from ..bitwise.window_rows import WINDOWS, window_ways
from ..inputs import Inputs, Shape
from ..shapes import shapes_that
from ..subjects import Subject

# More tiles of keys than a kernel has places for, in shapes of some 1000 keys; on the right more than one.
WINDOW = (700, 130)


def planned(shape: Shape) -> str:
    """The kernel that the shape launches."""
    plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal, 0, *WINDOW)
    return str(plan["kernel"]) if plan else ""


def attend(inputs: Inputs, is_causal: bool, window: tuple[int, int] = WINDOW) -> tuple[Tensor, ...]:
    return dhp_safe_fa.attention_lse(*inputs, is_causal=is_causal, window=window)


def ways(subject: Subject, inputs: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
    """Also within other windows, which kernels of packed sequences have, too."""
    return window_ways(subject, attend, inputs, stranger, is_causal, (WINDOW, *WINDOWS))


def shapes_of(kernel: dict[str, Any]) -> tuple[Shape, ...]:
    return shapes_that(lambda shape: planned(shape) == str(kernel["name"]), kernel)


def subject_of(kernel: dict[str, Any]) -> Subject:
    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    return Subject(name, attend, nullcontext, (name,), shapes_of(kernel), sha256, ways=ways, forms=FORMS)
