"""Looking again, where what chance does to a metric may explain all that was found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from .. import controls
from ..verdict import Progress
from . import hardware
from .counting import Count, Request
from .metrics import CANDIDATES, IN_EVERY_LOOK, WITHIN
from .study import by_label, by_twin, explained_elsewhere, findings, study, unusual

# Where classes differ in none but CANDIDATES and WITHIN, the metrics that do are counted again, so many times in all
# classes: the median of three outvotes what chance did to one run, and every class shows how far chance brings its
# runs. Of 21 classes with an event in one run of ten, one has two in its three runs in four of ten such looks. So this
# look only says which classes are in doubt; these, and two others, are counted so many times more, and ranks decide.
# The counts of the look before are not judged then: they come from other passes, with other metrics, and a difference
# between the two would be taken for chance.
LOOKS_AGAIN = (3, 15)

# Where nothing else differs, chance may have done it.
_BY_CHANCE = frozenset((*CANDIDATES, *WITHIN))


@dataclass(frozen=True)
class Doubt:
    """Of a metric.

    Attributes:
        texts: what it says.
        labels: where it is not the same in all runs: also where it says nothing, because chance is seen elsewhere.
        classes: of which it says something, with two to compare them with.
    """

    texts: tuple[str, ...]
    labels: tuple[str, ...]
    classes: tuple[str, ...]


@dataclass(frozen=True)
class Settled:
    """Runs by which all are judged, after looking again where chance may have done it.

    Attributes:
        counts: of all looks, those that are judged.
        doubts: by subject, for each look again: of which metrics it was for.
        controls: in doubt at first, and in which metrics.
    """

    counts: Sequence[Count]
    doubts: dict[str, list[dict[str, Doubt]]] = field(default_factory=dict)
    controls: dict[str, list[str]] = field(default_factory=dict)


def in_doubt(counts: Iterable[Count], name: str) -> dict[str, Doubt]:
    """Metric to what it says against a subject, if chance may have done it all: differences in metrics that need not be
    exact. In few A/A pairs a rare event, such as one sector more in a million, is not seen."""
    shapes = {label: study(some) for label, some in by_label(counts, name).items()}
    elsewhere = explained_elsewhere(shapes.values())
    found = [(label, *one) for label, seen in shapes.items() for one in findings(seen, elsewhere).items()]
    if not all(metric in _BY_CHANCE for _, metric, _ in found):
        return {}
    doubts = {}
    for metric in dict.fromkeys(metric for _, metric, _ in found):
        said = {label: f"{label}: {text}" for label, of, text in found if of == metric}
        labels = [label for label, seen in shapes.items() if metric in seen and not seen[metric].is_equal]
        classes = dict.fromkeys(data for label in said for data in unusual(shapes[label][metric]))
        doubts[metric] = Doubt(tuple(said.values()), tuple(labels), tuple(classes))
    return doubts


def controls_in_doubt(counts: Sequence[Count], expected: Mapping[str, str]) -> dict[str, list[str]]:
    """Of controls the metrics in which a twin differs of which nothing should be seen, if chance may have done it all:
    the clean one; of a control that is expected to be seen by nobody here the other, too."""
    found = {}
    for name, twins in by_twin(counts, expected).items():
        silent = controls.TWINS if expected[name] == controls.BLIND else (controls.CLEAN,)
        seen = list(dict.fromkeys(metric for twin in silent for metric in twins[twin]))
        if seen and all(metric in _BY_CHANCE for metric in seen):
            found[name] = seen
    return found


# Subject or control to what is in doubt there: metric to labels.
_Doubtful = Mapping[str, Mapping[str, Collection[str]]]


def _judged_by(counts: Sequence[Count], again: Sequence[Count], doubtful: _Doubtful) -> list[Count]:
    """The runs by which subjects and controls are judged that were looked at again: of what is in doubt, the new look's
    alone; of executed instructions those of all looks, of others those judged before. Of a leak twin instructions are
    the first look's: else a leak that only they see would have a second chance."""

    def in_question(count: Count) -> set[str]:
        return {metric for metric, labels in doubtful.get(count.name, {}).items() if count.label in labels}

    before = [
        _only(count, rest)
        for count in counts
        # a leak twin's, of which all was looked at once more, says nothing; nothing at all was counted of other kernels
        if (rest := count.values.keys() - in_question(count)) or not count.values
    ]
    anew = [
        _only(count, in_question(count).union(() if count.label == controls.LEAK else IN_EVERY_LOOK))
        for count in again
        if count.name in doubtful or not count.values  # of a call that launched others, which speaks against them all
    ]
    return before + anew


def _only(count: Count, metrics: Collection[str]) -> Count:
    return replace(count, values={metric: value for metric, value in count.values.items() if metric in metrics})


def without_doubt(counts: Sequence[Count], first: Request, expected: Mapping[str, str], progress: Progress) -> Settled:
    """Look again where chance may have done what was found in the first look. expected: of its controls."""
    judged = counts
    doubts_before: dict[str, list[dict[str, Doubt]]] = {}
    of_controls_at_first: dict[str, list[str]] = {}
    for look, times in enumerate(LOOKS_AGAIN):
        doubts = {name: found for part in first.parts.values() for name in part if (found := in_doubt(judged, name))}
        of_controls = controls_in_doubt(judged, expected)
        if not doubts and not of_controls:
            break
        again = _request_again(first, times, doubts, of_controls, is_first=not look)
        counted = hardware.measure(again, partial(_tell_again, progress, again.calls))
        doubtful: dict[str, dict[str, Collection[str]]] = {
            name: {metric: one.labels for metric, one in found.items()} for name, found in doubts.items()
        }
        doubtful |= {name: dict.fromkeys(metrics, controls.TWINS) for name, metrics in of_controls.items()}
        judged = _judged_by(judged, counted, doubtful)
        for name, found in doubts.items():
            doubts_before.setdefault(name, []).append(found)
        of_controls_at_first = of_controls_at_first or of_controls
    return Settled(judged, doubts_before, of_controls_at_first)


def _request_again(
    first: Request,
    times: int,
    doubts: Mapping[str, Mapping[str, Doubt]],
    of_controls: Mapping[str, Sequence[str]],
    is_first: bool,
) -> Request:
    """What is in doubt, so many times: on the shapes where it varies, at first with all classes, then with those in
    doubt; controls with all."""
    subjects, labels = {}, {}
    for call, data in first.subjects.items():
        doubtful = [one for name in first.parts[call] for one in doubts.get(name, {}).values()]
        if doubtful:
            in_question = tuple(dict.fromkeys(chosen for one in doubtful for chosen in one.classes))
            subjects[call] = (data if is_first else in_question) * times
            labels[call] = tuple(dict.fromkeys(label for one in doubtful for label in one.labels))
    metrics = set(IN_EVERY_LOOK).union(*doubts.values(), *of_controls.values())
    return replace(
        first,
        metrics=tuple(metric for metric in first.metrics if metric in metrics),
        subjects=subjects,
        labels=labels,
        controls=tuple(of_controls),
        control_data=first.control_data * times if of_controls else (),
        parts={call: first.parts[call] for call in subjects},
    )


def _tell_again(progress: Progress, calls: int, done: int, what: str) -> None:
    progress(f"again: {what}", done, calls)
