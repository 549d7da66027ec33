"""What SASS instructions of sm_80 to sm_90a read, write and reveal.

opcodes.py names the opcodes, widths.py the registers that their operands take; arithmetic.py, memory.py and control.py
hold the effects. Whatever does not fit raises UnknownInstruction: nothing is guessed.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache

from . import arithmetic, control, memory
from .effect import BARRIER, CALL, GUARDED_BARRIER, Effects, Frame
from .opcodes import BARRIERS, BULK, CONTROL, CONVERGE, GLOBAL, GMMA, SHARED, SLOTS, TEXTURE, TRANSFER, check, words_of
from .operands import BARRIER_RESULT, UP, Operand, P, UnknownInstruction, parse, split
from .parts import locations

__all__ = ["CALL", "CONTROL", "Effects", "Frame", "effects", "guard_location"]


@cache
def effects(opcode: str, operands: str, guard: str) -> Effects:
    """Effects of ``opcode operands`` under ``guard`` ("", "P0", "!UP3"). UnknownInstruction names what is not known."""
    base, *modifiers = opcode.split(".")
    name = f"{opcode} {operands}".strip()
    check(opcode)
    try:
        parsed = [parse(part) for part in split(operands)]
    except UnknownInstruction as error:
        raise UnknownInstruction(f"{opcode}: operand {error}") from error
    predicate = guard_location(guard)
    result = _effects(base, modifiers, parsed, name, predicate)
    if guard in ("!PT", "!UPT"):  # never executed
        return Effects()
    return result if predicate is None else _with_guard(result, predicate)


@cache
def guard_location(guard: str) -> int | None:
    """Location of a guard; None for none and for the constant predicates."""
    match = re.fullmatch(r"!?(U?P)(\d)", guard)
    return None if not match else (UP if match[1] == "UP" else P) + int(match[2])


def _effects(base: str, modifiers: list[str], operands: list[Operand], name: str, guard: int | None) -> Effects:
    if base in words_of(TRANSFER) or base in words_of(CONVERGE):
        return control.transfer(base, operands, guard)
    if base in ("LDC", "ULDC"):
        return memory.constant(base, modifiers, operands, name)
    if base in ("LDL", "STL"):
        return memory.local(base, modifiers, operands, name)
    if base in ("P2R", "UP2UR", "R2P", "UR2UP"):
        return arithmetic.predicates(base, operands, name)
    if base in SLOTS:
        return arithmetic.alu(base, modifiers, operands, name)
    if base == "SYNCS":
        return memory.syncs(modifiers, operands, name)
    if base == "LDGSTS" or base in words_of(GLOBAL) or base in words_of(SHARED):
        return memory.access(base, modifiers, operands, name)
    if base in ("SULD", "SUST", "SURED"):
        return memory.surface(base, modifiers, operands, name)
    if base in words_of(TEXTURE):
        return memory.texture(base, modifiers, operands, name)
    if base in words_of(GMMA):
        return memory.gmma(base, modifiers, operands, name)
    if base in words_of(BULK):
        return memory.bulk(base, modifiers, operands, name)
    if base == "B2R":
        return Effects(locations(o for o in operands if o.kind in ("R", "P")), (BARRIER_RESULT,))
    if base in words_of(BARRIERS):
        return control.barrier(base, modifiers, operands, name)
    return Effects(sinks=((BARRIER, locations(operands)),), guard_kind=GUARDED_BARRIER)  # _INERT


def _with_guard(effects: Effects, guard: int) -> Effects:
    sinks = effects.sinks
    if not effects.steers and (effects.guard_kind, (guard,)) not in sinks:
        sinks = (*sinks, (effects.guard_kind, (guard,)))
    return replace(effects, guard=guard, sinks=sinks)
