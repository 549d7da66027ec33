"""The gate `timing`: does a kernel take longer for some inputs than for others of equal bit statistics?

A pass says that no difference was found in the cycles a launch takes, beyond what the clock does to them, and how large
one would have had to be to be found. How long a cycle lasts follows from power; that channel is measured beside it and
reported, not judged (docs/gates-timing.md).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .. import controls, inputs
from ..inputs import Shape
from ..planted import Planted
from ..subjects import Subject, require_shapes
from ..verdict import ControlOutcome, GateResult, Progress, conclude, not_run
from .clock import Clock, GpuClock, Job
from .controls import Delays, delay_outcomes, planted_outcome, planted_study
from .inputs import POWER, POWER_REFERENCE, REFERENCE, SAME, UNLIKE
from .judge import Comparison, Judged, Resolution, Study, compare, first_look, judge
from .stats import permutations_for

GATE = "timing"
# Inputs are the same in every run; the order of the launches is not, nor are the permutations.
_SEED = 20

# In cycles: a run that could only have found more than this is no evidence of constant time. The gate's shapes have
# eight tiles of keys or more, so 2 % is a sixth of the time that one tile takes. A full run looks for a quarter of it.
CEILING_PERCENT = 2.0
_FULL_PERCENT = 0.5
_QUICK_PERCENT = 1.5  # less than the limit, beyond which chance would carry a third of what has just that noise


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        shapes: of each subject, at most.
        blocks: launches of each class on a subject at least; of the planted controls, and of the power classes.
        resolution: what is to be found, and in how many blocks at most.
        sustained_s: length of one back-to-back run.
        repeats: back-to-back runs of each class.
    """

    shapes: int
    blocks: int
    resolution: Resolution
    control_blocks: int
    power_blocks: int
    sustained_s: float
    repeats: int


QUICK = Extent(
    shapes=2,
    blocks=200,
    resolution=Resolution(_QUICK_PERCENT, 1600),
    control_blocks=150,
    power_blocks=100,
    sustained_s=0.05,
    repeats=2,
)
FULL = Extent(
    shapes=4,
    blocks=200,
    resolution=Resolution(_FULL_PERCENT, 2000),
    control_blocks=200,
    power_blocks=400,
    sustained_s=0.2,
    repeats=3,
)


def attention_job(subject: Subject, shape: Shape, contents: dict[str, Any]) -> Job:
    """The subject on buffers of that shape."""
    buffers = tuple(tensor.clone() for tensor in next(iter(contents.values())))
    return Job(lambda: subject.attend(buffers, shape.is_causal), buffers, contents, subject.context, subject.entry)


def _matched_study(subject: Subject, shape: Shape) -> Study:
    def make() -> Job:
        unlike = {UNLIKE: subject.power(shape, _SEED, "cuda")[UNLIKE]}
        return attention_job(subject, shape, subject.matched(shape, _SEED, "cuda") | unlike)

    return Study(f"{subject.name} {shape}", make, REFERENCE, SAME, subject.tested, UNLIKE)


def _control_outcomes(
    subject: Subject, clock: Clock, extent: Extent, rng: np.random.Generator, tell: Progress, total: int
) -> list[ControlOutcome]:
    """All controls; the delays ride on the subject's first shape."""
    loaded = controls.load_controls(lambda text: tell(text, 0, total))
    expected = loaded.expected_of(GATE)
    planted = Planted(loaded)
    secrets = inputs.planted_secrets(_SEED)
    outcomes = []
    for done, (name, expects) in enumerate(expected.items()):
        tell(name, done, total)
        study = partial(planted_study, planted, name, secrets=secrets)
        outcomes.append(planted_outcome(name, expects, study, clock, extent.control_blocks, rng))
    tell(f"delays behind {subject.name}", len(expected), total)
    shape = subject.shapes[0]
    attention = attention_job(subject, shape, {REFERENCE: subject.matched(shape, _SEED, "cuda")[REFERENCE]})

    return outcomes + delay_outcomes(Delays(planted, subject, attention), clock, extent.blocks, rng)


def power_channel(subject: Subject, clock: Clock, extent: Extent, rng: np.random.Generator) -> dict[str, Any]:
    """Zeros, ones and large numbers against normal ones, on the subject's first shape: report only.

    Returns, by class: effect in % of the time of "normal", launches interleaved with idle gaps (with its p, and the
    effect in % of the cycle counter) and sustained.
    """
    shape = subject.shapes[0]
    contents = subject.power(shape, _SEED, "cuda")

    def make() -> Job:
        return attention_job(subject, shape, contents)

    study = Study(f"{subject.name} {shape} power", make, POWER_REFERENCE, (), POWER)
    interleaved = compare(study, clock, extent.power_blocks, permutations_for(len(POWER)), rng)
    names = (POWER_REFERENCE, *POWER)
    sustained: dict[str, list[float]] = {name: [] for name in names}
    job = make()
    for _ in range(extent.repeats):
        for index in rng.permutation(len(names)):
            sustained[names[index]].append(clock.sustained(job, names[index], extent.sustained_s))
    base = float(np.median(sustained[POWER_REFERENCE]))
    return {
        name: {
            "interleaved_percent": interleaved.percent_ns(name),
            "interleaved_p": interleaved.ns.of[name].p,
            "interleaved_cycles_percent": interleaved.percent(name),
            "sustained_percent": 100 * (float(np.median(sustained[name])) / base - 1),
        }
        for name in POWER
    }


