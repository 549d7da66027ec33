"""The kernel that a call of the backward launches first: rowsum(grad_out ∘ out), and lse in base 2, a row of queries.

Both lie in the workspace, which is the operator's own. What becomes of them is looked at in dq, each of whose rows
depends on its own delta and lse and on nobody else's.
"""

from __future__ import annotations

from typing import Any

from dhp_safe_fa import _inspect

from ..inputs import Shape
from ..subjects import Subject
from .backward import Call, subject_of

FAMILY = "delta"


def _launched(shape: Shape) -> list[str]:
    """Names of the kernels of the smallest head_dim that serves the shape."""
    fitting = [
        one
        for one in _inspect.kernels()
        if one["family"] == FAMILY and one["dtype"] == shape.dtype and one["head_dim"] >= shape.head_dim
    ]
    smallest = min((one["head_dim"] for one in fitting), default=0)
    return [str(one["name"]) for one in fitting if one["head_dim"] == smallest]


def subject(kernel: dict[str, Any]) -> Subject:
    return subject_of(kernel, Call(("dq",)), lambda shape: _launched(shape) == [kernel["name"]])
