"""Registers that a chain of guarded moves sets in every case: how compilers index an array that lies in registers.

``ISETP.EQ P0, R2, 0x0``, ``@P0 MOV R0, R8``, ``ISETP.EQ P0, R2, 0x4``, ``@P0 MOV R0, R9``, … writes R0 for certain if
the tests cover all that R2 may hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..cfg import Graph
from ..isa import Effects
from ..listing import Program
from .fixpoint import Addresses, fact_of
from .transfer import transfer


@dataclass
class _Case:
    """Writes of one register in straight code, each under a test of the same content of another register."""

    index: int
    tested: int  # position of the first test
    numbers: set[int] = field(default_factory=set)
    last: int = -1  # position of the last write


class Cases:
    """`wanted`: the registers whose values decide, by position."""

    def __init__(self, program: Program, graph: Graph, effects: dict[int, Effects]) -> None:
        self.found: list[tuple[int, _Case]] = []  # register and case
        for first, last in graph.blocks:
            self.found += self.scan(program, effects, first, last)
        self.wanted: dict[int, set[int]] = {}
        for _, case in self.found:
            self.wanted.setdefault(case.tested, set()).add(case.index)

    @staticmethod
    def scan(program: Program, effects: dict[int, Effects], first: int, last: int) -> Iterator[tuple[int, _Case]]:
        written: dict[int, int] = {}  # where each register was written last
        tests: dict[
            int, tuple[str, int, int, int, int]
        ] = {}  # of a predicate: relation, register, since, number, where
        cases: dict[tuple[int, int, int], _Case] = {}  # by the register written, the register tested, and since when
        for position in range(first, last + 1):
            effect, instruction = effects[position], program.code[position]
            if effect.guard is not None and effect.guard in tests:
                relation, index, since, number, where = tests[effect.guard]
                if relation == ("NE" if instruction.guard.startswith("!") else "EQ"):
                    for location in effect.writes:
                        case = cases.setdefault((location, index, since), _Case(index, where))
                        case.numbers.add(number)
                        case.last = position
            for location in (*effect.writes, *effect.apart):
                written[location] = position
                tests.pop(location, None)
            if instruction.base in ("ISETP", "UISETP") and not instruction.guard:
                step = transfer(instruction)
                fact = fact_of(step) if step else None
                if fact:
                    predicate, (relation, index, number) = fact
                    tests[predicate] = (relation, index, written.get(index, -1), number, position)
        yield from ((location, case) for (location, _, _), case in cases.items() if len(case.numbers) > 1)

    def certain(self, addresses: Addresses) -> dict[int, set[int]]:
        """Position to the registers that are certainly written behind it."""
        result: dict[int, set[int]] = {}
        for location, case in self.found:
            index = addresses.value(case.tested, case.index)
            if not index.is_plain or (index.hi - index.lo) // (index.step or 1) >= len(case.numbers):
                continue
            if set(range(index.lo, index.hi + 1, index.step or 1)) <= case.numbers:
                result.setdefault(case.last, set()).add(location)
        return result
