"""Proceed, roll back or undecided: decided from measured blocks and gate verdicts alone, by rules that fit on a page.

A block times our build, the previous best and `again` in turn, afresh: new inputs, new CUDA graphs. For each block
and shape there are two ratios: previous / ours, and again / ours, where `again` is a second copy of our very build: by
what that one differs from 1 is noise.

- The ratio of a block is the geometric mean over the shapes. The result is the median over the blocks, and its spread
  is a distribution-free interval of that median (Gibbons and Chakraborti, Nonparametric Statistical Inference, 5.2): of
  nine blocks, the second smallest to the second largest ratio, which covers 96 %.
- The bound is what `again` reaches by the same rules, and at least MIN_EFFECT.
- Better: the whole interval lies above the bound. Worse: below it. A shape is worse by the same rule, with
  SHAPE_TOLERANCE.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Decision = Literal["proceed", "roll back", "undecided"]

# A change that gains less than half a per cent is not worth its lines.
MIN_EFFECT = 0.005
# One shape may lose one per cent: that is what a different placement in memory does to an unchanged kernel.
SHAPE_TOLERANCE = 0.01
# Coverage that the interval has at least.
COVERAGE = 0.95


@dataclass(frozen=True)
class Timed:
    """One shape: µs per call, one number a block. same_launch: ours and previous launch the same cubin the same way."""

    case: str
    ours: Sequence[float]
    previous: Sequence[float]
    again: Sequence[float]
    same_launch: bool


@dataclass(frozen=True)
class Ratio:
    """previous / ours, above 1 where ours is faster: median and interval. bound: the noise, a ratio of at least 1."""

    median: float
    low: float
    high: float
    bound: float

    @property
    def better(self) -> bool:
        return self.low > self.bound

    @property
    def worse(self) -> bool:
        return self.high < 1 / self.bound

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}; noise up to {self.bound:.3f})"


@dataclass(frozen=True)
class Verdict:
    """ratio is None if nothing was timed against a previous best. reasons: sentences, never empty."""

    decision: Decision
    reasons: list[str]
    ratio: Ratio | None = None


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The narrowest pair of order statistics, equally far from both ends, that covers the median with COVERAGE.

    Raises:
        ValueError: there are too few values for any.
    """
    n, ordered = len(values), sorted(values)
    trimmed = -1
    while 1 - 2 * sum(math.comb(n, i) for i in range(trimmed + 2)) / 2**n >= COVERAGE:
        trimmed += 1
    if trimmed < 0:
        raise ValueError(f"{n} blocks; an interval that covers the median with {COVERAGE:.0%} needs 6")
    return ordered[trimmed], ordered[n - 1 - trimmed]


def ratio(shapes: Sequence[Timed], at_least: float = MIN_EFFECT) -> Ratio:
    """Over all these shapes together. ValueError without any."""
    if not shapes:
        raise ValueError("no shape was timed")
    gains = _block_means([(shape.previous, shape.ours) for shape in shapes])
    noise = _block_means([(shape.again, shape.ours) for shape in shapes])
    low, high = interval(gains)
    bound = max(math.log1p(at_least), *map(abs, interval(noise)))
    # six digits: the last bits of exp differ between C libraries
    return Ratio(*(round(math.exp(x), 6) for x in (statistics.median(gains), low, high, bound)))


def judge(
    gates: Mapping[str, str], required: Sequence[str], shapes: Sequence[Timed] | None, wrong: str | None = None
) -> Verdict:
    """The decision.

    Args:
        gates: verdicts of the gates that were run, in order.
        required: the gates that have to pass before anything may proceed.
        shapes: None if there is no previous best to compare with, or nothing was timed because a gate failed.
        wrong: what is wrong with the output, if it is.
    """
    if failed := [name for name, verdict in gates.items() if verdict == "FAIL"]:
        return Verdict("roll back", [f"gate {name}: FAIL" for name in failed])
    if wrong:
        return Verdict("roll back", [wrong])
    missing = [f"gate {name}: {gates.get(name, 'NOT RUN')}" for name in required if gates.get(name) != "PASS"]
    if shapes is None:
        first = "there is no previous best to compare with"
        return Verdict("undecided", [*missing, first]) if missing else Verdict("proceed", [first, "every gate passed"])

    overall = ratio(shapes)
    if all(shape.same_launch for shape in shapes):
        reason = f"the same cubins, launched in the same way: {overall} is noise"
        return Verdict("undecided", [*missing, reason], overall)
    slower = [(s.case, r) for s in shapes if (r := ratio([s], SHAPE_TOLERANCE)).worse]
    losses = [f"slower at {case}: {r}" for case, r in slower]
    if overall.worse or (losses and not overall.better):
        reasons = [f"slower than the previous best: {overall}"] if overall.worse else []
        return Verdict("roll back", [*reasons, *losses], overall)
    if not overall.better:
        return Verdict("undecided", [*missing, f"no difference beyond noise: {overall}"], overall)
    gain = f"faster than the previous best: {overall}"
    if missing or losses:
        return Verdict("undecided", [gain, *missing, *losses], overall)
    return Verdict("proceed", [gain, "no shape is slower", "every gate passed"], overall)


# A line of the log is judged by the rules of the day on which it was written: schema → rules. Another rule is another
# function here, with a schema of its own.
RULES = {"dhp_safe_fa.burn/1": judge, "dhp_safe_fa.burn/2": judge}


def _block_means(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> list[float]:
    """For each block the mean over the shapes of log(one / other)."""
    logs = [[math.log(one / other) for one, other in zip(*pair, strict=True)] for pair in pairs]
    return [statistics.fmean(block) for block in zip(*logs, strict=True)]
