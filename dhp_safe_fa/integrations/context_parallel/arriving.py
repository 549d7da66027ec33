"""Rows of all ranks, brought together: read from the other GPUs' memory where that can be (mapped.py), or broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel.mapped import mapped, send
from dhp_safe_fa.integrations.context_parallel.packing import Kind, Step, lay_out, pack, unpack
from dhp_safe_fa.integrations.context_parallel.placement import Chunk

# Of torch.distributed, which has called it so since 2.13.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Arriving(Protocol):
    """Whole sequences that will be on their way."""

    def begin(self) -> None:
        """Lets them set off, if they have not."""

    def wait(self) -> list[Tensor]:
        """The whole tensors, their dimensions as the local ones'. Once: from then on they are the caller's alone."""


A = TypeVar("A", bound=Arriving)


class Broadcast:
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
        while self._transfers:
            self._transfers.pop(0).wait()
        whole = self._whole.movedim(0, self._dim)
        del self._whole
        return whole


class Broadcasts:
    """Of one step."""

    def __init__(self, group: dist.ProcessGroup, chunks: Sequence[Chunk], tensors: Sequence[Tensor]) -> None:
        self._each = [Broadcast(group, chunks, tensor) for tensor in tensors]

    def begin(self) -> None:
        """They have: transfers asked for later would wait for what is computed until then."""

    def wait(self) -> list[Tensor]:
        return [each.wait() for each in self._each]


def gather(group: dist.ProcessGroup, steps: Sequence[Step]) -> Sequence[Callable[[], Arriving]]:
    """What starts to bring together, of one step after the other, sequences of which this rank holds a part.

    Args:
        group: the ranks, all of which do this with tensors of the same shapes but for their numbers of rows.
        steps: chunks of the whole sequences, and this rank's part of each, [B, H, rows, ...].
    """
    if not steps:
        return []
    memory = mapped(group, steps[0][1][0].device)
    if memory is not None:
        return send(memory, group, steps, dim=2)
    return [partial(Broadcasts, group, *step) for step in steps]


def one_ahead(starts: Iterable[Callable[[], A]]) -> Iterator[A]:
    """What each start returns, once the next one has been started: it is on its way while this one is worked on.

    Every one begins after the work on the one before it was given to the GPU, which so does not wait while the host
    asks for copies."""
    waiting: list[A] = []
    for start in starts:
        waiting.append(start())
        if len(waiting) > 1:
            yield waiting.pop(0)
        waiting[0].begin()
    yield from waiting


def gather_small(group: dist.ProcessGroup, steps: Sequence[Step]) -> list[list[Tensor]]:
    """Whole sequences, all in one collective; arguments as `gather`. Small ones: they are copied three times."""
    rank, ranks = dist.get_rank(group), group.size()
    kinds, size = lay_out(steps, ranks, dim=2)
    mine = torch.zeros(size, dtype=torch.uint8, device=steps[0][1][0].device)
    pack(mine, steps, kinds, rank, dim=2)
    gathered = mine.new_empty(ranks * size)
    _all_gather_single(gathered, mine, group=group)
    everyone = gathered.view(ranks, size)

    def whole(kind: Kind, chunks: Sequence[Chunk]) -> Tensor:
        return torch.cat([kind.of(everyone[chunk.rank], chunk.rank)[chunk.local] for chunk in chunks])

    return [
        unpack([whole(kind, chunks) for kind in of_step], of_step, dim=2)
        for (chunks, _), of_step in zip(steps, kinds, strict=True)
    ]
