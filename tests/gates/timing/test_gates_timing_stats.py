"""Statistics of the gate timing: false alarms and misses at the stated rates, on seeded synthetic times."""

from __future__ import annotations

import numpy as np
import pytest

from dhp_safe_fa.gates.timing import stats

BLOCKS = 200


def times(rng: np.random.Generator, columns: int, shift: float = 0.0) -> stats.Times:
    """Times in ticks of 32 with a drift that blocks share, rare huge outliers, and the last column shifted."""
    drift = np.cumsum(rng.normal(0, 20, (BLOCKS, 1)), axis=0)
    found = 20_000 + drift + rng.normal(0, 60, (BLOCKS, columns))
    found += (rng.random((BLOCKS, columns)) < 0.01) * 5_000
    found[:, -1] += shift
    ticks: stats.Times = np.round(found / 32) * 32
    return ticks


def test_p_values_of_equal_classes_are_uniform() -> None:
    rng = np.random.default_rng(1)
    p = []
    for _ in range(400):
        y = times(rng, 3)
        p.append(stats.contrast(y[:, :2], y[:, 2], 400, rng).p)
    # 400 draws: standard deviations of the shares are 1.1 % and 2.5 %
    assert 0.02 < np.mean(np.array(p) <= 0.05) < 0.085
    assert 0.4 < np.mean(np.array(p) <= 0.5) < 0.6


def test_the_detectable_effect_is_found_at_the_stated_power() -> None:
    rng = np.random.default_rng(2)
    tests = 20
    found = []
    for _ in range(60):
        y = times(rng, 5)
        same = [stats.contrast(y[:, :2], y[:, column], 100, rng) for column in (2, 3)]
        shifted = y[:, 4] + stats.detectable(same, tests)
        one = stats.contrast(y[:, :2], shifted, stats.permutations_for(tests), rng)
        found.append(one.p * tests < stats.ALPHA and abs(one.effect) > stats.upper_bound(same))
    # the standard deviation of the share is 4 %
    assert np.mean(found) > stats.POWER - 0.12


def test_twice_the_detectable_effect_is_found_always_and_half_of_it_rarely() -> None:
    rng = np.random.default_rng(3)
    tests = 4
    for multiple, most, least in ((2.0, 1.0, 1.0), (0.25, 0.2, 0.0)):
        found = []
        for _ in range(20):
            y = times(rng, 5)
            same = [stats.contrast(y[:, :2], y[:, column], 100, rng) for column in (2, 3)]
            shifted = y[:, 4] + multiple * stats.detectable(same, tests)
            one = stats.contrast(y[:, :2], shifted, stats.permutations_for(tests), rng)
            found.append(one.p * tests < stats.ALPHA and abs(one.effect) > stats.upper_bound(same))
        assert least <= np.mean(found) <= most


@pytest.mark.parametrize("shift", [-700.0, 130.0, 20_000.0])
def test_the_effect_is_estimated_with_its_sign(shift: float) -> None:
    rng = np.random.default_rng(4)
    y = times(rng, 3, shift)
    one = stats.contrast(y[:, :2], y[:, 2], 999, rng)
    assert abs(one.effect - shift) < 5 * one.error < 60
    assert one.p == 1 / 1000


def test_constant_times_differ_by_nothing() -> None:
    y = np.full((50, 3), 3200.0)
    one = stats.contrast(y[:, :2], y[:, 2], 100, np.random.default_rng(5))
    assert (one.effect, one.error, one.p) == (0.0, 0.0, 1.0)


def test_the_error_is_the_spread_of_the_effect() -> None:
    rng = np.random.default_rng(6)
    contrasts = [stats.contrast(y[:, :2], y[:, 2], 20, rng) for y in (times(rng, 3) for _ in range(200))]
    spread = np.std([one.effect for one in contrasts])
    assert 0.85 < np.mean([one.error for one in contrasts]) / spread < 1.15


def test_trimmed_mean_ignores_the_ends() -> None:
    values = np.array([-1e9, 1, 2, 3, 4, 5, 6, 7, 8, 1e9])
    assert stats.trimmed_mean(values) == 4.5


def test_holm() -> None:
    assert stats.holm([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert stats.holm([0.6, 0.9]) == [1.0, 1.0]
    assert stats.holm([]) == []


def test_more_tests_can_detect_less() -> None:
    same = [stats.Contrast(1.0, 2.0, 0.5), stats.Contrast(-0.5, 2.0, 0.3)]
    assert stats.upper_bound(same) == pytest.approx(1 + 2.576 * 2, abs=0.01)
    assert stats.detectable(same, 100) > stats.detectable(same, 1) > stats.upper_bound(same)


def test_a_biased_clock_raises_the_bound() -> None:
    """Identical classes that differ: an effect of their size is none."""
    assert stats.detectable([stats.Contrast(100.0, 1.0, 0.0)], 1) > 100
