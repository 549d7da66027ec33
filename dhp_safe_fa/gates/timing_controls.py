"""Planted leaks for the gate `timing`: every control of tests/controls/, and delays of a chosen size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from . import controls, inputs
from .planted import Planted
from .subjects import Subject
from .timing_clock import Clock, Job
from .timing_inputs import REFERENCE, SAME
from .timing_judge import Judged, Study, compare, judge
from .timing_stats import detectable, permutations_for
from .verdict import ControlOutcome

# Classes of planted_secrets that are compared with "normal".
_TESTED = ("zeros", "large", "ascending", "descending", "denormals", "NaN")

DELAY = "calibrated_delay"
# Delays, as multiples of the detectable effect. At one half and one, chance decides; at two and more it must not.
MULTIPLES = {"0.5x": 0.5, "1x": 1.0, "2x": 2.0, "10x": 10.0}
_MUST_BE_CAUGHT = 2.0
# Every delay starts from so many cycles, so that the secret moves the end of a spin that is under way.
_BASE_CYCLES = 2000
_HIGHEST_GHZ = 1.98  # of an H100, where the cycle counter could not be read


def planted_study(planted: Planted, name: str, twin: str, secrets: dict[str, Tensor]) -> Study:
    """A control on the classes of inputs.planted_secrets."""

    def make() -> Job:
        secret, out = (torch.zeros(inputs.SECRETS, device="cuda") for _ in range(2))
        contents = {REFERENCE: [secrets["normal"]], **{same: [secrets["normal"].clone()] for same in SAME}}
        contents |= {tested: [secrets[tested]] for tested in _TESTED}
        return Job(lambda: planted.launch(name, twin, secret, out), [secret], contents)

    return Study(f"{name} {twin}", make, REFERENCE, SAME, _TESTED)


def seen(judged: Judged) -> str:
    """What the gate has to say against a study, in a line; empty for nothing."""
    wrong = [f"identical inputs differ: {judged.describe(name)}" for name in judged.invalid]
    return "; ".join(wrong + [judged.describe(name) for name in judged.differences])


def planted_outcome(
    name: str, expects: str, study: Callable[[str], Study], clock: Clock, blocks: int, rng: np.random.Generator
) -> ControlOutcome:
    """The word on one control; study makes what a twin is judged by."""
    leak, clean = judge([study(twin) for twin in controls.TWINS], clock, blocks, rng)
    return controls.judge_executed(name, expects, seen(leak), seen(clean))


def delay_study(planted: Planted, twin: str, subject: Subject, attention: Job, cycles: dict[str, float]) -> Study:
    """The subject's launch, and behind it a kernel that spins for so many cycles: classes differ in nothing else."""

    def make() -> Job:
        secret, out = (torch.zeros(inputs.SECRETS, device="cuda") for _ in range(2))
        for buffer, tensor in zip(attention.buffers, attention.contents[REFERENCE], strict=True):
            buffer.copy_(tensor)

        def launch() -> None:
            attention.launch()
            planted.launch(DELAY, twin, secret, out)

        contents = {name: [torch.full_like(secret, value)] for name, value in cycles.items()}
        return Job(launch, [secret], contents, attention.context)

    tested = tuple(name for name in cycles if name in MULTIPLES)
    return Study(f"{subject.name} and {DELAY} {twin}", make, REFERENCE, SAME, tested)


def calibrate(
    delayed: Callable[[str, dict[str, float]], Study], clock: Clock, blocks: int, rng: np.random.Generator
) -> tuple[dict[str, float], float]:
    """Cycles for each class, and the detectable effect in nanoseconds, from classes without a difference."""
    plain = dict.fromkeys((REFERENCE, *SAME), float(_BASE_CYCLES))
    none = compare(delayed("leak", plain), clock, blocks, permutations_for(len(MULTIPLES)), rng)
    smallest = detectable(none.same, len(MULTIPLES))
    per_ns = np.nanmedian(none.sample.cycles / none.sample.ns) if np.isfinite(none.sample.cycles).any() else np.nan
    per_ns = float(per_ns) if np.isfinite(per_ns) else _HIGHEST_GHZ
    return {**plain, **{name: _BASE_CYCLES + m * smallest * per_ns for name, m in MULTIPLES.items()}}, smallest


def delay_outcomes(
    delayed: Callable[[str, dict[str, float]], Study], clock: Clock, blocks: int, rng: np.random.Generator
) -> list[ControlOutcome]:
    """Delays of MULTIPLES of the detectable effect: which are caught. The clean twin spins alike for all classes."""
    cycles, smallest = calibrate(delayed, clock, blocks, rng)
    (leak,) = judge([delayed("leak", cycles)], clock, blocks, rng)
    (clean,) = judge([delayed("clean", cycles)], clock, blocks, rng)
    outcomes = []
    for name, multiple in MULTIPLES.items():
        expects = controls.CAUGHT if multiple >= _MUST_BE_CAUGHT else controls.MAY
        caught = leak.describe(name) if name in leak.differences and not leak.invalid else ""
        outcome = controls.judge_executed(f"{DELAY} {name}", expects, caught, seen(clean))
        measured = caught or f"not caught: {leak.describe(name)}"
        outcomes.append(replace(outcome, seen=f"planted {multiple * smallest:.0f} ns; {measured}"))
    return outcomes
