"""Are two tensors, or a thousand runs, the same bytes? Compared on the device; the host waits once, at the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .memory import Memory, PoisonedBlocks

# An integer type of the same width: NaN equals NaN, -0 differs from +0.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Outputs = tuple[Tensor, ...]


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


def compare_runs(
    call: Callable[[], Outputs],
    names: Sequence[str],
    memory: Memory,
    runs: int,
    beside: Callable[[], None] = lambda: None,
) -> str:
    """Call so many times, on poisoned memory, and compare each run's outputs with the first one's.

    Args:
        call: takes its outputs and workspaces from torch's allocator.
        names: of its outputs.
        beside: called before each run, to start what runs beside it.

    Returns:
        The first differing element of each output, or nothing.
    """

    def once(run: int) -> Outputs:
        memory.poison(run)
        beside()
        outputs = call()
        memory.check(outputs)
        return outputs

    first = tuple(output.clone() for output in once(0))
    expected = [bits(output) for output in first]
    changed = [output.clone() for output in first]  # with the last differing value of each element
    wrong = torch.zeros(runs, len(first), dtype=torch.int64, device=first[0].device)  # elements of each output

    def note(run: int) -> None:  # a function, so that no variable keeps an output, hence its memory, for the next run
        for right, output, kept, count in zip(expected, once(run), changed, wrong[run], strict=True):
            differs = bits(output) != right
            torch.sum(differs.flatten(), 0, out=count)
            torch.where(differs, output, kept, out=kept)

    for run in range(1, runs):
        note(run)
    said = compare_outputs(names, first, tuple(changed))
    if not said:
        return ""
    bad = wrong.any(dim=1).nonzero().flatten()
    return f"{said}; {len(bad)} of {runs - 1} runs differ from the first, run {int(bad[0])} before all others"


def repeat(
    call: Callable[[], Outputs], names: Sequence[str], runs: int, beside: Callable[[], None] = lambda: None
) -> str:
    """`compare_runs` on poisoned memory. WrongMemory if the call was given other memory."""
    call()  # what a library sets up at first use is not part of every call
    return compare_runs(call, names, PoisonedBlocks(call()), runs, beside)
