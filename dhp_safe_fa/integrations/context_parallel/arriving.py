"""Rows of all ranks, brought together: read from the other GPUs' memory where that can be (mapped.py), or broadcast."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel.agreement import all_gather_single
from dhp_safe_fa.integrations.context_parallel.mapped import Step, aligned, mapped, rows_of_ranks, send
from dhp_safe_fa.integrations.context_parallel.placement import Chunk

T = TypeVar("T")


class Arriving(Protocol):
    """Whole sequences on their way."""

    def wait(self) -> list[Tensor]:
        """The whole tensors, their dimensions as the local ones'. Once: from then on they are the caller's alone."""


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


def one_ahead(starts: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each start returns, once the next one has been started: it is on its way while this one is worked on."""
    waiting: list[T] = []
    for start in starts:
        waiting.append(start())
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def gather_small(group: dist.ProcessGroup, steps: Sequence[Step]) -> list[list[Tensor]]:
    """Whole sequences, all in one collective; arguments as `gather`. Small ones: they are copied three times."""
    rank, ranks = dist.get_rank(group), group.size()
    local, ends, places = [], [0] * ranks, []
    for chunks, tensors in steps:
        rows = rows_of_ranks(chunks, ranks)
        for tensor in tensors:
            each = tensor.movedim(2, 0)[: rows[rank]].contiguous()
            begins = ends
            of_row = each.shape[1:].numel() * each.dtype.itemsize
            ends = [aligned(begin + count * of_row) for begin, count in zip(begins, rows, strict=True)]
            flat = each.view(-1).view(torch.uint8)
            local.append(torch.nn.functional.pad(flat, (0, ends[rank] - begins[rank] - flat.numel())))
            places.append((begins, rows, each.shape[1:], each.dtype))
    mine = torch.cat(local)
    mine = torch.nn.functional.pad(mine, (0, max(ends) - ends[rank]))
    gathered = mine.new_empty(ranks * max(ends))
    all_gather_single(gathered, mine, group=group)
    everyone = gathered.view(ranks, -1)

    def part(chunk: Chunk, begins: list[int], rows: list[int], row: torch.Size, dtype: torch.dtype) -> Tensor:
        shape = torch.Size((rows[chunk.rank], *row))
        begin = begins[chunk.rank]
        return everyone[chunk.rank, begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)[chunk.local]

    def whole(chunks: Sequence[Chunk]) -> Tensor:
        place = next(of_places)
        return torch.cat([part(chunk, *place) for chunk in chunks]).movedim(0, 2)

    of_places = iter(places)
    return [[whole(chunks) for _ in tensors] for chunks, tensors in steps]
