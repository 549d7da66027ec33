"""Takes jobs to the clock and says which classes differ in time, after a second look at whatever seems to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from ..tools import NotRun
from .clock import Clock, Job, Sample
from .stats import (
    ALPHA,
    ByClock,
    Contrast,
    Times,
    by_clock,
    contrast,
    detectable,
    holm,
    permutations_for,
    trimmed_error,
    upper_bound,
)

# What a launch takes more or less where the same numbers were copied to its buffers from another address is 2 and 3
# cycles of some 5,000, in both looks, in two of five runs on two H200s (the control spin_loop, which waits for loads
# from eight places). So much is no difference, and counts in what can be detected.
LEAST_CYCLES = 8.0

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


@dataclass(frozen=True)
class Enough:
    """Until when a study is measured.

    Attributes:
        percent: so large a difference would be found, in % of the reference.
        most: blocks at most.
    """

    percent: float
    most: int

    def blocks(self, sample: Sample, same: int, tests: int) -> int:
        """How many blocks it takes, by the noise of some. That alone decides, and not what was found; two stages as in
        Stein, Annals of Mathematical Statistics 1945. same: how many classes are identical."""
        reference = sample.cycles[:, :2].mean(axis=1)
        error = max(trimmed_error(times - reference) for times in sample.cycles[:, 2:].T)
        alike = [Contrast(0.0, error, 1.0)] * same
        of_clocks = max(one.error for one in by_clock(sample.cycles, sample.ns))
        found = detectable(alike, error, tests) + ByClock(0.0, of_clocks).most
        wanted = self.percent / 100 * float(np.median(reference))
        return min(self.most, math.ceil(len(sample.cycles) * (found / wanted) ** 2))


@dataclass
class Contrasts:
    """The classes of one study against its reference, in one unit.

    Attributes:
        of: by class.
        same: the classes with identical content.
        by_clock: by class, what its clock may do.
        least: so much is no difference.
        corrected: p-values after Holm's correction over all that was tested together.
    """

    of: dict[str, Contrast]
    same: tuple[str, ...]
    by_clock: dict[str, ByClock] = field(default_factory=dict)
    least: float = 0.0
    corrected: dict[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> list[Contrast]:
        return [self.of[name] for name in self.same]

    def detectable(self, tests: int) -> float:
        """The smallest effect that would have been found among so many tests, whichever class has it."""
        noise = max(one.error for one in self.of.values())
        by_clock = max((one.most for one in self.by_clock.values()), default=0.0)
        return detectable(self.identical, noise, tests, self.least) + by_clock

    def outstanding(self) -> list[str]:
        """Classes that differ significantly, and by more than `least`; of those that are not identical, also by more
        than identical ones do, beside what their clock may explain."""
        bound = max(self.least, upper_bound(self.identical))

        def is_more(name: str, effect: float) -> bool:
            if name in self.same:
                return abs(effect) > self.least
            return abs(self.by_clock[name].left_of(effect)) > bound

        return [name for name, one in self.of.items() if self.corrected[name] < ALPHA and is_more(name, one.effect)]


@dataclass(frozen=True)
class Comparison:
    """What one measurement of a study says."""

    study: Study
    sample: Sample
    cycles: Contrasts
    ns: Contrasts

    @property
    def reference_cycles(self) -> float:
        return float(np.median(self.sample.cycles[:, :2]))

    @property
    def reference_ns(self) -> float:
        return float(np.median(self.sample.ns[:, :2]))

    def percent(self, name: str) -> float:
        """Effect on the cycles, in % of the reference."""
        return 100 * self.cycles.of[name].effect / self.reference_cycles

    def percent_ns(self, name: str) -> float:
        """Effect on the time, in % of the reference."""
        return 100 * self.ns.of[name].effect / self.reference_ns


@dataclass
class Judged:
    """A study, judged.

    Attributes:
        first: the measurement on which everything is reported.
        detectable_percent: what would have been found, by both looks at the clocks that they had, with a probability of
            at least stats.POWER; in % of the reference.
        differences: classes that take other numbers of cycles than the reference, by more than their clock may explain,
            in both measurements.
        invalid: classes with identical content that seem to, in both measurements.
        unconfirmed: classes that seemed to, and did not when measured again.
        clock: classes that take another time in as many cycles.
    """

    first: Comparison
    detectable_percent: float
    differences: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    unconfirmed: list[str] = field(default_factory=list)
    clock: list[str] = field(default_factory=list)

    @property
    def detectable_ns(self) -> float:
        return self.detectable_percent / 100 * self.first.reference_ns

    def describe(self, name: str) -> str:
        """One line about a class."""
        one = self.first.cycles.of[name]
        p = self.first.cycles.corrected[name]
        return f"{name}: {self.first.percent(name):+.2f} % ({one.effect:+.0f} cycles), p {p:.1g}"

    def as_json(self) -> dict[str, Any]:
        first = self.first
        return {
            "study": first.study.name,
            "blocks": len(first.sample.ns),
            "reference_ns": first.reference_ns,
            "reference_cycles": first.reference_cycles,
            "detectable_percent": self.detectable_percent,
            "detectable_ns": self.detectable_ns,
            "classes": {name: _class_json(first, name) for name in first.cycles.of},
            "differences": self.differences,
            "identical_differences": self.invalid,
            "unconfirmed": self.unconfirmed,
            "through_the_clock": self.clock,
            "percentiles_cycles": _percentiles(first),
        }


def _class_json(comparison: Comparison, name: str) -> dict[str, float]:
    cycles, ns = comparison.cycles.of[name], comparison.ns.of[name]
    return {
        "effect_cycles": cycles.effect,
        "error_cycles": cycles.error,
        "by_clock_cycles": comparison.cycles.by_clock[name].shift,
        "by_clock_error_cycles": comparison.cycles.by_clock[name].error,
        "p": cycles.p,
        "p_corrected": comparison.cycles.corrected[name],
        "effect_ns": ns.effect,
        "error_ns": ns.error,
        "ns_p": ns.p,
        "ns_p_corrected": comparison.ns.corrected[name],
    }


def _percentiles(comparison: Comparison) -> dict[str, list[float]]:
    columns: dict[str, list[Times]] = {}
    for name, cycles in zip(comparison.study.columns, comparison.sample.cycles.T, strict=True):
        columns.setdefault(name, []).append(cycles)
    return {name: np.percentile(np.concatenate(cycles), PERCENTILES).tolist() for name, cycles in columns.items()}


def _measure(study: Study, clock: Clock, blocks: int, rng: np.random.Generator) -> Sample:
    """NotRun if the clock's times are no times."""
    sample = clock.interleaved(study.make(), study.columns, blocks, rng)
    if not all(np.isfinite(times).all() and (times > 0).all() for times in (sample.ns, sample.cycles)):
        raise NotRun(f"{study.name}: the clock gave a time that is no positive number")
    return sample


