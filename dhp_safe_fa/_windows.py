"""Soft caps, sinks and wide windows on CUDA: a batch as packed sequences of one length, whose kernels know them.

Which keys a row sees is said anew: a packed sequence has its last query at the last of its keys that count, and its
window around that place. Rows behind the last one that sees a key are left out, and are 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dhp_safe_fa._operator import softcaps
from dhp_safe_fa._segments import segment_of


class Band(NamedTuple):
    """What the rows of a call see, as of a packed sequence aligned at the bottom right.

    Attributes:
        queries: so many of the first rows; the others see nothing.
        keys: so many of the first keys; the others are not seen.
        window: (left, right) around the place of a query among these.
    """

    queries: int
    keys: int
    window: tuple[int, int]


def band(queries: int, keys: int, is_causal: bool, causal_offset: int, window: tuple[int, int]) -> Band:
    """Of a call of attention, whatever it is: query i sees key j if -left <= j - i - causal_offset <= right, which is 0
    under is_causal; -1 is no bound."""
    left, right = window[0], 0 if is_causal else window[1]
    if left != -1:  # row i begins at i + causal_offset - left
        queries = max(0, min(queries, keys - causal_offset + left))
    if right != -1:  # the last row ends at its place + right
        keys = max(0, min(keys, queries + causal_offset + right))
    ahead = causal_offset - (keys - queries)  # of the place that a packed query has
    widest = queries + keys  # reaches all keys from any place, and int64 can hold it
    left = -1 if left == -1 else max(0, min(left - ahead, widest))  # negative only where no key is left
    right = -1 if right == -1 else max(0, min(right + ahead, widest))
    return Band(queries, keys, (left, right))


def _is_served(q: Tensor, k: Tensor, is_causal: bool, window: tuple[int, int]) -> bool:
    """Whether there are kernels of calls for the window: for all that hide no key on the left, and else if nobody sees
    keys of several segments (dhp_window_is_within in csrc/mask.h)."""
    left, right = window[0], 0 if is_causal else window[1]
    segment = segment_of(q.shape[3])
    most = segment.keys if segment else 0
    # the sides first: of a length torch.compile would keep what it was compared with
    return left == -1 or (right != -1 and left + 1 + right <= most) or k.shape[2] <= most


def are_packed(
    q: object,
    k: object,
    v: object,
    is_causal: bool,
    window: tuple[int, int],
    softcap: float | None = None,
    sinks: object = None,
    scale: float | None = None,
) -> bool:
    """Whether a call with these goes this way: on CUDA, where no gradient is recorded, with what only kernels of packed
    sequences have, and if nothing is to be refused that the operator has the words for."""
    tensors = (q, k, v, sinks)
    return (
        min(window) >= -1
        and isinstance(q, Tensor)
        and isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and q.is_cuda
        and q.dim() == k.dim() == v.dim() == 4
        and q.shape[0] == k.shape[0] == v.shape[0]
        and softcaps.refusal(softcap, scale, q) is None
        and (sinks is None or (isinstance(sinks, Tensor) and sinks.shape == q.shape[1:2]))
        and (bool(softcap) or sinks is not None or not _is_served(q, k, is_causal, window))
        and not (torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors))
    )


def _tokens(t: Tensor) -> Tensor:
    """[B, H, S, D] as [B·S, H, D]; a view where tokens lie behind each other."""
    return t.transpose(1, 2).flatten(0, 1)


def _begins(batch: int, length: int, device: torch.device) -> Tensor:
    if length == 0:
        return torch.zeros(batch + 1, dtype=torch.int32, device=device)
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=device)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    causal_offset: int,
    window: tuple[int, int],
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out [B, Hq, Sq, D] and lse [B, Hq, Sq] as the operator attention_lse returns them, by attention_varlen."""
    batch, _, length, _ = q.shape
    seen = band(length, k.shape[2], is_causal, causal_offset, window)
    # each of these tensors is a launch of its own, which a short call feels
    begins_q = _begins(batch, seen.queries, q.device)
    begins_k = begins_q if seen.queries == k.shape[2] else _begins(batch, k.shape[2], q.device)
    used = None
    if seen.keys != k.shape[2]:
        used = torch.full((batch,), seen.keys, dtype=torch.int32, device=q.device)
    packed, packed_lse = torch.ops.dhp.attention_varlen(
        *map(_tokens, (q[:, :, : seen.queries], k, v)),
        *(begins_q, begins_k, seen.queries, seen.keys),
        *(False, scale, True, *seen.window, softcap, used, None, None, sinks),
    )
    found = packed.unflatten(0, (batch, seen.queries)).transpose(1, 2)
    found_lse = packed_lse.unflatten(1, (batch, seen.queries)).transpose(0, 1)
    out = torch.empty_like(q)
    if seen.queries == length and found.stride() == out.stride():
        return found, found_lse.contiguous()
    lse = found_lse.new_empty(q.shape[:3])
    out[:, :, : seen.queries], out[:, :, seen.queries :] = found, 0
    lse[:, :, : seen.queries] = found_lse
    lse[:, :, seen.queries :] = -torch.inf if sinks is None else sinks[:, None]
    return out, lse
