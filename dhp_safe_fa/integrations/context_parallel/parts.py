"""The launches of a backward one by one, and the places of what they write (csrc/families/backward/part.h)."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

KEYS_OF_TILE = 128  # of bounds, and of a share of dq
ROWS_OF_PAIR = 2  # of statistics
ROWS_OF_BLOCK = 16  # of sums
COLUMNS_OF_BOX = 64
WIDEST = 128  # head_dim that one pass serves

_library = torch.library.Library("dhp", "FRAGMENT")
_library.define("_backward_workspace(Tensor q, Tensor k) -> (Tensor, int, int, int, int, int, int)")
_library.define(
    "_backward_part(int part, Tensor(a!) workspace, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
    "Tensor grad_out, Tensor? grad_lse, Tensor(b!) dq, Tensor(c!)? dk, Tensor(d!)? dv, bool is_causal, float? scale, "
    "int causal_offset) -> ()"
)


class Part(IntEnum):
    """In the order of dhp_backward_part."""

    BOUNDS = 0
    DELTA = 1
    SHARES = 2
    DQ = 3


def serve(q: Tensor) -> bool:
    """Whether dq of such queries, [B, H, S, D], is made of sums."""
    return q.is_cuda and q.shape[3] <= WIDEST


def stand_in(like: Tensor, heads: int, rows: int) -> Tensor:
    """[B, heads, rows, D] of which nobody reads an element."""
    head_dim = like.shape[3]
    return like.new_empty(head_dim).expand(like.shape[0], heads, rows, head_dim)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


class Workspace:
    """Of a call with these q and k, or their shapes.

    Attributes:
        memory: all of it, bytes.
        statistics: float32 [B, Hq, pairs of query rows, 4]: their lse in base 2, then their deltas.
        failed: float32 [B, Hk]: NaN where sums are wrong.
        sums: int32 [B, Hq, boxes of 64 columns, blocks of 16 query rows, 1024].
        units: uint8 [B, Hq, Sq]: of a row's sums. 255, all bits, if the row is NaN.
        bounds: float32 [B, Hk, tiles of 128 keys, 128, 2]: maxima over the keys of a tile up to each.
        columns: int32 [B, Hk, tiles of 128 keys, words]: a bit for each column of k that is not finite.
    """

    def __init__(self, q: Tensor, k: Tensor) -> None:
        self.memory, *offsets = torch.ops.dhp._backward_workspace(q, k)
        batch, heads, rows, head_dim = q.shape
        key_heads, boxes, tiles = k.shape[1], ceil_div(head_dim, COLUMNS_OF_BOX), ceil_div(k.shape[2], KEYS_OF_TILE)
        block = ROWS_OF_BLOCK * COLUMNS_OF_BOX
        statistics, failed, sums, units, bounds, columns = offsets
        self.statistics = self._place(statistics, torch.float32, batch, heads, ceil_div(rows, ROWS_OF_PAIR), 4)
        self.failed = self._place(failed, torch.float32, batch, key_heads)
        self.sums = self._place(sums, torch.int32, batch, heads, boxes, ceil_div(rows, ROWS_OF_BLOCK), block)
        self.units = self._place(units, torch.uint8, batch, heads, rows)
        self.bounds = self._place(bounds, torch.float32, batch, key_heads, tiles, KEYS_OF_TILE, 2)
        self.columns = self._place(columns, torch.int32, batch, key_heads, tiles, boxes * COLUMNS_OF_BOX // 32)

    def _place(self, offset: int, dtype: torch.dtype, *shape: int) -> Tensor:
        end = offset + torch.Size(shape).numel() * dtype.itemsize
        place: Tensor = self.memory[offset:end].view(dtype).view(shape)
        return place

    def run(self, part: Part, q: Tensor, k: Tensor, options: Mapping[str, Any], **given: Tensor | None) -> None:
        """One launch, with these places.

        Args:
            part: which.
            q, k: [B, H, S, D]; of any content where they are neither read nor written.
            options: is_causal, scale and causal_offset of the call.
            given: of v, out, lse, grad_out, grad_lse, dq, dk and dv those that are read or written; dq, dk and dv
                contiguous, dk and dv None where they are not needed.
        """
        stand_ins = {"v": k, "out": q, "lse": self.statistics, "grad_out": q, "grad_lse": None, "dq": q}
        tensors = {**stand_ins, "dk": None, "dv": None, **given}
        torch.ops.dhp._backward_part(part, self.memory, q, k, **tensors, **options)
