"""The gate `bitwise`: the same bytes in every run (C4), and for a row whatever is computed beside it (C5).

Docs: docs/gates-bitwise.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .. import controls
from ..inputs import Shape
from ..subjects import Subject, require_gpu, require_shapes
from ..verdict import ControlOutcome, GateResult, Progress, conclude, not_run
from .compare import Outputs, kept, repeat
from .controls import control_outcomes
from .load import Load
from .memory import WrongMemory
from .rows import Rows, rows_of_shape

GATE = "bitwise"
_SEED = 30

# The load has to be running for so much of the time of the runs beside it. If it was not, because these took longer
# than the same runs alone, they are made again beside a load so many times as long.
_LOAD_SHARE = 0.5
_LONGER = (1, 4)


@dataclass(frozen=True)
class Extent:
    """Runs of each shape on normal inputs, on each other class of inputs, and of each control."""

    runs: int
    class_runs: int
    control_runs: int


QUICK = Extent(runs=100, class_runs=10, control_runs=100)
FULL = Extent(runs=1000, class_runs=50, control_runs=200)


def repeat_shape(subject: Subject, shape: Shape, extent: Extent) -> tuple[list[str], float]:
    """All classes of inputs repeated alone, then the normal one beside a load, with the bits that it has alone. Returns
    the differences, and for which part of the time the load was running, the last time."""
    problems = []
    took_ms = 0.0  # a run on normal inputs, with all that goes with it
    share = 0.0

    def call_of(name: str) -> Callable[[], Outputs]:
        made = subject.make(name, shape, _SEED, "cuda")
        return lambda: subject.attend(made, shape.is_causal)

    with subject.context():
        for name in subject.classes:
            call = call_of(name)
            runs = extent.runs if name == "normal" else extent.class_runs
            began = time.perf_counter()
            problems.append((name, repeat(call, subject.outputs, runs)))  # ends when the device has
            if name == "normal":
                took_ms = (time.perf_counter() - began) * 1e3 / runs
        call = call_of("normal")
        alone = kept(call())
        for longer in _LONGER:
            load = Load(longer * took_ms)
            said = repeat(call, subject.outputs, extent.runs, load, alone)
            problems.append(("normal, beside a load", said))
            share = load.busy_share()
            if said or share >= _LOAD_SHARE:  # what was found stands, whatever ran beside it
                break
    return [f"{shape} {name}: {said}" for name, said in problems if said], share


class NoRows(Exception):
    """Nothing was compared, because every way to compute rows again was refused."""


def _all_rows(subject: Subject, shape: Shape) -> Rows:
    """Row invariance of all row_classes on one shape. NoRows if a class could not be computed in any second way."""
    found = Rows([], [], 0)
    for own, company in subject.row_classes.items():
        rows = rows_of_shape(subject, shape, own, company, _SEED)
        if len(rows.refused) == rows.ways:
            raise NoRows(f"no row could be computed again: {', '.join(rows.refused[:1]) or 'there was no way'}")
        differing, refused = ([f"{shape} {own}: {line}" for line in some] for some in (rows.differing, rows.refused))
        found = found.and_more(Rows(differing, refused, rows.ways))
    return found


def examine(
    subject: Subject, extent: Extent, outcomes: list[ControlOutcome], tell: Callable[[str], None]
) -> GateResult:
    """Repeats and row invariance of one subject, on all its shapes. What a peer refuses to compute is counted; ours
    must compute everything. Where a shape cannot be looked at, it was not run, unless something has been found."""
    repeats: list[str] = []
    rows = Rows([], [], 0)
    share = 1.0
    for shape in subject.shapes:
        tell(f"{subject.name} {shape}")
        try:
            said, busy = repeat_shape(subject, shape, extent)
            repeats += said
            share = min(share, busy)
            rows = rows.and_more(_all_rows(subject, shape))
        except (WrongMemory, NoRows) as error:
            if not repeats + rows.differing:
                return not_run(GATE, subject.name, f"{shape}: {error}")
            repeats.append(f"{shape}: not run: {error}")
    figures = {
        "shapes": len(subject.shapes),
        "runs": extent.runs,
        "beside a load": extent.runs,
        "on other classes": extent.class_runs,
        "differing": len(repeats),
        "ways to compute a row": rows.ways,
        "differing ways": len(rows.differing),
        "refused": len(rows.refused),
    }
    problems = repeats + rows.differing + (rows.refused if subject.kernels else [])
    running = f"was running for {100 * share:.0f} % of the time"
    idle = share < _LOAD_SHARE and not problems  # what was found stands, whatever ran beside it
    load = ControlOutcome("co-running load", controls.CAUGHT, running, running if idle else "")
    return conclude(GATE, subject.name, figures, problems, outcomes, [load])


def run(subjects: Sequence[Subject], quick: bool, progress: Progress) -> list[GateResult]:
    """Controls, then all subjects; kernels of the same call in one, and what is found there is found of each. NotRun
    without a Hopper GPU."""
    require_gpu()
    require_shapes(subjects)
    calls = {subject.name: subject.call() for subject in subjects}
    wholes = {call.name: call for call in calls.values()}
    require_shapes(wholes.values())
    extent = QUICK if quick else FULL
    total = len(controls.load_controls().expects) + sum(len(call.shapes) for call in wholes.values())
    done = 0

    def tell(text: str) -> None:
        nonlocal done
        progress(text, done, total)
        done = min(done + 1, total)

    outcomes = control_outcomes(extent.control_runs, tell)
    found = {name: examine(call, extent, outcomes, tell) for name, call in wholes.items()}
    return [replace(found[calls[subject.name].name], subject=subject.name) for subject in subjects]
