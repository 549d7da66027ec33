"""Which rows lie on which rank, and which of them belong to one sequence.

All rows are cut into chunks of consecutive ones. Plain: one chunk a rank, in order. Balanced: two chunks a rank, r and
2n - 1 - r of 2n. Under a causal mask late queries see more keys than early ones; with an early and a late chunk each,
all ranks have as many pairs to compute. Where a sequence begins does not matter for that: it lies in any chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
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


def chunks(length: int, ranks: int, balanced: bool, multiple: int = 1) -> list[Chunk]:
    """A sequence of this length, in order; chunks are as torch.tensor_split makes them of so many rows at a time, the
    first ones longer, and the last one of all as long as what is left."""
    count = 2 * ranks if balanced else ranks
    groups = -(-length // multiple)
    size, longer = groups // count, groups % count  # torch.compile knows no divmod of sizes
    ends = [min(multiple * (size * (i + 1) + min(i + 1, longer)), length) for i in range(count)]
    return _in_order([end - begin for begin, end in pairwise((0, *ends))], ranks)


@lru_cache
def chunks_held(lengths: tuple[int, ...], balanced: bool, multiple: int = 1) -> tuple[Chunk, ...]:
    """What ranks hold that have so many rows each.

    Raises:
        ValueError: balanced, and the lengths are not those of :func:`chunks`: it is not known then where to cut.
    """
    if not balanced:
        return tuple(_in_order(lengths, len(lengths)))
    found = chunks(sum(lengths), len(lengths), balanced, multiple)
    expected = [sum(c.stop - c.start for c in found if c.rank == rank) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise ValueError(
            f"{list(lengths)} rows on the ranks; balanced placement of {sum(lengths)} rows is {expected}, as "
            "ContextParallel.shard makes it (supported without balanced=True: any lengths)"
        )
    return tuple(found)


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


# ---- sequences ------------------------------------------------------------------------------------------------------


class Together(NamedTuple):
    """Rows [begin, end) of all queries, and of all keys, that are one sequence: attention is computed among them.

    Attributes:
        causal_offset: of its first query against its first key.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal_offset: int


def packed_together(
    begins_q: Sequence[int], begins_k: Sequence[int], is_bottom_right: bool, queries: int, keys: int
) -> list[Together]:
    """Packed sequences, and behind them what belongs to none: queries without a key, keys without a query.

    Args:
        begins_q, begins_k: where sequences begin among queries and keys, and where the last one ends.
        is_bottom_right: the last query of a sequence stands at its last key; else the first one at the first.
        queries, keys: how many there are.

    Raises:
        ValueError: sequences end behind the last row.
    """
    for name, begins, rows in (("q", begins_q, queries), ("k", begins_k, keys)):
        if begins[-1] > rows:
            raise ValueError(f"cu_seqlens_{name}: ends with {begins[-1]}, but all ranks together have {rows} rows")
    found = []
    for of_queries, of_keys in zip(pairwise(begins_q), pairwise(begins_k), strict=True):
        offset = (of_keys[1] - of_keys[0]) - (of_queries[1] - of_queries[0]) if is_bottom_right else 0
        found.append(Together(of_queries, of_keys, offset))
    return [
        *found,
        Together((begins_q[-1], queries), (keys, keys), 0),
        Together((queries, queries), (begins_k[-1], keys), 0),
    ]


def held(own: Sequence[Chunk], rows: tuple[int, int]) -> Iterator[tuple[slice, int]]:
    """Of these rows those in the chunks of a rank: where they are in what it holds, and how many come before them."""
    for chunk in own:
        start, stop = max(chunk.start, rows[0]), min(chunk.stop, rows[1])
        if start < stop:
            first = chunk.first + start - chunk.start
            yield slice(first, first + stop - start), start - rows[0]
