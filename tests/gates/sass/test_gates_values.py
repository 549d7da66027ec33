"""Sets of numbers: every operation holds what it computes on members of its operands, and addresses meet or do not."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from dhp_safe_fa.gates.sass.addresses.values import (
    ANY,
    Value,
    add,
    join,
    keep_bits,
    logic,
    may_meet,
    multiply,
    negative,
    restrict,
    shift_right,
    single,
)

WORD, PAGE = 1 << 32, 1 << 24


def members(value: Value) -> list[int]:
    numbers = range(value.lo, value.hi + 1, value.step or 1)
    return [(n + page * PAGE) % WORD for n in numbers for page in ((0, 1, 255) if value.page else (0,))]


def holds(value: Value, number: int) -> bool:
    pages = range(256) if value.page else (0,)
    candidates = (number + turn * WORD - page * PAGE for turn in (-2, -1, 0, 1, 2) for page in pages)
    return any(value.lo <= c <= value.hi and (c - value.lo) % (value.step or 1) == 0 for c in candidates)


def any_value(chance: random.Random) -> Value:
    lo = chance.choice([0, 1, 4, 0x400, 0x38400, -8, -1, WORD - 4, chance.randrange(1 << 20)])
    step = chance.choice([0, 1, 3, 4, 12, 0x80, 0x8000])
    return Value("", lo, lo + step * chance.randrange(1, 6), step, page=chance.random() < 0.2)


def signed(number: int) -> int:
    return number - WORD if number >= WORD // 2 else number


def table(entries: int, a: int, b: int, c: int) -> int:
    bits = range(32)
    return sum((entries >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in bits)


def test_operations_hold_what_members_give() -> None:
    chance = random.Random(1)
    for _ in range(400):
        a, b, c = (any_value(chance) for _ in range(3))
        mask, entries = chance.choice([0xFF, 0xFFFFFC00, 0x1FC, 0x38000, chance.randrange(WORD)]), chance.randrange(256)
        by = chance.choice([0, 1, 2, 5, 24, 31])
        cases: list[tuple[Value, Callable[[int, int, int], int]]] = [
            (add(a, b), lambda x, y, z: x + y),
            (negative(a), lambda x, y, z: -x),
            (multiply(a, b), lambda x, y, z: x * y),
            (multiply(a, single(1 << by)), lambda x, y, z, by=by: x << by),  # type: ignore[misc]
            (shift_right(a, by, signed=False), lambda x, y, z, by=by: x >> by),  # type: ignore[misc]
            (shift_right(a, by, signed=True), lambda x, y, z, by=by: signed(x) >> by),  # type: ignore[misc]
            (keep_bits(a, mask), lambda x, y, z, m=mask: x & m),  # type: ignore[misc]
            (logic(0xC0, a, single(mask), single(0)), lambda x, y, z, m=mask: x & m),  # type: ignore[misc]
            (logic(0xF8, a, b, single(mask)), lambda x, y, z, m=mask: x | y & m),  # type: ignore[misc]
            (logic(0xFC, a, b, c), lambda x, y, z: x | y),
            (logic(0xFE, a, b, c), lambda x, y, z: x | y | z),
            (logic(entries, a, b, c), lambda x, y, z, e=entries: table(e, x, y, z)),  # type: ignore[misc]
            *(
                (logic(e, a, single(mask), c), lambda x, y, z, e=e, m=mask: table(e, x, m, z))  # type: ignore[misc]
                for e in (0xE2, 0xB8, 0xC0, 0x30, entries)
            ),
            (join(a, b), lambda x, y, z: x),
            (join(a, b), lambda x, y, z: y),
        ]
        for number, (result, function) in enumerate(cases):
            x, y, z = (chance.choice(members(value)) for value in (a, b, c))
            assert holds(result, function(x, y, z) % WORD), (number, a, b, c, hex(mask), hex(entries), by)
        size = chance.choice([1, 4, 16, 4096])
        if any((x - y) % PAGE < 8 or (y - x) % PAGE < size for x in members(a) for y in members(b)):
            assert may_meet(a, size, b, 8)


def test_a_place_below_the_alignment_is_added() -> None:
    """How ptxas adds a remainder to an aligned address: 0x32500 | (8 n & 0x38), here in any CTA of a cluster."""
    barriers = Value("", 0x32500, 0x32500, 0, page=True)
    for places in ((ANY, single(0x38)), (single(0x38), ANY)):
        assert logic(0xF8, barriers, *places) == Value("", 0x32500, 0x32538, 8, page=True)
    assert logic(0xF8, barriers, ANY, single(0x138)) == ANY  # may be a bit of the address, too
    lanes = Value("", 0, 0xF8, 8)
    for operands in ((barriers, lanes, single(0)), (lanes, barriers, ANY)):
        assert logic(0xFC, *operands) == Value("", 0x32500, 0x325F8, 8, page=True)
    assert logic(0xFC, barriers, Value("", 0, 0x100, 8), single(0)) == ANY
    assert logic(0xFE, lanes, single(0x200), Value("", 0x32400, 0x32400, 0, page=True)).lo == 0x32600


def test_bits_of_two_numbers_side_by_side() -> None:
    """4 n + the CTA's number in its cluster: of n where the mask has a 1, of the block's number where it has a 0."""
    tiles = Value("", 0, 28, 4)
    assert logic(0xE2, tiles, single(WORD - 4), ANY) == Value("", 0, 31, 1)
    assert logic(0xE2, ANY, single(3), tiles) == Value("", 0, 31, 1)
    assert logic(0x6A, tiles, single(WORD - 4), ANY) == ANY  # no bit of one alone


def test_the_place_of_a_ring_stays_exact() -> None:
    """slot + 1 == 3 ? 0 : slot + 1."""
    slot = single(0)
    for _ in range(5):
        after = restrict(add(slot, single(1)), "NE", 3)
        slot = join(slot, join(after, single(0))) if after else slot
    assert slot == Value("", 0, 2, 1)


@pytest.mark.parametrize(
    ("a", "size", "b", "meet"),
    [
        (single(0x400), 4, single(0x404), False),
        (single(0x400), 8, single(0x404), True),
        (Value("", 0x400, 0x5FC, 4), 4, single(0x600), False),
        (Value("", 0x400, 0x600, 4), 4, single(0x600), True),
        (Value("", 0x400, 0x8400, 0x4000), 16, single(0x5000), False),
        (Value("", 0x400, 0x400, 0, page=True), 4, single(0x400 + 5 * PAGE), True),  # another CTA's
        (Value("", 0x400, 0x400, 0, page=True), 4, single(0x408 + 5 * PAGE), False),
        (ANY, 4, single(0x400), True),
        (Value("pointer"), 4, single(0x400), True),
    ],
)
def test_addresses_meet(a: Value, size: int, b: Value, meet: bool) -> None:
    assert may_meet(a, size, b, 8) is meet
