"""The kernel that a call of the backward launches first: rowsum(grad_out ∘ out), and lse in base 2, a row of queries.

Both lie in the workspace, which is the operator's own. What becomes of them is looked at in dq, each of whose rows
depends on its own delta and lse and on nobody else's.
"""

from __future__ import annotations

from typing import Any

from ..subjects import Subject
from .backward import Call, subject_of


def subject(kernel: dict[str, Any]) -> Subject:
    return subject_of(kernel, Call(("dq",)))
