"""Memory that holds something else before every run: outputs and workspaces that nobody writes cannot stay hidden."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Protocol

import torch
from torch import Tensor

# More than the workspaces of forward passes need on the shapes of this gate, the peers' and ours, which are rows' parts
# between segments, 17 MiB at most. Requests of at most 1 MiB, as for the workspace of our backward, torch serves from
# other memory: blocks of all sizes are there.
_WORKSPACE_BYTES = (32 * 2**20, *(2**n for n in range(9, 21)))

_LARGEST_SMALL = 2**20  # bytes of a request that torch serves from small memory
_GRANULE = 512  # bytes: torch's blocks have multiples of it


class WrongMemory(Exception):
    """The memory that a call used was not the poisoned one."""


class Memory(Protocol):
    """What the gate needs: poison before a run, and a look at where its outputs lie."""

    def poison(self, run: int) -> None: ...

    def check(self, outputs: Sequence[Tensor]) -> None: ...


class PoisonedBlocks:
    """Blocks of torch's caching allocator that the calls under test will be given, because they have just been freed.

    Before each run all memory that the allocator has free is taken, filled and given back. It serves a request from the
    smallest free block that holds it, so outputs come from these; whether they did is checked. (A pool of their own
    would say the same of workspaces, but torch 2.11 crashes when it is asked about one.)

    Which blocks are free takes the allocator longer to say than a run takes, and mostly they are those of the last
    look: these are asked for again. It is looked anew where the allocator has another amount of memory, or of it in
    use, or answers with another block: first a block as large as each output and blocks for workspaces are taken and
    given back, so that there is memory for a call. Blocks next to each other are filled as one.
    """

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        torch.cuda.empty_cache()  # or a free block that something else left would be given to a call
        storages = [output.untyped_storage().nbytes() for output in outputs]  # an output may be a part of one
        self._reserve = [_GRANULE * max(1, -(-size // _GRANULE)) for size in storages] + [*_WORKSPACE_BYTES]
        self._in_use: tuple[int, ...] = ()  # when it was last looked at, before anything was taken
        self._sizes: list[int] = []  # of all that was free, in the order in which it is asked for
        self._places: list[int] = []  # where these blocks lay
        self._filled: list[Tensor] = []  # what these blocks are together, none next to another; they hold no memory

    def poison(self, run: int) -> None:
        """Fill with one byte, another one in each run: 0xff, which is NaN, would hide what is added to it."""
        blocks = self._all_free()
        for some in self._filled:
            some.fill_(run * 37 % 256)  # 37 is odd: every byte comes once in 256 runs
        del blocks  # not before they are filled

    def _all_free(self) -> list[Tensor]:
        """All blocks that are free, taken."""
        if _in_use() == self._in_use:
            blocks = _take(self._sizes)
            if [block.data_ptr() for block in blocks] == self._places:
                return blocks
            del blocks  # or they would not be free
        return self._look()

    def _look(self) -> list[Tensor]:
        """The same, whatever was free before."""
        _take(self._reserve)
        self._in_use, self._sizes = _in_use(), free_sizes()
        blocks = _take(self._sizes)
        self._places = [block.data_ptr() for block in blocks]
        spans: list[tuple[int, int]] = []  # from address to address
        for start, end in sorted((block.data_ptr(), block.data_ptr() + block.numel()) for block in blocks):
            if spans and spans[-1][1] == start:  # once given back they are one block
                start = spans.pop()[0]
            spans.append((start, end))
        self._filled = [_bytes(start, end) for start, end in spans]
        return blocks

    def check(self, outputs: Sequence[Tensor]) -> None:
        """WrongMemory unless the outputs of a call lie in what was poisoned before it."""
        if not all(self._holds(output) for output in outputs):
            raise WrongMemory("an output does not lie in the memory that was poisoned")

    def _holds(self, tensor: Tensor) -> bool:
        first = tensor.data_ptr()
        last = first + tensor.numel() * tensor.element_size()
        return any(some.data_ptr() <= first and last <= some.data_ptr() + some.numel() for some in self._filled)


def _take(sizes: Sequence[int]) -> list[Tensor]:
    nothing = torch.empty(0, dtype=torch.uint8, device="cuda")  # new_empty takes half as long as torch.empty
    return [nothing.new_empty(size) for size in sizes]


def _bytes(start: int, end: int) -> Tensor:
    """Memory of the current device, which somebody else holds, as a tensor (CUDA array interface, version 3).
    WrongMemory if torch gives a copy."""
    shown = {"data": (start, False), "shape": (end - start,), "typestr": "|u1", "version": 3}
    tensor = torch.as_tensor(SimpleNamespace(__cuda_array_interface__=shown), device="cuda")
    if tensor.data_ptr() != start or tensor.numel() != end - start:
        raise WrongMemory("torch gives no tensor over memory that is to be poisoned")
    return tensor


def _in_use() -> tuple[int, ...]:
    """How much memory the allocator has, and has in use: also what was given back and waits for another stream, which
    is in use until it can be had again."""
    said = torch.cuda.memory_stats_as_nested_dict()
    kinds = ("reserved_bytes", "allocated_bytes", "active_bytes", "allocation", "active")
    return tuple(said[kind]["all"]["current"] for kind in kinds)


def free_sizes() -> list[int]:
    """Sizes of requests that take all blocks which the current stream would be given, and no new memory.

    Torch serves a request of more than 1 MiB from large memory, any other from small memory, from the smallest block
    that holds it. It cuts what is asked for out of 20 MiB, or 2 MiB: what is left there waits for the next request. So
    the largest block is asked for first, of small memory 1 MiB of it at a time.
    """
    here = (torch.cuda.current_device(), torch.cuda.current_stream().cuda_stream, (0, 0))  # (0, 0): not of a CUDA graph
    sizes: list[int] = []
    for segment in torch.cuda.memory_snapshot():
        if (segment["device"], segment["stream"], tuple(segment["segment_pool_id"])) != here:
            continue
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["segment_type"] == "large":
            sizes += [size for size in free if size > _LARGEST_SMALL]
        else:
            for size in free:
                sizes += [_LARGEST_SMALL] * (size // _LARGEST_SMALL) + [size % _LARGEST_SMALL]
    return sorted((size for size in sizes if size > 0), reverse=True)
