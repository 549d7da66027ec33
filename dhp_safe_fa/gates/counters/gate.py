"""The gate `counters`: what Nsight Compute counts is the same for every input, to the last digit.

Each class of a subject's inputs is run several times. A metric that is the same in all runs of the same input (A/A) is
*exact*, and then has to be the same over all classes. That counts of executed instructions are exact is demanded: a
kernel that spins executes what chance decides. Of a metric that need not be, but is the median of its class in three
runs of four, the medians have to be equal; of others they may lie no farther apart than what A/A shows of chance
explains. Where classes differ in none but such metrics, these are counted again, in more runs, and judged by those
alone: what chance did to one run is then outvoted, and what data do comes again; twice at most. So are controls whose
clean twin differs so. Bytes, cache traffic and time are reported, their spread over the classes beside their spread in
A/A.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import controls
from ..subjects import Subject, require_shapes
from ..verdict import ControlOutcome, GateResult, Progress, conclude
from . import ncu
from .looks import Settled, without_doubt
from .metrics import (
    CHEAP,
    CONTROLS_ONCE,
    COSTLY,
    INSTRUCTIONS,
    ONCE_ALONE,
    REGISTERS,
    REPORTED,
    TIME,
    WITHIN,
)
from .ncu import Count, Request
from .study import Study, base_of, by_label, by_twin, explained_elsewhere, findings, study

GATE = "counters"


@dataclass(frozen=True)
class Extent:
    """How much is run, as lists of classes of data. One that comes twice is an A/A pair.

    Attributes:
        shapes: of each subject.
        repeats: of every class of a subject's inputs, for each shape.
        again: classes that are run once more.
        data_once: for one shape, with the metrics that take many passes; empty for every class twice.
        control_data: of ``inputs.planted_secrets``, for each control.
        control_data_once: the same, for CONTROLS_ONCE.
        reported: what is counted beside COSTLY.
    """

    shapes: int
    repeats: int
    again: tuple[str, ...]
    data_once: tuple[str, ...]
    control_data: tuple[str, ...]
    control_data_once: tuple[str, ...]
    reported: tuple[str, ...] = ()

    def data(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """For each shape of a subject with these classes."""
        return (*classes * self.repeats, *self.again)

    def once(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """For its one shape with the costly metrics."""
        return self.data_once or classes * 2


QUICK = Extent(
    shapes=2,
    repeats=1,
    again=("zeros", "normal", "NaN rows"),
    data_once=("zeros", "normal", "large", "NaN rows") * 2,
    control_data=("zeros", "ascending", "large", "NaN", "zeros"),
    control_data_once=("zeros", "ascending", "NaN", "zeros"),
)
FULL = Extent(
    shapes=4,
    repeats=2,
    again=(),
    data_once=(),
    control_data=("zeros", "normal", "large", "ascending", "descending", "denormals", "NaN", "zeros", "normal"),
    control_data_once=("zeros", "ascending", "NaN") * 2,
    reported=REPORTED,
)


def judge_controls(counts: Sequence[Count], expected: dict[str, str]) -> list[ControlOutcome]:
    """What the metrics of all shapes saw of each control."""
    outcomes = []
    for name, said in by_twin(counts, expected).items():
        leak, clean = ("; ".join(list(said[twin].values())[:2]) for twin in controls.TWINS)
        expects = controls.MAY if name in ONCE_ALONE else expected[name]
        outcomes.append(controls.judge_executed(name, expects, leak, clean))
    return outcomes


def judge_controls_once(counts: Sequence[Count]) -> list[ControlOutcome]:
    """What the costly metrics saw of CONTROLS_ONCE: each has to see its own control's leak, and none a clean twin."""
    said = by_twin(counts, CONTROLS_ONCE.values())
    outcomes = []
    for metric, name in CONTROLS_ONCE.items():
        leak = "; ".join(text for found, text in said[name][controls.LEAK].items() if base_of(found) == metric)
        clean = "; ".join(list(said[name][controls.CLEAN].values())[:2])
        outcomes.append(controls.judge_executed(f"{name}: {metric}", controls.CAUGHT, leak, clean))
    return outcomes


def _other_kernels(runs: Sequence[Count]) -> list[str]:
    """Runs that launch other kernels than the first one: data, or chance, decide over it."""
    first, *others = runs
    differing = dict.fromkeys(run.data for run in others if run.kernels != first.kernels)
    return [f"{data} launches other kernels than {first.data}" for data in differing]


