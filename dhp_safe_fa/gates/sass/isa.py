"""What SASS instructions of sm_80 to sm_90a read, write and reveal.

One line of the table below per family: its destinations in the order in which they are printed (``?``: may be left
out), then its opcodes. All other operands are sources. Opcode names: NVIDIA, "CUDA Binary Utilities", Instruction Set
Reference; operand order and register widths: read off ptxas output. Whatever does not fit the table raises
UnknownInstruction: nothing is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

from .operands import (
    BARRIER_RESULT,
    UP,
    Operand,
    P,
    Register,
    UnknownInstruction,
    parse,
    split,
)

# ---- the table ---------------------------------------------------------------------------------------------------

_ALU = {
    "R": """FADD FADD32I FMUL FMUL32I FFMA FFMA32I FMNMX FSEL FSET FSWZADD MUFU RRO HADD2 HADD2_32I HMUL2 HMUL2_32I
            HFMA2 HFMA2_32I HMNMX2 HSET2 DADD DMUL DFMA DMNMX F2F F2FP F2I F2IP FRND I2F I2FP I2I I2IP BMSK BREV FLO
            IABS IDP IDP4A IMNMX VIMNMX VIADDMNMX VIADD VABSDIFF VABSDIFF4 VHMNMX LOP ISCADD XMAD MOV MOV32I SEL PRMT
            SGXT SHF SHL SHR POPC HMMA IMMA DMMA BMMA MOVM CS2R S2R LEPC GETLMEMBASE""",
    "R P? P?": "IADD3 IADD IMAD LEA",
    "P? R": "LOP3 SHFL MATCH",
    "P P": "ISETP FSETP DSETP HSETP2 PLOP3",
    "P": "FCHK PSETP",
    "R? P": "VOTE",
    "P UR?": "ELECT",
    "P? UR": "R2UR",
    "UR": """UMOV UMOV32I USEL UPRMT USGXT USHF UPOPC UFLO UBREV UBMSK UIMNMX S2UR REDUX UIABS""",
    "UR UP? UP?": "UIADD3 UIMAD ULEA",
    "UP? UR": "ULOP3",
    "UP UP": "UISETP UPLOP3",
    "UR? UP": "VOTEU",
}
_CONSTANT = {"R": "LDC", "UR": "ULDC"}
_GLOBAL = "LD LDG ST STG ATOM ATOMG RED REDG REDAS CCTL STAS QSPC LDGMC REDGMC"  # 64-bit addresses
_SHARED = "LDS LDSM STS STSM ATOMS CCTLS ARRIVES"
_TEXTURE = "TEX TLD TLD4 TMML TXD TXQ SULD SUST SUATOM SURED"
_GMMA = "HGMMA IGMMA QGMMA BGMMA"
_BULK = "UTMALDG UTMASTG UTMAREDG UTMAPF UTMACCTL UBLKCP UBLKRED UBLKPF"
_BARRIER = "BAR WARPSYNC NANOSLEEP DEPBAR USETMAXREG BMOV"  # their operands say who waits, for whom, for how long
_CONVERGE = "BSSY BSYNC BREAK YIELD"
_TRANSFER = "BRA BRX BRXU JMP JMX JMXU CALL RET EXIT KILL RTT"
_INERT = """NOP MEMBAR ERRBAR CGAERRBAR FENCE LDGDEPBAR WARPGROUP WARPGROUPSET UTMACMDFLUSH CCTLL CCTLT PMTRIG ACQBULK
            ACQSHMINIT PREEXIT ENDCOLLECTIVE UCGABAR_ARV UCGABAR_WAIT BPT"""

# Votes, reductions and R2UR take part only in the lanes where their guard holds; these read others too.
_CROSS_LANES = {"SHFL", "HMMA", "IMMA", "DMMA", "BMMA", "MOVM"}
_MUST_NOT_READ = re.compile(r"SR_(CLOCK\w*|GLOBALTIMER\w*|PM\w*|SNAPSHOT\w*)")
_PUBLIC_SPECIAL = re.compile(
    r"SRZ|SR_(TID(\.[XYZ])?|CTAID(\.[XYZ])?|NTID|NCTAID|LANEID|LTMASK|LEMASK|EQMASK|GTMASK|GEMASK|VIRTID|VIRTCFG|"
    r"VIRTUALSMID|GRIDID|CgaCtaId|CgaSize|CGA\w*|CgaCtaMask|SMEMSZ|SWINLO|SWINHI|SWINSZ|SMEMBANKS|LMEMLOSZ|LMEMHIOFF|"
    r"STACKBASE|TOTALSMEMSIZE|DYNAMICSMEMSIZE\w*|REGALLOC|CTXADDR|BARRIERALLOC|AFFINITY|INVOCATION_ID)"
)

# Guarded instructions whose guard is secret, by what the observer sees: see docs/gates-sass.md.
GUARDED_MEMORY, GUARDED_BARRIER, GUARDED_ARITHMETIC = "guarded-memory", "guarded-barrier", "guarded-arithmetic"
BRANCH, INDIRECT, CALL, EXIT = "branch", "indirect-branch", "call", "exit"
ADDRESS, DESCRIPTOR, BARRIER, LANE, CLOCK = "address", "descriptor", "barrier-operand", "shuffle-lane", "clock"


def _words(text: str) -> list[str]:
    return text.split()


_SLOTS = {op: slots.split() for table in (_ALU, _CONSTANT) for slots, ops in table.items() for op in _words(ops)}
_OTHERS = "LDL STL LDGSTS SYNCS B2R P2R UP2UR R2P"
CONTROL = frozenset(_words(f"{_TRANSFER} {_CONVERGE} WARPSYNC"))
KNOWN = CONTROL.union(_SLOTS, _words(" ".join((_GLOBAL, _SHARED, _TEXTURE, _GMMA, _BULK, _BARRIER, _INERT, _OTHERS))))

# ---- the result --------------------------------------------------------------------------------------------------


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


# ---- widths ------------------------------------------------------------------------------------------------------

Widths = tuple[int, tuple[int, ...]]  # of the destination register, of the register sources in their order


def _size(modifiers: list[str]) -> int:
    """Registers that a memory instruction moves per thread."""
    return 4 if "128" in modifiers else 2 if "64" in modifiers or "U64" in modifiers or "S64" in modifiers else 1


def _conversion(modifiers: list[str]) -> Widths:
    """F2F.to.from, F2I.to.from, I2F.to.from; the 32-bit type is not printed, except between floats."""
    types = [m for m in modifiers if re.fullmatch(r"(F|BF|TF|S|U)(8|16|32|64)", m)]
    to, source = (types[0], types[1]) if len(types) > 1 else (types[0] if types else "", "")
    return 2 if to.endswith("64") else 1, (2 if source.endswith("64") else 1,)


def _f2i(modifiers: list[str]) -> Widths:
    return 2 if {"S64", "U64"} & set(modifiers) else 1, (2 if "F64" in modifiers else 1,)


def _i2f(modifiers: list[str]) -> Widths:
    return 2 if "F64" in modifiers else 1, (2 if {"S64", "U64"} & set(modifiers) else 1,)


def _imad(modifiers: list[str]) -> Widths:
    wide, high = "WIDE" in modifiers, "HI" in modifiers
    return 2 if wide else 1, (1, 1, 2 if wide or high else 1)


# Registers of A, B, and of C and D, per thread: PTX ISA, "Matrix fragments for mma".
_HMMA = {"884": (2, 2, 4), "1688": (2, 1, 4), "16816": (4, 2, 4), "1684": (2, 1, 4)}
_IMMA = {"8816": (1, 1, 2), "8832": (1, 1, 2), "16816": (2, 1, 4), "16832": (4, 2, 4), "16864": (4, 2, 4)}
_DMMA = {"884": (2, 2, 4), "1684": (4, 2, 8), "1688": (8, 4, 8), "16816": (16, 8, 8)}
_BMMA = {"88128": (1, 1, 2), "168128": (2, 1, 4), "168256": (4, 2, 4)}


def _mma(table: dict[str, tuple[int, int, int]]) -> Callable[[list[str]], Widths]:
    def widths(modifiers: list[str]) -> Widths:
        shape = next((m for m in modifiers if m in table), None)
        if shape is None:
            raise UnknownInstruction(f"matrix shape {'.'.join(modifiers)}")
        a, b, c = table[shape]
        if "TF32" in modifiers and shape == "1688":
            a, b = 4, 2
        if "SP" in modifiers:
            b *= 2  # a sparse A meets twice the depth of B
        if table is _HMMA and "F32" not in modifiers and shape != "884":
            c = 2
        return c, (a, b, c)

    return widths


def _all_double(_: list[str]) -> Widths:
    return 2, (2, 2, 2)


_WIDTHS: dict[str, Callable[[list[str]], Widths]] = {
    **dict.fromkeys(["DADD", "DMUL", "DFMA", "DMNMX", "DSETP"], _all_double),
    **dict.fromkeys(["IMAD", "UIMAD"], _imad),
    **dict.fromkeys(["F2F"], _conversion),
    **dict.fromkeys(["F2I"], _f2i),
    **dict.fromkeys(["I2F"], _i2f),
    "FRND": lambda m: (2, (2,)) if "F64" in m else (1, (1,)),
    "CS2R": lambda m: (1, ()) if "32" in m else (2, ()),
    "LEPC": lambda _: (2, ()),
    "HMMA": _mma(_HMMA),
    "IMMA": _mma(_IMMA),
    "DMMA": _mma(_DMMA),
    "BMMA": _mma(_BMMA),
}


def _widths(base: str, modifiers: list[str]) -> Widths:
    rule = _WIDTHS.get(base)
    if rule:
        return rule(modifiers)
    return (2, (2, 2, 2)) if "64" in modifiers else (1, ())  # UIADD3.64 and its like


def _shape_n(modifiers: list[str]) -> int:
    match = next((re.fullmatch(r"64x(\d+)x\d+", m) for m in modifiers if m.startswith("64x")), None)
    if match is None:
        raise UnknownInstruction(f"matrix shape {'.'.join(modifiers)}")
    return int(match[1])


# ---- parts -------------------------------------------------------------------------------------------------------


def _locations(operands: Iterable[Operand], width: int = 1) -> tuple[int, ...]:
    """Every register that the operands name, those inside brackets included."""
    found: list[int] = []
    for operand in operands:
        if operand.register:
            found += operand.register.locations(2 if ".64" in operand.register.suffix else width)
        for registers in operand.inside:
            for register in registers:
                found += register.locations(2 if ".64" in register.suffix else width)
    return tuple(found)


def _address(operand: Operand, wide: bool) -> tuple[tuple[str, tuple[int, ...]], ...]:
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


def _take(slots: list[str], operands: list[Operand], name: str) -> int:
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


def _alu(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    taken = _take(_SLOTS[base], operands, name)
    targets, sources = operands[:taken], operands[taken:]
    wide, source_widths = _widths(base, modifiers)
    writes = [x for t in targets if t.register for x in t.register.locations(wide if t.kind in ("R", "UR") else 1)]
    # A predicate that is a source stands behind all other sources; one before them would be a destination unknown here.
    kinds = [s.kind in ("P", "UP") for s in sources]
    if any(a and not b for a, b in pairwise(kinds)) and base not in ("PLOP3", "UPLOP3"):
        raise UnknownInstruction(name)
    flows: list[int] = []
    registers = 0
    for source in sources:
        if source.register and source.kind in ("R", "UR"):
            width = source_widths[registers] if registers < len(source_widths) else 1
            flows += source.register.locations(2 if ".64" in source.register.suffix else width)
        else:
            flows += _locations([source])
        registers += source.kind in ("R", "UR", "imm", "mem")
    constants = [s for s in sources if s.kind == "mem"]  # c[bank][offset], which may be indexed
    sinks: tuple[tuple[str, tuple[int, ...]], ...] = tuple((ADDRESS, _locations([c])) for c in constants)
    forbidden = ""
    if base in ("S2R", "S2UR", "CS2R"):
        register = sources[0].text if sources else ""
        if _MUST_NOT_READ.fullmatch(register):
            forbidden = CLOCK
        elif not _PUBLIC_SPECIAL.fullmatch(register):
            raise UnknownInstruction(f"{base} {register}")
    apart: list[int] = []
    if base == "SHFL":  # data, lane, clamp; the predicate says whether the lane is in range
        sinks = ((LANE, _locations(sources[1:])),)
        apart = [x for x in writes if x >= P]
        writes = [x for x in writes if x < P]
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


def _constant(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    if _take(_SLOTS[base], operands, name) != 1 or len(operands) != 2 or operands[1].kind != "mem":
        raise UnknownInstruction(name)
    index = _locations(operands[1:])
    assert operands[0].register
    resets = operands[0].text == "R1" and operands[1].text.startswith("c[0x0][0x")
    writes = operands[0].register.locations(_size(modifiers))
    return Effects(writes, index, sinks=((ADDRESS, index),), resets_stack=resets)


def _memory(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """Loads, stores, atomics, asynchronous copies: destinations stand before the first address."""
    if base == "CCTL" and not operands:  # CCTL.IVALL
        return Effects(guard_kind=GUARDED_MEMORY)
    at = next((i for i, o in enumerate(operands) if o.kind == "mem"), None)
    if at is None or any(o.kind not in ("R", "P") for o in operands[:at]):
        raise UnknownInstruction(name)
    wide = base in _words(_GLOBAL)
    size = _size(modifiers)
    if base == "LDSM":
        size = next((int(m) for m in modifiers if m in ("2", "4")), 1)
    writes = [x for o in operands[:at] if o.register for x in o.register.locations(size if o.kind == "R" else 1)]
    sinks: tuple[tuple[str, tuple[int, ...]], ...] = ()
    for operand in operands[at:]:
        if operand.kind == "mem":
            sinks += _address(operand, wide or (base == "LDGSTS" and sinks != ()))
    tail = operands[at + 1 :]
    if base == "LDGSTS":  # a predicate operand decides whether the copy happens
        sinks += ((GUARDED_MEMORY, _locations(o for o in tail if o.kind == "P")),)
    secret = "global memory" if wide or base == "LDGSTS" else "shared memory"
    generic = base == "ST"  # may reach local memory through its generic address
    return Effects(
        tuple(writes),
        secret=secret if writes else "",
        sinks=sinks,
        guard_kind=GUARDED_MEMORY,
        stores=_locations((o for o in tail if o.register), size) if generic else (),
    )


def _local(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
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
    sinks = _address(memory, wide=False)
    if load:
        return Effects(moved, sinks=sinks, guard_kind=GUARDED_MEMORY, frame=frame)
    return Effects(sinks=sinks, guard_kind=GUARDED_MEMORY, frame=frame, stores=moved)


def _texture(operands: list[Operand]) -> Effects:
    """Texture and surface: results are secret, every source register is an address. Up to two result quadruples."""
    targets = [o for o in operands[:3] if o.kind in ("R", "P")]
    writes = tuple(x for o in targets if o.register for x in o.register.locations(4 if o.kind == "R" else 1))
    return Effects(
        writes,
        secret="global memory",
        sinks=((ADDRESS, _locations((o for o in operands if o.kind in ("R", "UR", "mem")), 4)),),
        guard_kind=GUARDED_MEMORY,
    )


def _gmma(modifiers: list[str], operands: list[Operand], name: str) -> Effects:
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


def _bulk(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
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
            found += _locations([operand], width)
        else:
            found += _locations([operand])  # a size, a multicast mask
    return Effects(sinks=((DESCRIPTOR, tuple(found)),), guard_kind=GUARDED_MEMORY)


def _syncs(modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    """mbarrier words, which only SYNCS touches, are public; so are their results. Counts must be public."""
    at = next((i for i, o in enumerate(operands) if o.kind == "mem"), None)
    if at is None or any(o.kind not in ("R", "UR", "P", "UP") for o in operands[:at]):
        raise UnknownInstruction(name)
    size = _size(modifiers)
    state = 2 if "TRANS64" in modifiers else size  # of an arrival's result, of which waits read the upper word
    writes = [x for o in operands[:at] if o.register for x in o.register.locations(state if "R" in o.kind else 1)]
    sinks = (*_address(operands[at], wide=False), (BARRIER, _locations(operands[at + 1 :], size)))
    return Effects(tuple(writes), sinks=sinks, guard_kind=GUARDED_BARRIER)


def _barrier(base: str, modifiers: list[str], operands: list[Operand], name: str) -> Effects:
    kind = GUARDED_BARRIER
    if base == "BAR" and "RED" in modifiers:
        data = _locations(o for o in operands if o.kind == "P")
        ids = _locations(o for o in operands if o.kind in ("R", "UR"))
        return Effects((BARRIER_RESULT,), data, sinks=((BARRIER, ids),), guard_kind=kind)
    if base == "USETMAXREG":
        taken = _take(["UP?"], operands, name)
        return Effects(_locations(operands[:taken]), sinks=((BARRIER, _locations(operands[taken:])),), guard_kind=kind)
    if base == "BMOV":  # convergence masks follow from branches, which are sinks themselves
        if len(operands) != 2 or operands[0].kind not in ("R", "B"):
            raise UnknownInstruction(name)
        return Effects(_locations(operands[:1]), _locations(operands[1:]), guard_kind=kind)
    return Effects(sinks=((BARRIER, _locations(operands)),), guard_kind=kind)


def _predicates(base: str, operands: list[Operand], name: str) -> Effects:
    """P2R R, PR, R, mask (UP2UR for uniform ones) and R2P PR, R, mask move the predicates of the mask."""
    mask = operands[-1].value if operands else None
    file, first = ("UPR", UP) if base == "UP2UR" else ("PR", P)
    if mask is None or not any(o.kind == file for o in operands):
        raise UnknownInstruction(name)
    chosen = tuple(first + i for i in range(7) if mask >> i & 1)
    if base == "R2P":
        return Effects(chosen, _locations(operands))
    if operands[0].kind not in ("R", "UR"):
        raise UnknownInstruction(name)
    return Effects(_locations(operands[:1]), chosen + _locations(operands[1:]))


_SINK_OF_TRANSFER = {"BRX": INDIRECT, "BRXU": INDIRECT, "JMX": INDIRECT, "JMXU": INDIRECT, "CALL": CALL, "RET": CALL}


def _transfer(base: str, operands: list[Operand], guard: int | None) -> Effects:
    """Control transfers and convergence: guard, target register (a pair) and predicate operands all steer."""
    if base in _words(_CONVERGE):
        return Effects(_locations(operands[:1]) if base == "BSSY" else (), guard_kind=GUARDED_BARRIER)
    width = 2 if base in _SINK_OF_TRANSFER else 1
    steers = tuple(
        x for o in operands if o.register and o.kind != "B" for x in o.register.locations(width if "R" in o.kind else 1)
    ) + (() if guard is None else (guard,))
    kind = _SINK_OF_TRANSFER.get(base, EXIT if base in ("EXIT", "KILL", "RTT") else BRANCH)
    return Effects(sinks=((kind, steers),), steers=steers, guard_kind=kind)


# ---- entry points ------------------------------------------------------------------------------------------------


@cache
def effects(opcode: str, operands: str, guard: str) -> Effects:
    """Effects of ``opcode operands`` under ``guard`` ("", "P0", "!UP3"). UnknownInstruction names what is not known."""
    base, *modifiers = opcode.split(".")
    name = f"{opcode} {operands}".strip()
    if base not in KNOWN:
        raise UnknownInstruction(opcode)
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
    if base in _words(_TRANSFER) or base in _words(_CONVERGE):
        return _transfer(base, operands, guard)
    if base in ("LDC", "ULDC"):
        return _constant(base, modifiers, operands, name)
    if base in ("LDL", "STL"):
        return _local(base, modifiers, operands, name)
    if base in ("P2R", "UP2UR", "R2P"):
        return _predicates(base, operands, name)
    if base in _SLOTS:
        return _alu(base, modifiers, operands, name)
    if base == "SYNCS":
        return _syncs(modifiers, operands, name)
    if base == "LDGSTS" or base in _words(_GLOBAL) or base in _words(_SHARED):
        return _memory(base, modifiers, operands, name)
    if base in _words(_TEXTURE):
        return _texture(operands)
    if base in _words(_GMMA):
        return _gmma(modifiers, operands, name)
    if base in _words(_BULK):
        return _bulk(base, modifiers, operands, name)
    if base == "B2R":
        return Effects(_locations(o for o in operands if o.kind in ("R", "P")), (BARRIER_RESULT,))
    if base in _words(_BARRIER):
        return _barrier(base, modifiers, operands, name)
    return Effects(sinks=((BARRIER, _locations(operands)),), guard_kind=GUARDED_BARRIER)  # _INERT


def _with_guard(effects: Effects, guard: int) -> Effects:
    sinks = effects.sinks
    if not effects.steers and (effects.guard_kind, (guard,)) not in sinks:
        sinks = (*sinks, (effects.guard_kind, (guard,)))
    return replace(effects, guard=guard, sinks=sinks)
