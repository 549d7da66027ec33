"""What the families of instructions share: the registers of operands, the sinks of an address, destinations."""

from __future__ import annotations

from collections.abc import Iterable

from .effect import ADDRESS, DESCRIPTOR
from .operands import Operand, UnknownInstruction


def locations(operands: Iterable[Operand], width: int = 1) -> tuple[int, ...]:
    """Every register that the operands name, those inside brackets included."""
    found: list[int] = []
    for operand in operands:
        if operand.register:
            found += operand.register.locations(2 if ".64" in operand.register.suffix else width)
        for registers in operand.inside:
            for register in registers:
                found += register.locations(2 if ".64" in register.suffix else width)
    return tuple(found)


def address(operand: Operand, wide: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The sinks of one memory operand; wide: 64-bit addresses, which are printed as their lower register."""
    inside = list(operand.inside)
    sinks = []
    if operand.space == "desc":
        sinks.append((DESCRIPTOR, tuple(x for r in inside[0] for x in r.locations(2))))
        inside = inside[1:]
    found: list[int] = []
    for registers in inside:
        for register in registers:
            narrow = not wide or ".U32" in register.suffix
            found += register.locations(1 if narrow and ".64" not in register.suffix else 2)
    sinks.append((ADDRESS, tuple(found)))
    return tuple(sinks)


def take(slots: list[str], operands: list[Operand], name: str) -> int:
    """How many operands are destinations; the slots' register files must match."""
    position = 0
    for slot in slots:
        operand = operands[position] if position < len(operands) else None
        fits = operand is not None and operand.kind == slot.rstrip("?") and not operand.negated
        if fits:
            position += 1
        elif not slot.endswith("?"):
            raise UnknownInstruction(name)
    return position
