"""The kernel that a call launches first if one kernel computes all gradients: how large keys and values are.

That lies in the workspace, which is the operator's own, and becomes the units of dq. It is looked at in dq, each of
whose rows depends on the keys that it sees and on no others.
"""

from __future__ import annotations

from .backward import subject_of_dq as subject

__all__ = ["subject"]
