"""Information flow through one kernel: which locations may depend on secrets, and where that shows.

A fixed point over the control-flow graph. The lattice has two points, public and secret; a secret location also
carries its distance from a source and the instruction that wrote it, so that the shortest way back can be printed.
Distances only fall, so the iteration ends.
"""

from __future__ import annotations

import copy
import heapq
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache

from .addresses.aliases import DECLARED, MBARRIER, Aliases, is_store, writes_global
from .addresses.cases import Cases
from .addresses.fixpoint import Addresses
from .addresses.values import STACK
from .cfg import Graph, build_graph, is_indirect
from .isa import CALL, Effects, effects
from .isa.operands import BARRIER_RESULT, LOCAL, LOCAL_ANY, UP, UR, B, P, R, UnknownInstruction
from .listing import FRAGMENT, Program
from .order import awaits_launches, may_come_after, may_end_a_meeting, meets_all, reached_without
from .state import NEVER, UNKNOWN, UNSET, Mark, State, negation, source_of_copy

UNRESOLVED = "unresolved-control"
_STACK_POINTER = R + 1
# Of all register files but the barriers'.
_REGISTERS = [*range(R, R + 255), *range(UR, UR + 63), *range(P, P + 7), *range(UP, UP + 7)]
_FRAME = 1 << 16  # bytes of local memory; what may be anywhere in more is taken to be anywhere
# Constants and special registers, but for those that are the same in every block of every launch of a kernel for so
# many threads: of bank 0 of sm_90 the block's size, the stack, the generic address of parameters and the memory
# descriptor; the compiler's banks; and what a thread's place in its block says.
_VARIES = re.compile(
    r"cx\[|c\[(?!0x[24]\])(?!0x0\]\[0x(?:0|4|28|198|19c|208|20c)\])|SR_(?!TID|LANEID|[LEG][TQE]MASK|SWINHI)"
)


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
    def __init__(
        self,
        program: Program,
        graph: Graph,
        is_declassified: Callable[[int], bool],
        public: Collection[int],
        made: Collection[int] = (),
        is_maker: bool = False,
    ) -> None:
        self.program = program
        self.graph = graph
        self.within = set(range(len(graph.blocks)))  # the blocks that are looked at
        self.is_declassified = is_declassified
        self.is_maker = is_maker
        self.early = reached_without(program, graph, meets_all)
        self.effects: dict[int, Effects] = {}
        self.unknown: dict[str, None] = {}
        for first, last in graph.blocks:
            for position in range(first, last + 1):
                instruction = program.code[position]
                try:
                    self.effects[position] = effects(instruction.opcode, instruction.operands, instruction.guard)
                except UnknownInstruction as error:
                    self.unknown[str(error)] = None
                    self.effects[position] = Effects()
        self.aliases = Aliases(program, list(self.effects), public)
        wanted = {position: set(locations) for position, locations in self.aliases.wanted.items()}
        for position, effect in self.effects.items():
            base = effect.frame.base if effect.frame else None
            if base and base.locations() not in ((), (_STACK_POINTER,)):
                wanted.setdefault(position, set()).update(base.locations())
        cases = Cases(program, graph, self.effects)
        for position, locations in cases.wanted.items():
            wanted.setdefault(position, set()).update(locations)
        self.addresses = Addresses(program, graph, self.effects, wanted, public)
        before_launches = reached_without(program, graph, awaits_launches)
        self.public_loads = self.aliases.public_loads(self.addresses, made, before_launches)
        self.certain = cases.certain(self.addresses)
        self.forget()

    def forget(self) -> None:
        """Back to where nothing is known of what flows."""
        self.parent: dict[int, int | None] = {}
        self.entry_states = [State() for _ in self.graph.blocks]
        self.context: list[Mark | None] = [None] * len(self.graph.blocks)  # mark of the branch that a block depends on
        self.unwritten: set[int] = set()  # loads from local memory that nothing may have written before
        # What other threads of the block, or other lanes of a warp, may have left: locations to marks, from any place.
        self.left: dict[int, Mark] = {}
        self.is_settled = True

    def run(self) -> None:
        """The fixed point, again until what threads leave for each other does not grow."""
        entry = self.entry_states[self.graph.entry]
        entry.stack = 0
        first, _ = self.graph.blocks[self.graph.entry]
        if self.program.code[first].section != FRAGMENT:  # another kernel may have left a secret there
            entry.unset = {x for x in _REGISTERS if x != _STACK_POINTER}
        self.settle([self.graph.entry])
        while not self.is_settled:
            self.is_settled = True
            self.settle([b for b, state in enumerate(self.entry_states) if state.stack != UNSET])

    def leave(self, location: int, mark: Mark) -> None:
        old = self.left.get(location)
        if old is None or mark < old:
            self.left[location] = mark
            self.is_settled = False

    def settle(self, queue: list[int]) -> None:
        waiting = set(queue)
        while queue:
            block = heapq.heappop(queue)
            waiting.discard(block)
            state = self.entry_states[block].copy()
            first, last = self.graph.blocks[block]
            for position in range(first, last + 1):
                self.step(position, state, self.context[block])
            woken = self.spread(block, last, state)
            for successor in self.within.intersection(self.graph.successors[block]):
                if self.entry_states[successor].join(state):
                    woken.add(successor)
            for other in woken - waiting:
                waiting.add(other)
                heapq.heappush(queue, other)

    def through(self, block: int) -> Iterator[tuple[int, State]]:
        """Each position of a block, and the state that it meets."""
        state = self.entry_states[block].copy()
        first, last = self.graph.blocks[block]
        for position in range(first, last + 1):
            yield position, state
            self.step(position, state, self.context[block])

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

    def frame(self, position: int, state: State) -> tuple[range, bool] | None:
        """Where the local memory that an instruction touches begins, in bytes relative to the stack pointer at entry:
        all places that it may, and whether the address was there for all to see, R1 plus a constant. None: unknown."""
        frame = self.effects[position].frame
        assert frame
        base = frame.base.locations() if frame.base else ()
        if base == (_STACK_POINTER,):
            return (
                (range(state.stack + frame.offset, state.stack + frame.offset + 1), True)
                if isinstance(state.stack, int)
                else None
            )
        value = self.addresses.value(position, base[0]) if base else None
        if value is None or value.base != STACK or value.hi - value.lo > _FRAME:
            return None
        return range(value.lo + frame.offset, value.hi + frame.offset + 1, value.step or 1), False

    def width(self, position: int) -> int:
        """Bytes that a load from local memory, or a store to it, moves."""
        frame, modifiers = self.effects[position].frame, set(self.program.code[position].modifiers)
        assert frame
        return 1 if modifiers & {"U8", "S8"} else 2 if modifiers & {"U16", "S16"} else 4 * frame.words

    def loaded(self, position: int, state: State, guard: str, best: Mark | None) -> Mark | None:
        """The mark of what LDL reads. What nothing has written is secret: another kernel may have left it there."""
        frame = self.effects[position].frame
        assert frame
        found = self.frame(position, state)
        if found is None:
            everything = tuple(x for x in state.marks if x > LOCAL // 2)
            best = self.worst((*everything, LOCAL_ANY), state, best, guard)
            is_spill = frame.base is not None and frame.base.locations() == (_STACK_POINTER,)
            return best if is_spill else self.never_written(position, best)
        starts, width = found[0], self.width(position)
        words = sorted(
            {LOCAL + byte // 4 for start in starts for byte in (start, start + width - 1)}
            | {LOCAL + start // 4 + i for start in starts for i in range(frame.words)}
        )
        for word in words:
            known = state.given.get(word)
            if guard and known and known[0] == guard:
                continue
            touched = {4 * (word - LOCAL) + i for i in range(4)}
            if width < 4:
                touched &= {start + i for start in starts for i in range(width)}
            if not touched <= state.written:
                best = self.never_written(position, best)
        return self.worst((*words, LOCAL_ANY), state, best, guard)

    def never_written(self, position: int, best: Mark | None) -> Mark:
        self.unwritten.add(position)
        return (0, position) if best is None else best

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
        if BARRIER_RESULT in effect.flows:
            best = min(filter(None, (best, self.left.get(BARRIER_RESULT))), default=None)
        if effect.frame and not effect.stores and effect.writes:
            best = self.loaded(position, state, guard, best)
        if position in self.public_loads:  # what is public there is not which of it was read
            best = self.worst(tuple(x for _, sink in effect.sinks for x in sink), state, best, guard)
        mark: Mark | None = None
        if self.is_declassified(position):
            mark = None
        elif (effect.secret and position not in self.public_loads) or (
            best is not None and best[1] == position and position in self.unwritten
        ):
            mark = (1, position)
            self.parent[position] = None
        elif best is not None:
            mark = (best[0] + 1, position)
            if effect.writes:
                self.note(position, best)
        if BARRIER_RESULT in effect.writes and mark is not None:
            self.leave(BARRIER_RESULT, mark)
        copied = state.given.get(source_of_copy(self.program.code[position]))
        for location in effect.writes:
            state.write(location, mark, guard)
            if copied and copied[1] is None:
                state.given[location] = copied
        state.unset -= self.certain.get(position, set())
        if "COLLECTIVE" in self.program.code[position].opcode:
            self.exchange(state)
        if effect.stores or (effect.frame and not effect.writes):
            self.store(position, state, self.worst(effect.stores, state, best, guard), guard)
        for location in (*effect.writes, *effect.apart):
            if P <= location < B:
                state.forget(location, position, is_certain=not guard)
        state.conditions.vote(self.program.code[position])
        if _STACK_POINTER in effect.writes:
            if effect.resets_stack:
                state.stack = 0
            elif effect.stack is not None and effect.guard is None and isinstance(state.stack, int):
                state.stack += effect.stack
            else:
                state.stack = UNKNOWN

    def exchange(self, state: State) -> None:
        """Lanes of a split warp meet here to run one instruction together. Each may come from another such place, so
        that a register of theirs holds what it does there; and it may go on with what was written elsewhere."""
        for location, mark in state.marks.items():
            if location < B:
                self.leave(location, mark)
        state.given.clear()
        for location, mark in self.left.items():
            if location < B:
                state.marks[location] = min(mark, state.marks.get(location, mark))

    def store(self, position: int, state: State, best: Mark | None, guard: str) -> None:
        """STL, or a generic store that may reach local memory."""
        effect = self.effects[position]
        found = self.frame(position, state) if effect.frame else None
        mark = None if best is None else (best[0] + 1, position)
        if best is not None:
            self.note(position, best)
        if found is None or effect.frame is None:
            if mark is not None:
                state.marks[LOCAL_ANY] = min(mark, state.marks.get(LOCAL_ANY, mark))
            return
        starts, is_certain = found
        width = self.width(position)
        for word in sorted({LOCAL + (start + i) // 4 for start in starts for i in range(0, width, min(width, 4))}):
            known = state.given.get(word)
            if effect.frame.partial or not is_certain:  # the rest of the word, or what is elsewhere, stays
                state.write(word, self.worst((word,), state, mark), "")
            else:
                state.write(word, mark, guard)
                if known and guard and known[0] == negation(guard):
                    state.written.update(range(4 * (word - LOCAL), 4 * (word - LOCAL) + 4))
        if is_certain and not guard:
            state.written.update(range(starts[0], starts[0] + width))

    def chain(self, position: int, mark: Mark | None) -> tuple[tuple[int, ...], str]:
        """Positions from the source to `position`, and what the source reads."""
        steps = [position]
        current = None if mark is None else mark[1]
        while current is not None and current not in steps and current != NEVER:
            steps.append(current)
            current = self.parent.get(current)
        first = self.effects.get(steps[-1], Effects())
        source = first.secret or first.forbidden
        if current == NEVER:
            source = "a register that was never written"
        elif not source and steps[-1] in self.unwritten:
            source = "local memory that was never written"
        return tuple(reversed(steps)), source

    def varies(self, position: int) -> bool:
        """Whether it reads what differs between blocks or launches; an mbarrier's counts may, too."""
        instruction = self.program.code[position]
        return instruction.base == "SYNCS" or bool(_VARIES.search(instruction.operands))

    def uncertain_initialisations(self) -> Iterator[int]:
        """Where an mbarrier is initialised when others may have met already; or in some blocks or launches only: on a
        condition that the thread's number does not decide alone. That one on it holds for some thread is taken for
        granted."""
        starts = self.aliases.initialisations & self.early
        if not starts:
            return
        yield from (p for p in starts if may_come_after(self.program, self.graph, may_end_a_meeting, p))
        other = copy.copy(self)
        other.forget()
        other.within = {b for b, (first, _) in enumerate(self.graph.blocks) if first in self.early}
        other.public_loads, other.is_declassified = set(), lambda _: False
        other.effects = {
            position: replace(effect, secret="the launch")
            if effect.writes and self.varies(position)
            else effect
            for position, effect in self.effects.items()
        }
        other.run()
        for block in sorted(other.within):
            for position, state in other.through(block):
                guard = other.effects[position].guard
                guards = () if guard is None else (guard,)
                if position in starts and other.worst(guards, state, other.context[block]) is not None:
                    yield position

    def findings(self) -> list[Finding]:
        found: dict[tuple[int, str], Finding] = {}

        def add(kind: str, position: int, mark: Mark | None) -> None:
            chain, source = self.chain(position, mark)
            found.setdefault((position, kind), Finding(kind, position, chain, source))

        for block in range(len(self.graph.blocks)):
            for position, state in self.through(block):
                effect = self.effects[position]
                guard = "" if effect.guard is None else self.program.code[position].guard
                if effect.forbidden:
                    add(effect.forbidden, position, None)
                instruction = self.program.code[position]
                makes = self.is_maker and writes_global(instruction)
                made = ((DECLARED, effect.flows),) if makes and is_store(instruction) else ()
                for kind, locations in (*effect.sinks, *made):
                    mark = self.worst(locations, state, None, guard)
                    if mark is not None:
                        add(kind, position, mark)
                if makes and not made:  # what is copied there is in no register
                    add(DECLARED, position, None)
                if instruction.base == "CALL" and self.context[block] is not None:
                    add(CALL, position, self.context[block])
        without = cache(lambda others: reached_without(self.program, self.graph, meets_all, others))
        for kind, position in self.aliases.judge(self.addresses, self.early, without):
            add(kind, position, None)
        for position in self.uncertain_initialisations():
            add(MBARRIER, position, None)
        blocks = zip(self.graph.blocks, self.entry_states, strict=True)
        missed = [first for (first, _), state in blocks if state.stack == UNSET]
        for position in (*self.graph.unresolved, *self.graph.unreached[:1], *missed[:1]):
            add(UNRESOLVED, position, None)
        return sorted(found.values(), key=lambda f: (len(f.chain), f.position))


def analyse(
    program: Program,
    kernel: str,
    is_declassified: Callable[[int], bool] = lambda _: False,
    public: Collection[int] = (),
    made: Collection[int] = (),
    is_maker: bool = False,
) -> Analysis:
    """Findings of one kernel. is_declassified(position): the policy says that this instruction's result is public.
    public: the parameters, in bytes from the first one, that point to memory which is declared public; made: those of
    them to what a launch before this one writes. is_maker: others take for public what this kernel writes."""
    graph = build_graph(program, kernel)
    if program.target and not program.target.startswith("sm_90"):  # where the parameters begin is known of sm_90
        public = ()
    taint = _Taint(program, graph, is_declassified, public, made, is_maker)
    taint.run()
    return Analysis(graph, taint.findings(), sorted(taint.unknown))


def count_indirect(program: Program, graph: Graph) -> int:
    """Indirect branches and calls in the reached code."""
    return sum(is_indirect(program.code[p]) for first, last in graph.blocks for p in range(first, last + 1))
