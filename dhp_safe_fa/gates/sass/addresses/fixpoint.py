"""Which addresses instructions may use: a fixed point over the registers that addresses are made from.

Only what an address asks for is followed, backwards through the instructions that write it. A register that no path
has written yet holds nothing, since no program reads it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from ..cfg import Graph
from ..isa import Effects, guard_location
from ..listing import Instruction, Program
from ..operands import UP, UR, B, Operand, P, Register
from ..state import negation
from .transfer import Transfer, transfer
from .values import UNTRACKED, Value, add, join, restrict, single, spread

Fact = tuple[str, int, int]  # of a predicate: relation, location, number
_RELATIONS = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "LE": "GT", "GT": "LE"}
_JOINS = 24  # changes of a register at one block before a loop is taken to go on for ever: more than places in a ring


@dataclass
class _State:
    """values: what registers hold. given: (condition, value) where the condition holds. facts: what a predicate says
    about a register that has not changed since. written: where each lane predicate was written last. votes: of a guard
    by a uniform predicate, the condition that it stands for.

    A condition is a guard or, of uniform registers, "some lane: P0 of 7": the predicate P0, as the instruction at
    position 7 wrote it, holds in some lane. A uniform register that was written where one vote over P0 held can be read
    where another vote over the same P0 holds, even if P0 itself has changed by then.
    """

    values: dict[int, Value] = field(default_factory=dict)
    given: dict[int, tuple[str, Value]] = field(default_factory=dict)
    facts: dict[int, Fact] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)
    votes: dict[str, str] = field(default_factory=dict)

    def copy(self) -> _State:
        return _State(dict(self.values), dict(self.given), dict(self.facts), dict(self.written), dict(self.votes))

    def some_lane(self, guard: str) -> str:
        """The condition that a guard by a lane predicate holds in some lane; the guard where that has no name."""
        predicate = guard_location(guard)
        if predicate is None or predicate >= UP or predicate not in self.written:
            return guard
        return f"some lane: {guard} of {self.written[predicate]}"

    def condition(self, location: int, guard: str) -> str:
        return self.votes.get(guard) or self.some_lane(guard) if UR <= location < P else guard

    def read(self, location: int, guard: str) -> Value:
        known = self.given.get(location)
        if known and guard and known[0] == self.condition(location, guard):
            return known[1]
        return self.values.get(location, UNTRACKED)

    def write(self, location: int, value: Value, guard: str) -> None:
        for predicate in [p for p, fact in self.facts.items() if fact[1] == location]:
            del self.facts[predicate]
        known = self.given.pop(location, None)
        if guard:
            old = self.values.get(location)
            if known and known[0] == negation(guard):
                old = known[1]
            else:
                self.given[location] = (self.condition(location, guard), value)
            value = value if old is None else join(old, value)
        self.values[location] = value

    def forget(self, predicate: int, position: int, is_certain: bool) -> None:
        """A predicate was written, or may have been. Conditions on what the same instruction wrote before are over."""
        self.facts.pop(predicate, None)
        self.values.pop(predicate, None)
        end = f" of {position}"
        for location in [x for x, (c, _) in self.given.items() if c.endswith(end) or guard_location(c) == predicate]:
            del self.given[location]
        for vote in [v for v, c in self.votes.items() if c.endswith(end) or predicate in map(guard_location, (v, c))]:
            del self.votes[vote]
        self.written.pop(predicate, None)
        if is_certain:
            self.written[predicate] = position


class Addresses:
    """value(position, location): what a register holds when the instruction at a position reads it."""

    def __init__(
        self, program: Program, graph: Graph, effects: dict[int, Effects], wanted: dict[int, set[int]]
    ) -> None:
        self.program, self.graph, self.effects, self.wanted = program, graph, effects, wanted
        self.found: dict[tuple[int, int], Value] = {}
        self.steps: dict[int, Transfer | None] = {}
        self.slice()
        chosen = sorted({*self.steps, *wanted})
        self.per_block = [[p for p in chosen if first <= p <= last] for first, last in graph.blocks]
        if chosen:
            self.run()

    def guard(self, position: int) -> str:
        return "" if self.effects[position].guard is None else self.program.code[position].guard

    def slice(self) -> None:
        """The instructions that what is wanted depends on, into self.steps: what is needed, as it is live."""
        blocks = self.graph.blocks
        before: list[set[int]] = [set() for _ in blocks]
        callers: list[list[int]] = [[] for _ in blocks]
        for block, successors in enumerate(self.graph.successors):
            for successor in successors:
                callers[successor].append(block)
        queue, waiting = list(range(len(blocks))), set(range(len(blocks)))
        while queue:
            block = queue.pop()
            waiting.discard(block)
            live = {x for successor in self.graph.successors[block] for x in before[successor]}
            first, last = blocks[block]
            for position in range(last, first - 1, -1):
                self.need(position, live)
            if not live <= before[block]:
                before[block] |= live
                queue += [c for c in callers[block] if c not in waiting]
                waiting.update(callers[block])
        for position in self.steps:
            self.steps[position] = transfer(self.program.code[position])

    def need(self, position: int, live: set[int]) -> None:
        """One instruction backwards: from what is needed behind it to what is needed in front of it."""
        effect = self.effects[position]
        written = [x for x in (*effect.writes, *effect.apart) if x < B]
        if not live.isdisjoint(written):
            self.steps.setdefault(position, None)
            if effect.guard is None:
                live.difference_update(written)
            if any(x < P for x in written) and not effect.secret:
                live.update(x for x in effect.flows if x < B)
                live.update(x for _, sink in effect.sinks for x in sink if x < B)
            elif all(x >= P for x in written):  # predicates: the lanes that a vote asks are a condition
                live.update(x for x in effect.flows if P <= x < B)
        if position in self.wanted:
            live |= self.wanted[position]
        if effect.guard is not None and (position in self.steps or position in self.wanted):
            live.add(effect.guard)

    def run(self) -> None:
        states: dict[int, _State] = {self.graph.entry: _State()}
        changes: dict[tuple[int, int], int] = {}
        queue, waiting = [self.graph.entry], {self.graph.entry}
        while queue:
            block = heapq.heappop(queue)
            waiting.discard(block)
            state = states[block].copy()
            for position in self.per_block[block]:
                self.step(position, state)
            for successor in self.graph.successors[block]:
                if successor not in states:
                    states[successor] = state.copy()
                elif not self.merge(states[successor], state, successor, changes):
                    continue
                if successor not in waiting:
                    waiting.add(successor)
                    heapq.heappush(queue, successor)
        for block, state in states.items():
            at = state.copy()
            for position in self.per_block[block]:
                for location in self.wanted.get(position, ()):
                    self.found[position, location] = at.read(location, self.guard(position))
                self.step(position, at)

    @staticmethod
    def merge(mine: _State, other: _State, block: int, changes: dict[tuple[int, int], int]) -> bool:
        changed = False
        for location, theirs in other.values.items():
            old = mine.values.get(location)
            new = theirs if old is None else join(old, theirs)
            if new != old:
                count = changes[block, location] = changes.get((block, location), 0) + 1
                mine.values[location] = spread(new) if count > _JOINS else new
                changed = True
        for location, (guard, value) in list(mine.given.items()):
            found = other.given.get(location)
            if found is None or found[0] != guard:
                del mine.given[location]
                changed = True
            elif (new := join(value, found[1])) != value:
                count = changes[block, ~location] = changes.get((block, ~location), 0) + 1
                mine.given[location] = (guard, spread(new) if count > _JOINS else new)
                changed = True
        for predicate in [p for p, fact in mine.facts.items() if other.facts.get(p) != fact]:
            del mine.facts[predicate]
            changed = True
        for predicate in [p for p, position in mine.written.items() if other.written.get(p) != position]:
            del mine.written[predicate]
            changed = True
        for vote in [v for v, condition in mine.votes.items() if other.votes.get(v) != condition]:
            del mine.votes[vote]
            changed = True
        return changed

    def step(self, position: int, state: _State) -> None:
        if position not in self.steps:
            return
        effect, step, guard = self.effects[position], self.steps[position], self.guard(position)
        registers = [x for x in effect.writes if x < P]
        predicates = [x for x in (*effect.writes, *effect.apart) if P <= x < B]
        values: list[Value] = []
        if step is not None and registers:

            def chooses(predicate: Operand, source: Operand, value: Value) -> Value | None:
                return self.chosen(state, predicate, source, value)

            values = step.results(lambda location: state.read(location, guard), chooses)
        fact = None if step is None or guard else _fact(step)
        vote = None if step is None or guard else _vote(self.program.code[position], state)
        for predicate in predicates:
            state.forget(predicate, position, is_certain=not guard)
        for index, location in enumerate(registers):
            state.write(location, values[index] if index < len(values) else UNTRACKED, guard)
        if len(values) == len(registers) + 1 and len(predicates) == 1:
            state.write(predicates[0], values[-1], guard)
        if fact:
            state.facts[fact[0]] = fact[1]
        if vote:
            state.votes[vote[0]] = vote[1]

    @staticmethod
    def chosen(state: _State, predicate: Operand, source: Operand, value: Value) -> Value | None:
        """The part of a source that a select takes if the predicate operand holds; None if it is never taken."""
        if not predicate.register:
            return value
        if predicate.register.index < 0:
            return None if predicate.negated else value
        fact = state.facts.get(predicate.register.locations()[0])
        if fact is None or not source.register or source.register.locations() != (fact[1],) or source.text[0] == "-":
            return value
        return restrict(value, _RELATIONS[fact[0]] if predicate.negated else fact[0], fact[2])

    def value(self, position: int, location: int) -> Value:
        return self.found.get((position, location), UNTRACKED)

    def address(self, position: int, registers: Iterable[Register], offset: int) -> Value:
        """The sum in a pair of brackets, each register a 32-bit number."""
        total = single(offset)
        for register in registers:
            if register.index >= 0:
                total = add(total, self.value(position, register.locations()[0]))
        return total


def _fact(step: Transfer) -> tuple[int, Fact] | None:
    """ISETP.relation.AND P, PT, register, number, PT: what the predicate says about the register."""
    if step.base not in ("ISETP", "UISETP") or len(step.operands) != 5 or "EX" in step.modifiers:
        return None
    target, other, register, number, rest = step.operands
    relation = next((m for m in step.modifiers if m in _RELATIONS), None)
    if relation is None or not target.register or not register.register or other.text not in ("PT", "UPT"):
        return None
    bound = 0 if number.text in ("RZ", "URZ") else number.value
    if rest.text not in ("PT", "UPT") or "AND" not in step.modifiers or bound is None or bound < 0:
        return None
    if register.text.startswith(("-", "~", "|")) or register.register.index < 0 or target.register.index < 0:
        return None
    return target.register.locations()[0], (relation, register.register.locations()[0], bound)


def _vote(instruction: Instruction, state: _State) -> tuple[str, str] | None:
    """VOTEU.ALL UP0, P1: if UP0 is false, P1 is false in some lane. VOTEU.ANY UP0, P1: if true, true in some."""
    text = f"{instruction.opcode} {instruction.operands}"
    match = re.fullmatch(r"VOTEU\.(ALL|ANY) (?:UR\w+, )?(UP\d), (!?P\d)", text)
    if not match:
        return None
    if match[1] == "ANY":
        return match[2], state.some_lane(match[3])
    return f"!{match[2]}", state.some_lane(negation(match[3]))
