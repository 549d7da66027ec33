"""The kernel that a call launches last if one kernel computes all gradients: dq, from the sums of its shares."""

from __future__ import annotations

from typing import Any

from ..subjects import Subject
from .backward import Call, subject_of


def subject(kernel: dict[str, Any]) -> Subject:
    return subject_of(kernel, Call(("dq",)))
