"""The gate timing where classes draw unlike power: what a slower clock does is no difference, and leaks are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from dhp_safe_fa.gates.timing import stats
from dhp_safe_fa.gates.timing.clock import Job, Sample
from dhp_safe_fa.gates.timing.judge import Judged, Study, look

BLOCKS = 400
GHZ, NS = 1.665, 70_000.0  # an H200 at its power limit, and a packed forward there


@dataclass
class ThrottledClock:
    """Launches that compute for so many cycles and wait for so many nanoseconds, read as stamps read it.

    Attributes:
        slower: by which share the clock of the class "tested" is, in each look; in later ones as in the last of these.
        leak: of that class, as a share of the launch: cycles that it computes more.
        waits: the share of a launch that is waiting.
        multiple: such a multiple of what the first look could detect is the leak, if it is not given.
        ns: how long a launch is.
        jitter, noise: of the clock, and of what a launch computes: standard deviations, in shares.
        throttled: in which share of its launches the class's clock is slower.
        unlike: by which share the clock of the class "unlike" is faster; no such class where it is 0.
        follows: the share of its launch in which that class's cycles follow the clock, if not in all that waits.
        fast: in which share of its launches that class's clock is faster.
    """

    rng: np.random.Generator
    slower: tuple[float, ...] = (0.0,)
    leak: float | None = 0.0
    waits: float = 0.17
    multiple: float = 1.0
    ns: float = NS
    jitter: float = 0.0005
    noise: float = 0.004
    throttled: float = 1.0
    unlike: float = 0.0
    follows: float | None = None
    fast: float = 1.0
    looks: int = 0

    def _read(self, tested: int, blocks: int, columns: int, leak: float) -> Sample:
        shape = (blocks, columns)
        drift = np.linspace(-0.005, 0.005, blocks)[:, None]
        clock = GHZ * (1 + drift + self.rng.normal(0, self.jitter, shape))
        slower = self.slower[min(self.looks, len(self.slower) - 1)]
        clock[:, tested] *= 1 - slower * (self.rng.random(blocks) < self.throttled)
        computing = self.ns * GHZ * (1 - self.waits) * (1 + self.rng.normal(0, self.noise, shape))
        computing += (self.rng.random(shape) < 0.01) * self.ns * GHZ
        computing[:, tested] += leak * self.ns * GHZ
        if self.unlike:
            clock[:, -1] *= 1 + self.unlike * (self.rng.random(blocks) < self.fast)
            follows = self.waits if self.follows is None else self.follows
            computing[:, -1] += (follows - self.waits) * self.unlike * self.ns * GHZ
        waiting = self.ns * self.waits * (1 + self.rng.normal(0, self.noise, shape))
        ns = computing / clock + waiting
        ticks = np.floor((self.rng.uniform(0, 32, shape) + ns) / 32) * 32
        return Sample(ticks, ns * clock)

    def interleaved(self, job: Job, columns: Sequence[str], blocks: int, rng: np.random.Generator) -> Sample:
        tested = list(columns).index("tested")
        if self.leak is None:
            first = self._read(tested, blocks, len(columns), 0.0)
            self.leak = self.multiple * judged(Measured(first, self.unlike)).detectable_percent / 100
        sample = self._read(tested, blocks, len(columns), self.leak)
        self.looks += 1
        return sample

    def sustained(self, job: Job, name: str, seconds: float) -> float:
        raise AssertionError("nothing here is timed back to back")


@dataclass(frozen=True)
class Measured:
    """A clock that says the same whenever it is asked."""

    sample: Sample
    unlike: float = 0.0

    def interleaved(self, job: Job, columns: Sequence[str], blocks: int, rng: np.random.Generator) -> Sample:
        return self.sample

    def sustained(self, job: Job, name: str, seconds: float) -> float:
        raise AssertionError("nothing here is timed back to back")


def judged(clock: ThrottledClock | Measured, blocks: int = BLOCKS) -> Judged:
    unlike = "unlike" if clock.unlike else ""
    study = Study("study", lambda: Job(lambda: None, [], {}), "reference", ("same 1", "same 2"), ("tested",), unlike)
    (one,) = look([study], clock, blocks, np.random.default_rng(10))
    return one


def share_found(**given: Any) -> float:
    """Of 40 runs, whose leak is what the first look could detect; its standard deviation is 4.7 %."""
    rng = np.random.default_rng(12)
    clocks = [ThrottledClock(rng, leak=None, **given) for _ in range(40)]
    return float(np.mean([one.differences + one.doubtful == ["tested"] for one in map(judged, clocks)]))


@pytest.mark.parametrize("waits", [0.05, 0.17, 0.9])
@pytest.mark.parametrize("slower", [0.0087, 0.02, -0.01])
def test_what_another_clock_does_is_no_difference(slower: float, waits: float) -> None:
    one = judged(ThrottledClock(np.random.default_rng(9), (slower,), waits=waits))
    assert (one.differences, one.unconfirmed) == ([], [])
    assert one.clock == ["tested"] or waits == 0.9, "and it is reported"
    said = one.as_json()["classes"]["tested"]
    assert abs(said["by_clock_cycles"] + slower * GHZ * NS) < 4 * said["by_clock_error_cycles"]
    cycles = one.first.sample.cycles
    alone = stats.contrast(cycles[:, :2], cycles[:, -1], 999, np.random.default_rng(11))
    assert alone.p == 0.001 or waits == 0.05, "cycles alone would make it one"


@pytest.mark.parametrize(
    ("slower", "leak"),
    [(0.0, 0.003), (0.0, -0.003), (0.0087, 0.004), (0.0087, -0.012), (-0.01, 0.012), (-0.01, -0.004), (0.02, 0.01)],
)
def test_a_leak_at_another_clock_is_found(slower: float, leak: float) -> None:
    """Small ones against what the clock does; others have to exceed what it can do."""
    assert judged(ThrottledClock(np.random.default_rng(9), (slower,), leak)).differences == ["tested"]


@pytest.mark.parametrize("multiple", [1.0, -1.0])
@pytest.mark.parametrize("waits", [0.0, 0.17, 1.0])
def test_the_detectable_effect_is_found_at_the_stated_power_at_a_slower_clock(waits: float, multiple: float) -> None:
    assert share_found(slower=(0.01,), waits=waits, multiple=multiple) > stats.POWER - 0.1


@pytest.mark.parametrize("noise", [0.0005, 0.002])
def test_so_it_is_where_the_clock_jitters_more_than_cycles(noise: float) -> None:
    assert share_found(slower=(0.01,), waits=0.0, multiple=-1.0, jitter=0.0025, noise=noise) > stats.POWER - 0.1


def test_what_is_missed_at_another_clock_in_the_second_look_is_smaller_than_what_is_said() -> None:
    rng = np.random.default_rng(14)
    for _ in range(20):
        clock = ThrottledClock(rng, (0.0071, 0.0087), None, waits=0.0, multiple=-1.1, noise=0.001)
        one = judged(clock)
        assert one.differences or (clock.leak is not None and 100 * abs(clock.leak) < one.detectable_percent)


def test_what_the_clock_may_hide_counts_in_what_can_be_detected() -> None:
    steady, slower = (judged(ThrottledClock(np.random.default_rng(13), (share,))) for share in (0.0, 0.01))
    assert slower.detectable_percent - steady.detectable_percent == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("throttled", [0.05, 0.09, 0.2])
def test_few_launches_at_a_slower_clock_are_no_difference(throttled: float) -> None:
    """Of which the trimmed mean of clocks would know nothing."""
    rng = np.random.default_rng(15)
    clocks = [ThrottledClock(rng, (0.03,), waits=0.3, throttled=throttled) for _ in range(8)]
    assert not any(judged(clock, 2000).differences for clock in clocks)


def test_a_short_launch_that_waits_is_no_difference() -> None:
    """Its cycles are its nanoseconds, which are known to a tick only."""
    rng = np.random.default_rng(16)
    clocks = [ThrottledClock(rng, (0.005,), waits=1.0, ns=2003.0, noise=0.0005) for _ in range(40)]
    assert not any(judged(clock).differences for clock in clocks)


@pytest.mark.parametrize("ns", [1984.0, 2003.0])
@pytest.mark.parametrize("noise", [0.0005, 0.004])
def test_ticks_hide_no_leak(noise: float, ns: float) -> None:
    """Where all launches take whole ticks a trimmed mean does not see that they take longer."""
    assert share_found(waits=0.0, multiple=2.0, ns=ns, noise=noise) > stats.POWER - 0.1


# ---- with a class at quite another clock, by which what waits is known -----------------------------------------------


@pytest.mark.parametrize("waits", [0.0, 0.17, 0.9])
@pytest.mark.parametrize("slower", [0.0087, 0.02, -0.01])
def test_what_another_clock_does_is_no_difference_where_waiting_is_known(slower: float, waits: float) -> None:
    one = judged(ThrottledClock(np.random.default_rng(17), (slower,), waits=waits, unlike=0.1))
    assert (one.differences, one.doubtful, one.unconfirmed) == ([], [], [])
    assert one.first.waits_at_most == pytest.approx(min(1.0, waits + stats.CLOCKS_APART), abs=0.05)


@pytest.mark.parametrize("leak", [0.006, -0.006])
def test_a_leak_that_the_clock_could_hide_is_no_pass_where_nothing_waits(leak: float) -> None:
    """Less than what a launch that waits all the time would take at that clock: that might be it, so that it is no
    finding, either."""
    known, unknown = (
        judged(ThrottledClock(np.random.default_rng(18), (0.0087,), leak, waits=0.0, unlike=unlike))
        for unlike in (0.1, 0.0)
    )
    assert known.detectable_percent < 0.6 < 1.0 < unknown.detectable_percent and not unknown.doubtful
    assert unknown.differences == known.differences == (["tested"] if leak > 0 else [])
    assert known.doubtful == (["tested"] if leak < 0 else []) and not known.clock


@pytest.mark.parametrize("multiple", [1.0, -1.0])
@pytest.mark.parametrize("waits", [0.0, 0.17, 1.0])
def test_so_the_detectable_effect_is_seen_at_the_stated_power(waits: float, multiple: float) -> None:
    assert share_found(slower=(0.01,), waits=waits, multiple=multiple, unlike=0.1) > stats.POWER - 0.1


@pytest.mark.parametrize(("unlike", "follows"), [(0.1, 3.0), (0.1, -2.0), (0.0005, 0.0), (-0.1, 1.0)])
def test_a_class_that_tells_nothing_of_waiting_excuses_no_more_than_its_absence(unlike: float, follows: float) -> None:
    """It leaks itself, either way, or its clock is no other."""
    with_it = judged(ThrottledClock(np.random.default_rng(19), (0.01,), unlike=unlike, follows=follows))
    without = judged(ThrottledClock(np.random.default_rng(19), (0.01,)))
    assert with_it.first.waits_at_most == 1.0
    assert with_it.detectable_percent == pytest.approx(without.detectable_percent, abs=0.1)


@pytest.mark.parametrize("share", [0.08, 0.13])
def test_few_launches_at_a_faster_clock_tell_nothing_of_the_others(share: float) -> None:
    """Trimmed, their cycles say nothing, and their clock would say that all had gone faster (an attacker's finding)."""
    rng = np.random.default_rng(21)
    for _ in range(6):
        clock = ThrottledClock(rng, (0.01,), waits=0.9, unlike=0.15, fast=share)
        one = judged(clock, 1000)
        assert (one.differences, one.doubtful) == ([], [])


def test_so_many_cycles_as_another_address_makes_tell_nothing() -> None:
    """Of 5,000, at a clock that is hardly another."""
    rng = np.random.default_rng(22)
    for _ in range(6):
        clock = ThrottledClock(
            rng, (0.01,), waits=0.9, unlike=0.003, follows=0.9 - 8 / 5000 / 0.003, ns=5000 / GHZ, noise=0.0003
        )
        one = judged(clock)
        assert (one.differences, one.doubtful) == ([], [])
