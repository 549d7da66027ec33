"""Effects of loads, stores, atomics, textures, matrices behind descriptors and bulk copies."""

from __future__ import annotations

import re

from .effect import ADDRESS, BARRIER, DESCRIPTOR, GUARDED_BARRIER, GUARDED_MEMORY, Effects, Frame
from .opcodes import GLOBAL, SLOTS, words_of
from .operands import Operand, UnknownInstruction
from .parts import address, locations, take
from .widths import gmma as gmma_widths
from .widths import moved


def constant(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    if take(SLOTS[base], operands, name) != 1 or len(operands) != 2 or operands[1].kind != "mem":
        raise UnknownInstruction(name)
    index = locations(operands[1:])
    assert operands[0].register
    resets = operands[0].text == "R1" and operands[1].text.startswith("c[0x0][0x")
    writes = operands[0].register.locations(moved(modifiers))
    return Effects(writes, index, sinks=((ADDRESS, index),), resets_stack=resets)


# Kinds of the operands (R, U: registers, P: predicate, M: memory), destinations first.
_FORMS = {
    "LD LDG LDS LDSM LDGMC": "RM",
    "ST STG STS STSM STAS RED REDG REDAS": "MR",
    "ATOM ATOMG": "PRMRR?",
    "ATOMS": "[RP]MR{0,2}",
    "LDGSTS": "MMP?",
    "CCTL": "M?",  # CCTL.IVALL has none
    "ARRIVES": "M",
    "QSPC": "PRM",
}
_FORM = {opcode: re.compile(form) for opcodes, form in _FORMS.items() for opcode in words_of(opcodes)}


def access(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """Loads, stores, atomics, asynchronous copies: destinations stand before the first address, data behind it."""
    kinds = "".join("M" if o.kind == "mem" else o.kind if o.kind in ("R", "P") else "?" for o in operands)
    if not _FORM[base].fullmatch(kinds):
        raise UnknownInstruction(name)
    if base == "CCTL" and not operands:
        return Effects(guard_kind=GUARDED_MEMORY)
    at = kinds.index("M")
    wide = base in words_of(GLOBAL)
    if base in ("LDSM", "STSM"):
        size = next((int(m) for m in modifiers if m in ("2", "4")), 1)
    else:
        size = 1 if base in ("ARRIVES", "LDGSTS") else moved(modifiers)
    writes = [x for o in operands[:at] if o.register for x in o.register.locations(size if o.kind == "R" else 1)]
    sinks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    for operand in operands[at:]:
        if operand.kind == "mem":
            sinks += address(operand, wide or (base == "LDGSTS" and sinks != ()))
    tail = operands[at + 1 :]
    if base == "LDGSTS":  # a predicate operand decides whether the copy happens
        sinks += ((GUARDED_MEMORY, locations(o for o in tail if o.kind == "P")),)
    data = locations((o for o in tail if o.kind == "R"), size)
    if base == "QSPC":  # asks which space an address is in, and reads nothing there
        return Effects(tuple(writes), sinks[-1][1], sinks=sinks, guard_kind=GUARDED_MEMORY)
    return Effects(
        tuple(writes),
        data,
        secret="" if not writes else "global memory" if wide else "shared memory",
        sinks=sinks,
        guard_kind=GUARDED_MEMORY,
        stores=data if base == "ST" else (),  # may reach local memory through its generic address
    )


def local(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    load = base == "LDL"
    if len(operands) != 2 or operands[load].kind != "mem" or operands[not load].kind != "R":
        raise UnknownInstruction(name)
    memory, data = operands[load], operands[not load].register
    assert data
    words = moved(modifiers)
    registers = memory.inside[-1]
    base_register = registers[0] if len(registers) == 1 and not registers[0].suffix else None
    partial = bool({"U8", "S8", "U16", "S16"} & set(modifiers))
    frame = Frame(base_register, memory.offset, words, partial)
    content = data.locations(words)
    sinks = address(memory, wide=False)
    if load:
        return Effects(content, sinks=sinks, guard_kind=GUARDED_MEMORY, frame=frame)
    return Effects(sinks=sinks, guard_kind=GUARDED_MEMORY, frame=frame, stores=content)


_DIMENSIONS = {"1D": 1, "2D": 2, "3D": 3, "CUBE": 3, "ARRAY_1D": 2, "ARRAY_2D": 3, "ARRAY_CUBE": 4}
_SURFACES = {"1D": 1, "2D": 2, "3D": 3, "1D_ARRAY": 2, "2D_ARRAY": 3}


def texture(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """Textures: results are secret, every source is an address.

    [P], D2, D1, A, [B], [handle, offset], dimension, [mask]. Of the chosen components (all four without a mask), D1
    takes the first two and D2 the others; halves are packed in pairs. A takes the coordinates, B a level, offset or
    gradient and a bindless handle; in the packed form (SCR) each takes half of them all.
    """
    place = operands[0].kind == "P" if operands else False
    words = [o for o in operands if o.kind == "word"]
    registers = [o for o in operands[place:] if o.kind == "R"]
    mask = operands[-1].value if operands and operands[-1].kind == "imm" else 0xF
    others = [o for o in operands if o.kind not in ("R", "UR", "imm", "word") and not (place and o is operands[0])]
    if len(words) != 1 or len(registers) not in (3, 4) or others or mask is None or not 0 < mask < 16:
        raise UnknownInstruction(name)
    components = mask.bit_count()
    first, rest = min(components, 2), max(components - 2, 0)
    if "F16" in modifiers:
        first, rest = 1, -(-rest // 2)
    if base == "TXQ":
        coordinates, extra = 1, 0
    elif words[0].text not in _DIMENSIONS:
        raise UnknownInstruction(name)
    else:
        coordinates, extra = _DIMENSIONS[words[0].text], int("LL" in modifiers)
    if base == "TXD":  # two derivatives for each coordinate
        extra = 2 * coordinates
    # A gather names its component, which may be B, too.
    bindless = sum(m in ("R", "G", "B", "A") for m in modifiers) - (base == "TLD4")
    parts: list[int]
    if "SCR" in modifiers:
        total = coordinates + extra + bindless
        parts = [-(-total // 2), total // 2]
    elif base == "TXQ":
        parts = [coordinates + bindless, 0]
    elif bindless:
        raise UnknownInstruction(name)
    else:
        parts = [coordinates, extra]
    if (len(registers) == 4) != bool(parts[1]):
        raise UnknownInstruction(name)
    sources = (*locations(registers[2:3], parts[0]), *locations(registers[3:], parts[1]))
    handles = locations((o for o in operands if o.kind == "UR"), 2)
    return Effects(
        (*locations(operands[:place]), *locations(registers[:1], rest), *locations(registers[1:2], first)),
        secret="global memory",
        sinks=((ADDRESS, (*sources, *handles)),),
        guard_kind=GUARDED_MEMORY,
    )


def surface(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """SULD R, [coordinates], handle; SUST and SURED [coordinates], R, handle."""
    shape = [m for m in modifiers if m in _SURFACES]
    at = 1 if base == "SULD" else 0
    kinds = [o.kind for o in operands]
    if len(shape) != 1 or kinds[:2] != (["R", "mem"] if at else ["mem", "R"]) or set(kinds[2:]) - {"R", "UR", "imm"}:
        raise UnknownInstruction(name)
    size = 4 if "P" in modifiers else moved([m for m in modifiers if m not in _SURFACES])
    data = locations(operands[1 - at : 2 - at], size)
    address_of = (*locations(operands[at : at + 1], _SURFACES[shape[0]]), *locations(operands[2:]))
    return Effects(
        data if at else (),
        () if at else data,
        secret="global memory" if at else "",
        sinks=((ADDRESS, address_of),),
        guard_kind=GUARDED_MEMORY,
    )


def gmma(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """D, [A], gdesc, C, [predicate], [metadata]: matrices behind descriptors come from shared memory. gdesc[UR] holds
    the pair of A, then of B; with A in registers only the second pair is read."""
    at = next((i for i, o in enumerate(operands) if o.space == "gdesc"), None)
    kinds = [o.kind for o in operands]
    if at not in (1, 2) or set(kinds[:at]) != {"R"} or kinds[at + 1 : at + 2] != ["R"]:
        raise UnknownInstruction(name)
    more = kinds[at + 2 :]
    more = more[more[:1] == ["UP"] :]  # whether C is added
    metadata = 1 if "SP" in modifiers else 0
    if more[:metadata] != ["R"] * metadata or set(more[metadata:]) - {"imm", "word"}:
        raise UnknownInstruction(name)
    accumulator, fragment = gmma_widths(base, modifiers)
    descriptors = operands[at].inside[0]
    if len(descriptors) != 1:
        raise UnknownInstruction(name)
    descriptor = descriptors[0].locations(4)
    return Effects(
        locations(operands[:1], accumulator),
        (
            *locations(operands[1:at], fragment),
            *locations(operands[at + 1 : at + 2], accumulator),
            *locations(operands[at + 2 :]),
        ),
        secret="shared memory",
        sinks=((DESCRIPTOR, descriptor if at == 1 else descriptor[2:]),),
        guard_kind=GUARDED_MEMORY,
    )


def bulk(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """TMA: [(shared address, (barrier,)) coordinates] and [descriptor or global address], all in uniform registers."""
    rank = next((int(m[0]) for m in modifiers if re.fullmatch(r"[1-5]D", m)), None)
    widths = [2, 2]
    spaces = [m for m in modifiers if m in ("S", "G")]
    if base in ("UBLKCP", "UBLKRED"):
        if len(spaces) != 2:
            raise UnknownInstruction(name)
        widths[1] = 1 if spaces[1] == "S" else 2  # a shared target has its barrier beside
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
    size = moved(modifiers)
    state = 2 if "ARRIVE" in modifiers else size  # of which waits read the upper word
    writes = [x for o in operands[:at] if o.register for x in o.register.locations(state if "R" in o.kind else 1)]
    sinks = (*address(operands[at], wide=False), (BARRIER, locations(operands[at + 1 :], size)))
    return Effects(tuple(writes), sinks=sinks, guard_kind=GUARDED_BARRIER)
