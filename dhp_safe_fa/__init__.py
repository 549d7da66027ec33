"""Scaled dot product attention without a data-dependent hardware profile.

    import dhp_safe_fa
    out = dhp_safe_fa.attention(q, k, v, is_causal=True)      # or torch.ops.dhp.attention(q, k, v, True)

Importing the package registers ``torch.ops.dhp.attention`` and ``torch.ops.dhp.attention_lse``.
"""

from dhp_safe_fa._ops import attention, attention_lse
from dhp_safe_fa._version import __version__

__all__ = ["__version__", "attention", "attention_lse"]
