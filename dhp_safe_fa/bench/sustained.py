"""Each candidate by itself for a second or more, with the clock and the power that it settles at.

In the short samples of measurement.py everybody meets the same clock. Under its own steady load a GPU at its power
limit lowers the clock, for one kernel more than for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from dhp_safe_fa.bench import timing
from dhp_safe_fa.bench.cases import Case
from dhp_safe_fa.bench.measurement import Checked, check, graph_reason
from dhp_safe_fa.bench.meter import Meter, Reading
from dhp_safe_fa.bench.peers import Candidate
from dhp_safe_fa.bench.results import Outcome, Result, Stats


@dataclass(frozen=True)
class SustainedSettings:
    """rounds: how often each candidate has its turn, A B C A B C. sustained_s: seconds that are timed of a turn.
    settle_s: seconds of the same work before them. layout: how the inputs are stored, one of cases.LAYOUTS."""

    rounds: int = 3
    sustained_s: float = 1.0
    settle_s: float = 0.15
    layout: str = "BSHD"


@dataclass
class _Runner:
    """A checked candidate, its graph, and what its turns gave."""

    checked: Checked
    graph: timing.Graph
    us: list[float] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def turn(self, settings: SustainedSettings, meter: Meter | None) -> None:
        def begin() -> None:
            if meter:
                meter.begin()

        def end() -> None:
            if meter:
                self.readings.append(meter.end())

        self.us.append(timing.sustained_us(self.graph, settings.settle_s, settings.sustained_s, begin, end))

    def outcome(self) -> Outcome:
        outcome = replace(self.checked.found, graph_us=Stats.of(self.us))
        if not self.readings:
            return outcome
        clocks, powers = ([getattr(r, name) for r in self.readings] for name in Reading._fields)
        return replace(outcome, clock_mhz=Stats.of(clocks), power_w=Stats.of(powers))


def measure_sustained(
    case: Case,
    candidates: Sequence[Candidate],
    settings: SustainedSettings,
    generator: torch.Generator,
    meter: Meter | None,
) -> Result:
    """One case on the current CUDA device: every candidate that is right and can be captured, turn by turn.

    Raises:
        WrongResult: the first candidate fails, or is not accurate enough; nothing was timed.
    """
    lineup = check(case, candidates, "cuda", generator, settings.layout)
    runners: list[_Runner] = []
    uncaptured: list[Outcome] = []
    for checked in lineup.present:
        try:
            with checked.candidate.context():
                runners.append(_Runner(checked, timing.capture([checked.call], 1)))
        except RuntimeError as error:
            uncaptured.append(replace(checked.found, reason=graph_reason(error)))
    for _ in range(settings.rounds):
        for runner in runners:
            runner.turn(settings, meter)
    return lineup.result(case, candidates, [*uncaptured, *(runner.outcome() for runner in runners)])
