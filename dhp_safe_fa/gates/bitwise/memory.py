"""Memory that holds something else before every run: outputs and workspaces that nobody writes cannot stay hidden."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

# More than the workspaces of the peers' forward passes need on the shapes of this gate; ours has none there. Requests
# of at most 1 MiB, as for the workspace of our backward, torch serves from other memory: blocks of all sizes are there.
_WORKSPACE_BYTES = (32 * 2**20, *(2**n for n in range(9, 21)))


class WrongMemory(Exception):
    """The memory that a call used was not the poisoned one."""


class Memory(Protocol):
    """What the gate needs: poison before a run, and a look at where its outputs lie."""

    def poison(self, run: int) -> None: ...

    def check(self, outputs: Sequence[Tensor]) -> None: ...


class PoisonedBlocks:
    """Blocks of torch's caching allocator that the calls under test will be given, because they have just been freed.

    Before each run a block as large as each output, and blocks for workspaces, are taken, filled and given back.
    The allocator serves a request from the smallest free block that holds it, so outputs come from these; whether they
    did is checked. (A pool of their own would say the same of workspaces, but torch 2.11 crashes when it is asked about
    one.)
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        torch.cuda.empty_cache()  # or a free block that something else left would be given to a call
        storages = [output.untyped_storage().nbytes() for output in outputs]  # an output may be a part of one
        self._sizes = [max(1, size) for size in storages] + [*_WORKSPACE_BYTES]
        self._filled: list[tuple[int, int]] = []  # address, bytes

    def poison(self, run: int) -> None:
        """Fill with one byte, another one in each run: 0xff, which is NaN, would hide what is added to it."""
        blocks = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in self._sizes]
        for block in blocks:
            block.fill_(run * 37 % 256)  # 37 is odd: every byte comes once in 256 runs
        self._filled = [(block.data_ptr(), block.numel()) for block in blocks]

    def check(self, outputs: Sequence[Tensor]) -> None:
        """WrongMemory unless the outputs of a call lie in what was poisoned before it."""
        if not all(self._holds(output) for output in outputs):
            raise WrongMemory("an output does not lie in the memory that was poisoned")

    def _holds(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        return any(address <= start and end <= address + size for address, size in self._filled)
