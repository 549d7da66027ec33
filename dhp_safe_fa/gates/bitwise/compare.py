"""Are two tensors, or a thousand runs, the same bytes? Compared on the device, many runs at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .memory import Memory, PoisonedBlocks

# An integer type of the same width: NaN equals NaN, -0 differs from +0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Runs that are compared at a time, and the bytes that copies of their outputs take at most, unless one takes more: to
# compare each alone is three launches a run and output, which take the host longer than the call.
_BATCH = 32
_BATCH_BYTES = 2**28

Outputs = tuple[Tensor, ...]


def kept(outputs: Outputs) -> Outputs:
    """A copy: who writes all outputs to the same memory would be compared with itself."""
    return tuple(output.clone() for output in outputs)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_BITS[tensor.element_size()])


def _value(tensor: Tensor, index: tuple[int, ...]) -> str:
    width = 2 * tensor.element_size()
    pattern = int(bits(tensor)[index].item()) % 16**width
    return f"{tensor[index].item():.9g} (0x{pattern:0{width}x})"


def first_difference(name: str, expected: Tensor, got: Tensor) -> str:
    """The first element whose bits differ, both values, and how many differ; empty if none does."""
    if expected.shape != got.shape or expected.dtype != got.dtype:
        return f"{name}: {got.dtype} {list(got.shape)} instead of {expected.dtype} {list(expected.shape)}"
    differing = bits(expected) != bits(got)
    count = int(differing.sum().item())
    if not count:
        return ""
    flat = int(differing.flatten().to(torch.uint8).argmax().item())  # argmax: the first of the largest
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), expected.shape))
    place = ", ".join(map(str, index))
    values = f"{_value(expected, index)} became {_value(got, index)}"
    return f"{name}[{place}]: {values}; {count} of {expected.numel()} elements differ"


def compare_outputs(names: Sequence[str], expected: Outputs, got: Outputs) -> str:
    """The first difference in each output; empty if there is none."""
    parts = (first_difference(*trio) for trio in zip(names, expected, got, strict=True))
    return "; ".join(part for part in parts if part)


class Batch:
    """Copies of the outputs of runs, until there are enough to be compared with the first run's.

    Attributes:
        wrong: [runs, outputs], how many elements of each differ; of the first run none.
        changed: the first run's outputs with the last differing value of each element.
    """

    def __init__(self, names: Sequence[str], first: Outputs, runs: int) -> None:
        size = sum(output.numel() * output.element_size() for output in first)
        room = max(1, min(_BATCH, runs - 1, _BATCH_BYTES // max(1, size)))
        self._names, self._first = names, first
        self._expected = [bits(output) for output in first]
        self._copies = [output.new_empty((room, *output.shape)) for output in first]
        self._slots = list(zip(*(copies.unbind() for copies in self._copies), strict=True))
        self._differs = [torch.empty_like(copies, dtype=torch.bool) for copies in self._copies]
        self._compared, self._held = 1, 0  # runs
        self.wrong = torch.zeros(runs, len(first), dtype=torch.int64, device=first[0].device)
        self.changed = kept(first)

    def add(self, outputs: Outputs) -> str:
        """Those of the next run. Returns what they differ in where that is their number, a shape or a type: then they
        are not added."""
        slots = self._slots[self._held]
        if [(output.shape, output.dtype) for output in outputs] != [(slot.shape, slot.dtype) for slot in slots]:
            if len(outputs) != len(slots):
                return f"{len(outputs)} outputs instead of {len(slots)}"
            return compare_outputs(self._names, self._first, outputs)
        for slot, output in zip(slots, outputs, strict=True):
            slot.copy_(output)
        self._held += 1
        if self._held == len(self._slots):
            self.compare()
        return ""

    def compare(self) -> None:
        """The runs that have been added since the last time."""
        held = self._held
        wrong = self.wrong[self._compared : self._compared + held]
        for expected, copies, differs, count in zip(
            self._expected, self._copies, self._differs, wrong.unbind(1), strict=True
        ):
            torch.ne(bits(copies[:held]), expected, out=differs[:held])
            torch.sum(differs[:held].view(held, expected.numel()), 1, out=count)
        if wrong.any():
            for slot, outputs in enumerate(self._slots[:held]):
                for differs, output, changed in zip(self._differs, outputs, self.changed, strict=True):
                    torch.where(differs[slot], output, changed, out=changed)
        self._compared, self._held = self._compared + held, 0


def compare_runs(
    call: Callable[[], Outputs],
    names: Sequence[str],
    memory: Memory,
    runs: int,
    beside: Callable[[], None] = lambda: None,
    alone: Outputs = (),
) -> str:
    """Call so many times, on poisoned memory, and compare each run's outputs with the first one's.

    Args:
        call: takes its outputs and workspaces from torch's allocator.
        names: of its outputs.
        beside: called before each run, to start what runs beside it.
        alone: outputs that the first run is compared with.

    Returns:
        The first differing element of each output, or nothing.
    """

    def once(run: int) -> Outputs:
        memory.poison(run)
        beside()
        outputs = call()
        memory.check(outputs)
        return outputs

    first = kept(once(0))
    if alone and (said := compare_outputs(names, alone, first)):
        return f"{said}; in the first run, which differs from one alone"
    batch = Batch(names, first, runs)
    for run in range(1, runs):
        if said := batch.add(once(run)):  # no variable keeps an output, hence its memory, for the next run
            return f"{said}; in run {run}"
    batch.compare()
    said = compare_outputs(names, first, batch.changed)
    if not said:
        return ""
    bad = batch.wrong.any(dim=1).nonzero().flatten()
    return f"{said}; {len(bad)} of {runs - 1} runs differ from the first, run {int(bad[0])} before all others"


def repeat(
    call: Callable[[], Outputs],
    names: Sequence[str],
    runs: int,
    beside: Callable[[], None] = lambda: None,
    alone: Outputs = (),
) -> str:
    """`compare_runs` on poisoned memory. WrongMemory if the call was given other memory."""
    call()  # what a library sets up at first use is not part of every call
    return compare_runs(call, names, PoisonedBlocks(call()), runs, beside, alone)
