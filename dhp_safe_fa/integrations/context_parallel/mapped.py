"""Memory of all ranks of a group that each of them can read, for GPUs of one machine (torch's symmetric memory).

A rank writes what it has to send into its own memory; when all have, each reads what it needs from the others'. The
copy engines do that: NCCL's kernels would need multiprocessors, all of which a launch of ours takes.

What is sent stays until the sender writes there again, and that it does when all ranks have met after they read it: a
rank meets the others when its own copies are done. There are two buffers, in turn, so that they mostly have met for the
other one meanwhile. They meet in a collective of the group: a rank that is gone or late is what it is
everywhere, torch.distributed's error.
"""

from __future__ import annotations

import hashlib
import platform
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel.packing import Kind, Step, lay_out, pack, unpack
from dhp_safe_fa.integrations.context_parallel.placement import Chunk

BUFFERS = 2
GRAIN = 2 << 20  # bytes: buffers grow by pages of GPU memory


def _of_machine() -> int:
    """A number that processes of other machines do not have."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{platform.node()} {boot.read_text() if boot.exists() else ''}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


@dataclass
class Buffer:
    """This rank's memory, and everybody's.

    Attributes:
        handle: what keeps the others' memory mapped.
        read: how often ranks had sent when it was last read.
    """

    memory: Tensor
    of_ranks: list[Tensor]
    handle: object
    read: int = -1


def _make_buffer(group: dist.ProcessGroup, device: torch.device, size: int) -> Buffer:
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(memory, group)
    return Buffer(memory, [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())], handle)


@dataclass
class Mapped:
    """Of one group and GPU.

    Attributes:
        copying: the stream of what is read from others.
        nothing: what ranks add up where they meet.
        sent: how often this rank has sent; then all meet, when their own copies are done.
    """

    device: torch.device
    copying: torch.cuda.Stream
    nothing: Tensor
    buffers: list[Buffer | None] = field(default_factory=lambda: [None] * BUFFERS)
    sent: int = 0

    def meet(self, group: dist.ProcessGroup) -> None:
        """All ranks have come so far."""
        dist.all_reduce(self.nothing, group=group)

    def buffer(self, group: dist.ProcessGroup, size: int) -> Buffer:
        """The next one, of so many bytes, to be written on the current stream. Size is the same on all ranks."""
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(self.copying)
        index = self.sent % BUFFERS
        buffer = self.buffers[index]
        if buffer is not None and buffer.read == self.sent:  # others may still read it
            self.meet(group)
        self.sent += 1
        if buffer is None or buffer.memory.numel() < size:
            current.synchronize()  # what is given back, nobody reads
            self.buffers[index] = buffer = None
            buffer = self.buffers[index] = _make_buffer(group, self.device, -(-size // GRAIN) * GRAIN)
        return buffer


_mapped: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, Mapped | None]] = weakref.WeakKeyDictionary()


def mapped(group: dist.ProcessGroup, device: torch.device) -> Mapped | None:
    """None where ranks cannot read each other's memory. All ranks of a group call this together."""
    of_devices = _mapped.setdefault(group, {})
    if device not in of_devices:
        of_devices[device] = _map(group, device) if device.type == "cuda" and group.size() > 1 else None
    return of_devices[device]


def _map(group: dist.ProcessGroup, device: torch.device) -> Mapped | None:
    machines = torch.tensor([_of_machine()], device=device).repeat(2)
    machines[1].neg_()
    dist.all_reduce(machines, dist.ReduceOp.MAX, group=group)
    if int(machines.sum()) != 0:  # the largest is not the smallest
        return None
    found = Mapped(device, torch.cuda.Stream(device), torch.zeros(1, device=device))
    try:
        found.buffer(group, GRAIN)
        found.buffer(group, GRAIN)
        failed = 0
    except (RuntimeError, ImportError, AttributeError):  # no access from one GPU to the other, or a torch without it
        failed = 1
    result = torch.tensor([failed], device=device)
    dist.all_reduce(result, dist.ReduceOp.MAX, group=group)
    return None if int(result) else found


class Read:
    """Whole sequences on their way; see Arriving.

    Args:
        of: whose memory.
        buffer: where they are.
        chunks: of the whole sequences.
        kinds: of the step's tensors.
        rank, dim: this one; the dimension that counts the rows.
    """

    def __init__(
        self, of: Mapped, buffer: Buffer, chunks: Sequence[Chunk], kinds: Sequence[Kind], rank: int, dim: int
    ) -> None:
        self._of, self._buffer, self._chunks, self._kinds, self._rank, self._dim = of, buffer, chunks, kinds, rank, dim
        self._wholes = [
            torch.empty((chunks[-1].stop, len(kind.nth), *kind.row), dtype=kind.dtype, device=of.device)
            for kind in kinds
        ]
        # after all have met, and after what the memory was used for before
        self._after = torch.cuda.current_stream(of.device).record_event()
        self._there: torch.cuda.Event | None = None

    def _arrival(self) -> torch.cuda.Event:
        """They are on their way from now on at the latest."""
        if self._there is None:
            self._of.copying.wait_event(self._after)
            with torch.cuda.stream(self._of.copying):
                for kind, whole in zip(self._kinds, self._wholes, strict=True):
                    whole.record_stream(self._of.copying)
                    self._copy(kind, whole.view(-1).view(torch.uint8))
                self._there = self._of.copying.record_event()
            self._buffer.read = self._of.sent
        return self._there

    def _copy(self, kind: Kind, whole: Tensor) -> None:
        """Bytes: so the host, which has to be done before the first rows arrive, takes one step to name a chunk."""
        ranks, size = len(kind.rows), kind.bytes_of_row
        in_turn = sorted(self._chunks, key=lambda one: (one.rank - self._rank) % ranks)  # not all from one at a time
        for rank, start, stop, first in in_turn:
            begin = kind.begins[rank] + first * size
            there = self._buffer.of_ranks[rank][begin : begin + (stop - start) * size]
            whole[start * size : stop * size].copy_(there, non_blocking=True)

    def begin(self) -> None:
        self._arrival()

    def wait(self) -> list[Tensor]:
        torch.cuda.current_stream(self._of.device).wait_event(self._arrival())
        wholes = self._wholes
        del self._wholes
        return unpack(wholes, self._kinds, self._dim)


def send(of: Mapped, group: dist.ProcessGroup, steps: Sequence[Step], dim: int) -> list[Callable[[], Read]]:
    """Makes local tensors known to all ranks; what it returns starts to read those of all, of one step after the other.

    Args:
        of, group: all ranks do this with tensors of the same shapes but for their numbers of rows.
        steps: chunks of the whole sequences, and what this rank holds of each.
        dim: the dimension that counts the rows.
    """
    rank = dist.get_rank(group)
    kinds, size = lay_out(steps, group.size(), dim)
    buffer = of.buffer(group, size)
    pack(buffer.memory, steps, kinds, rank, dim)
    of.meet(group)
    return [
        partial(Read, of, buffer, chunks, of_step, rank, dim) for (chunks, _), of_step in zip(steps, kinds, strict=True)
    ]
