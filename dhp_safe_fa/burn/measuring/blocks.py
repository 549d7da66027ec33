"""Every case, block by block: our build, the previous best and our build again; or our build and the peers."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from dhp_safe_fa.bench import Candidate, Case, Result, Settings, measure
from dhp_safe_fa.bench.anchors import with_estimate
from dhp_safe_fa.burn.builds.library import HEADER, LIBRARY, Library
from dhp_safe_fa.burn.log.records import AGAIN, OURS, PREVIOUS, Shape

# Blocks of a run in which the builds are timed: nine let the interval of the median (see verdict.py) leave out one
# outlier at each end.
BUILD_BLOCKS = 9
# Before every third of them, a block of our build and the peers. Not in the same block: beside a heavy peer the
# GPU's clock falls, and whoever is next to it loses.
PEER_STRIDE = 4
BLOCKS = BUILD_BLOCKS + BUILD_BLOCKS // (PEER_STRIDE - 1)
# Digits that are kept of a time.
DIGITS = 6


# The candidates of one case in one block.
Lineup = Callable[[Case, int], list[Candidate]]


def interleaved(builds: Sequence[Candidate], peers: Sequence[Candidate], block: int) -> list[Candidate]:
    """Our build, which is the first, and the peers; or the builds, which change places from block to block."""
    if block % PEER_STRIDE == 0:
        return [builds[0], *peers]
    first = block % len(builds)
    return [*builds[first:], *builds[:first]]


def copy_of(library: Library) -> Library:
    """A second copy of a library: the dynamic linker loads it anew, so its kernels get other places in memory."""
    with tempfile.TemporaryDirectory() as folder:  # what is loaded does not need its file any more
        for name in (LIBRARY, HEADER):
            shutil.copy(library.path.parent / name, folder)
        return Library(Path(folder))


def measure_all(
    cases: Sequence[Case],
    lineup: Lineup,
    settings: Settings,
    blocks: int,
    device: str,
    factors: Mapping[str, dict[Case, float]],
    advance: Callable[[], None],
) -> list[Shape]:
    """A Shape for each case. Blocks are the outer loop: each case is spread over the whole run, with the clock's drift.

    Args:
        lineup: the first candidate of a block has to be right, see bench.measure.
        factors: by name, time by cuDNN's from a file of anchors: FlashAttention-3, estimated where it is not installed.
        advance: called after every case of every block.

    Raises:
        WrongResult, RuntimeError: a build's output is wrong, or it failed.
    """
    results: dict[Case, list[Result]] = {case: [] for case in cases}
    generator = torch.Generator(device)
    generator.seed()
    for block in range(blocks):
        for case in cases:
            result = measure(case, lineup(case, block), settings, device, generator)
            for name, of_cases in factors.items():
                result = with_estimate(result, of_cases, name)
            results[case].append(result)
            if device == "cuda":
                torch.cuda.empty_cache()  # the next graphs and inputs get other places
            advance()
    return [_shape(case, found, device) for case, found in results.items()]


def _shape(case: Case, results: Sequence[Result], device: str) -> Shape:
    """Times by graph replay on CUDA, so that the host plays no part; without a graph there is no time."""
    us: dict[str, list[float | None]] = {}
    absent: dict[str, str] = {}
    found = {outcome.name for result in results for outcome in result.outcomes}
    for name in [*(n for n in (OURS, PREVIOUS, AGAIN) if n in found), *sorted(found - {OURS, PREVIOUS, AGAIN})]:
        outcomes = [result.outcome(name) for result in results]
        stats = [o and (o.graph_us if device == "cuda" else o.eager_us) for o in outcomes]
        if any(stats):
            us[name] = [float(f"{s.median:.{DIGITS}g}") if s else None for s in stats]
        if reason := next((o.reason for o in outcomes if o and o.reason), None):
            absent[name] = reason
    return Shape(case.label, us, absent=absent)
