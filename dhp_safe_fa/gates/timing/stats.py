"""Statistics of the gate `timing`: paired differences, their p-values, and what could have been found.

A measurement is an array [blocks, columns] of times. A block holds one launch of every class, in random order. If a
class takes no other time than the reference, then within a block its label could be exchanged with those of the
reference's columns: that is all the p-value assumes. It needs no normal distribution, and slow drifts cancel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]

# Share cut off at either end of the sorted differences: a launch beside an interrupt counts no more than its neighbour.
TRIM = 0.1
# ALPHA bounds the probability, over all tests of a run together, that one measurement shows a difference where there is
# none. POWER is the probability that a difference of the detectable size is found: in the first measurement, and again
# in the second.
ALPHA = 0.01
POWER = 0.9
# Sequential Monte Carlo (Besag and Clifford, Biometrika 1991): draw until this many permuted statistics are as large as
# the observed one.
_EXCEEDANCES = 20
_CHUNK = 500  # permutations drawn at a time
# A block holds two launches of the reference (judge.Study.columns). Every class is compared with their mean, so the
# effects of two classes share a part of their noise: the mean's variance over that of a difference, 1/2 over 1 + 1/2.
_SHARED = 1 / 3
# Simulated pairs of looks: the standard deviation of their 90 % quantile is 0.2 % of it.
_LOOKS = 20_000


@dataclass(frozen=True)
class Contrast:
    """One class against the reference: trimmed mean of the differences, its standard error, and the p-value."""

    effect: float
    error: float
    p: float


def trimmed_mean(values: Times) -> Times:
    """Along the last axis, without the TRIM smallest and largest parts."""
    count = values.shape[-1]
    cut = int(TRIM * count)
    inner = np.partition(values, (cut, count - cut - 1), axis=-1)[..., cut : count - cut]
    means: Times = inner.mean(axis=-1)
    return means


def trimmed_error(values: Times) -> float:
    """Standard error of the trimmed mean, from the winsorised deviation (Tukey and McLaughlin, Sankhya 1963)."""
    count = len(values)
    cut = int(TRIM * count)
    ordered = np.sort(values)
    clipped = np.clip(values, ordered[cut], ordered[count - cut - 1])
    return float(clipped.std(ddof=1)) / ((1 - 2 * cut / count) * math.sqrt(count))


def permutations_for(tests: int) -> int:
    """How many permutations let a p-value fall well below what Holm's first step asks for."""
    return math.ceil(5 * tests / ALPHA)


