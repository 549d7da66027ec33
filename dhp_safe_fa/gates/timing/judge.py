"""Takes jobs to the clock and says which classes differ in time, after a second look at whatever seems to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
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
    Unlike,
    by_clock,
    contrast,
    detectable,
    holm,
    permutations_for,
    trimmed_error,
    unlike,
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
        unlike: one that draws other power, which is not judged: what its clock does to it says how much of a launch
            waits. Empty for none.
    """

    name: str
    make: Callable[[], Job]
    reference: str
    same: tuple[str, ...]
    tested: tuple[str, ...]
    unlike: str = ""

    @property
    def compared(self) -> tuple[str, ...]:
        return (*self.same, *self.tested)

    @property
    def columns(self) -> tuple[str, ...]:
        """The reference twice: half its noise, and exchanging labels has something to exchange with."""
        return (self.reference, self.reference, *self.compared, *filter(None, [self.unlike]))


@dataclass(frozen=True)
class Resolution:
    """What a study is to find, and so how long it is measured.

    Attributes:
        percent: so large a difference would be found, in % of the reference.
        most: blocks at most.
    """

    percent: float
    most: int

    def blocks(self, sample: Sample, study: Study, tests: int) -> int:
        """How many blocks it takes, by the noise of some. That alone decides, and not what was found; two stages as in
        Stein, Annals of Mathematical Statistics 1945."""
        reference = sample.cycles[:, :2].mean(axis=1)
        columns = range(2, 2 + len(study.compared))
        error = max(trimmed_error(sample.cycles[:, column] - reference) for column in columns)
        alike = [Contrast(0.0, error, 1.0)] * len(study.same)
        clocks = by_clock(sample.cycles, sample.ns)[: len(study.compared)]
        found = detectable(alike, error, tests) + ByClock(0.0, max(one.error for one in clocks)).most
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

    def outstanding(self, waits_all_the_time: bool = False) -> list[str]:
        """Classes that differ significantly, and by more than `least`; of those that are not identical, also by more
        than identical ones do, beside what their clock may explain; or might, if launches waited all the time."""
        bound = max(self.least, upper_bound(self.identical))

        def is_more(name: str, effect: float) -> bool:
            if name in self.same:
                return abs(effect) > self.least
            clock = self.by_clock[name]
            return abs((replace(clock, waiting=1.0) if waits_all_the_time else clock).left_of(effect)) > bound

        return [name for name, one in self.of.items() if self.corrected[name] < ALPHA and is_more(name, one.effect)]


@dataclass(frozen=True)
class Comparison:
    """What one measurement of a study says."""

    study: Study
    sample: Sample
    cycles: Contrasts
    ns: Contrasts
    unlike: Unlike | None

    @property
    def waits_at_most(self) -> float:
        """The share of a launch that waits."""
        return self.unlike.waits_at_most(LEAST_CYCLES) if self.unlike else 1.0

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
        differences: classes that take other numbers of cycles than the reference, by more than their clock may explain
            even if launches waited all the time, in both measurements.
        doubtful: others that take more or fewer than their clock explains by what is known of waiting.
        invalid: classes with identical content that seem to, in both measurements.
        unconfirmed: classes that seemed to, and did not when measured again.
        clock: classes that take another time in as many cycles.
    """

    first: Comparison
    detectable_percent: float
    differences: list[str] = field(default_factory=list)
    doubtful: list[str] = field(default_factory=list)
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
            "waits_at_most": first.waits_at_most,
            "unlike": asdict(first.unlike) if first.unlike else None,
            "classes": {name: _class_json(first, name) for name in first.cycles.of},
            "differences": self.differences,
            "doubtful": self.doubtful,
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
    needed: Callable[[Sample], int] = lambda sample: 0,
) -> Comparison:
    """Measure a study once; p-values are not corrected yet. needed: how many blocks it takes, by the first ones."""
    sample = _measure(study, clock, blocks, rng)
    if (more := needed(sample) - len(sample.cycles)) > 0:
        rest = _measure(study, clock, more, rng)
        sample = Sample(np.concatenate([sample.ns, rest.ns]), np.concatenate([sample.cycles, rest.cycles]))

    names = study.compared
    clocks = by_clock(sample.cycles, sample.ns)
    found = unlike(sample.cycles, sample.ns, clocks.pop()) if study.unlike else None
    if found:
        clocks = [replace(one, waiting=found.waits_at_most(LEAST_CYCLES)) for one in clocks]

    def contrasts(times: Times, clocks: Sequence[ByClock], least: float) -> Contrasts:
        def of(at: int, draws: np.random.Generator) -> Contrast:
            return contrast(times[:, :2], times[:, 2 + at], permutations, draws)

        # on all cores: the GPU waits meanwhile, and one core is at it for a fifth of the gate's time
        with ThreadPoolExecutor() as threads:
            all_found = threads.map(of, range(len(names)), rng.spawn(len(names)))
            of_class = dict(zip(names, all_found, strict=True))
            return Contrasts(of_class, study.same, dict(zip(names, clocks, strict=True)), least)

    cycles = contrasts(sample.cycles, clocks, LEAST_CYCLES)
    return Comparison(study, sample, cycles, contrasts(sample.ns, [ByClock()] * len(names), 0.0), found)


def _correct(together: Sequence[Contrasts]) -> None:
    """Holm's correction: over all tested classes, and apart from these over all identical ones."""
    for is_same in (False, True):
        keys = [(some, name) for some in together for name in some.of if (name in some.same) == is_same]
        corrected = holm([some.of[name].p for some, name in keys])
        for (some, name), p in zip(keys, corrected, strict=True):
            some.corrected[name] = p


