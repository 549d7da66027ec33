"""Information flow through one kernel: which locations may depend on secrets, and where that shows.

A fixed point over the control-flow graph. The lattice has two points, public and secret; a secret location also
carries its distance from a source and the instruction that wrote it, so that the shortest way back can be printed.
Distances only fall, so the iteration ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from .cfg import Graph, build_graph, is_indirect
from .isa import CALL, Effects, effects
from .listing import Program
from .operands import LOCAL, LOCAL_ANY, B, P, R, UnknownInstruction, location_name

Mark = tuple[int, int]  # distance from a source, position of the writing instruction
UNRESOLVED = "unresolved-control"
_STACK_POINTER = R + 1
_UNSET, _UNKNOWN = "unset", "unknown"  # of the stack pointer: no path yet, different on different paths


@dataclass
class State:
    """The secret locations at one point, and the stack pointer relative to its value at entry.

    given[location] = (guard, mark): the mark that the location has where the guard holds. It was written under that
    guard, and the predicate has not changed since. So ``@P0 MOV R1, 0x80`` and then ``@P0 STS [R2], R1`` is public,
    whatever R1 held before.
    """

    marks: dict[int, Mark] = field(default_factory=dict)
    stack: int | str = _UNSET
    given: dict[int, tuple[str, Mark | None]] = field(default_factory=dict)

    def copy(self) -> State:
        return State(dict(self.marks), self.stack, dict(self.given))

    def join(self, other: State) -> bool:
        """Add what `other`, the state at the end of a path, knows; True if that changed anything."""
        if self.stack == _UNSET:  # the first path that comes here
            self.marks, self.stack, self.given = dict(other.marks), other.stack, dict(other.given)
            return True
        changed = False
        for location, (guard, mark) in list(self.given.items()):
            theirs = other.given.get(location)
            if theirs is None or theirs[0] != guard:
                del self.given[location]
                changed = True
            elif theirs[1] is not None and (mark is None or theirs[1] < mark):
                self.given[location] = theirs
                changed = True
        for location, mark in other.marks.items():
            mine = self.marks.get(location)
            if mine is None or mark < mine:
                self.marks[location] = mark
                changed = True
        if self.stack not in (other.stack, _UNKNOWN):
            self.stack = _UNKNOWN
            changed = True
        return changed

    def write(self, location: int, mark: Mark | None, guard: str) -> None:
        """Overwrite a location, where the guard holds if there is one."""
        old = self.marks.get(location)
        if guard:
            known = self.given.pop(location, None)
            if known and known[0] == _negation(guard):  # written under both outcomes: nothing old is left
                old = known[1]
            else:
                self.given[location] = (guard, mark)
            mark = mark if old is None else old if mark is None else min(old, mark)
        else:
            self.given.pop(location, None)
        if mark is None:
            self.marks.pop(location, None)
        else:
            self.marks[location] = mark

    def forget(self, predicate: int) -> None:
        """A predicate was written: what held under its old value is not known to hold under the new one."""
        name = location_name(predicate)
        for location in [x for x, (guard, _) in self.given.items() if guard.lstrip("!") == name]:
            del self.given[location]

    def read(self, location: int, guard: str) -> Mark | None:
        """The mark of a location where the guard holds."""
        known = self.given.get(location)
        return known[1] if known and guard and known[0] == guard else self.marks.get(location)


def _negation(guard: str) -> str:
    return guard[1:] if guard.startswith("!") else f"!{guard}"


@dataclass(frozen=True)
class Finding:
    """One instruction that shows a secret: kind, position, and the positions from the source to it."""

    kind: str
    position: int
    chain: tuple[int, ...]
    source: str  # what the first instruction of the chain reads


@dataclass
class Analysis:
    """Everything found about one kernel."""

    graph: Graph
    findings: list[Finding]
    unknown: list[str]


class _Taint:
    def __init__(self, program: Program, graph: Graph, is_declassified: Callable[[int], bool]) -> None:
        self.program = program
        self.graph = graph
        self.is_declassified = is_declassified
        self.effects: dict[int, Effects] = {}
        self.unknown: dict[str, None] = {}
        self.parent: dict[int, int | None] = {}
        self.entry_states = [State() for _ in graph.blocks]
        self.context: list[Mark | None] = [None] * len(graph.blocks)  # mark of the branch that a block depends on
        for first, last in graph.blocks:
            for position in range(first, last + 1):
                instruction = program.code[position]
                try:
                    self.effects[position] = effects(instruction.opcode, instruction.operands, instruction.guard)
                except UnknownInstruction as error:
                    self.unknown[str(error)] = None
                    self.effects[position] = Effects()

    def run(self) -> None:
        queue = [self.graph.entry]
        self.entry_states[self.graph.entry].stack = 0
        waiting = set(queue)
        while queue:
            block = heapq.heappop(queue)
            waiting.discard(block)
            state = self.entry_states[block].copy()
            first, last = self.graph.blocks[block]
            for position in range(first, last + 1):
                self.step(position, state, self.context[block])
            woken = self.spread(block, last, state)
            for successor in self.graph.successors[block]:
                if self.entry_states[successor].join(state):
                    woken.add(successor)
            for other in woken - waiting:
                waiting.add(other)
                heapq.heappush(queue, other)

    def spread(self, block: int, last: int, state: State) -> set[int]:
        """A branch on a secret makes everything secret that is written while it matters."""
        guard = "" if self.effects[last].guard is None else self.program.code[last].guard
        mark = self.worst(self.effects[last].steers, state, None, guard)
        leaves = len(self.graph.successors[block]) + (block in self.graph.exits)
        if mark is None or leaves < 2:
            return set()
        self.note(last, mark)
        mine = (mark[0] + 1, last)
        changed = set()
        for inside in self.graph.region(block):
            old = self.context[inside]
            if old is None or mine < old:
                self.context[inside] = mine
                changed.add(inside)
        return changed

    @staticmethod
    def worst(locations: tuple[int, ...], state: State, start: Mark | None, guard: str = "") -> Mark | None:
        """The mark nearest to a source among `start` and those of the locations; None if all are public."""
        best = start
        for location in locations:
            mark = state.read(location, guard)
            if mark is not None and (best is None or mark < best):
                best = mark
        return best

    def note(self, position: int, mark: Mark) -> None:
        """Remember where the secret of an instruction comes from, unless it is itself a source."""
        old = self.parent.get(position, -1)
        if old is not None:
            self.parent[position] = mark[1]

    def words(self, position: int, state: State) -> tuple[int, ...] | None:
        """Locations of the local memory that an instruction touches; None if its address is not known."""
        frame = self.effects[position].frame
        assert frame
        base = frame.base.locations() if frame.base else None
        if base != (_STACK_POINTER,) or not isinstance(state.stack, int):
            return None
        word = (state.stack + frame.offset) // 4
        return tuple(LOCAL + word + i for i in range(frame.words))

    def step(self, position: int, state: State, context: Mark | None) -> None:
        """Apply one instruction to the state."""
        effect = self.effects[position]
        guard = "" if effect.guard is None else self.program.code[position].guard
        best = context
        if effect.guard is not None:
            best = self.worst((effect.guard,), state, best)
        for location in effect.apart:
            state.write(location, None if best is None else (best[0] + 1, position), guard)
        best = self.worst(effect.flows, state, best, "" if effect.crosses_lanes else guard)
        if effect.frame and not effect.stores and effect.writes:
            words = self.words(position, state)
            if words is None:
                words = tuple(x for x in state.marks if x > LOCAL // 2)
            best = self.worst((*words, LOCAL_ANY), state, best, guard)
        mark: Mark | None = None
        if self.is_declassified(position):
            mark = None
        elif effect.secret:
            mark = (1, position)
            self.parent[position] = None
        elif best is not None:
            mark = (best[0] + 1, position)
            if effect.writes:
                self.note(position, best)
        for location in effect.writes:
            state.write(location, mark, guard)
        if effect.stores or (effect.frame and not effect.writes):
            self.store(position, state, self.worst(effect.stores, state, best, guard), guard)
        for location in (*effect.writes, *effect.apart):
            if P <= location < B:
                state.forget(location)
        if _STACK_POINTER in effect.writes:
            if effect.resets_stack:
                state.stack = 0
            elif effect.stack is not None and effect.guard is None and isinstance(state.stack, int):
                state.stack += effect.stack
            else:
                state.stack = _UNKNOWN

    def store(self, position: int, state: State, best: Mark | None, guard: str) -> None:
        """STL, or a generic store that may reach local memory."""
        effect = self.effects[position]
        words = self.words(position, state) if effect.frame else None
        mark = None if best is None else (best[0] + 1, position)
        if best is not None:
            self.note(position, best)
        if words is None:
            if mark is not None:
                state.marks[LOCAL_ANY] = min(mark, state.marks.get(LOCAL_ANY, mark))
            return
        for word in words:
            if effect.frame and effect.frame.partial:  # the rest of the word stays
                state.write(word, self.worst((word,), state, mark), guard)
            else:
                state.write(word, mark, guard)

    def chain(self, position: int, mark: Mark | None) -> tuple[tuple[int, ...], str]:
        """Positions from the source to `position`, and what the source reads."""
        steps = [position]
        current = None if mark is None else mark[1]
        while current is not None and current not in steps:
            steps.append(current)
            current = self.parent.get(current)
        first = self.effects.get(steps[-1], Effects())
        source = first.secret or first.forbidden
        return tuple(reversed(steps)), source

    def findings(self) -> list[Finding]:
        found: dict[tuple[int, str], Finding] = {}

        def add(kind: str, position: int, mark: Mark | None) -> None:
            chain, source = self.chain(position, mark)
            found.setdefault((position, kind), Finding(kind, position, chain, source))

        for block, (first, last) in enumerate(self.graph.blocks):
            state = self.entry_states[block].copy()
            for position in range(first, last + 1):
                effect = self.effects[position]
                guard = "" if effect.guard is None else self.program.code[position].guard
                if effect.forbidden:
                    add(effect.forbidden, position, None)
                for kind, locations in effect.sinks:
                    mark = self.worst(locations, state, None, guard)
                    if mark is not None:
                        add(kind, position, mark)
                if self.program.code[position].base == "CALL" and self.context[block] is not None:
                    add(CALL, position, self.context[block])
                self.step(position, state, self.context[block])
        blocks = zip(self.graph.blocks, self.entry_states, strict=True)
        missed = [first for (first, _), state in blocks if state.stack == _UNSET]
        for position in (*self.graph.unresolved, *self.graph.unreached[:1], *missed[:1]):
            add(UNRESOLVED, position, None)
        return sorted(found.values(), key=lambda f: (len(f.chain), f.position))


def analyse(program: Program, kernel: str, is_declassified: Callable[[int], bool] = lambda _: False) -> Analysis:
    """Findings of one kernel. is_declassified(position): the policy says that this instruction's result is public."""
    graph = build_graph(program, kernel)
    taint = _Taint(program, graph, is_declassified)
    taint.run()
    return Analysis(graph, taint.findings(), sorted(taint.unknown))


def count_indirect(program: Program, graph: Graph) -> int:
    """Indirect branches and calls in the reached code."""
    return sum(is_indirect(program.code[p]) for first, last in graph.blocks for p in range(first, last + 1))
