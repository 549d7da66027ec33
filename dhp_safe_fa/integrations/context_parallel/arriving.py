"""Rows of all ranks, brought together by torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel.placement import Chunk

T = TypeVar("T")


class Arriving:
    """A whole sequence on its way.

    Every rank sends its chunks to all others. Rows are outermost in memory meanwhile, so that a chunk is one piece and
    arrives in its place, whatever its length: nothing is padded, and nothing is copied but what this rank has itself.

    Args:
        group: the ranks, all of which do this for the same chunks in the same order.
        chunks: of the whole sequence.
        local: what this rank holds of it.
        dim: the dimension that counts the rows.
    """

    def __init__(self, group: dist.ProcessGroup, chunks: Sequence[Chunk], local: Tensor, dim: int = 2) -> None:
        self._dim = dim
        rows = local.movedim(dim, 0)
        self._whole = local.new_empty(chunks[-1].stop, *rows.shape[1:])
        self._transfers = []
        for chunk in chunks:
            place = self._whole[chunk.start : chunk.stop]
            if chunk.rank == dist.get_rank(group):
                place.copy_(rows[chunk.local])
            if place.numel() > 0:
                self._transfers.append(dist.broadcast(place, group=group, group_src=chunk.rank, async_op=True))

    def wait(self) -> Tensor:
        """The whole tensor, its dimensions as the local one's. Once: from then on it is the caller's alone."""
        while self._transfers:
            self._transfers.pop(0).wait()
        whole = self._whole.movedim(0, self._dim)
        del self._whole
        return whole


def one_ahead(starts: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each start returns, once the next one has been started: it is on its way while this one is worked on."""
    waiting: list[T] = []
    for start in starts:
        waiting.append(start())
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting
