"""Effects of arithmetic, selects, votes, shuffles and moves between register files."""

from __future__ import annotations

import re
from itertools import pairwise

from .effect import ADDRESS, CLOCK, LANE, LATENCY, Effects
from .opcodes import SLOTS
from .operands import UP, Operand, P, UnknownInstruction
from .parts import locations, take
from .widths import widths

# Votes, reductions and R2UR take part only in the lanes where their guard holds; these read others too.
_CROSS_LANES = {"SHFL", "HMMA", "QMMA", "IMMA", "DMMA", "BMMA", "MOVM"}
_MUST_NOT_READ = re.compile(r"SR_(CLOCK\w*|GLOBALTIMER\w*|PM\w*|SNAPSHOT\w*)")
_PUBLIC_SPECIAL = re.compile(
    r"SRZ|SR_(TID(\.[XYZ])?|CTAID(\.[XYZ])?|NTID|NCTAID|LANEID|LTMASK|LEMASK|EQMASK|GTMASK|GEMASK|VIRTID|VIRTCFG|"
    r"VIRTUALSMID|GRIDID|CgaCtaId|CgaSize|CGA\w*|CgaCtaMask|SMEMSZ|SWINLO|SWINHI|SWINSZ|SMEMBANKS|LMEMLOSZ|LMEMHIOFF|"
    r"STACKBASE|TOTALSMEMSIZE|DYNAMICSMEMSIZE\w*|REGALLOC|CTXADDR|BARRIERALLOC|AFFINITY|INVOCATION_ID)"
)


def alu(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    taken = take(SLOTS[base], operands, name)
    targets, sources = operands[:taken], operands[taken:]
    if any(o.register and {"64", "U32"} & set(o.register.suffix.split(".")) for o in operands):
        raise UnknownInstruction(name)  # these belong to addresses; here, widths follow from the opcode alone
    wide, source_widths = widths(base, modifiers)
    writes = [x for t in targets if t.register for x in t.register.locations(wide if t.kind in ("R", "UR") else 1)]
    # A predicate that is a source stands behind all other sources; one before them would be a destination unknown here.
    kinds = [s.kind in ("P", "UP") for s in sources]
    if any(a and not b for a, b in pairwise(kinds)) and base not in ("PLOP3", "UPLOP3"):
        raise UnknownInstruction(name)
    flows: list[int] = []
    registers = 0
    for source in sources:
        if source.register and source.kind in ("R", "UR"):
            if source_widths is not None and registers >= len(source_widths):
                raise UnknownInstruction(name)
            flows += source.register.locations(1 if source_widths is None else source_widths[registers])
        else:
            flows += locations([source])
        registers += source.kind in ("R", "UR", "imm", "mem")
    constants = [s for s in sources if s.kind == "mem"]  # c[bank][offset], which may be indexed
    sinks: tuple[tuple[str, tuple[int, ...]], ...] = tuple((ADDRESS, locations([c])) for c in constants)
    forbidden = ""
    if base in ("S2R", "S2UR", "CS2R"):
        register = sources[0].text if sources else ""
        if _MUST_NOT_READ.fullmatch(register):
            forbidden = CLOCK
        elif not _PUBLIC_SPECIAL.fullmatch(register):
            raise UnknownInstruction(f"{base} {register}")
    apart: list[int] = []
    if base == "SHFL":  # data, lane, clamp; the predicate says whether the lane is in range
        sinks = ((LANE, locations(sources[1:])),)
        apart = [x for x in writes if x >= P]
        writes = [x for x in writes if x < P]
    if base == "MATCH":  # the more values differ, the longer it takes: on an H100 500 of 4,900 cycles of a small kernel
        sinks += ((LATENCY, tuple(flows)),)
    stack = None
    if base in ("VIADD", "IADD3") and [o.text for o in operands[:2]] == ["R1", "R1"]:
        numbers = [o.value for o in sources[1:] if o.kind == "imm"]
        others = [o for o in sources[1:] if o.kind != "imm" and o.text != "RZ"]
        if len(numbers) == 1 and numbers[0] is not None and not others:
            stack = (numbers[0] + 2**31) % 2**32 - 2**31
    resets = base in ("MOV", "IMAD") and name.startswith((f"{base} R1, c[0x0]", "IMAD.MOV.U32 R1, RZ, RZ, c[0x0]"))
    return Effects(
        tuple(writes),
        tuple(flows),
        apart=tuple(apart),
        sinks=sinks,
        forbidden=forbidden,
        crosses_lanes=base in _CROSS_LANES,
        stack=stack,
        resets_stack=resets,
    )


def predicates(base: str, operands: list[Operand], name: str) -> Effects:
    """P2R R, PR, R, mask (UP2UR for uniform ones) and R2P PR, R, mask move the predicates of the mask; UR2UP UPR, UR
    moves them all."""
    if base == "UR2UP":
        if [o.kind for o in operands] != ["UPR", "UR"]:
            raise UnknownInstruction(name)
        return Effects(tuple(range(UP, UP + 7)), locations(operands[1:]))
    mask = operands[-1].value if operands else None
    file, first = ("UPR", UP) if base == "UP2UR" else ("PR", P)
    if mask is None or not any(o.kind == file for o in operands):
        raise UnknownInstruction(name)
    chosen = tuple(first + i for i in range(7) if mask >> i & 1)
    if base == "R2P":
        return Effects(chosen, locations(operands))
    if operands[0].kind not in ("R", "UR"):
        raise UnknownInstruction(name)
    return Effects(locations(operands[:1]), chosen + locations(operands[1:]))
