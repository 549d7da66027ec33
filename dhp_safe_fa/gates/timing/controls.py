"""Planted leaks for the gate `timing`: every control of tests/controls/, and delays of a chosen size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from .. import controls, inputs
from ..planted import Planted
from ..subjects import Subject
from ..verdict import ControlOutcome
from .clock import Clock, Job
from .inputs import REFERENCE, SAME
from .judge import Judged, Study, compare, look
from .stats import permutations_for

# Classes of planted_secrets that are compared with "normal".
_TESTED = ("zeros", "large", "ascending", "descending", "denormals", "NaN")

DELAY = "calibrated_delay"
# Delays, as multiples of the detectable effect. At one half and one, chance decides; at two and more it must not.
MULTIPLES = {"0.5x": 0.5, "1x": 1.0, "2x": 2.0, "10x": 10.0}
_MUST_BE_CAUGHT = 2.0
# Every delay starts from so many cycles, so that the secret moves the end of a spin that is under way.
_BASE_CYCLES = 2000


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
    leak, clean = look([study(twin) for twin in controls.TWINS], clock, blocks, rng)
    return controls.judge_executed(name, expects, seen(leak), seen(clean))


class Delays:
    """A subject's launch, and behind it a kernel that spins for a number of cycles: classes differ in nothing else."""

    def __init__(self, planted: Planted, subject: Subject, attention: Job) -> None:
        self._planted, self._subject, self._attention = planted, subject, attention
        self._secret, self._out = (torch.zeros(inputs.SECRETS, device="cuda") for _ in range(2))
        for buffer, tensor in zip(attention.buffers, attention.contents[REFERENCE], strict=True):
            buffer.copy_(tensor)

    def spun(self, cycles: float) -> float:
        """Cycles that a spin of that length takes: it ends when it next looks at the clock."""
        self._secret.fill_(cycles)
        self._planted.launch(DELAY, "leak", self._secret, self._out)
        return float(self._out[0])

    def study(self, twin: str, cycles: dict[str, float]) -> Study:
        """Classes with so many cycles each; the clean twin spins alike for all."""

        def launch() -> None:
            self._attention.launch()
            self._planted.launch(DELAY, twin, self._secret, self._out)

        def make() -> Job:
            contents = {name: [torch.full_like(self._secret, value)] for name, value in cycles.items()}
            return Job(launch, [self._secret], contents, self._attention.context)

        tested = tuple(name for name in cycles if name in MULTIPLES)
        return Study(f"{self._subject.name} and {DELAY} {twin}", make, REFERENCE, SAME, tested)


def delay_outcomes(delays: Delays, clock: Clock, blocks: int, rng: np.random.Generator) -> list[ControlOutcome]:
    """Delays of MULTIPLES of the effect that can be detected among classes that spin alike: which are caught."""
    base = {name: float(_BASE_CYCLES) for name in (REFERENCE, *SAME)}
    alike = compare(delays.study("leak", base), clock, blocks, permutations_for(len(MULTIPLES)), rng)
    smallest = alike.cycles.detectable(len(MULTIPLES))
    start = delays.spun(_BASE_CYCLES)
    cycles = {**base, **{name: start + multiple * smallest for name, multiple in MULTIPLES.items()}}
    (leak,) = look([delays.study("leak", cycles)], clock, blocks, rng)
    (clean,) = look([delays.study("clean", cycles)], clock, blocks, rng)
    outcomes = []
    for name, multiple in MULTIPLES.items():
        expects = controls.CAUGHT if multiple >= _MUST_BE_CAUGHT else controls.MAY
        caught = leak.describe(name) if name in leak.differences and not leak.invalid else ""
        outcome = controls.judge_executed(f"{DELAY} {name}", expects, caught, seen(clean))
        planted = f"planted {delays.spun(cycles[name]) - start:.0f} cycles"
        outcomes.append(replace(outcome, seen=f"{planted}: {'' if caught else 'not '}caught, {leak.describe(name)}"))
    return outcomes