def judge_subject(name: str, often: Settled, once: Settled, outcomes: list[ControlOutcome]) -> GateResult:
    """The verdict on one subject, from its runs on all shapes (often) and those with the costly metrics (once)."""
    runs = [*by_label(often.counts, name).items(), *by_label(once.counts, name).items()]
    shapes = {label: study(some) for label, some in by_label(often.counts, name).items()}
    costly = {label: study(some) for label, some in by_label(once.counts, name).items()}
    doubts = [*often.doubts.get(name, ()), *once.doubts.get(name, ())]
    studies = [*shapes.items(), *costly.items()]
    elsewhere = explained_elsewhere(seen for _, seen in studies)
    problems = [f"{label}: {text}" for label, seen in studies for text in findings(seen, elsewhere).values()]
    problems += [f"{label}: {text}" for label, some in runs for text in _other_kernels(some)]
    idle = [label for label, seen in shapes.items() if not seen[INSTRUCTIONS].value]
    problems += [f"{label}: no instruction was counted" for label in idle]
    gated = {metric for _, seen in studies for metric in seen if base_of(metric) not in (*REPORTED, *WITHIN)}
    noisy = {metric for _, seen in studies for metric in gated & set(seen) if not seen[metric].is_exact}
    first, detail = next(iter(shapes.values())), next(iter(costly.values()))
    figures: dict[str, Any] = {
        "shapes": len(shapes),
        "calls": sum(count.name == name for count in (*often.counts, *once.counts)),
        "instructions": int(first[INSTRUCTIONS].value),
        "registers": int(first[REGISTERS].value),
        "exact": f"{len(gated - noisy)} of {len(gated)}",
        "differ": len({metric for _, seen in studies for metric in gated & set(findings(seen, elsewhere))}),
        "time: classes (A/A)": _spreads(detail[TIME]) if TIME in detail else "not counted",
        "not exact": sorted(noisy),
        "looks": 1 + max(len(run.doubts.get(name, ())) for run in (often, once)),
        "in doubt": [text for before in doubts for doubt in before.values() for text in doubt.texts],
        "controls in doubt at first": {
            planted: [*often.controls.get(planted, ()), *once.controls.get(planted, ())]
            for planted in {**often.controls, **once.controls}
        },
        "kernels": sorted({kernel for count in often.counts if count.name == name for kernel in count.kernels}),
        "counted": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in shapes.items()},
        "counted once": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in costly.items()},
    }
    return conclude(GATE, name, figures, problems, outcomes)


def _spreads(seen: Study) -> str:
    return f"{seen.classes_percent:.1f} ({seen.aa_percent:.1f}) %"


def _as_json(seen: Study) -> dict[str, Any]:
    return {"value": seen.value} if seen.is_equal else asdict(seen)


def run(subjects: list[Subject], quick: bool, progress: Progress) -> list[GateResult]:
    """Count controls and subjects; the kernels of a call in one. NotRun if there is no Nsight Compute, or it may not
    count."""
    require_shapes(subjects)
    calls: dict[str, Subject] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for subject in subjects:
        call = subject.call()
        first = next((name for name, other in calls.items() if other.name == call.name), subject.name)
        calls.setdefault(first, call)
        parts[first] = (*parts.get(first, ()), subject.name)
    require_shapes(calls.values())
    expected = controls.load_controls(lambda text: progress(text, 0, 1)).expected_of(GATE)
    extent = QUICK if quick else FULL
    shapes = min(extent.shapes, *(len(call.shapes) for call in calls.values()))
    planted, planted_once = tuple(expected), tuple(CONTROLS_ONCE.values())
    data = {name: extent.data(call.classes) for name, call in calls.items()}
    data_once = {name: extent.once(call.classes) for name, call in calls.items()}
    is_shipped = all(subject.cubin_sha256 for subject in subjects)  # a peer may launch others in another run
    for_all = Request(CHEAP, data, shapes, planted, extent.control_data, parts, application_replay=is_shipped)
    for_one = Request((*COSTLY, *extent.reported), data_once, 1, planted_once, extent.control_data_once, parts)
    in_first = for_all.calls
    total = in_first + for_one.calls
    seen_often = ncu.measure(for_all, lambda done, what: progress(what, done, total))
    seen_once = ncu.measure(for_one, lambda done, what: progress(what, in_first + done, total))
    often = without_doubt(seen_often, for_all, expected, progress)
    once = without_doubt(seen_once, for_one, dict.fromkeys(planted_once, controls.CAUGHT), progress)
    outcomes = [*judge_controls(often.counts, expected), *judge_controls_once(once.counts)]
    return [judge_subject(one.name, often, once, outcomes) for one in subjects]
