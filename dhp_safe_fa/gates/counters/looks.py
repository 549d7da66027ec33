"""Looking again, where what chance does to a metric may explain all that was found."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from .. import controls
from ..verdict import Progress
from . import ncu
from .metrics import CANDIDATES, CHEAP, INSTRUCTIONS, WITHIN
from .ncu import Count, Request
from .study import by_label, by_twin, explained_elsewhere, findings, study, unusual

# Where classes differ in none but CANDIDATES and WITHIN, the metrics that do are counted again, so many times in all
# classes: the median of three outvotes what chance did to one run, and every class shows how far chance brings its
# runs. Of 21 classes with an event in one run of ten, one has two in its three runs in four of ten such looks. So this
# look only says which classes are in doubt; these, and two others, are counted so many times more, and ranks decide.
# The counts of the look before are not judged then: they come from other passes, with other metrics, and a difference
# between the two would be taken for chance.
LOOKS_AGAIN = (3, 15)


def _may_be_chance(differing: Iterable[str]) -> bool:
    """Whether the metrics that differ are all of those, of the first run, that need not be exact."""
    return all(metric in (*CANDIDATES, *WITHIN) for metric in differing)


@dataclass(frozen=True)
class Doubt:
    """Of a metric: what it says (texts), and the classes of which it does, with two to compare them with."""

    texts: tuple[str, ...]
    classes: tuple[str, ...]


def in_doubt(often: Iterable[Count], name: str) -> dict[str, Doubt]:
    """Metric to what it says against a subject, if chance may have done it all: differences in metrics that need not be
    exact. In few A/A pairs a rare event, such as one sector more in a million, is not seen."""
    shapes = {label: study(some) for label, some in by_label(often, name).items()}
    elsewhere = explained_elsewhere(shapes.values())
    found = [(label, *one) for label, seen in shapes.items() for one in findings(seen, elsewhere).items()]
    if not _may_be_chance(metric for _, metric, _ in found):
        return {}
    doubts = {}
    for metric in dict.fromkeys(metric for _, metric, _ in found):
        said = {label: text for label, of, text in found if of == metric}
        classes = dict.fromkeys(data for label in said for data in unusual(shapes[label][metric]))
        doubts[metric] = Doubt(tuple(f"{label}: {text}" for label, text in said.items()), tuple(classes))
    return doubts


def controls_in_doubt(often: Sequence[Count], expected: Mapping[str, str]) -> dict[str, list[str]]:
    """Of controls the metrics in which a twin differs of which nothing should be seen, if chance may have done it all:
    the clean one; of a control that is expected to be seen by nobody here the other, too."""
    found = {}
    for name, twins in by_twin(often, expected).items():
        silent = controls.TWINS if expected[name] == controls.BLIND else (controls.CLEAN,)
        seen = list(dict.fromkeys(metric for twin in silent for metric in twins[twin]))
        if seen and _may_be_chance(seen):
            found[name] = seen
    return found


def _judged_by(often: Sequence[Count], again: Sequence[Count], doubt: Mapping[str, Iterable[str]]) -> list[Count]:
    """The runs by which subjects and controls are judged that were looked at again: of the metrics in doubt (doubt: by
    name), the new look's alone; of executed instructions those of all looks, of others those judged before. Of a leak
    twin instructions are the first look's: else a leak that only they see would have a second chance."""
    judged = []
    for count in often:
        kept = count.values.keys() - doubt.get(count.name, ())
        judged.append(_only(count, kept))
    for count in again:
        if doubt.get(count.name):
            in_all = set() if count.label == controls.LEAK else {INSTRUCTIONS}
            judged.append(_only(count, in_all.union(doubt[count.name])))
    return judged


def _only(count: Count, metrics: Collection[str]) -> Count:
    return replace(count, values={metric: value for metric, value in count.values.items() if metric in metrics})


def without_doubt(
    often: Sequence[Count], first_look: Request, expected: Mapping[str, str], progress: Progress
) -> tuple[Sequence[Count], dict[str, list[dict[str, Doubt]]], dict[str, list[str]]]:
    """The runs by which all are judged, after looking again where chance may have done it; what was in doubt before
    each such look, by subject; and the metrics in which controls were before the first."""
    doubts: dict[str, list[dict[str, Doubt]]] = {}
    of_controls: dict[str, list[str]] = {}
    for look, times in enumerate(LOOKS_AGAIN):
        doubt = {name: found for part in first_look.parts.values() for name in part if (found := in_doubt(often, name))}
        of_planted = controls_in_doubt(often, expected)
        if not doubt and not of_planted:
            break
        again = _request_again(first_look, times, doubt, of_planted, is_first=not look)
        counted = ncu.measure(again, partial(_tell_again, progress, again.calls))
        often = _judged_by(often, counted, {**doubt, **of_planted})
        for name, found in doubt.items():
            doubts.setdefault(name, []).append(found)
        of_controls = of_controls or of_planted
    return often, doubts, of_controls


def _request_again(
    first_look: Request,
    times: int,
    doubt: Mapping[str, Mapping[str, Doubt]],
    of_planted: Mapping[str, Sequence[str]],
    is_first: bool,
) -> Request:
    """What is in doubt, so many times: at first with all classes, then with those in doubt; controls with all."""
    subjects = {}
    for call, data in first_look.subjects.items():
        doubtful = [one for name in first_look.parts[call] for one in doubt.get(name, {}).values()]
        in_question = tuple(dict.fromkeys(chosen for one in doubtful for chosen in one.classes))
        if doubtful:
            subjects[call] = (data if is_first else in_question) * times
    metrics = {INSTRUCTIONS}.union(*doubt.values(), *of_planted.values())
    return Request(
        tuple(metric for metric in CHEAP if metric in metrics),
        subjects,
        first_look.shapes,
        tuple(of_planted),
        first_look.control_data * times if of_planted else (),
        {call: first_look.parts[call] for call in subjects},
        first_look.application_replay,
    )


def _tell_again(progress: Progress, calls: int, done: int, what: str) -> None:
    progress(f"again: {what}", done, calls)
