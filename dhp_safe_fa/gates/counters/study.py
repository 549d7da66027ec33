"""What counted runs say: how far apart classes of data are, beside what chance does to runs of the same data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median

import numpy as np

from .. import controls
from .counting import Count
from .metrics import CANDIDATES, DEMANDED, MERGED, PATCHED, PERCENT, WITHIN, base_of, is_reported

# Of CANDIDATES, one that has its class's median in so many of the runs of a label is nearly exact. The other runs are
# events too rare to bring many medians anywhere: they explain nothing. Where classes have fewer runs than SOME, pairs
# are few, and a metric is also nearly exact that has one and the same value in MOSTLY of all runs.
NEARLY = 0.75
SOME = 3
MOSTLY = 0.5
# Where every class has so many runs, they are compared by rank, which assumes nothing of how chance is distributed.
MANY = 9


@dataclass(frozen=True)
class Study:
    """What was seen of one metric on one label (a shape, or a twin).

    Attributes:
        is_exact: the same in all runs of the same data.
        is_nearly: of CANDIDATES, what is usual with the same data in NEARLY of their runs, or in MOSTLY of all.
        runs: of the class that has fewest.
        is_equal: the same in all runs.
        value: the median over the classes.
        aa_percent: the largest spread within a class, (max - min) / median.
        classes_percent: the spread of the classes' medians.
        within: the largest spread within a class, in the metric's unit.
        apart: how far apart the classes' medians are, likewise.
        explained: how far apart the runs of the same data (A/A) let chance bring them; nearly exact ones nowhere.
        p: the probability that chance ranks the classes as unlike as they are, if all have MANY runs; else 1.
        by_class: medians, if the classes differ.
    """

    is_exact: bool
    is_nearly: bool
    runs: int
    is_equal: bool
    value: float
    aa_percent: float
    classes_percent: float
    within: float
    apart: float
    explained: float
    p: float
    by_class: dict[str, float]


# The probability that the medians of the classes are farther apart than is said to be explained, where only (normally
# distributed) chance is at work: a run judges some hundred metrics.
_UNEXPLAINED = 0.001
_DRAWS = 50_000


@cache
def _chance(runs: tuple[int, ...]) -> float:
    """How far apart the medians of classes, with so many runs each, may come by chance: in units of the largest
    difference between runs of one class. 2.6 for eleven classes with two runs each, 18 if only three have two."""
    rng = np.random.default_rng(0)
    classes = [rng.standard_normal((count, _DRAWS)) for count in runs]
    medians = np.array([np.median(values, axis=0) for values in classes])
    within = np.max([np.ptp(values, axis=0) for values in classes], axis=0)
    return float(np.quantile(np.ptp(medians, axis=0) / within, 1 - _UNEXPLAINED))


# A p of _UNEXPLAINED is then known to a quarter of itself (one standard deviation).
_PERMUTATIONS = 20_000


def _unlike(classes: Sequence[Sequence[float]]) -> float:
    """p of Kruskal and Wallis' test (Journal of the American Statistical Association 1952), by permutations."""
    everything = np.concatenate([np.asarray(values) for values in classes])
    _, place, often = np.unique(everything, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(often) - (often - 1) / 2)[place]
    sizes = np.array([len(values) for values in classes])
    begins = np.cumsum(sizes) - sizes
    rng = np.random.default_rng(0)
    shuffled = np.vstack([ranks, rng.permuted(np.tile(ranks, (_PERMUTATIONS, 1)), axis=1)])
    unlike = (np.add.reduceat(shuffled, begins, axis=1) ** 2 / sizes).sum(axis=1)
    return float((unlike >= unlike[0] * (1 - 1e-12)).mean())


def _spread(values: Sequence[float]) -> float:
    """(max - min) / median in percent; of the maximum if the median is 0."""
    most, least, middle = max(values), min(values), median(values)
    return 0.0 if most == least else 100 * (most - least) / abs(middle or most or least)


def _require_repeats(runs: Sequence[Count]) -> None:
    repeats = Counter(run.data for run in runs)
    if len(repeats) < 2 or max(repeats.values()) < 2:
        raise ValueError(f"two classes of data, one of them twice, are needed, not {', '.join(repeats) or 'none'}")


def study(counts: Iterable[Count]) -> dict[str, Study]:
    """Metric to what was seen of it, over the runs of one label in which it was counted. An opcode that a run lacks is
    0 there, and so is everything where a call launched other kernels. ValueError without classes to compare, or
    without two runs of any."""
    runs = list(counts)
    _require_repeats(runs)
    counted = [{base_of(metric) for metric in run.values} for run in runs]
    found = {}
    for metric in dict.fromkeys(metric for run in runs for metric in run.values):
        by_class: dict[str, list[float]] = {}
        for run, bases in zip(runs, counted, strict=True):
            if not bases or base_of(metric) in bases:
                by_class.setdefault(run.data, []).append(run.values.get(metric, 0.0))
        medians = {data: median(values) for data, values in by_class.items()}
        everything = [value for values in by_class.values() for value in values]
        is_equal = len(set(everything)) == 1
        again = [(value, medians[data]) for data, values in by_class.items() if len(values) > 1 for value in values]
        is_alike = sum(value == usual for value, usual in again) >= NEARLY * len(again)
        fewest = min(map(len, by_class.values()))
        is_mostly = fewest < SOME and max(Counter(everything).values()) >= MOSTLY * len(everything)
        is_nearly = (is_alike or is_mostly) and base_of(metric) in CANDIDATES
        within = max(max(values) - min(values) for values in by_class.values())
        repeats = tuple(len(values) for values in by_class.values())
        found[metric] = Study(
            is_exact=within == 0,
            is_nearly=is_nearly,
            runs=fewest,
            is_equal=is_equal,
            value=median(medians.values()),
            aa_percent=max(map(_spread, by_class.values())),
            classes_percent=_spread(list(medians.values())),
            within=within,
            apart=max(medians.values()) - min(medians.values()),
            explained=0.0 if is_nearly or not within else within * _chance(repeats),
            p=_unlike(list(by_class.values())) if fewest >= MANY and not is_equal else 1.0,
            by_class={} if is_equal else medians,
        )
    return found


