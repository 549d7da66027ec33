"""What the analysis of secrets knows at one point of a kernel, and which conditions guarded instructions share."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from .isa import guard_location
from .isa.operands import UP, UR, P
from .listing import Instruction

Mark = tuple[int, int]  # distance from a source, position of the writing instruction
NEVER = -1  # instead of the instruction that wrote a location: none did
UNWRITTEN: Mark = (1, NEVER)
UNSET, UNKNOWN = "unset", "unknown"  # of the stack pointer: no path yet, different on different paths
_COPY = re.compile(r"(?:R\d+, |(U)R\d+, U)R(\d+)")
_VOTE = re.compile(r"VOTEU\.(ALL|ANY) (?:UR\w+, )?(UP\d), (!?P\d)")


def negation(guard: str) -> str:
    """The guard that holds where this one does not."""
    return guard[1:] if guard.startswith("!") else f"!{guard}"


def source_of_copy(instruction: Instruction) -> int:
    """The location that an unguarded MOV from register to register, both uniform or both not, copies, and with it what
    is known of it under a condition; NEVER for any other instruction."""
    if instruction.guard or instruction.opcode not in ("MOV", "UMOV"):
        return NEVER
    match = _COPY.fullmatch(instruction.operands)
    return (UR if match[1] else 0) + int(match[2]) if match else NEVER


@dataclass
class Conditions:
    """Names for what guards stand for, so that what was written under a guard is known under an equal one.

    A condition is the guard itself or, for uniform registers, "some lane: P0 of 7": the predicate P0, as the
    instruction at position 7 wrote it, holds in some lane. A uniform register that was written where one vote over P0
    held can be read where another vote over the same P0 holds, even if P0 itself has changed by then.

    written: where each lane predicate was written last. votes: of a guard by a uniform predicate, its condition.
    """

    written: dict[int, int] = field(default_factory=dict)
    votes: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Conditions:
        return Conditions(dict(self.written), dict(self.votes))

    def join(self, other: Conditions) -> bool:
        """Keep what the other path knows, too; True if that is less."""
        before = len(self.written) + len(self.votes)
        self.written = {p: at for p, at in self.written.items() if other.written.get(p) == at}
        self.votes = {v: condition for v, condition in self.votes.items() if other.votes.get(v) == condition}
        return len(self.written) + len(self.votes) != before

    def some_lane(self, guard: str) -> str:
        """The condition that a lane predicate's guard holds in some lane; the guard where that has no name."""
        predicate = guard_location(guard)
        if predicate is None or predicate >= UP or predicate not in self.written:
            return guard
        return f"some lane: {guard} of {self.written[predicate]}"

    def of(self, location: int, guard: str) -> str:
        """The condition under which an instruction with this guard reads or writes a location."""
        return self.votes.get(guard) or self.some_lane(guard) if UR <= location < P else guard

    def forget(self, predicate: int, position: int, is_certain: bool) -> None:
        """The instruction at a position wrote a predicate, or may have. What it wrote before has no name any more."""
        self.votes = {v: c for v, c in self.votes.items() if guard_location(v) != predicate}
        self.votes = {v: c for v, c in self.votes.items() if not _is_over(c, predicate, position)}
        self.written.pop(predicate, None)
        if is_certain:
            self.written[predicate] = position

    def over(self, conditions: Iterable[tuple[int, str]], predicate: int, position: int) -> list[int]:
        """The locations whose conditions end with this write of a predicate."""
        return [location for location, condition in conditions if _is_over(condition, predicate, position)]

    def vote(self, instruction: Instruction) -> None:
        """VOTEU.ALL UP0, P1: if UP0 is false, P1 is false in some lane. VOTEU.ANY UP0, P1: if true, true in some."""
        if instruction.guard or not instruction.opcode.startswith("VOTEU"):
            return
        match = _VOTE.fullmatch(f"{instruction.opcode} {instruction.operands}")
        if match:
            guard, asked = (match[2], match[3]) if match[1] == "ANY" else (f"!{match[2]}", negation(match[3]))
            self.votes[guard] = self.some_lane(asked)


def _is_over(condition: str, predicate: int, position: int) -> bool:
    return condition.endswith(f" of {position}") or guard_location(condition) == predicate


@dataclass
class State:
    """The secret locations at one point, the stack pointer relative to its value at entry, the bytes of local memory,
    relative to the same, that were certainly written, and the registers that may never have been (`unset`).

    given[location] = (condition, mark): the mark that the location has where the condition holds. It was written under
    a guard that says so, and the predicate has not changed since. So ``@P0 MOV R1, 0x80`` and then
    ``@P0 STS [R2], R1`` is public, whatever R1 held before.
    """

    marks: dict[int, Mark] = field(default_factory=dict)
    stack: int | str = UNSET
    given: dict[int, tuple[str, Mark | None]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)
    unset: set[int] = field(default_factory=set)
    conditions: Conditions = field(default_factory=Conditions)

    def copy(self) -> State:
        given, conditions = dict(self.given), self.conditions.copy()
        return State(dict(self.marks), self.stack, given, set(self.written), set(self.unset), conditions)

    def join(self, other: State) -> bool:
        """Add what `other`, the state at the end of a path, knows; True if that changed anything."""
        if self.stack == UNSET:  # the first path that comes here
            self.marks, self.stack, self.given = dict(other.marks), other.stack, dict(other.given)
            self.written, self.unset = set(other.written), set(other.unset)
            self.conditions = other.conditions.copy()
            return True
        changed = not (self.written <= other.written and other.unset <= self.unset)
        self.unset |= other.unset
        self.written &= other.written
        changed |= self.conditions.join(other.conditions)
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
        if self.stack not in (other.stack, UNKNOWN):
            self.stack = UNKNOWN
            changed = True
        return changed

    def write(self, location: int, mark: Mark | None, guard: str) -> None:
        """Overwrite a location, where the guard holds if there is one."""
        old = self.marks.get(location)
        if guard:
            known = self.given.pop(location, None)
            if known and known[0] == negation(guard):  # written under both outcomes: nothing old is left
                old = known[1]
                self.unset.discard(location)
            else:
                self.given[location] = (self.conditions.of(location, guard), mark)
            mark = mark if old is None else old if mark is None else min(old, mark)
        else:
            self.given.pop(location, None)
            self.unset.discard(location)
        if mark is None:
            self.marks.pop(location, None)
        else:
            self.marks[location] = mark

    def forget(self, predicate: int, position: int, is_certain: bool) -> None:
        """A predicate was written: what held under its old value is not known to hold under the new one."""
        known = ((location, condition) for location, (condition, _) in self.given.items())
        for location in self.conditions.over(known, predicate, position):
            del self.given[location]
        self.conditions.forget(predicate, position, is_certain)

    def read(self, location: int, guard: str) -> Mark | None:
        """The mark of a location where the guard holds."""
        known = self.given.get(location)
        if known and guard and known[0] == self.conditions.of(location, guard):
            return known[1]
        return UNWRITTEN if location in self.unset else self.marks.get(location)