def compare(
    study: Study,
    clock: Clock,
    blocks: int,
    permutations: int,
    rng: np.random.Generator,
    enough: Callable[[Sample], int] = lambda sample: 0,
) -> Comparison:
    """Measure a study once; p-values are not corrected yet. enough: how many blocks are needed, by the first ones."""
    sample = _measure(study, clock, blocks, rng)
    if (more := enough(sample) - len(sample.cycles)) > 0:
        rest = _measure(study, clock, more, rng)
        sample = Sample(np.concatenate([sample.ns, rest.ns]), np.concatenate([sample.cycles, rest.cycles]))

    names = study.columns[2:]

    def contrasts(times: Times, clocks: Sequence[ByClock], least: float) -> Contrasts:
        def of(at: int, draws: np.random.Generator) -> Contrast:
            return contrast(times[:, :2], times[:, 2 + at], permutations, draws)

        # on all cores: the GPU waits meanwhile, and one core is at it for a fifth of the gate's time
        with ThreadPoolExecutor() as threads:
            found = threads.map(of, range(len(names)), rng.spawn(len(names)))
            of_class = dict(zip(names, found, strict=True))
            return Contrasts(of_class, study.same, dict(zip(names, clocks, strict=True)), least)

    cycles = contrasts(sample.cycles, by_clock(sample.cycles, sample.ns), LEAST_CYCLES)
    return Comparison(study, sample, cycles, contrasts(sample.ns, [ByClock()] * len(names), 0.0))


def _correct(together: Sequence[Contrasts]) -> None:
    """Holm's correction: over all tested classes, and apart from these over all identical ones."""
    for is_same in (False, True):
        keys = [(some, name) for some in together for name in some.of if (name in some.same) == is_same]
        corrected = holm([some.of[name].p for some, name in keys])
        for (some, name), p in zip(keys, corrected, strict=True):
            some.corrected[name] = p


def judge(
    studies: Sequence[Study],
    clock: Clock,
    blocks: int,
    rng: np.random.Generator,
    progress: Callable[[str], None] = lambda _: None,
    enough: Enough | None = None,
) -> list[Judged]:
    """Measure all studies, correct for the number of tests among them, and measure again where something was found, in
    as many blocks. enough: in more than `blocks`, if that takes more.

    A difference is what is found twice: in the multiprocessor's cycles, corrected p below ALPHA, effect above the bound
    of identical classes and LEAST_CYCLES, and beyond what the class's clock may explain, and the same sign. So the
    chance to report one where there is none is far below ALPHA, and what is twice the detectable effect is practically
    never missed.
    Differences in nanoseconds alone come from the clock's frequency, which follows the power that is drawn; they are
    reported as such.

    Raises:
        ValueError: a study has nothing to compare, or no identical classes to say what a difference is.
    """
    for study in studies:
        if not study.tested or not study.same:
            raise ValueError(f"{study.name}: classes to be tested and identical ones are needed")
    tests = sum(len(study.tested) for study in studies)
    permutations = permutations_for(tests)
    firsts = []
    for study in studies:
        progress(study.name)
        until = partial(enough.blocks, same=len(study.same), tests=tests) if enough else lambda sample: 0
        firsts.append(compare(study, clock, blocks, permutations, rng, until))
    _correct([first.cycles for first in firsts])
    _correct([first.ns for first in firsts])
    judged = [Judged(first, 100 * first.cycles.detectable(tests) / first.reference_cycles) for first in firsts]
    suspected = [one for one in judged if one.first.cycles.outstanding()]
    seconds = []
    for one in suspected:
        progress(f"{one.first.study.name}, again")
        seconds.append(compare(one.first.study, clock, len(one.first.sample.cycles), permutations, rng))
    _correct([second.cycles for second in seconds])
    for one, second in zip(suspected, seconds, strict=True):
        _settle(one, second.cycles)
        # its clock was another one
        again = 100 * second.cycles.detectable(tests) / second.reference_cycles
        one.detectable_percent = max(one.detectable_percent, again)
    for one in judged:
        tested = set(one.first.study.tested) - set(one.differences)
        one.clock = [name for name in one.first.ns.outstanding() if name in tested]
    return judged


def _settle(one: Judged, second: Contrasts) -> None:
    """Sort what stood out in the first measurement by what the second one says of it."""
    confirmed = second.outstanding()
    for name in one.first.cycles.outstanding():
        agrees = one.first.cycles.of[name].effect * second.of[name].effect > 0
        if name not in confirmed or not agrees:
            one.unconfirmed.append(name)
        elif name in second.same:
            one.invalid.append(name)
        else:
            one.differences.append(name)
