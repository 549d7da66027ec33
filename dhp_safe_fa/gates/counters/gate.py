"""The gate `counters`: what a launch executes and asks of memory is the same for every input, to the last digit.

Each class of a subject's inputs is run several times. A metric that is the same in all runs of the same input (A/A) is
*exact*, and then has to be the same over all classes. That counts of executed instructions are exact is demanded: a
kernel that spins executes what chance decides. Of a metric that need not be, but is the median of its class in three
runs of four, the medians have to be equal; of others they may lie no farther apart than what A/A shows of chance
explains. Where classes differ in none but such metrics, these are counted again, in more runs, and judged by those
alone: what chance did to one run is then outvoted, and what data do comes again; twice at most. So are controls whose
clean twin differs so. Bytes, cache traffic and time are reported, their spread over the classes beside their spread in
A/A. The hardware counts on all shapes (hardware.py), patched code each opcode, and its guards, on one (ncu.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .. import controls
from ..subjects import Subject, require_shapes
from ..verdict import ControlOutcome, GateResult, Progress, conclude
from . import hardware, ncu
from .counting import Count, Request
from .looks import Settled, without_doubt
from .metrics import (
    ALIVE,
    HARDWARE,
    INSTRUCTIONS,
    PATCHED,
    PATCHED_CONTROLS,
    REGISTERS,
    TIME,
    WITHIN,
    base_of,
    is_reported,
)
from .study import Study, by_label, by_twin, explained_elsewhere, findings, study

GATE = "counters"


@dataclass(frozen=True)
class Extent:
    """How much is run, as lists of classes of data. One that comes twice is an A/A pair.

    Attributes:
        shapes: of each subject.
        repeats: of every class of a subject's inputs, for each shape.
        again: classes that are run once more.
        control_data: of ``inputs.planted_secrets``, for each control, also where patched code counts.
        patched: for the one shape on which patched code counts; empty for every class, and `patched_again` once more.
        patched_again: see there.
    """

    shapes: int
    repeats: int
    again: tuple[str, ...]
    control_data: tuple[str, ...]
    patched: tuple[str, ...]
    patched_again: tuple[str, ...]

    def data(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """For each shape of a subject with these classes."""
        return (*classes * self.repeats, *self.again)

    def data_patched(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """For its one shape with patched code."""
        return (*(self.patched or classes), *self.patched_again)


QUICK = Extent(
    shapes=2,
    repeats=1,
    again=("zeros", "normal", "NaN rows"),
    control_data=("zeros", "ascending", "large", "NaN", "zeros"),
    patched=("zeros", "normal", "large", "NaN rows"),
    patched_again=("zeros", "normal", "large", "NaN rows"),
)
FULL = Extent(
    shapes=4,
    repeats=2,
    again=(),
    control_data=("zeros", "normal", "large", "ascending", "descending", "denormals", "NaN", "zeros", "normal"),
    patched=(),
    patched_again=("zeros", "normal", "NaN rows"),
)


def judge_controls(
    counts: Sequence[Count], patched: Sequence[Count], expected: Mapping[str, str]
) -> list[ControlOutcome]:
    """What was counted of each control, by the hardware and by patched code; then, for each metric that has a leak of
    its own, whether it has seen that."""
    said = by_twin(counts, expected)
    for name, twins in by_twin(patched, _patched_of(expected)).items():
        said[name] = {twin: {**said[name][twin], **found} for twin, found in twins.items()}

    def judge(name: str, expects: str, metric: str = "") -> ControlOutcome:
        texts = (
            [text for of, text in said[name][twin].items() if metric in ("", base_of(of))] for twin in controls.TWINS
        )
        leak, clean = ("; ".join(some[:2]) for some in texts)
        return controls.judge_executed(f"{name}: {metric}" if metric else name, expects, leak, clean)

    outcomes = [judge(name, expects) for name, expects in expected.items()]
    return outcomes + [judge(name, controls.CAUGHT, metric) for metric, name in ALIVE.items() if name in expected]


def _patched_of(expected: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in PATCHED_CONTROLS if name in expected)


def _other_kernels(runs: Sequence[Count]) -> list[str]:
    """Runs that launch other kernels than the first one: data, or chance, decide over it."""
    first, *others = runs
    differing = dict.fromkeys(run.data for run in others if run.kernels != first.kernels)
    return [f"{data} launches other kernels than {first.data}" for data in differing]


def judge_subject(name: str, often: Settled, patched: Sequence[Count], outcomes: list[ControlOutcome]) -> GateResult:
    """The verdict on one subject, from its runs on all shapes (often) and those with patched code."""
    runs = [*by_label(often.counts, name).items(), *by_label(patched, name).items()]
    shapes = {label: study(some) for label, some in by_label(often.counts, name).items()}
    once = {label: study(some) for label, some in by_label(patched, name).items()}
    doubts = often.doubts.get(name, ())
    studies = [*shapes.items(), *once.items()]
    elsewhere = explained_elsewhere(seen for _, seen in studies)
    problems = [f"{label}: {text}" for label, seen in studies for text in findings(seen, elsewhere).values()]
    problems += [f"{label}: {text}" for label, some in runs for text in _other_kernels(some)]
    idle = [label for label, seen in shapes.items() if not seen[INSTRUCTIONS].value]
    problems += [f"{label}: no instruction was counted" for label in idle]
    judged = {metric for _, seen in studies for metric in seen if not is_reported(metric)}
    gated = {metric for metric in judged if base_of(metric) not in WITHIN}
    noisy = {metric for _, seen in studies for metric in gated & set(seen) if not seen[metric].is_exact}
    first = next(iter(shapes.values()))
    figures: dict[str, Any] = {
        "shapes": len(shapes),
        "calls": sum(count.name == name for count in (*often.counts, *patched)),
        "instructions": int(first[INSTRUCTIONS].value),
        "registers": int(first[REGISTERS].value),
        "exact": f"{len(gated - noisy)} of {len(gated)}",
        "differ": len({metric for _, seen in studies for metric in gated & set(findings(seen, elsewhere))}),
        "time: classes (A/A)": _spreads(first[TIME]),
        "not exact": sorted(noisy),
        "looks": 1 + len(doubts),
        "in doubt": [text for before in doubts for doubt in before.values() for text in doubt.texts],
        "controls in doubt at first": often.controls,
        "kernels": sorted({kernel for count in often.counts if count.name == name for kernel in count.kernels}),
        "counted": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in shapes.items()},
        "counted once": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in once.items()},
    }
    return conclude(GATE, name, figures, problems, outcomes)


def _spreads(seen: Study) -> str:
    return f"{seen.classes_percent:.1f} ({seen.aa_percent:.1f}) %"


def _as_json(seen: Study) -> dict[str, Any]:
    return {"value": seen.value} if seen.is_equal else asdict(seen)


def run(subjects: list[Subject], quick: bool, progress: Progress) -> list[GateResult]:
    """Count controls and subjects; the kernels of a call in one. NotRun without a Hopper GPU, CUPTI and Nsight Compute,
    and if they may not count."""
    require_shapes(subjects)
    ncu.find_ncu()
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
    data = {name: extent.data(call.classes) for name, call in calls.items()}
    for_all = Request(HARDWARE, data, shapes, tuple(expected), extent.control_data, parts)
    once = {name: extent.data_patched(call.classes) for name, call in calls.items()}
    for_one = Request(PATCHED, once, 1, _patched_of(expected), extent.control_data, parts)
    total = for_all.calls + for_one.calls
    seen = hardware.measure(for_all, lambda done, what: progress(what, done, total))
    patched = ncu.measure(for_one, lambda done, what: progress(what, for_all.calls + done, total))
    often = without_doubt(seen, for_all, expected, progress)
    outcomes = judge_controls(often.counts, patched, expected)
    return [judge_subject(one.name, often, patched, outcomes) for one in subjects]
