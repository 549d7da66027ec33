"""The kernel that a call of packed sequences launches first: the list of their query tiles.

It reads lengths and page tables alone. What is put in is what the forward of packed sequences gets, whose rows would be
others if the list were another.
"""

from __future__ import annotations

from typing import Any

from dhp_safe_fa import _inspect

from ..subjects import Subject
from .packed import subject_of


def subject(kernel: dict[str, Any]) -> Subject:
    """In the call of a forward that goes through such a list."""
    reader = next(one for one in _inspect.kernels() if one["part"] == "packed out")
    return subject_of(kernel, reader)
