"""Memory of all ranks of a group that each of them can read, for GPUs of one machine (torch's symmetric memory).

A rank writes what it has to send into its own memory; when all have, each reads what it needs from the others'. The
copy engines do that: NCCL's kernels would need multiprocessors, all of which a launch of ours takes.

What is sent stays until the sender writes there again, and that it does when all ranks have met after they read it: a
rank does all of this on one stream, in the order of the calls. There are two places, in turn, so that they mostly have
met for the other one meanwhile. They meet in a collective of the group: a rank that is gone or late is what it is
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

PLACES = 2
GRAIN = 2 << 20  # bytes: places grow by pages of GPU memory


def _of_machine() -> int:
    """A number that processes of other machines do not have."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = f"{platform.node()} {boot.read_text() if boot.exists() else ''}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


@dataclass
class Place:
    """This rank's memory, and everybody's.

    Attributes:
        handle: what keeps the others' memory mapped.
        read: how often all ranks had met when it was last read.
    """

    memory: Tensor
    of_ranks: list[Tensor]
    handle: object
    read: int = -1


def _make_place(group: dist.ProcessGroup, device: torch.device, size: int) -> Place:
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(memory, group)
    return Place(memory, [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(group.size())], handle)


@dataclass
class Mapped:
    """Of one group and GPU.

    Attributes:
        stream: of all that is written for others, and read from them.
        uses: how often a place was written.
        meetings: how often all ranks have met.
    """

    device: torch.device
    stream: torch.cuda.Stream
    places: list[Place | None] = field(default_factory=lambda: [None] * PLACES)
    uses: int = 0
    meetings: int = 0

    def meet(self, group: dist.ProcessGroup) -> None:
        """On the stream: all ranks have come so far."""
        self.meetings += 1
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def place(self, group: dist.ProcessGroup, size: int) -> Place:
        """The next one, of so many bytes; on the stream. Size is the same on all ranks."""
        index = self.uses % PLACES
        self.uses += 1
        place = self.places[index]
        if place is not None and place.read == self.meetings:  # others may still read it
            self.meet(group)
        if place is None or place.memory.numel() < size:
            self.stream.synchronize()  # what is given back, nobody reads
            self.places[index] = place = None
            place = self.places[index] = _make_place(group, self.device, -(-size // GRAIN) * GRAIN)
        return place


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
    found = Mapped(device, torch.cuda.Stream(device))
    try:
        with torch.cuda.stream(found.stream):
            found.place(group, GRAIN)
            found.place(group, GRAIN)
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
        place: where they are.
        step: chunks, and what this rank holds itself.
        kinds: of the step's tensors.
        rank, dim: this one; the dimension that counts the rows.
    """

    def __init__(self, of: Mapped, place: Place, step: Step, kinds: Sequence[Kind], rank: int, dim: int) -> None:
        self._of, self._place, self._step, self._kinds, self._rank, self._dim = of, place, step, kinds, rank, dim
        rows = step[0][-1].stop
        self._wholes = [
            torch.empty((rows, len(kind.nth), *kind.row), dtype=kind.dtype, device=of.device) for kind in kinds
        ]
        self._free = torch.cuda.current_stream(of.device).record_event()  # then nobody has the memory any more

    def begin(self) -> None:
        (chunks, tensors), of, rank = self._step, self._of, self._rank
        of.stream.wait_event(self._free)
        for kind, whole in zip(self._kinds, self._wholes, strict=True):
            whole.record_stream(of.stream)
            ranks = len(kind.rows)
            for chunk in sorted(chunks, key=lambda one: (one.rank - rank) % ranks):  # not all from one at a time
                here = whole[chunk.start : chunk.stop]
                if chunk.rank == rank:
                    for i, nth in enumerate(kind.nth):
                        here[:, i].copy_(tensors[nth].movedim(self._dim, 0)[chunk.local])
                elif chunk.stop > chunk.start:
                    with torch.cuda.stream(of.stream):
                        there = kind.of(self._place.of_ranks[chunk.rank], chunk.rank)[chunk.local]
                        here.copy_(there, non_blocking=True)
        self._there = of.stream.record_event()
        self._place.read = of.meetings

    def wait(self) -> list[Tensor]:
        torch.cuda.current_stream(self._of.device).wait_event(self._there)
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
    of.stream.wait_stream(torch.cuda.current_stream(of.device))
    for _, tensors in steps:
        for tensor in tensors:
            tensor.record_stream(of.stream)
    with torch.cuda.stream(of.stream):
        place = of.place(group, size)
        pack(place.memory, steps, kinds, rank, dim)
        of.meet(group)
    return [partial(Read, of, place, step, of_step, rank, dim) for step, of_step in zip(steps, kinds, strict=True)]
