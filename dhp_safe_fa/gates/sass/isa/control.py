"""Effects of control transfers, convergence barriers and barriers between threads."""

from __future__ import annotations

from .effect import BARRIER, BRANCH, CALL, EXIT, GUARDED_BARRIER, INDIRECT, Effects
from .opcodes import CONVERGE, words_of
from .operands import BARRIER_RESULT, Operand, UnknownInstruction
from .parts import locations, take

_SINK_OF_TRANSFER = {"BRX": INDIRECT, "BRXU": INDIRECT, "JMX": INDIRECT, "JMXU": INDIRECT, "CALL": CALL, "RET": CALL}


def transfer(base: str, operands: list[Operand], guard: int | None) -> Effects:
    """Control transfers and convergence: guard, target register (a pair) and predicate operands all steer."""
    if base in words_of(CONVERGE):
        masks = ((GUARDED_BARRIER, locations(o for o in operands if o.kind == "P")),)  # of BREAK: who leaves
        return Effects(locations(operands[:1]) if base == "BSSY" else (), sinks=masks, guard_kind=GUARDED_BARRIER)
    width = 2 if base in _SINK_OF_TRANSFER else 1
    steers = tuple(
        x for o in operands if o.register and o.kind != "B" for x in o.register.locations(width if "R" in o.kind else 1)
    ) + (() if guard is None else (guard,))
    kind = _SINK_OF_TRANSFER.get(base, EXIT if base in ("EXIT", "KILL", "RTT") else BRANCH)
    return Effects(sinks=((kind, steers),), steers=steers, guard_kind=kind)


def barrier(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    kind = GUARDED_BARRIER
    if base == "BAR" and "RED" in modifiers:
        data = locations(o for o in operands if o.kind == "P")
        ids = locations(o for o in operands if o.kind in ("R", "UR"))
        return Effects((BARRIER_RESULT,), data, sinks=((BARRIER, ids),), guard_kind=kind)
    if base == "USETMAXREG":
        taken = take(["UP?"], operands, name)
        return Effects(locations(operands[:taken]), sinks=((BARRIER, locations(operands[taken:])),), guard_kind=kind)
    if base == "BMOV":  # convergence masks follow from branches, which are sinks themselves
        if len(operands) != 2 or operands[0].kind not in ("R", "B"):
            raise UnknownInstruction(name)
        return Effects(locations(operands[:1]), locations(operands[1:]), guard_kind=kind)
    return Effects(sinks=((BARRIER, locations(operands)),), guard_kind=kind)
