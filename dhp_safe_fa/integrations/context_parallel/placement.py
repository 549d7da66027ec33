"""Which rows of a sequence lie on which rank.

A sequence is cut into chunks of consecutive rows. Plain: one chunk a rank, in order. Balanced: two chunks a rank, r and
2n - 1 - r of 2n. Under a causal mask late queries see more keys than early ones; with an early and a late chunk each,
all ranks have as many pairs to compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Chunk(NamedTuple):
    """Rows [start, stop) of the sequence, which are [first, first + stop - start) of what their rank holds."""

    rank: int
    start: int
    stop: int
    first: int

    @property
    def local(self) -> slice:
        return slice(self.first, self.first + self.stop - self.start)


def chunks(length: int, ranks: int, balanced: bool) -> list[Chunk]:
    """A sequence of this length, in order; chunks are as torch.tensor_split makes them, the first ones a row longer."""
    count = 2 * ranks if balanced else ranks
    size, longer = divmod(length, count)
    return _in_order([size + (i < longer) for i in range(count)], ranks)


def chunks_held(lengths: Sequence[int], balanced: bool) -> list[Chunk]:
    """What ranks hold that have so many rows each.

    Raises:
        ValueError: balanced, and the lengths are not those of :func:`chunks`: it is not known then where to cut.
    """
    if not balanced:
        return _in_order(lengths, len(lengths))
    found = chunks(sum(lengths), len(lengths), balanced)
    expected = [sum(c.stop - c.start for c in found if c.rank == rank) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise ValueError(
            f"{list(lengths)} rows on the ranks; balanced placement of {sum(lengths)} rows is {expected}, as "
            "ContextParallel.shard makes it (supported without balanced=True: any lengths)"
        )
    return found


def _in_order(sizes: Sequence[int], ranks: int) -> list[Chunk]:
    """Chunks of these sizes; those after the first one of each rank go to the ranks in reverse order."""
    found: list[Chunk] = []
    start = 0
    for i, size in enumerate(sizes):
        rank = i if i < ranks else 2 * ranks - 1 - i
        first = 0 if i < ranks else sizes[rank]
        found.append(Chunk(rank, start, start + size, first))
        start += size
    return found