def contrast(reference: Times, times: Times, permutations: int, rng: np.random.Generator) -> Contrast:
    """Compare a class with the reference.

    Args:
        reference: [blocks, columns], launches of the reference.
        times: [blocks], launches of the class in the same blocks.
        permutations: how many at most; the smallest possible p is one over this number plus one.

    Returns:
        The effect is trimmed_mean(class - mean of the reference's columns), in the unit of the times; positive is
        slower. p is two-sided, by exchanging labels within blocks.
    """
    block = np.column_stack([times, reference])
    count, columns = block.shape
    # the difference between a column and the mean of the others, whichever column is called the class
    differences = (block - block.mean(axis=1, keepdims=True)) * (columns / (columns - 1))
    observed = differences[:, 0]
    effect = float(trimmed_mean(observed))
    limit = abs(effect) * (1 - 1e-9)  # times come in ticks: equal statistics must count as equal
    rows = np.arange(count)
    done = exceeding = 0
    while done < permutations:
        size = min(_CHUNK, permutations - done)
        chosen = rng.integers(columns, size=(size, count), dtype=np.uint8)
        hits = np.abs(trimmed_mean(differences[rows, chosen])) >= limit
        if exceeding + int(hits.sum()) >= _EXCEEDANCES:
            at = int(np.flatnonzero(hits)[_EXCEEDANCES - exceeding - 1])
            return Contrast(effect, trimmed_error(observed), _EXCEEDANCES / (done + at + 1))
        exceeding += int(hits.sum())
        done += size
    return Contrast(effect, trimmed_error(observed), (exceeding + 1) / (done + 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for their number (Holm, Scandinavian Journal of Statistics 1979), in the given order."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


Z_99 = NormalDist().inv_cdf(0.995)


# By how much of what the multiprocessor with the stamps shows the clock of another may differ from it: those of a GPU
# follow their voltages one by one. On H200s, where nothing waits, classes 3 to 18 % faster by that clock took up to
# 0.1 of that fewer cycles on one card and more on another, and one 0.75 % slower took 0.12 of it fewer.
CLOCKS_APART = 0.25


@dataclass(frozen=True)
class ByClock:
    """What another clock than the reference's may do to a launch, where it waits: that lasts as long at any clock.

    Attributes:
        shift: how many cycles more it takes, if it waits all the time.
        error: the standard error of that.
        waiting: the share of the launch that it waits, at most.
    """

    shift: float = 0.0
    error: float = 0.0
    waiting: float = 1.0

    def left_of(self, effect: float) -> float:
        """What remains of an effect if the clock, within 99 % limits, explains as much of it as it can, or nothing."""
        least, most = min(self.shift - Z_99 * self.error, 0.0), max(self.shift + Z_99 * self.error, 0.0)
        return effect - min(max(effect, self.waiting * least), self.waiting * most)

    @property
    def most(self) -> float:
        """What it explains of any effect, in both looks with a probability of at least POWER."""
        return self.waiting * (abs(self.shift) + (Z_99 + math.sqrt(2) * NormalDist().inv_cdf(POWER)) * self.error)


@dataclass(frozen=True)
class Unlike:
    """A class at quite another clock against the reference, in cycles.

    Attributes:
        effect, error: of its launches, as of a Contrast.
        clock: what its clock does, if a launch waits all the time.
        typical: the same of most of its launches, at the least: a few at another clock are no reason to believe that
            all of them were.
    """

    effect: float
    error: float
    clock: ByClock
    typical: float

    def waits_at_most(self, least: float) -> float:
        """The share of a launch that waits, within 99 % limits: there cycles follow the clock, and not where it
        computes. 1, all of it, where the clock is no other, and where cycles go the other way by more than clocks are
        apart: then something else is at work. least: so many cycles are no difference."""
        sign = math.copysign(1.0, self.clock.shift)
        surely = min(abs(self.clock.shift) - Z_99 * self.clock.error, sign * self.typical)
        if surely <= 0:
            return 1.0
        share = (sign * self.effect + Z_99 * self.error + least) / surely
        return min(1.0, max(0.0, share) + CLOCKS_APART) if share >= -CLOCKS_APART else 1.0


def unlike(cycles: Times, ns: Times, clock: ByClock) -> Unlike:
    """Of the last column. [blocks, columns] each; clock: of that column."""
    differences = cycles[:, -1] - cycles[:, :2].mean(axis=1)
    clocks = cycles / ns
    apart = (clocks[:, -1] - clocks[:, :2].mean(axis=1)) * float(np.median(ns[:, :2]))
    sign = math.copysign(1.0, clock.shift)
    typical = float(trimmed_mean(apart)) - sign * Z_99 * trimmed_error(apart)
    return Unlike(float(trimmed_mean(differences)), trimmed_error(differences), clock, typical)


def by_clock(cycles: Times, ns: Times) -> list[ByClock]:
    """For each column but the first two, which are the reference's. [blocks, columns] each.

    A clock is all cycles over all nanoseconds: so the steps in which time is read make no difference, and launches
    beside an interrupt none either. An error in it is what a block's launch has more cycles than its time says.
    """

    def clock_of(columns: slice) -> tuple[float, Times]:
        own_cycles, own_ns = cycles[:, columns].mean(axis=1), ns[:, columns].mean(axis=1)
        clock = float(own_cycles.mean() / own_ns.mean())
        return clock, (own_cycles - clock * own_ns) / own_ns.mean()

    launch = float(np.median(ns[:, :2]))
    reference, errors_of_reference = clock_of(slice(2))
    found = []
    for at in range(2, cycles.shape[1]):
        clock, errors = clock_of(slice(at, at + 1))
        error = float(np.std(errors - errors_of_reference, ddof=1)) / math.sqrt(len(cycles))
        found.append(ByClock(launch * (clock - reference), launch * error))
    return found


def upper_bound(same: Sequence[Contrast]) -> float:
    """How far apart identical classes may be, by what they showed: the largest 99 % confidence limit among them."""
    return max(abs(one.effect) + Z_99 * one.error for one in same)


@cache
def _looks(identical: int) -> tuple[Times, Times, Times]:
    """Standardised noise, the same in every run: of a class in the first look and in the second ([_LOOKS] each), and of
    identical classes in the second look ([identical, _LOOKS])."""
    rng = np.random.default_rng(0)
    first, reference = rng.standard_normal((2, _LOOKS))
    own = rng.standard_normal((1 + identical, _LOOKS))
    second = math.sqrt(1 - _SHARED) * own - math.sqrt(_SHARED) * reference
    return first, second[0], second[1:]


def detectable(same: Sequence[Contrast], error: float, tests: int, least: float = 0.0) -> float:
    """The smallest effect that the whole procedure finds with a probability of at least POWER, in the times' unit.

    An effect is found if in both looks it exceeds the first, strictest step of Holm's correction over all the tests,
    the bound that identical classes set, and `least`. Of the first look that bound is known; in the second one
    identical classes are drawn anew, around what the first one showed of them. Their noise is so counted twice, on the
    safe side: the true probability is 0.90 to 0.95 in the simulations of the tests.

    Args:
        same: identical classes in the first look.
        error: the largest standard error among all classes, identical or not, of the first look.
        tests: how many classes are tested together.
        least: an effect of this size or less is never found.
    """
    first, second, identical = _looks(len(same))
    critical = NormalDist().inv_cdf(1 - ALPHA / (2 * tests)) * error
    around = np.array([[one.effect] for one in same]) + error * identical
    bound_again = np.abs(around).max(axis=0) + Z_99 * error
    needed_first = max(critical, upper_bound(same), least) - error * first
    needed_second = np.maximum(max(critical, least), bound_again) - error * second
    return float(np.quantile(np.maximum(needed_first, needed_second), POWER))
