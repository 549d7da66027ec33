"""How tensors that several ranks hold parts of lie in bytes, of one rank as of the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel.placement import Chunk

ALIGNMENT = 256  # bytes, of each kind: copy engines work in larger units than elements

# Chunks of whole sequences, and what this rank holds of each.
Step = tuple[Sequence[Chunk], Sequence[Tensor]]


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

    def of(self, memory: Tensor, rank: int) -> Tensor:
        """[rows, tensors, ...]"""
        shape = torch.Size((self.rows[rank], len(self.nth), *self.row))
        end = self.begins[rank] + shape.numel() * self.dtype.itemsize
        return memory[self.begins[rank] : end].view(self.dtype).view(shape)


def lay_out(steps: Sequence[Step], ranks: int, dim: int) -> tuple[list[list[Kind]], int]:
    """The kinds of each step, and how many bytes the rank with the most needs; the same on all ranks.

    Args:
        steps: of tensors that have the same shapes on all ranks but for their numbers of rows.
        ranks: how many.
        dim: the dimension that counts the rows.
    """
    ends = [0] * ranks
    kinds: list[list[Kind]] = []
    for chunks, tensors in steps:
        rows = [sum(c.stop - c.start for c in chunks if c.rank == rank) for rank in range(ranks)]
        alike: dict[tuple[torch.Size, torch.dtype], list[int]] = {}
        for nth, tensor in enumerate(tensors):
            alike.setdefault((tensor.movedim(dim, 0).shape[1:], tensor.dtype), []).append(nth)
        kinds.append([])
        for (row, dtype), several in alike.items():
            kinds[-1].append(Kind(several, row, dtype, ends, rows))
            of_row = len(several) * row.numel() * dtype.itemsize
            ends = [-(-(end + n * of_row) // ALIGNMENT) * ALIGNMENT for end, n in zip(ends, rows, strict=True)]
    return kinds, max(ends)


def pack(memory: Tensor, steps: Sequence[Step], kinds: Sequence[Sequence[Kind]], rank: int, dim: int) -> None:
    """Writes what this rank holds."""
    for (_, tensors), of_step in zip(steps, kinds, strict=True):
        for kind in of_step:
            mine = kind.of(memory, rank)
            for i, nth in enumerate(kind.nth):
                mine[:, i].copy_(tensors[nth].movedim(dim, 0)[: mine.shape[0]], non_blocking=True)


def unpack(wholes: Sequence[Tensor], kinds: Sequence[Kind], dim: int) -> list[Tensor]:
    """The tensors of a step, views of its kinds, [rows of all ranks, tensors, ...]."""
    found = {
        nth: whole[:, i].movedim(0, dim)
        for kind, whole in zip(kinds, wholes, strict=True)
        for i, nth in enumerate(kind.nth)
    }
    return [found[nth] for nth in sorted(found)]
