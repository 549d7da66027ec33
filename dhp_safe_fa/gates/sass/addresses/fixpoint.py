"""Which addresses instructions may use: a fixed point over the registers that addresses are made from.

Only what an address asks for is followed, backwards through the instructions that write it. A register that no path
has written yet holds nothing, since no program reads it.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from ..cfg import Graph
from ..isa import Effects
from ..isa.operands import B, Operand, P, Register
from ..listing import Program
from ..state import Conditions, negation, source_of_copy
from .transfer import THREADS, Transfer, transfer
from .values import MIXED, UNTRACKED, Value, add, is_declared, join, restrict, single, spread

Fact = tuple[str, int, int]  # of a predicate: relation, location, number
_RELATIONS = {"EQ": "NE", "NE": "EQ", "LT": "GE", "GE": "LT", "LE": "GT", "GT": "LE"}
_JOINS = 24  # changes of a register at one block before a loop is taken to go on for ever: more than places in a ring


@dataclass
class _State:
    """values: what registers hold. given: (condition, value) where the condition holds. facts: what a predicate says
    about a register that has not changed since."""

    values: dict[int, Value] = field(default_factory=dict)
    given: dict[int, tuple[str, Value]] = field(default_factory=dict)
    facts: dict[int, Fact] = field(default_factory=dict)
    conditions: Conditions = field(default_factory=Conditions)

    def copy(self) -> _State:
        return _State(dict(self.values), dict(self.given), dict(self.facts), self.conditions.copy())

    def read(self, location: int, guard: str) -> Value:
        known = self.given.get(location)
        if known and guard and known[0] == self.conditions.of(location, guard):
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
                self.given[location] = (self.conditions.of(location, guard), value)
            value = value if old is None else join(old, value)
        self.values[location] = value

    def forget(self, predicate: int, position: int, is_certain: bool) -> None:
        """A predicate was written, or may have been."""
        self.facts.pop(predicate, None)
        self.values.pop(predicate, None)
        known = ((location, condition) for location, (condition, _) in self.given.items())
        for location in self.conditions.over(known, predicate, position):
            del self.given[location]
        self.conditions.forget(predicate, position, is_certain)


class Addresses:
    """value(position, location): what a register holds when the instruction at a position reads it. public: the pointer
    parameters to declared memory."""

    def __init__(
        self,
        program: Program,
        graph: Graph,
        effects: dict[int, Effects],
        wanted: dict[int, set[int]],
        public: Collection[int] = (),
    ) -> None:
        self.program, self.graph, self.effects, self.wanted = program, graph, effects, wanted
        self.public = public
        entry, _ = graph.blocks[graph.entry]
        names = [name for name in program.kernels if program.labels[name] == entry]
        self.threads = min((program.threads.get(name, THREADS) for name in names), default=THREADS)
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
            self.steps[position] = transfer(self.program.code[position], self.threads, self.public)

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
        return mine.conditions.join(other.conditions) or changed

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

            # A shuffle reads other lanes too, where the guard may not hold.
            known = "" if effect.crosses_lanes else guard
            values = step.results(lambda location: state.read(location, known), chooses)
        if self.public and registers and not effect.secret:
            values = self.mixed(effect, state, guard, values, len(registers))
        fact = None if step is None or guard else fact_of(step)
        copied = state.given.get(source_of_copy(self.program.code[position]))
        for predicate in predicates:
            state.forget(predicate, position, is_certain=not guard)
        for index, location in enumerate(registers):
            state.write(location, values[index] if index < len(values) else UNTRACKED, guard)
        if len(values) == len(registers) + 1 and len(predicates) == 1:
            state.write(predicates[0], values[-1], guard)
        if fact:
            state.facts[fact[0]] = fact[1]
        if copied:
            state.given[registers[0]] = copied
        state.conditions.vote(self.program.code[position])

    @staticmethod
    def mixed(effect: Effects, state: _State, guard: str, values: list[Value], count: int) -> list[Value]:
        """Values of registers that an instruction writes, where one that is not known to add numbers reads a pointer to
        declared memory."""
        if not any(is_declared(state.read(x, guard).base) for x in effect.flows if x < P):
            return values
        known = [v if is_declared(v.base) else MIXED for v in values]
        return known + [MIXED] * (count - len(known))

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


def fact_of(step: Transfer) -> tuple[int, Fact] | None:
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