def _largest(channel: dict[str, Any], key: str) -> float:
    """The value farthest from 0."""
    values: list[float] = [one[key] for one in channel.values()]
    return max(values, key=abs)


_DOUBTFUL = "its clock explains that only if launches wait longer than zeros say"


def _detectable(one: Judged) -> str:
    return f"{one.detectable_percent:.2f} % ({one.detectable_ns:.0f} ns)"


def _span(numbers: Sequence[int]) -> str:
    return f"{min(numbers)} to {max(numbers)}" if len(set(numbers)) > 1 else str(numbers[0])


def result_of(
    subject: Subject, judged: Sequence[Judged], channel: dict[str, Any], outcomes: list[ControlOutcome]
) -> GateResult:
    """One subject's verdict. judged: its shapes."""

    def shape(one: Judged) -> str:
        return one.first.study.name.removeprefix(subject.name).strip()

    def lines(one: Judged, names: list[str]) -> list[str]:
        return [f"{shape(one)}: {one.describe(name)}" for name in names]

    found = [line for one in judged for line in lines(one, one.differences)]
    identical = [f"identical inputs differ: {line}" for one in judged for line in lines(one, one.invalid)]
    same = ControlOutcome("A/A", controls.BLIND, "; ".join(identical) or "nothing", "; ".join(identical))
    doubtful = [f"{line}; {_DOUBTFUL}" for one in judged if not found for line in lines(one, one.doubtful)]
    waiting = ControlOutcome("waiting", controls.MAY, "; ".join(doubtful) or "nothing", "; ".join(doubtful))
    weakest = max(judged, key=lambda one: one.detectable_percent)
    # what was found stands, however coarse the measurement: false alarms are bounded by the p-values
    coarse = [
        f"{shape(one)}: only a difference of {_detectable(one)} would have been found; {CEILING_PERCENT:g} % is needed"
        for one in judged
        if not found and not one.detectable_percent <= CEILING_PERCENT  # so that NaN is refused, too
    ]
    resolution = ControlOutcome("resolution", controls.MAY, _detectable(weakest), "; ".join(coarse))
    by_clock = [(one.first.percent_ns(name), name) for one in judged for name in one.clock]
    percent, name = max(by_clock, key=lambda pair: abs(pair[0]), default=(0.0, ""))
    figures = {
        "shapes": len(judged),
        "blocks": _span([len(one.first.sample.ns) for one in judged]),
        "difference": f"{len(found)} found" if found else f"none found at {_detectable(weakest)}",
        "by the clock alone": f"{name} {percent:+.2f} %" if name else "none found",
        "power: interleaved %": _largest(channel, "interleaved_percent"),
        "sustained %": _largest(channel, "sustained_percent"),
        "detectable": {"percent": weakest.detectable_percent, "ns": weakest.detectable_ns},
        "studies": [one.as_json() for one in judged],
        "power": channel,
    }
    problems = identical + found + doubtful + coarse
    return conclude(GATE, subject.name, figures, problems, outcomes, [same, waiting, resolution])


def run(subjects: Sequence[Subject], quick: bool, progress: Progress) -> list[GateResult]:
    """Time all subjects on their matched classes; controls first. NotRun without a Hopper GPU."""
    return run_on(GpuClock(), subjects, QUICK if quick else FULL, progress)


def run_on(clock: Clock, subjects: Sequence[Subject], extent: Extent, progress: Progress) -> list[GateResult]:
    """`run`, by a given clock. A TimeoutError of `progress` says that time is up: subjects that have not been measured
    are NOT RUN, the others are judged. While controls are run it ends all."""
    require_shapes(subjects)
    rng = np.random.default_rng()
    control_steps = len(controls.load_controls().expects)
    chosen = {subject.name: subject.shapes[: extent.shapes] for subject in subjects}
    total = control_steps + sum(map(len, chosen.values())) + len(subjects)
    outcomes = _control_outcomes(subjects[0], clock, extent, rng, progress, total)
    done = control_steps

    def tell(text: str) -> None:
        nonlocal done
        done += 1
        progress(text, min(done, total), total)

    tests = sum(len(subject.tested) * len(chosen[subject.name]) for subject in subjects)
    measured: list[tuple[Subject, list[Comparison], dict[str, Any]]] = []
    stopped: list[GateResult] = []
    for subject in subjects:
        try:
            firsts = []
            for shape in chosen[subject.name]:
                study = _matched_study(subject, shape)
                tell(study.name)
                firsts.append(first_look(study, clock, extent.blocks, tests, rng, extent.resolution))
            tell(f"{subject.name}: power")
        except TimeoutError as error:
            stopped = [not_run(GATE, left.name, error) for left in subjects[len(measured) :]]
            break
        measured.append((subject, firsts, power_channel(subject, clock, extent, rng)))

    def tell_late(text: str) -> None:
        with suppress(TimeoutError):  # what was found is looked at again, however late it is
            tell(text)

    judged = iter(judge([first for _, firsts, _ in measured for first in firsts], clock, tests, rng, tell_late))
    results = [
        result_of(subject, [next(judged) for _ in firsts], channel, outcomes) for subject, firsts, channel in measured
    ]
    return results + stopped


def plot(results: Sequence[GateResult], path: Path) -> None:
    """Draw the distributions of all subjects that were measured. What stops it is printed: the results stand."""
    studies = [study for result in results for study in result.figures.get("studies", [])]
    if not studies:
        return
    try:
        from .plot import draw  # matplotlib is needed here only

        draw(studies, path)
    except (ImportError, ValueError, OSError) as error:
        print(f"--plot {path}: not drawn: {error}", file=sys.stderr)
