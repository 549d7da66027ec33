"""Takes jobs to the clock and says which classes differ in time, after a second look at whatever seems to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .timing_clock import Clock, Job, Sample
from .timing_stats import (
    ALPHA,
    Contrast,
    Times,
    contrast,
    detectable,
    holm,
    permutations_for,
    trimmed_mean,
    upper_bound,
)

# Percentiles that are kept of every class, for the plot.
PERCENTILES = np.linspace(0, 100, 101)


@dataclass(frozen=True)
class Study:
    """Classes to be compared on one job.

    Attributes:
        name: what the job is.
        make: the job, made when its turn comes, so that only one set of inputs is in memory.
        reference: the class that all others are compared with.
        same: classes with identical content, for A/A.
        tested: the other classes.
    """

    name: str
    make: Callable[[], Job]
    reference: str
    same: tuple[str, ...]
    tested: tuple[str, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """The reference twice: half its noise, and exchanging labels has something to exchange with."""
        return (self.reference, self.reference, *self.same, *self.tested)


@dataclass
class Comparison:
    """What one measurement of a study says, in nanoseconds. corrected: p-values after Holm's correction."""

    study: Study
    sample: Sample
    contrasts: dict[str, Contrast]
    corrected: dict[str, float] = field(default_factory=dict)

    @property
    def reference_ns(self) -> float:
        return float(np.median(self.sample.ns[:, :2]))

    @property
    def same(self) -> list[Contrast]:
        return [self.contrasts[name] for name in self.study.same]

    @property
    def bound(self) -> float:
        return upper_bound(self.same)

    def cycles_percent(self, name: str) -> float | None:
        """The effect on the multiprocessor's cycle counter, in % of the reference; None if it could not be read."""
        column = self.study.columns.index(name)
        cycles = self.sample.cycles[:, [0, 1, column]]
        cycles = cycles[~np.isnan(cycles).any(axis=1)]
        if len(cycles) * 2 < len(self.sample.cycles):
            return None
        base = cycles[:, :2].mean(axis=1)
        return float(100 * trimmed_mean(cycles[:, 2] - base) / np.median(base))


@dataclass
class Judged:
    """A study, judged.

    Attributes:
        first: the measurement on which everything is reported.
        detectable_ns: what would have been found with probability timing_stats.POWER.
        differences: classes that differ from the reference, in both measurements.
        invalid: classes with identical content that seem to differ, in both measurements.
        unconfirmed: classes that seemed to differ, and did not when measured again.
    """

    first: Comparison
    detectable_ns: float
    differences: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)

    @property
    def detectable_percent(self) -> float:
        return 100 * self.detectable_ns / self.first.reference_ns

    def describe(self, name: str) -> str:
        """One line about a class."""
        one = self.first.contrasts[name]
        percent = 100 * one.effect / self.first.reference_ns
        return f"{name}: {percent:+.2f} % ({one.effect:+.0f} ns), p {self.first.corrected[name]:.1g}"

    def as_json(self) -> dict[str, Any]:
        first = self.first
        classes = {
            name: {
                "effect_ns": one.effect,
                "error_ns": one.error,
                "p": one.p,
                "p_corrected": first.corrected[name],
                "effect_cycles_percent": first.cycles_percent(name),
            }
            for name, one in first.contrasts.items()
        }
        return {
            "study": first.study.name,
            "blocks": len(first.sample.ns),
            "reference_ns": first.reference_ns,
            "detectable_ns": self.detectable_ns,
            "identical_classes_bound_ns": first.bound,
            "classes": classes,
            "unconfirmed": self.unconfirmed,
            "percentiles_ns": _percentiles(first),
        }


def _percentiles(comparison: Comparison) -> dict[str, list[float]]:
    columns: dict[str, list[Times]] = {}
    for name, times in zip(comparison.study.columns, comparison.sample.ns.T, strict=True):
        columns.setdefault(name, []).append(times)
    return {name: np.percentile(np.concatenate(times), PERCENTILES).tolist() for name, times in columns.items()}


def compare(study: Study, clock: Clock, blocks: int, permutations: int, rng: np.random.Generator) -> Comparison:
    """Measure a study once; p-values are not corrected yet."""
    sample = clock.interleaved(study.make(), study.columns, blocks, rng)
    reference = sample.ns[:, :2]
    contrasts = {
        name: contrast(reference, sample.ns[:, column], permutations, rng)
        for column, name in enumerate(study.columns)
        if column >= 2
    }
    return Comparison(study, sample, contrasts)


def _correct(comparisons: Sequence[Comparison], classes: Callable[[Comparison], Sequence[str]]) -> None:
    """Holm's correction over some classes of all the comparisons together."""
    keys = [(comparison, name) for comparison in comparisons for name in classes(comparison)]
    corrected = holm([comparison.contrasts[name].p for comparison, name in keys])
    for (comparison, name), p in zip(keys, corrected, strict=True):
        comparison.corrected[name] = p


def judge(
    studies: Sequence[Study],
    clock: Clock,
    blocks: int,
    rng: np.random.Generator,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Judged]:
    """Measure all studies, correct for the number of tests among them, and measure again where something was found.

    A difference is what is found twice: corrected p below ALPHA, effect above the bound of identical classes, and the
    same sign. So the chance to report one where there is none is far below ALPHA, and what is twice the detectable
    effect is practically never missed.
    """
    tests = max(1, sum(len(study.tested) for study in studies))
    permutations = permutations_for(tests)
    firsts = []
    for study in studies:
        progress(study.name)
        firsts.append(compare(study, clock, blocks, permutations, rng))
    _correct(firsts, lambda c: c.study.tested)
    _correct(firsts, lambda c: c.study.same)
    judged = [Judged(first, detectable(first.same, tests)) for first in firsts]
    suspected = [one for one in judged if _outstanding(one.first)]
    seconds = []
    for one in suspected:
        progress(f"{one.first.study.name}, again")
        seconds.append(compare(one.first.study, clock, blocks, permutations, rng))
    _correct(seconds, lambda c: c.study.tested)
    _correct(seconds, lambda c: c.study.same)
    for one, second in zip(suspected, seconds, strict=True):
        confirmed = _outstanding(second)
        for name in _outstanding(one.first):
            agrees = one.first.contrasts[name].effect * second.contrasts[name].effect > 0
            if name not in confirmed or not agrees:
                one.unconfirmed.append(name)
            elif name in one.first.study.same:
                one.invalid.append(name)
            else:
                one.differences.append(name)
    return judged


def _outstanding(comparison: Comparison) -> list[str]:
    """Classes that differ significantly, and by more than identical classes do; these themselves only have to differ
    significantly."""
    same = comparison.study.same
    return [
        name
        for name, one in comparison.contrasts.items()
        if comparison.corrected[name] < ALPHA and (name in same or abs(one.effect) > comparison.bound)
    ]
