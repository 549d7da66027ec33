"""Attention for transformers: importing this module registers attn_implementation="dhp".

    import dhp_safe_fa.integrations.transformers
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="dhp")

A batch may be padded on the left, on the right, or both. Where each sequence begins and ends is read from the 2-D
attention_mask once in a forward pass (lengths are public, see audits/SOUNDNESS.md), and each sequence is computed over
its own keys alone: its rows of attention have the bits they have when it is computed alone (products of other layers
may round differently). Neighbours in the batch that lie alike share a call of the kernel.

A sliding window is served on the CPU; on CUDA, until it hides a key.

Refused, with a sentence: a chunk shorter than the sequence, packed sequences, custom and 4-D masks, padding in between
tokens, static and paged caches, dropout, attention sinks, soft caps, position biases and returned attention weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from dhp_safe_fa._ops import attention

NAME = "dhp"

# Arguments with which some models change attention, and what they are called there.
UNSUPPORTED = {
    "softcap": "a soft cap of the scores",
    "s_aux": "attention sinks",
    "position_bias": "a position bias",
    "cache": "a paged cache",
    "cu_seq_lens_q": "packed sequences",
    "output_attentions": "attention weights as an output",
}


@dataclass(frozen=True)
class VisibleKeys:
    """Which keys each query may see: what the mask interface hands to every layer, instead of a mask.

    Attributes:
        queries, keys: Sq and Sk of the layer's attention.
        is_causal: query i sees key j only if j <= i + causal_offset.
        causal_offset: position of the first query less that of the first key; 0 if not is_causal.
        sequences: [start, stop) among the keys, for each row of the batch; None if there is no padding.
        window: a query sees so many keys, itself the last; None if it sees all before it.
    """

    queries: int
    keys: int
    is_causal: bool
    causal_offset: int
    sequences: tuple[tuple[int, int], ...] | None
    window: int | None = None


def _refuse(sentence: str) -> NoReturn:
    raise ValueError(f"attn_implementation={NAME!r}: {sentence}")


def _window(size: int, tokens: int) -> str:
    return (
        f"a chunk or window of {size} keys over {tokens} tokens; supported: up to {size} tokens, where it hides none, "
        "and causal sliding windows (for longer sequences use attn_implementation 'sdpa' or 'eager')"
    )


# ---- the mask interface ---------------------------------------------------------------------------------------------


def visible_keys(
    *,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    cache_position: Tensor | None = None,
    mask_function: object = causal_mask_function,
    attention_mask: Tensor | VisibleKeys | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_options: object,
) -> VisibleKeys:
    """transformers' mask interface, called once in a forward pass for each kind of layer.

    Args:
        q_length, q_offset: number of queries, and position of the first one.
        kv_length, kv_offset: number of keys, and position of the first one.
        cache_position: [Sq], positions of the queries: what older transformers give in place of q_length and q_offset.
        mask_function: transformers' description of the mask.
        attention_mask: bool [B, kv_offset + kv_length], False at padding.
        local_size: size of the sliding window or chunk, if mask_function has one.
        allow_is_causal_skip, allow_is_bidirectional_skip: mask_function is causal, bidirectional, and nothing more than
            that but for local_size.

    Raises:
        ValueError: a mask that is not served.
    """
    if isinstance(attention_mask, VisibleKeys):
        return attention_mask  # generate() prepares masks ahead, and the model hands them in again
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], int(cache_position[0])
    static = "a static cache holds keys that are not there yet; supported: the default, dynamic cache"
    if q_length is None or isinstance(q_offset, Tensor):
        _refuse(static)
    is_causal, window = mask_function is causal_mask_function, None
    if not is_causal and mask_function is not bidirectional_mask_function:
        is_causal = allow_is_causal_skip
        if local_size is None or not (allow_is_causal_skip or allow_is_bidirectional_skip):
            _refuse(
                "packed sequences or a custom mask; supported: causal or bidirectional attention with padding (under "
                "torch.compile transformers takes every call without a cache for packed: pass use_cache=True)"
            )
        if q_offset + q_length > local_size:
            if not is_causal:
                _refuse(_window(local_size, q_offset + q_length))
            window = local_size
    if is_causal and q_offset + q_length < kv_offset + kv_length:
        _refuse(static)
    sequences = None if attention_mask is None else _sequences(attention_mask[:, kv_offset : kv_offset + kv_length])
    if sequences is not None and all(sequence == (0, kv_length) for sequence in sequences):
        sequences = None
    return VisibleKeys(q_length, kv_length, is_causal, q_offset - kv_offset if is_causal else 0, sequences, window)


def _sequences(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """[start, stop) of the tokens in each row of a bool mask [B, Sk]; waits for the device, once."""
    length = mask.shape[1]
    position = torch.arange(length, device=mask.device)
    start = position.masked_fill(~mask, length).amin(dim=1)
    stop = position.masked_fill(~mask, -1).amax(dim=1) + 1
    rows: list[list[int]] = torch.stack([start, stop, mask.sum(dim=1)], dim=1).tolist()
    for row, (first, last, count) in enumerate(rows):
        if count not in (0, last - first):
            _refuse(
                f"attention_mask has padding between the tokens of row {row}; "
                "supported: padding before and after a sequence"
            )
    return tuple((first, last) if count else (0, 0) for first, last, count in rows)


# ---- the attention interface ----------------------------------------------------------------------------------------


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: VisibleKeys | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface.

    Args:
        query: [B, Hq, Sq, D]
        key, value: [B, Hk, Sk, D]
        attention_mask: of :func:`visible_keys`, or None from a model that needs no mask.
        scaling: factor of the scores; 1/sqrt(D) by default.
        is_causal: looked at only without attention_mask, which knows better.
        sliding_window: what tells a window from a chunk, of which attention_mask has the size.

    Returns:
        [B, Sq, Hq, D], and None in place of attention weights. A row that sees no key is 0.

    Raises:
        ValueError: an option or a mask that is not served. RuntimeError: from :func:`dhp_safe_fa.attention`.
    """
    for name, meaning in UNSUPPORTED.items():
        if options.get(name) is not None and options[name] is not False:
            _refuse(f"{meaning} ({name}) is not supported; use 'sdpa' or 'eager' for this model")
    if dropout > 0:
        _refuse(f"dropout {dropout:g}; supported: 0 (call model.eval())")
    if attention_mask is None:
        attention_mask = _without_mask(module, query.shape[2], key.shape[2], is_causal, sliding_window)
    if not isinstance(attention_mask, VisibleKeys):
        _refuse("attention_mask was made outside of the model; supported: 2-D [B, S], or none")
    if attention_mask.window not in (None, sliding_window):
        _refuse(_window(attention_mask.window, attention_mask.keys))
    out = _attend(query, key, value, attention_mask, scaling)
    return out.transpose(1, 2).contiguous(), None


