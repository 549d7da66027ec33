"""The kernel that a call of the backward launches first: rowsum(grad_out ∘ out), and lse in base 2, a row of queries.

Both lie in the workspace, which is the operator's own. What becomes of them is looked at in dq, each of whose rows
depends on its own delta and lse and on nobody else's.
"""

from __future__ import annotations

from .backward import subject_of_dq as subject

__all__ = ["subject"]