def explained_elsewhere(studies: Iterable[dict[str, Study]]) -> dict[str, float]:
    """The metrics that were not nearly exact everywhere, and how far apart chance brings classes on the label where it
    does so least; of WITHIN, MERGED times the most that A/A differs, and as METRIC % the same in percent. On a label
    whose few A/A pairs happen to agree (less than SOME runs of a class), that much is no finding."""
    found: dict[str, float] = {}
    for seen in studies:
        for metric, one in seen.items():
            if base_of(metric) in WITHIN:
                for name, merged in ((metric, one.within), (metric + PERCENT, one.aa_percent)):
                    found[name] = max(MERGED * merged, found.get(name, 0.0))
            elif not (one.is_exact or one.is_nearly):
                found[metric] = min(one.explained, found.get(metric, one.explained))
    return found


def _differs(metric: str, seen: Study, elsewhere: Mapping[str, float]) -> bool:
    """Whether the classes differ by more than is known to be chance, in a metric that is judged."""
    base = base_of(metric)
    if base in WITHIN:
        merged = max(MERGED * seen.within, elsewhere.get(metric, 0.0))
        merged_percent = max(MERGED * seen.aa_percent, elsewhere.get(metric + PERCENT, 0.0))
        is_more = seen.apart > merged or seen.classes_percent > merged_percent  # labels are of unlike sizes
        return seen.classes_percent > WITHIN[base] and is_more
    if base in (*DEMANDED, *PATCHED):
        return not seen.is_equal
    if seen.runs >= MANY:
        return seen.p < _UNEXPLAINED
    return seen.apart > (seen.explained or (elsewhere.get(metric, 0.0) if seen.runs < SOME else 0.0))


def findings(seen: dict[str, Study], elsewhere: Mapping[str, float]) -> dict[str, str]:
    """What speaks against a kernel on one label, by metric. elsewhere: see explained_elsewhere."""
    found = {}
    for metric, one in seen.items():
        if is_reported(metric):
            continue
        if base_of(metric) in (*DEMANDED, *PATCHED) and not one.is_exact:
            found[metric] = f"{metric} varies by {one.aa_percent:.2g} % between runs of the same input"
        elif _differs(metric, one, elsewhere):
            found[metric] = _difference(metric, one)
    return found


# Of these at most so many at either end are looked at alone.
_AT_AN_END = 3


def unusual(seen: Study) -> tuple[str, ...]:
    """Of a metric in which classes differ, those with another median than most, at most the lowest and the highest few;
    and, to compare them with, two that are usual, or as near as there are."""
    usual = Counter(seen.by_class.values()).most_common(1)[0][0]
    ordered = sorted(seen.by_class, key=lambda data: seen.by_class[data])
    low = [data for data in ordered if seen.by_class[data] < usual][:_AT_AN_END]
    high = [data for data in ordered if seen.by_class[data] > usual][-_AT_AN_END:]
    rest = [data for data in seen.by_class if data not in (*low, *high)]
    beside = sorted(rest, key=lambda data: abs(seen.by_class[data] - usual))[:2]
    return (*low, *high, *beside)


def _difference(metric: str, seen: Study) -> str:
    low, *_, high = sorted(seen.by_class, key=lambda data: seen.by_class[data])
    chance = f", of which chance explains {seen.explained:.0f}" if seen.explained else ""
    chance = f", p {seen.p:.1g}" if seen.runs >= MANY else chance
    return f"{metric}: {seen.by_class[low]:.0f} ({low}) to {seen.by_class[high]:.0f} ({high}){chance}"


def by_label(counts: Iterable[Count], name: str) -> dict[str, list[Count]]:
    """The runs of one subject or control, by label."""
    labels: dict[str, list[Count]] = {}
    for count in counts:
        if count.name == name:
            labels.setdefault(count.label, []).append(count)
    return labels


def by_twin(counts: Sequence[Count], names: Iterable[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Control to twin to findings. What is noise in any clean twin may be noise in all."""
    seen = {}
    for name in names:
        labels = by_label(counts, name)
        seen[name] = {twin: study(labels[twin]) for twin in controls.TWINS}
    elsewhere = explained_elsewhere(twins[controls.CLEAN] for twins in seen.values())
    return {name: {twin: findings(one, elsewhere) for twin, one in twins.items()} for name, twins in seen.items()}
