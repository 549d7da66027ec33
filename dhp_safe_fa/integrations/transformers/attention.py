"""transformers' attention interface: what the mask interface saw becomes calls of the operators."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor

from dhp_safe_fa._ops import attention, attention_varlen
from dhp_safe_fa.integrations.transformers.masks import VisibleKeys, refuse, refuse_window

# Arguments with which some models change attention, and what they are called there.
UNSUPPORTED = {
    "position_bias": "a position bias",
    "output_attentions": "attention weights as an output",
}


def operator_options(
    is_causal: bool, window: int | None, scaling: float | None, dropout: float, options: dict[str, Any]
) -> dict[str, Any]:
    """What every call of the operators for a layer has in common; refuses what they have no option for."""
    for name, meaning in UNSUPPORTED.items():
        if options.get(name) is not None and options[name] is not False:
            refuse(f"{meaning} ({name}) is not supported; use 'sdpa' or 'eager' for this model")
    if dropout > 0:
        refuse(f"dropout {dropout:g}; supported: 0 (set the model's attention dropout to 0, or call model.eval())")
    sinks = options.get("s_aux")
    return {
        "is_causal": is_causal,
        "scale": scaling,
        "window": (-1, -1) if window is None else (window - 1, 0),
        "softcap": options.get("softcap"),
        "sinks": None if sinks is None else sinks.float(),  # exact: models have them in their own dtype
    }


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
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
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
        cu_seq_lens_q: where packed sequences begin among all tokens, [sequences + 1], if the caller of the model says
            so; cu_seq_lens_k must be equal.

    Returns:
        [B, Sq, Hq, D], and None in place of attention weights. A row that sees no key is 0.

    Raises:
        ValueError: an option or a mask that is not served. RuntimeError: from the operators.
    """
    if options.get("cache") is not None or options.get("read_index") is not None:
        refuse("a paged cache (cache, read_index); supported: generate_batch within `with serving(model):`")
    if attention_mask is None:
        attention_mask = _without_mask(module, query.shape[2], key.shape[2], is_causal, sliding_window)
    if not isinstance(attention_mask, VisibleKeys):
        refuse("attention_mask was made outside of the model; supported: 2-D [B, S], or none")
    if attention_mask.window not in (None, sliding_window):
        refuse_window(attention_mask.window, attention_mask.keys)
    if cu_seq_lens_q is not None:
        attention_mask = _with_lengths(attention_mask, cu_seq_lens_q, cu_seq_lens_k)
    if (query.shape[2], key.shape[2]) != (attention_mask.queries, attention_mask.keys):
        refuse(
            f"the mask is for {attention_mask.queries} queries and {attention_mask.keys} keys, "
            f"the layer has {query.shape[2]} and {key.shape[2]}"
        )
    common = operator_options(attention_mask.is_causal, attention_mask.window, scaling, dropout, options)
    if attention_mask.packed is not None:
        return _attend_packed(query, key, value, attention_mask.packed, common), None
    return _attend(query, key, value, attention_mask, common).transpose(1, 2).contiguous(), None


def _without_mask(
    module: torch.nn.Module, queries: int, keys: int, is_causal: bool | None, sliding_window: int | None
) -> VisibleKeys:
    is_causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if is_causal and queries > 1 and queries != keys:
        refuse(f"no mask says where {queries} queries stand among {keys} keys")
    if sliding_window is not None and keys > sliding_window:
        refuse_window(sliding_window, keys)
    return VisibleKeys(queries, keys, is_causal and queries > 1, 0, None)


def _with_lengths(visible: VisibleKeys, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None) -> VisibleKeys:
    for name, lengths in (("cu_seq_lens_q", cu_seq_lens_q), ("cu_seq_lens_k", cu_seq_lens_k)):
        if lengths is not None and not isinstance(lengths, Tensor):
            refuse(f"{name}: {type(lengths).__name__}; expected a tensor [sequences + 1] of whole numbers")
    if visible.sequences is not None or visible.queries != visible.keys:
        refuse("packed sequences (cu_seq_lens_q) with padding or a cache; supported: with neither")
    packed = tuple(cu_seq_lens_q.tolist())
    if cu_seq_lens_k is not None and tuple(cu_seq_lens_k.tolist()) != packed:
        refuse("cu_seq_lens_k differs from cu_seq_lens_q; supported: packed sequences with as many keys as queries")
    if visible.packed not in (None, packed):
        refuse(f"cu_seq_lens_q is {list(packed)}, but by position_ids it is {list(visible.packed or ())}")
    return replace(visible, packed=packed)


def _attend(query: Tensor, key: Tensor, value: Tensor, visible: VisibleKeys, common: dict[str, Any]) -> Tensor:
    """[B, Hq, Sq, D]: one call of the kernel for each run of batch rows whose sequences lie alike."""
    if visible.sequences is None:
        return attention(query, key, value, causal_offset=visible.causal_offset, **common)
    if len(visible.sequences) != query.shape[0]:
        refuse(f"attention_mask has {len(visible.sequences)} rows for a batch of {query.shape[0]}")
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
                **common,
            )
        )
    return torch.cat(parts)


def _attend_packed(
    query: Tensor, key: Tensor, value: Tensor, packed: tuple[int, ...], common: dict[str, Any]
) -> Tensor:
    """[B, S, Hq, D]: one call for all sequences; one for each on CUDA where gradients are recorded, which
    attention_varlen does not have there."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in (query, key, value))  # [tokens, H, D]
    if packed[:1] != (0,) or packed[-1:] != (q.shape[0],) or sorted(packed) != list(packed):
        refuse(f"packed sequences begin and end at {list(packed)}; supported: ascending, from 0 to all {q.shape[0]}")
    lengths = [stop - start for start, stop in pairwise(packed)]
    if q.is_cuda and torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v)):
        sequences = zip(*(t.transpose(0, 1)[None].split(lengths, dim=2) for t in (q, k, v)), strict=True)
        out = torch.cat([attention(*each, **common) for each in sequences], dim=2)[0].transpose(0, 1)
    else:
        begins = torch.tensor(packed, dtype=torch.int32, device=q.device)
        longest = max([0, *lengths])
        out = attention_varlen(q, k, v, begins, begins, longest, longest, **common)
    return out.reshape(query.shape[0], query.shape[2], *out.shape[1:])
