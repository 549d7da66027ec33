"""Key segments on CUDA, by head_dim, as the kernels say: of one a row is a chain, of several a fold."""

from __future__ import annotations

from typing import NamedTuple

from dhp_safe_fa import _inspect


class Segment(NamedTuple):
    """Of rows whose head_dim is this or less, but more than that of the segment before.

    Attributes:
        head_dim: columns of the kernels.
        tile_k: keys of a key tile.
        keys: of a segment, whole key tiles.
    """

    head_dim: int
    tile_k: int
    keys: int


# Of all kernels of a head_dim the same, or a row's bits would depend on which of them computes it.
_SEGMENTS = sorted({
    Segment(int(kernel["head_dim"]), int(kernel["tile_k"]), int(kernel["tile_k"]) * int(kernel["segment_tiles"]))
    for kernel in _inspect.kernels()
    if kernel["family"] == "forward"
})  # fmt: skip


def segment_of(head_dim: int) -> Segment | None:
    """That of rows of q; None where no kernel serves their head_dim, or none was built."""
    return next((segment for segment in _SEGMENTS if head_dim <= segment.head_dim), None)
