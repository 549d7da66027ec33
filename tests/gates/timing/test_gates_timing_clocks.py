"""The gate timing where classes draw unlike power: what a slower clock does is no difference, and leaks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from dhp_safe_fa.gates.timing import stats
from dhp_safe_fa.gates.timing.clock import Job, Sample
from dhp_safe_fa.gates.timing.judge import Judged, Study, judge

BLOCKS = 400
GHZ, NS = 1.665, 70_000.0  # an H200 at its power limit, and a packed forward there


@dataclass
class ThrottledClock:
    """Launches that compute for so many cycles and wait for so many nanoseconds, read as stamps read it.

    Attributes:
        slower: by which share the clock of the class "tested" is.
        leak: of that class, as a share of the launch: cycles that it computes more.
        waits: the share of a launch that is waiting.
        multiple: such a multiple of what the first look could detect is the leak, if it is not given.
    """

    rng: np.random.Generator
    slower: float
    leak: float | None = 0.0
    waits: float = 0.17
    multiple: float = 1.0

    def _read(self, tested: int, columns: int, leak: float) -> Sample:
        shape = (BLOCKS, columns)
        drift = np.linspace(-0.005, 0.005, BLOCKS)[:, None]
        clock = GHZ * (1 + drift + self.rng.normal(0, 0.0005, shape))
        clock[:, tested] *= 1 - self.slower
        computing = NS * GHZ * (1 - self.waits) * (1 + self.rng.normal(0, 0.004, shape))
        computing += (self.rng.random(shape) < 0.01) * NS * GHZ
        computing[:, tested] += leak * NS * GHZ
        ns = computing / clock + self.waits * NS
        ticks = np.floor((self.rng.uniform(0, 32, shape) + ns) / 32) * 32
        return Sample(ticks, ns * clock)

    def interleaved(self, job: Job, columns: Sequence[str], blocks: int, rng: np.random.Generator) -> Sample:
        tested = list(columns).index("tested")
        if self.leak is None:
            self.leak = 0.0
            self.leak = self.multiple * judged(self).detectable_percent / 100
        return self._read(tested, len(columns), self.leak)

    def sustained(self, job: Job, name: str, seconds: float) -> float:
        raise AssertionError("nothing here is timed back to back")


def judged(clock: ThrottledClock) -> Judged:
    study = Study("study", lambda: Job(lambda: None, [], {}), "reference", ("same 1", "same 2"), ("tested",))
    (one,) = judge([study], clock, BLOCKS, np.random.default_rng(10))
    return one


@pytest.mark.parametrize("waits", [0.05, 0.17, 0.9])
@pytest.mark.parametrize("slower", [0.0087, 0.02, -0.01])
def test_what_another_clock_does_is_no_difference(slower: float, waits: float) -> None:
    one = judged(ThrottledClock(np.random.default_rng(9), slower, waits=waits))
    assert (one.differences, one.unconfirmed) == ([], [])
    assert one.clock == ["tested"], "and it is reported"
    assert one.as_json()["classes"]["tested"]["by_clock_cycles"] == pytest.approx(-slower * GHZ * NS, rel=0.02)
    cycles = one.first.sample.cycles
    alone = stats.contrast(cycles[:, :2], cycles[:, -1], 999, np.random.default_rng(11))
    assert alone.p == 0.001 or waits == 0.05, "cycles alone would make it one"


@pytest.mark.parametrize(
    ("slower", "leak"),
    [(0.0, 0.003), (0.0, -0.003), (0.0087, 0.004), (0.0087, -0.012), (-0.01, 0.012), (-0.01, -0.004), (0.02, 0.01)],
)
def test_a_leak_at_another_clock_is_found(slower: float, leak: float) -> None:
    """Small ones against what the clock does; others have to exceed what it can do."""
    assert judged(ThrottledClock(np.random.default_rng(9), slower, leak)).differences == ["tested"]


@pytest.mark.parametrize("multiple", [1.0, -1.0])
@pytest.mark.parametrize("waits", [0.0, 0.17, 1.0])
def test_the_detectable_effect_is_found_at_the_stated_power_at_a_slower_clock(waits: float, multiple: float) -> None:
    """The standard deviation of the share is 4.7 %."""
    rng = np.random.default_rng(12)
    clocks = [ThrottledClock(rng, 0.01, None, waits, multiple) for _ in range(40)]
    assert np.mean([judged(clock).differences == ["tested"] for clock in clocks]) > stats.POWER - 0.1


def test_what_the_clock_may_hide_counts_in_what_can_be_detected() -> None:
    steady, slower = (judged(ThrottledClock(np.random.default_rng(13), share)) for share in (0.0, 0.01))
    assert slower.detectable_percent - steady.detectable_percent == pytest.approx(1.0, abs=0.1)
