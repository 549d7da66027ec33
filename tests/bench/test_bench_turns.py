"""The order of turns: everybody follows every other equally often, and nobody itself."""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise

import pytest

from dhp_safe_fa.bench import turns
from dhp_safe_fa.bench.measurement import DEFAULT_SETTINGS


@pytest.mark.parametrize("count", range(1, 10))
def test_everybody_follows_every_other_once_a_cycle_and_nobody_itself(count: int) -> None:
    rounds = turns.cycle(count)
    assert all(sorted(one) == list(range(count)) for one in rounds)
    if count > 1:
        once_more = [*chain.from_iterable(rounds), rounds[0][0]]
        met = Counter(pairwise(once_more))
        assert len(met) == count * (count - 1) and set(met.values()) == {1}
        assert not any(before == after for before, after in met)
    assert [turns.order(number, count) for number in range(2 * len(rounds))] == [*rounds, *rounds]


@pytest.mark.parametrize("count", range(1, 6))
def test_a_run_of_up_to_five_has_whole_cycles(count: int) -> None:
    assert DEFAULT_SETTINGS.rounds % len(turns.cycle(count)) == 0
