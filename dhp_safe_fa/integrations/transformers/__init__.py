"""Attention for transformers: importing this package registers attn_implementation="dhp".

    import dhp_safe_fa.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dhp")

A batch may be padded on the left, on the right, or both, or have several sequences packed in a row. Where each sequence
begins and ends is read from the 2-D attention_mask or the position_ids once in a forward pass (lengths are public, see
audits/SOUNDNESS.md), and each sequence is computed over its own keys alone: its rows of attention have the bits they
have when it is computed alone (products of other layers may round differently). Neighbours in the batch that lie alike
share a call of the kernel, and so do packed sequences.

generate_batch is served within `with serving(model):` (paged.py). docs/serving.md has all of it in one place.

On the CPU; on CUDA sliding windows are served until they hide a key of a call whose gradients are recorded, or in a
CUDA graph of generate_batch, and soft caps and sinks where no gradient is recorded. Refused, with a sentence: a chunk
shorter than the sequence, custom and 4-D masks, padding in between tokens, dropout, position biases and returned
attention weights.
"""

from __future__ import annotations

import torch

try:
    from transformers import AttentionInterface, AttentionMaskInterface
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ImportError("transformers is not installed: pip install 'transformers>=5.23'", name=error.name) from error

from dhp_safe_fa.integrations.transformers.attention import attention_forward
from dhp_safe_fa.integrations.transformers.masks import NAME, VisibleKeys, visible_keys
from dhp_safe_fa.integrations.transformers.paged import (
    PAGED_NAME,
    paged_attention_forward,
    pattern_of_requests,
    serving,
)

__all__ = ["NAME", "PAGED_NAME", "VisibleKeys", "attention_forward", "serving", "visible_keys"]

AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, visible_keys)
# Not compiled: masks and lengths are read, and the cache is written in place.
AttentionInterface.register(PAGED_NAME, torch.compiler.disable(paged_attention_forward))
AttentionMaskInterface.register(PAGED_NAME, torch.compiler.disable(pattern_of_requests))
