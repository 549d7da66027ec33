"""Scaled dot product attention without a data-dependent hardware profile.

    import dhp_safe_fa
    out = dhp_safe_fa.attention(q, k, v, is_causal=True)      # or torch.ops.dhp.attention(q, k, v, True)

    with dhp_safe_fa.policy("secure"):                        # every SDPA call of an unmodified model, or an error
        model(tokens)

Importing the package registers ``torch.ops.dhp.attention``, ``attention_lse`` and ``attention_varlen``. Imported on
request: ``dhp_safe_fa.integrations.transformers``, ``.dtensor`` and ``.context_parallel``.
"""

from dhp_safe_fa._ops import attention, attention_lse, attention_varlen, attention_varlen_lse
from dhp_safe_fa._policy import Policy, policy, set_policy
from dhp_safe_fa._report import Call
from dhp_safe_fa._sdpa import sdpa
from dhp_safe_fa._version import __version__

__all__ = [
    "Call",
    "Policy",
    "__version__",
    "attention",
    "attention_lse",
    "attention_varlen",
    "attention_varlen_lse",
    "policy",
    "sdpa",
    "set_policy",
]