def first_look(
    study: Study, clock: Clock, blocks: int, tests: int, rng: np.random.Generator, resolution: Resolution | None = None
) -> Comparison:
    """Measure a study that will be judged among so many tests. resolution: in more than `blocks`, if that takes more.

    Raises:
        ValueError: it has nothing to compare, or no identical classes to say what a difference is.
    """
    if not study.tested or not study.same:
        raise ValueError(f"{study.name}: classes to be tested and identical ones are needed")
    needed = partial(resolution.blocks, study=study, tests=tests) if resolution else lambda sample: 0
    return compare(study, clock, blocks, permutations_for(tests), rng, needed)


def judge(
    firsts: Sequence[Comparison],
    clock: Clock,
    tests: int,
    rng: np.random.Generator,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Judged]:
    """Correct what was measured for the number of tests, and measure again, as long, where something was found.

    A difference is what is found twice: in the multiprocessor's cycles, corrected p below ALPHA, effect above the bound
    of identical classes and LEAST_CYCLES, and beyond what the class's clock may explain, and the same sign. So the
    chance to report one where there is none is far below ALPHA, and what is twice the detectable effect is practically
    never missed.
    Differences in nanoseconds alone come from the clock's frequency, which follows the power that is drawn; they are
    reported as such.
    """
    _correct([first.cycles for first in firsts])
    _correct([first.ns for first in firsts])
    judged = [Judged(first, 100 * first.cycles.detectable(tests) / first.reference_cycles) for first in firsts]
    suspected = [one for one in judged if one.first.cycles.outstanding()]
    seconds = []
    for one in suspected:
        study, blocks = one.first.study, len(one.first.sample.cycles)
        progress(f"{study.name}, again")
        seconds.append(compare(study, clock, blocks, permutations_for(tests), rng))
    _correct([second.cycles for second in seconds])
    for one, second in zip(suspected, seconds, strict=True):
        _settle(one, second.cycles)
        # its clock was another one
        again = 100 * second.cycles.detectable(tests) / second.reference_cycles
        one.detectable_percent = max(one.detectable_percent, again)
    for one in judged:
        tested = set(one.first.study.tested) - set(one.differences) - set(one.doubtful)
        one.clock = [name for name in one.first.ns.outstanding() if name in tested]
    return judged


def look(studies: Sequence[Study], clock: Clock, blocks: int, rng: np.random.Generator) -> list[Judged]:
    """Measure some studies and judge them together."""
    tests = sum(len(study.tested) for study in studies)
    return judge([first_look(study, clock, blocks, tests, rng) for study in studies], clock, tests, rng)


def _settle(one: Judged, second: Contrasts) -> None:
    """Sort what stood out in the first measurement by what the second one says of it."""
    confirmed = second.outstanding()
    certain = set(second.outstanding(True)).intersection(one.first.cycles.outstanding(True))
    for name in one.first.cycles.outstanding():
        agrees = one.first.cycles.of[name].effect * second.of[name].effect > 0
        if name not in confirmed or not agrees:
            one.unconfirmed.append(name)
        elif name in second.same:
            one.invalid.append(name)
        elif name in certain:
            one.differences.append(name)
        else:
            one.doubtful.append(name)
