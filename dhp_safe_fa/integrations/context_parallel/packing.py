"""How tensors that several ranks hold parts of lie in bytes, of one rank as of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel.placement import Chunk

ALIGNMENT = 256  # bytes, of each kind: copy engines work in larger units than elements
WORD = torch.complex128  # of sixteen bytes, the most that one instruction of a GPU copies

# Chunks of whole sequences, and what this rank holds of each.
Step = tuple[Sequence[Chunk], Sequence[Tensor]]
Row = tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class Kind:
    """Tensors of a step whose rows are alike: in memory a row of one lies beside that of the others, so that a chunk of
    all is one copy.

    Attributes:
        nth: which of the step's.
        row: shape of a row of one of them.
        begins, rows: of each rank, where they begin, in bytes, and how many.
    """

    nth: list[int]
    row: torch.Size
    dtype: torch.dtype
    begins: list[int]
    rows: list[int]

    @property
    def bytes_of_row(self) -> int:
        """Of all tensors."""
        return len(self.nth) * self.row.numel() * self.dtype.itemsize

    def of(self, memory: Tensor, rank: int) -> Tensor:
        """[rows, tensors, ...]"""
        shape = torch.Size((self.rows[rank], len(self.nth), *self.row))
        end = self.begins[rank] + self.rows[rank] * self.bytes_of_row
        return memory[self.begins[rank] : end].view(self.dtype).view(shape)


def lay_out(steps: Sequence[Step], ranks: int, dim: int) -> tuple[list[list[Kind]], int]:
    """The kinds of each step, and how many bytes the rank with the most needs; the same on all ranks.

    Args:
        steps: of tensors that have the same shapes on all ranks but for their numbers of rows.
        ranks: how many.
        dim: the dimension that counts the rows.
    """

    def row(tensor: Tensor) -> Row:
        return torch.Size((*tensor.shape[:dim], *tensor.shape[dim + 1 :])), tensor.dtype

    return _lay_out(tuple((tuple(chunks), tuple(map(row, tensors))) for chunks, tensors in steps), ranks)


@lru_cache  # a model's layers make calls that are alike: the host works it out once
def _lay_out(
    steps: tuple[tuple[tuple[Chunk, ...], tuple[Row, ...]], ...], ranks: int
) -> tuple[list[list[Kind]], int]:
    ends = [0] * ranks
    kinds: list[list[Kind]] = []
    for chunks, of_tensors in steps:
        rows = [sum(c.stop - c.start for c in chunks if c.rank == rank) for rank in range(ranks)]
        alike: dict[Row, list[int]] = {}
        for nth, of_tensor in enumerate(of_tensors):
            alike.setdefault(of_tensor, []).append(nth)
        kinds.append([])
        for (row, dtype), several in alike.items():
            kind = Kind(several, row, dtype, ends, rows)
            kinds[-1].append(kind)
            sizes = [n * kind.bytes_of_row for n in rows]
            ends = [-(-(end + size) // ALIGNMENT) * ALIGNMENT for end, size in zip(ends, sizes, strict=True)]
    return kinds, max(ends)


def pack(memory: Tensor, steps: Sequence[Step], kinds: Sequence[Sequence[Kind]], rank: int, dim: int) -> None:
    """Writes what this rank holds."""
    for (_, tensors), of_step in zip(steps, kinds, strict=True):
        for kind in of_step:
            mine = kind.of(memory, rank).movedim(0, dim + 1)  # [tensors, as they are]
            for place, nth in zip(mine, kind.nth, strict=True):
                _copy(place, tensors[nth].narrow(dim, 0, kind.rows[rank]))


def _copy(place: Tensor, tensor: Tensor) -> None:
    """In words, if both are whole ones in the last dimension, with nothing between."""
    if all(_is_in_words(t) for t in (place, tensor)):
        place, tensor = place.view(WORD), tensor.view(WORD)
    place.copy_(tensor, non_blocking=True)


def _is_in_words(tensor: Tensor) -> bool:
    *strides, last = tensor.stride()
    sizes = (tensor.shape[-1], tensor.storage_offset(), *strides)
    return last == 1 and tensor.data_ptr() % 16 == 0 and not any(n * tensor.itemsize % 16 for n in sizes)


def unpack(wholes: Sequence[Tensor], kinds: Sequence[Kind], dim: int) -> list[Tensor]:
    """The tensors of a step, views of its kinds, [rows of all ranks, tensors, ...]."""
    found = {
        nth: whole[:, i].movedim(0, dim)
        for kind, whole in zip(kinds, wholes, strict=True)
        for i, nth in enumerate(kind.nth)
    }
    return [found[nth] for nth in sorted(found)]
