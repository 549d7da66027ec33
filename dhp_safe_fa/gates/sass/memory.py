"""Effects of loads, stores, atomics, textures, matrices behind descriptors and bulk copies."""

from __future__ import annotations

import re

from .effect import ADDRESS, BARRIER, DESCRIPTOR, GUARDED_BARRIER, GUARDED_MEMORY, Effects, Frame
from .opcodes import GLOBAL, SLOTS, words_of
from .operands import Operand, UnknownInstruction
from .parts import address, locations, take


def _size(modifiers: list[str]) -> int:
    """Registers that a memory instruction moves per thread."""
    return 4 if "128" in modifiers else 2 if "64" in modifiers or "U64" in modifiers or "S64" in modifiers else 1


def constant(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    if take(SLOTS[base], operands, name) != 1 or len(operands) != 2 or operands[1].kind != "mem":
        raise UnknownInstruction(name)
    index = locations(operands[1:])
    assert operands[0].register
    resets = operands[0].text == "R1" and operands[1].text.startswith("c[0x0][0x")
    writes = operands[0].register.locations(_size(modifiers))
    return Effects(writes, index, sinks=((ADDRESS, index),), resets_stack=resets)


def access(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """Loads, stores, atomics, asynchronous copies: destinations stand before the first address."""
    if base == "CCTL" and not operands:  # CCTL.IVALL
        return Effects(guard_kind=GUARDED_MEMORY)
    at = next((i for i, o in enumerate(operands) if o.kind == "mem"), None)
    if at is None or any(o.kind not in ("R", "P") for o in operands[:at]):
        raise UnknownInstruction(name)
    wide = base in words_of(GLOBAL)
    size = _size(modifiers)
    if base == "LDSM":
        size = next((int(m) for m in modifiers if m in ("2", "4")), 1)
    writes = [x for o in operands[:at] if o.register for x in o.register.locations(size if o.kind == "R" else 1)]
    sinks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    for operand in operands[at:]:
        if operand.kind == "mem":
            sinks += address(operand, wide or (base == "LDGSTS" and sinks != ()))
    tail = operands[at + 1 :]
    if base == "LDGSTS":  # a predicate operand decides whether the copy happens
        sinks += ((GUARDED_MEMORY, locations(o for o in tail if o.kind == "P")),)
    secret = "global memory" if wide or base == "LDGSTS" else "shared memory"
    generic = base == "ST"  # may reach local memory through its generic address
    return Effects(
        tuple(writes),
        secret=secret if writes else "",
        sinks=sinks,
        guard_kind=GUARDED_MEMORY,
        stores=locations((o for o in tail if o.register), size) if generic else (),
    )


def local(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    load = base == "LDL"
    if len(operands) != 2 or operands[load].kind != "mem" or operands[not load].kind != "R":
        raise UnknownInstruction(name)
    memory, data = operands[load], operands[not load].register
    assert data
    words = _size(modifiers)
    registers = memory.inside[-1]
    base_register = registers[0] if len(registers) == 1 and not registers[0].suffix else None
    partial = bool({"U8", "S8", "U16", "S16"} & set(modifiers))
    frame = Frame(base_register, memory.offset, words, partial)
    moved = data.locations(words)
    sinks = address(memory, wide=False)
    if load:
        return Effects(moved, sinks=sinks, guard_kind=GUARDED_MEMORY, frame=frame)
    return Effects(sinks=sinks, guard_kind=GUARDED_MEMORY, frame=frame, stores=moved)


def texture(operands: list[Operand]) -> Effects:
    """Texture and surface: results are secret, every source register is an address. Up to two result quadruples."""
    targets = [o for o in operands[:3] if o.kind in ("R", "P")]
    writes = tuple(x for o in targets if o.register for x in o.register.locations(4 if o.kind == "R" else 1))
    return Effects(
        writes,
        secret="global memory",
        sinks=((ADDRESS, locations((o for o in operands if o.kind in ("R", "UR", "mem")), 4)),),
        guard_kind=GUARDED_MEMORY,
    )


def _shape_n(modifiers: list[str]) -> int:
    match = next((re.fullmatch(r"64x(\d+)x\d+", m) for m in modifiers if m.startswith("64x")), None)
    if match is None:
        raise UnknownInstruction(f"matrix shape {'.'.join(modifiers)}")
    return int(match[1])


def gmma(modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """D, [A], gdesc, C: matrices behind descriptors come from shared memory. gdesc[UR] holds the pair of A, then of B;
    with A in registers only the second pair is read."""
    at = next((i for i, o in enumerate(operands) if o.space == "gdesc"), None)
    if at not in (1, 2) or operands[0].kind != "R" or not operands[at].inside[0]:
        raise UnknownInstruction(name)
    assert at is not None and operands[0].register
    columns = _shape_n(modifiers)
    width = columns // 4 if "F16" in modifiers and "F32" not in modifiers else columns // 2
    descriptor = operands[at].inside[0][0].locations(4)
    return Effects(
        operands[0].register.locations(width),
        secret="shared memory",
        sinks=((DESCRIPTOR, descriptor if at == 1 else descriptor[2:]),),
        guard_kind=GUARDED_MEMORY,
    )


def bulk(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """TMA: [(shared address, (barrier,)) coordinates] and [descriptor or global address], all in uniform registers."""
    rank = next((int(m[0]) for m in modifiers if re.fullmatch(r"[1-5]D", m)), None)
    widths = [2, 2]
    if base in ("UTMALDG", "UTMAPF", "UTMASTG", "UTMAREDG"):
        if rank is None:
            raise UnknownInstruction(name)
        widths[0] = rank + {"UTMALDG": 2, "UTMAPF": 0}.get(base, 1)  # a prefetch has no shared address and no barrier
    found: list[int] = []
    for operand in operands:
        if operand.kind == "mem":
            width = widths.pop(0) if widths else 2
            found += locations([operand], width)
        else:
            found += locations([operand])  # a size, a multicast mask
    return Effects(sinks=((DESCRIPTOR, tuple(found)),), guard_kind=GUARDED_MEMORY)


def syncs(modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """mbarrier words, which only SYNCS touches, are public; so are their results. Counts must be public."""
    at = next((i for i, o in enumerate(operands) if o.kind == "mem"), None)
    if at is None or any(o.kind not in ("R", "UR", "P", "UP") for o in operands[:at]):
        raise UnknownInstruction(name)
    size = _size(modifiers)
    writes = [x for o in operands[:at] if o.register for x in o.register.locations(size if "R" in o.kind else 1)]
    sinks = (*address(operands[at], wide=False), (BARRIER, locations(operands[at + 1 :], size)))
    return Effects(tuple(writes), sinks=sinks, guard_kind=GUARDED_BARRIER)
