"""The forms in which attention serves the same rows: a call, packed sequences, and a cache in pages (C5).

A form computes all rows of a call anew, with strangers where its rows must not see them: sequences of other lengths
between its own, other keys in the pages that it has not, and behind its last key in the last page. The inputs
are q, k, v, and sinks if there are any; options are those of the call, a soft cap and a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

import dhp_safe_fa

from .. import sinks
from ..inputs import Inputs
from .compare import Outputs
from .rows import Form

# Smaller and larger than the kernels' tiles of keys (128, and 80 above head_dim 128).
PAGE_SIZES = (16, 256)
_SEED = 32
# Rows and keys of the strangers' sequences: a few, fewer than a tile, and more rows than keys.
_STRANGERS = ((37, 50), (5, 131), (20, 3))
# Keys of padding before a sequence's own: a few, and more than a tile.
_LEFT = (3, 150)


def a_call(inputs: Inputs, stranger: Inputs, is_causal: bool, **options: Any) -> Outputs:
    """The operator's own."""
    return dhp_safe_fa.attention_lse(*inputs[:3], is_causal=is_causal, sinks=sinks.of(inputs), **options)


def _begins(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int().to(device)


def _tokens(t: Tensor, batch: int, length: int | None = None) -> Tensor:
    """[S, H, D] of the first rows of a batch [B, H, S, D]."""
    return t[batch, :, :length].transpose(0, 1)


def packed(inputs: Inputs, stranger: Inputs, is_causal: bool, **options: Any) -> Outputs:
    """Sequences one behind the other, a stranger's behind each."""
    q, k = inputs[:2]
    batch, _, rows, _ = q.shape
    others = [_STRANGERS[b % len(_STRANGERS)] for b in range(batch)]
    some = [(min(queries, rows), min(keys, k.shape[2])) for queries, keys in others]
    lengths_q = [length for queries, _ in some for length in (rows, queries)]
    lengths_k = [length for _, keys in some for length in (k.shape[2], keys)]

    def joined(own: Tensor, other: Tensor, at: int) -> Tensor:
        return torch.cat([t for b in range(batch) for t in (_tokens(own, b), _tokens(other, b, some[b][at]))])

    out, lse = dhp_safe_fa.attention_varlen_lse(
        joined(q, stranger[0], 0),
        joined(k, stranger[1], 1),
        joined(inputs[2], stranger[2], 1),
        _begins(lengths_q, q.device),
        _begins(lengths_k, q.device),
        max(lengths_q),
        max(lengths_k),
        is_causal=is_causal,
        alignment="top-left",
        sinks=sinks.of(inputs),
        **options,
    )
    parts, lse_parts = out.split(lengths_q)[::2], lse.split(lengths_q, dim=1)[::2]
    return torch.stack(parts).transpose(1, 2), torch.stack(lse_parts)


def in_pages(page_size: int, inputs: Inputs, stranger: Inputs, is_causal: bool, **options: Any) -> Outputs:
    """Keys in pages that lie in any order among a stranger's."""
    q = inputs[0]
    batch, _, rows, _ = q.shape
    keys = inputs[1].shape[2]
    pages = -(-keys // page_size)
    order = torch.randperm(batch * pages + batch, generator=torch.Generator().manual_seed(_SEED))
    table = order[: batch * pages].view(batch, pages).to(q.device)
    places = (table.repeat_interleave(page_size, 1) * page_size)[:, :keys]
    places = places + torch.arange(keys, device=q.device) % page_size

    def cache(own: Tensor, other: Tensor) -> Tensor:
        tokens = _tokens(other, 0)
        filled = tokens[torch.arange(len(order) * page_size, device=q.device) % keys]
        filled[places.flatten()] = own.transpose(1, 2).flatten(0, 1)
        return filled.view(len(order), page_size, *filled.shape[1:])

    out, lse = dhp_safe_fa.attention_varlen_lse(
        q.transpose(1, 2).flatten(0, 1),
        cache(inputs[1], stranger[1]),
        cache(inputs[2], stranger[2]),
        _begins([rows] * batch, q.device),
        None,
        rows,
        keys,
        is_causal=is_causal,
        alignment="top-left",
        seqused_k=torch.full((batch,), keys, dtype=torch.int32, device=q.device),
        page_table=table.int(),
        sinks=sinks.of(inputs),
        **options,
    )
    return out.unflatten(0, (batch, rows)).transpose(1, 2), lse.unflatten(1, (batch, rows)).transpose(0, 1)


def padded_on_the_left(inputs: Inputs, stranger: Inputs, is_causal: bool, **options: Any) -> Outputs:
    """Sequences whose first keys are a stranger's, and do not count."""
    q, k = inputs[:2]
    batch, _, rows, _ = q.shape
    left = [min(_LEFT[b % len(_LEFT)], k.shape[2]) for b in range(batch)]

    def behind(own: Tensor, other: Tensor) -> Tensor:
        return torch.cat([t for b in range(batch) for t in (_tokens(other, b, left[b]), _tokens(own, b))])

    lengths_k = [padding + k.shape[2] for padding in left]
    out, lse = dhp_safe_fa.attention_varlen_lse(
        q.transpose(1, 2).flatten(0, 1),
        behind(k, stranger[1]),
        behind(inputs[2], stranger[2]),
        _begins([rows] * batch, q.device),
        _begins(lengths_k, q.device),
        rows,
        max(lengths_k),
        is_causal=is_causal,
        alignment="top-left",
        leftpad_k=torch.tensor(left, dtype=torch.int32, device=q.device),
        sinks=sinks.of(inputs),
        **options,
    )
    return out.unflatten(0, (batch, rows)).transpose(1, 2), lse.unflatten(1, (batch, rows)).transpose(0, 1)


# What a subject of the forward is computed as again.
A_CALL = "a call of attention"
FORMS: Mapping[str, Form] = {
    A_CALL: a_call,
    "packed sequences": packed,
    "sequences padded on the left": padded_on_the_left,
    **{f"pages of {size} keys": partial(in_pages, size) for size in PAGE_SIZES},
}
