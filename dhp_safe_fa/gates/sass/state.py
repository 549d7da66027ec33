"""What the analysis of secrets knows at one point of a kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

from .operands import location_name

Mark = tuple[int, int]  # distance from a source, position of the writing instruction
UNSET, UNKNOWN = "unset", "unknown"  # of the stack pointer: no path yet, different on different paths


def negation(guard: str) -> str:
    """The guard that holds where this one does not."""
    return guard[1:] if guard.startswith("!") else f"!{guard}"


@dataclass
class State:
    """The secret locations at one point, the stack pointer relative to its value at entry, and the bytes of local
    memory, relative to the same, that were certainly written.

    given[location] = (guard, mark): the mark that the location has where the guard holds. It was written under that
    guard, and the predicate has not changed since. So ``@P0 MOV R1, 0x80`` and then ``@P0 STS [R2], R1`` is public,
    whatever R1 held before.
    """

    marks: dict[int, Mark] = field(default_factory=dict)
    stack: int | str = UNSET
    given: dict[int, tuple[str, Mark | None]] = field(default_factory=dict)
    written: set[int] = field(default_factory=set)

    def copy(self) -> State:
        return State(dict(self.marks), self.stack, dict(self.given), set(self.written))

    def join(self, other: State) -> bool:
        """Add what `other`, the state at the end of a path, knows; True if that changed anything."""
        if self.stack == UNSET:  # the first path that comes here
            self.marks, self.stack, self.given = dict(other.marks), other.stack, dict(other.given)
            self.written = set(other.written)
            return True
        changed = not self.written <= other.written
        self.written &= other.written
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
