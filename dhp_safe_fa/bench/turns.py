"""In which order candidates have their turns.

At its power limit a GPU is slower after a heavy neighbour than after a light one: whoever is timed next gains or loses
up to a tenth. So over the rounds of a cycle everybody follows every other equally often, and nobody itself (E. J.
Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949).
"""

from __future__ import annotations


def cycle(count: int) -> int:
    """Rounds until everybody has followed every other equally often."""
    return 1 if count < 3 else count if count % 2 == 0 else 2 * count


def order(round_number: int, count: int) -> list[int]:
    """The candidates, by number, of one round. Of two each always follows the other."""
    if count < 3:
        return list(range(count))
    zigzag = [(i + 1) // 2 if i % 2 == 0 else count - (i + 1) // 2 for i in range(count)]  # 0, n-1, 1, n-2 ...
    turn = round_number % cycle(count)
    if turn >= count:  # of an odd number half of the neighbours come in the other order only
        return [(i + turn) % count for i in reversed(zigzag)]
    return [(i - turn) % count for i in zigzag]
