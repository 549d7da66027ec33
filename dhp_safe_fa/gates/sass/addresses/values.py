"""What a register may hold: sets of 32-bit numbers that are precise enough to tell two shared addresses apart.

A value is `base` plus any number lo, lo + step, …, hi, modulo 2^32. Bases: ``""`` for a plain number, POINTER for what
is made from a kernel parameter or the address of a global variable, WINDOW and WINDOW_HIGH for the two words of the
generic address of the parameters, SHARED_HIGH for the upper word of a generic address in shared memory, STACK for the
stack pointer at entry, CARRY for the carry of an addition to WINDOW, UNKNOWN for anything else; declared(n) for the two
words of a pointer parameter, n bytes from the first one, whose memory is declared public; MIXED for what is made from
one in any other way than by adding numbers, and for all that is made of that. `page`: any multiple of 2^24 may have
been added, which is how the CTA of a cluster is written above a shared address; below it, addresses of all CTAs are
alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from math import gcd

POINTER, WINDOW, WINDOW_HIGH, SHARED_HIGH = "pointer", "window", "window.hi", "shared.hi"
STACK, CARRY, UNKNOWN = "stack", "carry", "?"
_WORD, _PAGE = 1 << 32, 1 << 24
_DECLARED, _HIGH = "declared ", " high"
_OR = {0xFC: 2, 0xFE: 3}  # tables of a LOP3: a | b, a | b | c
_OR_MASKED = 0xF8  # a | (b & c)


def declared(parameter: int, high: bool = False) -> str:
    """The base of a word of that pointer."""
    return f"{_DECLARED}{parameter}{_HIGH if high else ''}"


def is_declared(base: str) -> bool:
    """A word of a pointer to declared memory, or MIXED."""
    return base.startswith(_DECLARED)


def is_upper_of(upper: str, lower: str) -> bool:
    """Whether these are the bases of the two words of one declared pointer."""
    return is_declared(lower) and upper == lower + _HIGH


@dataclass(frozen=True)
class Value:
    """step is 0 for a single number, otherwise it divides hi - lo."""

    base: str = ""
    lo: int = 0
    hi: int = _WORD - 1
    step: int = 1
    page: bool = False

    @property
    def number(self) -> int | None:
        """The number, if it is one."""
        return self.lo if self.lo == self.hi and not self.base and not self.page else None

    @property
    def is_plain(self) -> bool:
        """Numbers that are the same signed and unsigned."""
        return not self.base and not self.page and 0 <= self.lo <= self.hi < _WORD // 2

    @property
    def alignment(self) -> int:
        """The largest power of two that divides every number of the set."""
        found = gcd(self.lo, self.step, _PAGE if self.page else 0, _WORD)
        return found & -found


ANY, UNTRACKED, MIXED = Value(), Value(UNKNOWN), Value(f"{_DECLARED}?")


def single(number: int) -> Value:
    number = (number + _WORD // 2) % _WORD - _WORD // 2
    return Value("", number, number, 0)


def spread(value: Value) -> Value:
    """All numbers that agree with the set modulo the power of two in its step: what a loop may make of it."""
    step = gcd(value.step, _WORD) if value.lo != value.hi else _WORD
    return replace(value, lo=value.lo % step, hi=_WORD - step + value.lo % step, step=step)


def _made(base: str, lo: int, hi: int, step: int, page: bool) -> Value:
    if hi - lo >= _WORD:
        return spread(Value(base, lo, hi, step, page))
    shift = (lo + _WORD // 2) // _WORD * _WORD
    return Value(base, lo - shift, hi - shift, 0 if lo == hi else step, page)


def _sum_of(a: str, b: str) -> str:
    if not a or not b:
        return a or b
    return POINTER if a == b == POINTER else UNKNOWN


def add(a: Value, b: Value) -> Value:
    return _made(_sum_of(a.base, b.base), a.lo + b.lo, a.hi + b.hi, gcd(a.step, b.step), a.page or b.page)


def negative(a: Value) -> Value:
    if a.base:
        return ANY if a.base == POINTER else UNTRACKED
    return _made("", -a.hi, -a.lo, a.step, a.page)


def multiply(a: Value, b: Value) -> Value:
    factor, other = (a.number, b) if a.number is not None else (b.number, a)
    if factor == 1:
        return other
    if factor is None:
        if a.is_plain and b.is_plain and a.hi * b.hi < _WORD:
            return _made("", a.lo * b.lo, a.hi * b.hi, 1, False)
        return ANY
    if factor % _PAGE == 0:
        return Value("", 0, 0, 0, page=factor != 0)
    if factor > _WORD // 2:
        factor -= _WORD
    if other.base:
        return spread(Value("", 0, _WORD, abs(factor)))
    ends = sorted((other.lo * factor, other.hi * factor))
    return _made("", ends[0], ends[1], other.step * abs(factor), other.page)


def shift_right(a: Value, by: int, signed: bool) -> Value:
    if not a.is_plain:
        if signed:
            return Value("", -(_WORD // 2 >> by), (_WORD // 2 - 1) >> by, 1)
        return Value("", 0, (_WORD - 1) >> by, 1)
    exact = a.step % (1 << by) == 0
    return _made("", a.lo >> by, a.hi >> by, a.step >> by if exact else 1, False)


def keep_bits(a: Value, mask: int) -> Value:
    """a AND a constant."""
    mask &= _WORD - 1
    if a.page and not a.base and a.lo >= 0 and a.hi < _PAGE:
        return replace(keep_bits(replace(a, page=False), mask % _PAGE), page=mask >= _PAGE)
    if a.is_plain:
        mask &= (1 << a.hi.bit_length()) - 1
        unit = mask & -mask
        if mask and mask + unit == 1 << a.hi.bit_length():  # all bits above `unit` are kept
            low, high = a.lo & mask, a.hi & mask
            return _made("", low, high, a.step if a.step % unit == 0 else unit, False)
    if not mask:
        return single(0)
    unit = max(mask & -mask, 1 if a.base else a.alignment)
    return _made("", 0, mask - mask % unit, unit, False)


def logic(table: int, a: Value, b: Value, c: Value) -> Value:
    """LOP3: bit by bit, entry 4a + 2b + c of the table."""
    operands = [a, b, c]
    numbers = [value.number for value in operands]
    free = [i for i, number in enumerate(numbers) if number is None]
    if len(free) <= 1:
        off, on = (_constant_logic(table, numbers, bits) for bits in (0, _WORD - 1))
        if not free:
            return single(off)
        kept = keep_bits(operands[free[0]], off ^ on)
        if not off & (off ^ on):  # what is fixed and what comes from the operand are different bits
            return add(kept, single(off))
    if len(free) == 2:
        picked = _picked(table, operands, numbers, free)
        if picked is not None:
            return picked
    joined: list[tuple[Value, ...]] = []
    if table in _OR:
        joined = list(permutations(operands[: _OR[table]]))
    if table == _OR_MASKED:
        joined = [(a, keep_bits(x, m)) for x, m in ((b, numbers[2]), (c, numbers[1])) if m is not None]
    for values in joined:
        total = _sum_of_bits(*values)
        if total is not None:
            return total
    if not all(value.is_plain or value.number is not None for value in operands):
        return ANY
    may = sum(1 << bit for bit in range(32) if _may_be_set(table, operands, bit))
    if may >= _WORD // 2 or not may:
        return ANY if may else single(0)
    unit = may & -may
    return _made("", 0, (1 << may.bit_length()) - unit, unit, False)


def _sum_of_bits(first: Value, *others: Value) -> Value | None:
    """What all of their bits make, where each is below the alignment of those before it: then that is a sum."""
    total = first
    for value in others:
        if total.base or not value.is_plain or value.hi >= total.alignment:
            return None
        total = add(total, value)
    return total


def _picked(table: int, operands: list[Value], numbers: list[int | None], free: list[int]) -> Value | None:
    """Where the constant operand has a 1, the bits of one of the others, or none; where it has a 0, likewise."""
    (fixed,) = {0, 1, 2} - set(free)
    mask, total = numbers[fixed] or 0, single(0)
    for bit, bits in ((1, mask), (0, ~mask & (_WORD - 1))):
        entries = [x for x in range(8) if x >> (2 - fixed) & 1 == bit]
        said = [table >> x & 1 for x in entries]
        if not bits or not any(said):
            continue
        of_one = [i for i in free if said == [x >> (2 - i) & 1 for x in entries]]
        if not of_one:
            return None
        total = add(total, keep_bits(operands[of_one[0]], bits))
    return total


def _may_be_set(table: int, operands: list[Value], bit: int) -> bool:
    """Whether a bit of the result can be 1, given what that bit of each operand can be."""
    choices: list[tuple[int, ...]] = []
    for value in operands:
        if value.number is not None:
            choices.append((value.number >> bit & 1,))
        else:
            is_free = value.alignment <= 1 << bit and bit < value.hi.bit_length()
            choices.append((0, 1) if is_free else (0,))
    return any(table >> (4 * a + 2 * b + c) & 1 for a in choices[0] for b in choices[1] for c in choices[2])


def _constant_logic(table: int, numbers: list[int | None], free: int) -> int:
    a, b, c = (free if number is None else number for number in numbers)
    result = 0
    for entry in range(8):
        if table >> entry & 1:
            result |= (a if entry & 4 else ~a) & (b if entry & 2 else ~b) & (c if entry & 1 else ~c)
    return result & (_WORD - 1)


def join(a: Value, b: Value) -> Value:
    if a == b:
        return a
    if a.base != b.base:
        return MIXED if is_declared(a.base) or is_declared(b.base) else UNTRACKED
    step = gcd(a.step, b.step, abs(a.lo - b.lo))
    return _made(a.base, min(a.lo, b.lo), max(a.hi, b.hi), step, a.page or b.page)


def restrict(a: Value, relation: str, bound: int) -> Value | None:
    """The part of a plain set for which ``a relation bound`` holds; None if there is none."""
    if not a.is_plain:
        return a
    step, lo, hi = a.step or 1, a.lo, a.hi
    if relation == "EQ":
        lo = hi = bound
    elif relation == "NE":
        lo, hi = (lo + step if lo == bound else lo), (hi - step if hi == bound else hi)
    elif relation in ("LT", "LE"):
        limit = bound - (relation == "LT")
        hi = min(hi, limit - (limit - lo) % step)
    else:
        limit = bound + (relation == "GT")
        lo = max(lo, limit + (lo - limit) % step)
    return None if lo > hi else Value("", lo, hi, 0 if lo == hi else a.step)


def may_meet(a: Value, a_bytes: int, b: Value, b_bytes: int) -> bool:
    """Whether two accesses to the shared memory of CTAs of a cluster can touch the same byte of any of them."""
    if a.base or b.base:
        return True
    step = gcd(a.step, b.step, _PAGE)
    low, high = a.lo - b.hi, a.hi - b.lo  # of the distance from b to a
    if high - low >= _PAGE:
        low, high = low % step, low % step + _PAGE - step
    residue = (a.lo - b.lo) % step
    for page in range(low // _PAGE - 1, high // _PAGE + 2):
        first = max(low, page * _PAGE - a_bytes + 1)
        last = min(high, page * _PAGE + b_bytes - 1)
        if first + (residue - first) % step <= last:
            return True
    return False
