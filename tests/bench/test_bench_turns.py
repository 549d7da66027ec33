"""The order of turns: everybody follows every other equally often, and nobody itself."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import pytest

from dhp_safe_fa.bench import turns
from dhp_safe_fa.bench.measurement import DEFAULT_SETTINGS


@pytest.mark.parametrize("count", range(1, 9))
def test_everybody_follows_every_other_equally_often_and_nobody_itself(count: int) -> None:
    rounds = [turns.order(number, count) for number in range(2 * turns.cycle(count))]
    assert all(sorted(one) == list(range(count)) for one in rounds)
    within = Counter(chain.from_iterable(map(pairwise, rounds[: turns.cycle(count)])))
    if count > 2:
        assert len(within) == count * (count - 1) and len(set(within.values())) == 1
    if count > 1:
        assert all(before != after for before, after in pairwise(chain.from_iterable(rounds)))


def test_a_run_of_four_has_whole_cycles() -> None:
    assert DEFAULT_SETTINGS.rounds % turns.cycle(4) == 0
