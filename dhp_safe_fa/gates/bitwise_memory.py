"""Memory that holds something else before every run: outputs and workspaces that nobody writes cannot stay hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor

_LARGEST_SMALL = 2**20  # torch's allocator takes requests up to this size from its segments of 2 MiB


class WrongMemory(Exception):
    """The memory that a call used was not the poisoned one."""


class Memory(Protocol):
    """What the gate needs: poison, then a context in which torch allocates from what was poisoned."""

    def poison(self, run: int) -> None: ...

    def use(self) -> AbstractContextManager[object]: ...

    def check(self, outputs: Sequence[Tensor]) -> None: ...


def _device_allocations() -> int:
    """How often torch's allocator has asked the device for memory. (A second snapshot crashes in torch 2.11.)"""
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0))


class PoisonedPool:
    """A pool of torch's caching allocator that serves nothing but the calls under test.

    It grows while the call runs for the first times (`warm_up`). From then on all of it is filled before each run, by
    taking every segment whole, filling it and giving it back; what the call allocates is then a part of it.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.MemPool()
        self._segments: list[tuple[int, int]] = []  # address, bytes
        self._grown = 0  # segments that the pool has asked the device for

    @contextmanager
    def use(self) -> Iterator[None]:
        before = _device_allocations()
        with torch.cuda.use_mem_pool(self._pool):
            yield
        self._grown += _device_allocations() - before

    def warm_up(self) -> None:
        """Take the present size of the pool as its size."""
        snapshot: list[dict[str, Any]] = torch.cuda.memory_snapshot(self._pool.id)
        self._segments = sorted((segment["address"], segment["total_size"]) for segment in snapshot)
        self._grown = 0

    def poison(self, run: int) -> None:
        """Fill with one byte, another one in each run: 0xff, which is NaN, would hide what is added to it.

        WrongMemory if the pool is in use, or has grown.
        """
        pieces = []
        with self.use():
            for _, size in sorted(self._segments, key=lambda segment: -segment[1]):
                sizes = [size] if size > 2 * _LARGEST_SMALL else [_LARGEST_SMALL] * (size // _LARGEST_SMALL)
                pieces += [torch.empty(piece, dtype=torch.uint8, device="cuda") for piece in sizes]
        covered = sum(piece.numel() for piece in pieces)
        if not all(self._holds(piece) for piece in pieces) or covered != sum(size for _, size in self._segments):
            raise WrongMemory("the allocator did not give back the memory of the run before")
        for piece in pieces:
            piece.fill_(run * 37 % 256)  # 37 is odd: every byte comes once in 256 runs

    def _holds(self, tensor: Tensor) -> bool:
        start = tensor.data_ptr()
        end = start + tensor.numel() * tensor.element_size()
        return any(address <= start and end <= address + size for address, size in self._segments)

    def check(self, outputs: Sequence[Tensor]) -> None:
        """WrongMemory unless the outputs of a call lie in what was poisoned before it."""
        if not all(self._holds(output) for output in outputs):
            raise WrongMemory("an output does not lie in the memory that was poisoned")

    def check_unchanged(self) -> None:
        """WrongMemory if a call took memory that had not been poisoned."""
        if self._grown:
            raise WrongMemory("a call took more memory than its first runs did, which was not poisoned")
