"""The kernel that a call launches first if one kernel computes all gradients: how large keys and values are.

That lies in the workspace, which is the operator's own, and becomes the units of dq. It is looked at in dq, each of
whose rows depends on the keys that it sees and on no others.
"""

from __future__ import annotations

from typing import Any

from ..subjects import Subject
from .backward import Call, subject_of


def subject(kernel: dict[str, Any]) -> Subject:
    return subject_of(kernel, Call(("dq",)))