def _without_mask(
    module: torch.nn.Module, queries: int, keys: int, is_causal: bool | None, sliding_window: int | None
) -> VisibleKeys:
    is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if is_causal and queries > 1 and queries != keys:
        _refuse(f"no mask says where {queries} queries stand among {keys} keys")
    if sliding_window is not None and keys > sliding_window:
        _refuse(_window(sliding_window, keys))
    return VisibleKeys(queries, keys, is_causal and queries > 1, 0, None)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, scaling: float | None) -> Tensor:
    """[B, Hq, Sq, D]: one call of the kernel for each run of batch rows whose sequences lie alike."""
    if (query.shape[2], key.shape[2]) != (visible.queries, visible.keys):
        _refuse(
            f"the mask is for {visible.queries} queries and {visible.keys} keys, "
            f"the layer has {query.shape[2]} and {key.shape[2]}"
        )
    window = (-1, -1) if visible.window is None else (visible.window - 1, 0)
    options: dict[str, Any] = {"is_causal": visible.is_causal, "scale": scaling, "window": window}
    if visible.sequences is None:
        return attention(query, key, value, causal_offset=visible.causal_offset, **options)
    if len(visible.sequences) != query.shape[0]:
        _refuse(f"attention_mask has {len(visible.sequences)} rows for a batch of {query.shape[0]}")
    parts, row = [], 0
    for (start, stop), alike in groupby(visible.sequences):
        rows = slice(row, row + len(list(alike)))
        row = rows.stop
        parts.append(
            attention(
                query[rows],
                key[rows, :, start:stop],
                value[rows, :, start:stop],
                causal_offset=visible.causal_offset - start if visible.is_causal else 0,
                **options,
            )
        )
    return torch.cat(parts)


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, visible_keys)
