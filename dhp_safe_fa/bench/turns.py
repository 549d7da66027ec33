"""In which order candidates have their turns.

At its power limit a GPU is slower after a heavy neighbour than after a light one: whoever is timed next gains or loses
up to a tenth. So in a cycle of rounds, one after another and the cycle again, everybody follows every other exactly
once, and nobody itself.
"""

from __future__ import annotations

from functools import cache


@cache
def cycle(count: int) -> tuple[tuple[int, ...], ...]:
    """The rounds, one fewer than there are candidates: each has all of them, by number."""
    if count < 2:
        return (tuple(range(count)),)
    turns, met = [0], set[tuple[int, int]]()

    def go_on() -> bool:
        """Tries who may come next, in order; what led nowhere is taken back."""
        last = turns[-1]
        if len(turns) == count * (count - 1):
            return (last, turns[0]) not in met
        had = turns[len(turns) // count * count :]  # of this round
        for number in range(count):
            if number == last or number in had or (last, number) in met:
                continue
            turns.append(number)
            met.add((last, number))
            if go_on():
                return True
            turns.pop()
            met.discard((last, number))
        return False

    if not go_on():
        raise ValueError(f"no such order of {count} candidates")
    return tuple(tuple(turns[at : at + count]) for at in range(0, len(turns), count))


def order(round_number: int, count: int) -> tuple[int, ...]:
    """The candidates, by number, of one round. Of two each always follows the other."""
    rounds = cycle(count)
    return rounds[round_number % len(rounds)]
