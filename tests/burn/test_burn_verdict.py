"""The verdict: what noise may not do, what a real change has to do, and every rule by itself."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import samples

from dhp_safe_fa.burn import verdict
from dhp_safe_fa.burn.verdict import Timed, Verdict, interval, judge, ratio
from dhp_safe_fa.gates.registry import NAMES

PASSED = dict.fromkeys(NAMES, "PASS")
# The usual run has 18 shapes; few shapes are the harder case, because noise averages out over many.
MANY = tuple(f"1,1,{64 * (i + 1)},64:full:float16" for i in range(18))
RUNS = 300


def judged(gain: float, seed: int, cases: tuple[str, ...], *, same: bool = False) -> Verdict:
    found = samples.shapes(random.Random(seed), gain, same=same, cases=cases)
    return judge(PASSED, NAMES, [shape.timed() for shape in found])


def timed(previous: list[float], again: list[float] | None = None, case: str = "c") -> Timed:
    """Ours takes 1 in all of nine blocks."""
    return Timed(case, [1.0] * 9, previous, again or [1.0] * 9, same_launch=False)


@pytest.mark.parametrize(
    ("cases", "decided"),
    [(samples.CASES[:1], 1), (samples.CASES, 0), (MANY, 0)],
    ids=["1 shape", "3 shapes", "18 shapes"],
)
def test_noise_alone_is_undecided(cases: tuple[str, ...], decided: int, session_seed: int) -> None:
    """Two equally fast builds, of which the loop does not know that they are the same. Of one shape alone, noise
    decided two of 900,000 simulations, and one in 300 is what this test bears; of three shapes it decided none."""
    decisions = Counter(judged(1.0, session_seed + i, cases).decision for i in range(RUNS))
    assert decisions["undecided"] >= RUNS - decided, decisions


@pytest.mark.parametrize("cases", [samples.CASES, MANY], ids=["3 shapes", "18 shapes"])
def test_five_per_cent(cases: tuple[str, ...], session_seed: int) -> None:
    """Never decided the wrong way. Rare noise may leave it undecided: of 20,000 simulations with three shapes none was,
    and one in 300 is what this test bears, because with other seeds it has been seen once."""
    for gain, right in ((1 / 1.05, "roll back"), (1.05, "proceed")):
        decisions = Counter(judged(gain, session_seed + i, cases).decision for i in range(RUNS))
        assert decisions[right] >= RUNS - 1, decisions
        assert decisions[right] + decisions["undecided"] == RUNS, decisions


def test_same_cubins_never_proceed() -> None:
    """Not even if something beside the cubins makes them look faster or slower."""
    for gain in (0.9, 1.0, 1.1):
        found = judged(gain, 1, samples.CASES, same=True)
        assert found.decision == "undecided"
        assert "the same cubins" in found.reasons[0]


def test_interval() -> None:
    assert interval([9, 1, 5, 2, 8, 3, 7, 4, 6]) == (2, 8)  # 1 - 2 (1 + 9) / 512 = 96 %
    assert interval([3, 1, 2, 6, 5, 4]) == (1, 6)  # 1 - 2 / 64 = 97 %
    assert interval([*range(20)]) == (5, 14)  # the textbook's ranks 6 and 15 of 20: 95.9 %
    with pytest.raises(ValueError, match="5 blocks; an interval that covers the median with 95% needs 6"):
        interval([1, 2, 3, 4, 5])


def test_interval_covers_the_median(session_seed: int) -> None:
    rng = random.Random(session_seed)
    covered = 0
    for _ in range(5000):
        low, high = interval([rng.gauss(0, 1) for _ in range(9)])
        covered += low <= 0 <= high
    assert covered / 5000 == pytest.approx(0.9609, abs=0.0175)  # more than six standard deviations


def test_ratio_on_known_numbers() -> None:
    shapes = [timed([2.0] * 9), timed([8.0] * 9)]
    assert ratio(shapes).median == pytest.approx(4)  # the geometric mean
    assert (ratio(shapes).low, ratio(shapes).high) == (pytest.approx(4), pytest.approx(4))
    assert ratio(shapes).bound == pytest.approx(1 + verdict.MIN_EFFECT)


def test_the_twin_sets_the_bound() -> None:
    """3 % faster, in a run whose second copy of the same build differs by 4 %."""
    shape = timed([1.03] * 9, again=[1.04] * 9)
    assert judge(PASSED, NAMES, [shape]).decision == "undecided"
    assert judge(PASSED, NAMES, [timed([1.03] * 9)]).decision == "proceed"


def test_one_outlier_at_each_end_is_harmless() -> None:
    assert judge(PASSED, NAMES, [timed([0.5, *[1.03] * 7, 3.0])]).decision == "proceed"
    assert judge(PASSED, NAMES, [timed([0.5, 0.5, *[1.03] * 7])]).decision == "undecided"


def test_a_slower_shape() -> None:
    slow, fast = timed([0.97] * 9, case="slow"), timed([1.10] * 9, case="fast")
    even = [timed([1.0] * 9, case=f"even {i}") for i in range(20)]
    mixed = judge(PASSED, NAMES, [slow, fast])
    assert mixed.decision == "undecided"
    assert any("slower at slow" in reason for reason in mixed.reasons)
    assert judge(PASSED, NAMES, [slow, *even]).decision == "roll back"
    within = timed([0.995] * 9, case="within")
    assert judge(PASSED, NAMES, [within, fast]).decision == "proceed"


@pytest.mark.parametrize("bad", ["NOT RUN", "INVALID", None])
def test_without_every_gate_nothing_proceeds(bad: str | None) -> None:
    gates = {name: text for name, text in (PASSED | {"timing": bad}).items() if text}
    found = judge(gates, NAMES, [timed([1.1] * 9)])
    assert found.decision == "undecided"
    assert f"gate timing: {bad or 'NOT RUN'}" in found.reasons
    assert judge(gates, NAMES, None).decision == "undecided"
    assert judge(gates, NAMES, [timed([0.9] * 9)]).decision == "roll back"


def test_a_failed_gate_or_a_wrong_output_rolls_back() -> None:
    assert judge({"sass": "FAIL"}, NAMES, None) == Verdict("roll back", ["gate sass: FAIL"])
    assert judge({**PASSED, "timing": "FAIL"}, NAMES, [timed([2.0] * 9)]).decision == "roll back"
    assert judge(PASSED, NAMES, None, "ours is wrong") == Verdict("roll back", ["ours is wrong"])


def test_the_first_iteration() -> None:
    assert judge(PASSED, NAMES, None).decision == "proceed"
