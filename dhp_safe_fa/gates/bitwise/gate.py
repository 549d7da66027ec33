"""The gate `bitwise`: the same bytes in every run (C4), and for a row whatever is computed beside it (C5).

Docs: docs/gates-bitwise.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import dhp_safe_fa

from .. import controls, inputs
from ..inputs import Shape
from ..planted import THREADS, Planted
from ..subjects import Subject, require_gpu, require_shapes
from ..verdict import ControlOutcome, GateResult, Progress, conclude, not_run
from .compare import Outputs, compare_outputs, compare_runs
from .load import Load
from .memory import PoisonedBlocks, WrongMemory
from .rows import Rows, recompute

GATE = "bitwise"
_SEED = 30
_NAMES = ("out", "lse")

# The load has to be running for so much of the time of the runs beside it.
_LOAD_SHARE = 0.5

# What a control needs beside one CTA and memory that holds anything. A sum by atomics starts from zero, or poison alone
# would catch it; the split of row_variance is in rows, of which one CTA computes one.
_ATOMIC, _ROWS = "atomic_reduction", "row_variance"
_GRIDS = {_ATOMIC: inputs.SECRETS // THREADS, _ROWS: 4}
_COMPARED = 64  # floats of out: every clean twin writes as many


@dataclass(frozen=True)
class Extent:
    """Runs of each shape on normal inputs, on each other class of inputs, and of each control."""

    runs: int
    class_runs: int
    control_runs: int


QUICK = Extent(runs=100, class_runs=10, control_runs=100)
FULL = Extent(runs=1000, class_runs=50, control_runs=200)


def repeat(
    call: Callable[[], Outputs], names: Sequence[str], runs: int, beside: Callable[[], None] = lambda: None
) -> str:
    """`compare_runs` on poisoned memory. WrongMemory if the call was given other memory."""
    call()  # what a library sets up at first use is not part of every call
    return compare_runs(call, names, PoisonedBlocks(call()), runs, beside)


# ---- controls --------------------------------------------------------------------------------------------------------


def _planted_call(planted: Planted, name: str, twin: str, secret: Tensor, grid: int) -> Callable[[], Outputs]:
    allocate = torch.zeros if name == _ATOMIC else torch.empty

    def call() -> Outputs:
        out = allocate(inputs.SECRETS, device="cuda")
        planted.launch(name, twin, secret, out, grid)
        return (out[:_COMPARED],)

    return call


def _rows_alone(planted: Planted, twin: str, secret: Tensor) -> str:
    """Each row of row_variance computed alone, compared with all rows at once."""
    rows = _GRIDS[_ROWS]
    per_row = secret.numel() // rows
    together, alone = (torch.zeros(inputs.SECRETS, device="cuda") for _ in range(2))
    planted.launch(_ROWS, twin, secret, together, rows)
    for row in range(rows):
        own, out = torch.zeros_like(secret), torch.zeros_like(together)
        own[:per_row] = secret[row * per_row : (row + 1) * per_row]
        planted.launch(_ROWS, twin, own, out, 1)
        alone[row * THREADS : (row + 1) * THREADS] = out[:THREADS]
    return compare_outputs(["row alone: out"], (together,), (alone,))


def control_outcomes(extent: Extent, tell: Callable[[str], None]) -> list[ControlOutcome]:
    """All controls, leak and clean twin, repeated; row_variance also row by row."""
    loaded = controls.load_controls(tell)
    expected = loaded.expected_of(GATE)
    planted = Planted(loaded)
    secret = inputs.planted_secrets(_SEED)["normal"]
    outcomes = []
    for name, expects in expected.items():
        tell(name)
        said = {}
        for twin in controls.TWINS:
            call = _planted_call(planted, name, twin, secret, _GRIDS.get(name, 1))
            said[twin] = repeat(call, ["out"], extent.control_runs)
            if name == _ROWS:
                said[twin] = "; ".join(filter(None, (said[twin], _rows_alone(planted, twin, secret))))
        outcomes.append(controls.judge_executed(name, expects, said["leak"], said["clean"]))
    return outcomes


# ---- subjects --------------------------------------------------------------------------------------------------------


def _names(outputs: Outputs) -> tuple[str, ...]:
    return _NAMES[: len(outputs)]


def repeat_shape(subject: Subject, shape: Shape, extent: Extent) -> tuple[list[str], float]:
    """All classes of inputs repeated alone, then the normal one beside a load. Returns the differences, and for which
    part of the time the load was running."""
    problems = []

    def call_of(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Outputs]:
        return lambda: subject.attend(q, k, v, shape.is_causal)

    with subject.context():
        for name in inputs.CLASSES:
            call = call_of(*inputs.make(name, shape, _SEED))
            runs = extent.runs if name == "normal" else extent.class_runs
            problems.append((name, repeat(call, _names(call()), runs)))
        call = call_of(*inputs.make("normal", shape, _SEED))
        load = Load()
        problems.append(("normal, beside a load", repeat(call, _names(call()), extent.runs, load)))
    return [f"{shape} {name}: {said}" for name, said in problems if said], load.busy_share()


def _attend_offset(q: Tensor, k: Tensor, v: Tensor, causal_offset: int) -> Outputs:
    return dhp_safe_fa.attention_lse(q, k, v, is_causal=True, causal_offset=causal_offset)


def rows_of_shape(subject: Subject, shape: Shape) -> Rows:
    """Row invariance on one shape; ours also with a causal_offset."""
    is_ours = bool(subject.kernels)
    own, stranger = (inputs.make("normal", shape, seed) for seed in (_SEED, _SEED + 1))

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Outputs:
        return subject.attend(q, k, v, is_causal)

    with subject.context():
        names = _names(attend(*own, shape.is_causal))
        return recompute(attend, names, own, stranger, shape.is_causal, _attend_offset if is_ours else None)


def examine(
    subject: Subject, extent: Extent, outcomes: list[ControlOutcome], tell: Callable[[str], None]
) -> GateResult:
    """Repeats and row invariance of one subject, on all its shapes. What a peer refuses to compute is counted; ours
    must compute everything."""
    repeats: list[str] = []
    differing: list[str] = []
    refused: list[str] = []
    ways, share = 0, 1.0
    for shape in subject.shapes:
        tell(f"{subject.name} {shape}")
        try:
            said, busy = repeat_shape(subject, shape, extent)
        except WrongMemory as error:
            return not_run(GATE, subject.name, f"{shape}: {error}")
        repeats += said
        share = min(share, busy)
        rows = rows_of_shape(subject, shape)
        differing += [f"{shape} {line}" for line in rows.differing]
        refused += [f"{shape} {line}" for line in rows.refused]
        ways += rows.ways
    running = f"was running for {100 * share:.0f} % of the time"
    load = ControlOutcome("co-running load", controls.CAUGHT, running, running if share < _LOAD_SHARE else "")
    figures = {
        "shapes": len(subject.shapes),
        "runs": extent.runs,
        "beside a load": extent.runs,
        "on other classes": extent.class_runs,
        "differing": len(repeats),
        "ways to compute a row": ways,
        "differing ways": len(differing),
        "refused": len(refused),
    }
    problems = repeats + differing + (refused if subject.kernels else [])
    return conclude(GATE, subject.name, figures, problems, outcomes, [load])


def run(subjects: Sequence[Subject], quick: bool, progress: Progress) -> list[GateResult]:
    """Controls, then all subjects. NotRun without a Hopper GPU."""
    require_gpu()
    require_shapes(subjects)
    extent = QUICK if quick else FULL
    total = len(controls.load_controls().expects) + sum(len(subject.shapes) for subject in subjects)
    done = 0

    def tell(text: str) -> None:
        nonlocal done
        progress(text, done, total)
        done = min(done + 1, total)

    outcomes = control_outcomes(extent, tell)
    return [examine(subject, extent, outcomes, tell) for subject in subjects]
