"""What one SASS instruction does to locations, and the kinds of findings that it may give rise to."""

from __future__ import annotations

from dataclasses import dataclass

from .operands import Register

# Guarded instructions whose guard is secret, by what the observer sees: see docs/gates-sass.md.
GUARDED_MEMORY, GUARDED_BARRIER, GUARDED_ARITHMETIC = "guarded-memory", "guarded-barrier", "guarded-arithmetic"
BRANCH, INDIRECT, CALL, EXIT = "branch", "indirect-branch", "call", "exit"
ADDRESS, DESCRIPTOR, BARRIER, LANE, CLOCK = "address", "descriptor", "barrier-operand", "shuffle-lane", "clock"
LATENCY = "latency"  # of an instruction that takes longer for some values


@dataclass(frozen=True)
class Frame:
    """An access to local memory (LDL, STL): `words` 32-bit words at base + offset bytes."""

    base: Register | None
    offset: int
    words: int
    partial: bool  # narrower than a word: a store leaves the rest of it


@dataclass(frozen=True)
class Effects:
    """What one instruction does to locations.

    writes: locations it overwrites (if guarded: may overwrite). flows: locations whose content reaches the writes.
    apart: writes that follow from operands which are sinks, so that no secret flows there unless it is found anyhow.
    secret: what makes the writes secret whatever the flows ("global memory"), or "". sinks: (finding kind, locations
    that must be public). steers: locations that decide where control goes. guard: location of the predicate, if any.
    """

    writes: tuple[int, ...] = ()
    flows: tuple[int, ...] = ()
    secret: str = ""
    apart: tuple[int, ...] = ()
    sinks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    steers: tuple[int, ...] = ()
    guard: int | None = None
    guard_kind: str = GUARDED_ARITHMETIC
    forbidden: str = ""  # a finding whatever the operands hold
    frame: Frame | None = None
    stores: tuple[int, ...] = ()  # of STL and generic stores: the data
    stack: int | None = None  # R1 += stack
    crosses_lanes: bool = False  # reads registers of lanes that its guard may exclude
    resets_stack: bool = False  # R1 = the stack pointer that the driver put into constant bank 0
