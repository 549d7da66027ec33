"""What integer instructions make of values: the part of the instruction set that addresses are computed with.

What is not named here makes UNTRACKED, which can be told apart from nothing.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Collection

from ..isa.operands import Operand, UnknownInstruction, parse, split
from ..listing import Instruction
from .values import (
    ANY,
    CARRY,
    MIXED,
    POINTER,
    SHARED_HIGH,
    STACK,
    UNTRACKED,
    WINDOW,
    WINDOW_HIGH,
    Value,
    add,
    declared,
    is_declared,
    join,
    keep_bits,
    logic,
    multiply,
    negative,
    shift_right,
    single,
)

Read = Callable[[int], Value]
# Constant bank 0 of sm_90: the stack pointer, the generic address of the parameters, the first parameter. What else
# the driver puts in front of the parameters, and is no address of a constant: sizes of block and grid, the generic
# address of local memory, whether this is a cluster, the memory descriptor of the kernel.
_STACK_AT, _WINDOW_AT, _PARAMETERS_AT = 0x28, 0x198, 0x210
_NO_CONSTANTS = {*range(0x18), 0x20, 0x24, 0x140, 0x208, 0x20C}
# Ranges that the programming guide gives: threads of a block, lanes, CTAs of a cluster (16, if the launch allows it).
_SPECIAL = {
    "SR_TID.X": 1023, "SR_TID.Y": 1023, "SR_TID.Z": 63, "SR_LANEID": 31, "SR_CgaCtaId": 15, "SRZ": 0,
}  # fmt: skip
THREADS = 1024  # of a block at most
_PLAIN_SPECIAL = re.compile(r"SR_(CTAID\.[XYZ]|NTID|NCTAID|\w*MASK)")
_PREDICATE_FIRST = {"LOP3", "ULOP3", "SHFL", "MATCH", "R2UR"}  # of their destinations
_CARRIES = {"IADD3", "UIADD3", "LEA", "ULEA", "IMAD", "UIMAD"}


def constant(offset: int | None, bank: int, second: bool, public: Collection[int] = ()) -> Value:
    """A word of a constant bank; second: the upper word of a pair whose lower one is at offset. public: the parameters
    that are pointers to declared memory, in bytes from the first parameter."""
    if offset is None:
        return UNTRACKED
    offset += 4 * second
    if bank == 4:  # addresses of the program's variables
        return Value(POINTER)
    if bank == 3:  # its constants, among which the address of another constant may be
        return UNTRACKED
    if bank != 0 or offset in _NO_CONSTANTS:  # bank 2: tables of the compiler
        return ANY
    if offset >= _PARAMETERS_AT:
        return _parameter(offset - _PARAMETERS_AT, public)
    known = {_STACK_AT: STACK, _WINDOW_AT: WINDOW, _WINDOW_AT + 4: WINDOW_HIGH}
    return Value(known[offset], 0, 0, 0) if offset in known else UNTRACKED


def _parameter(offset: int, public: Collection[int]) -> Value:
    for pointer in public:
        if offset in (pointer, pointer + 4):
            return Value(declared(pointer, high=offset != pointer), 0, 0, 0)
        if -4 < offset - pointer < 8:  # across its words
            return MIXED
    return Value(POINTER)


class Transfer:
    """One instruction, its operands parsed. read(location) gives a register's value where the instruction's guard
    holds; what was never written has no say in any result. public: see `constant`."""

    def __init__(self, instruction: Instruction, threads: int, public: Collection[int]) -> None:
        self.threads = threads
        self.public = public
        self.pointers: set[str] = set()  # to declared memory: words of those that the last results were made from
        self.carriers: set[int] = set()  # the operands that hold them, by identity
        self.base = instruction.base
        self.modifiers = instruction.modifiers
        self.operands = [parse(part) for part in split(instruction.operands)]
        self.text = instruction.operands

    def of(self, operand: Operand, read: Read, second: bool = False) -> Value:
        """A source; second: the register behind it, of a pair."""
        if operand.kind in ("R", "UR") and operand.register:
            if operand.register.index < 0:
                return single(0)
            locations = operand.register.locations(2)
            value = read(locations[second]) if len(locations) > second else UNTRACKED
        elif operand.kind == "imm":
            if operand.value is None:
                return ANY
            return single(0 if second and operand.value >= 0 else -1 if second else operand.value)
        elif operand.kind == "mem" and operand.space == "c":
            value = self.bank(operand, read, second)
        else:
            return UNTRACKED
        if is_declared(value.base):
            self.pointers.add(value.base)
            self.carriers.add(id(operand))
        if "|" in operand.text or "~" in operand.text:
            return ANY
        return negative(value) if operand.text.startswith("-") else value

    def bank(self, operand: Operand, read: Read, second: bool) -> Value:
        """c[bank][register + offset]."""
        match = re.search(r"c\[0x([0-9a-f]+)\]", operand.text)
        if not match or operand.inside[0]:
            return UNTRACKED
        index = single(operand.offset)
        for register in operand.inside[-1]:
            index = add(index, read(register.locations()[0]) if register.index >= 0 else single(0))
        bank = int(match[1], 16)
        if index.number is None and bank == 0:
            first, last = index.lo - _PARAMETERS_AT, index.hi - _PARAMETERS_AT
            is_known = index.is_plain and first >= 0 and not any(first - 8 < p < last + 8 for p in self.public)
            return Value(POINTER) if is_known else MIXED if self.public else UNTRACKED
        return constant(index.number or 0, bank, second, self.public)

    def results(self, read: Read, chooses: Callable[[Operand, Operand, Value], Value | None]) -> list[Value]:
        """Values of the destination registers, one, or two for a pair; what carries out of an addition stands last.

        chooses(predicate, source, value): the part of a source's value that a select takes if the predicate holds.
        What is made of a pointer to declared memory is that pointer plus something, or mixed: no number by which
        another pointer could be led there."""
        self.pointers.clear()
        self.carriers.clear()
        found = self._results(read, chooses)
        if not self.pointers:
            return found
        return [v if v.base in self.pointers and len(self.carriers) == 1 else MIXED for v in found]

    def _results(self, read: Read, chooses: Callable[[Operand, Operand, Value], Value | None]) -> list[Value]:
        base, modifiers = self.base, set(self.modifiers)
        targets = 2 if base in _PREDICATE_FIRST and self.operands[0].kind in ("P", "UP") else 1
        while targets < len(self.operands) and self.operands[targets].kind in ("P", "UP") and base in _CARRIES:
            targets += 1
        sources = self.operands[targets:]
        values = [self.of(source, read) for source in sources]

        if base in ("MOV", "UMOV", "SHFL") or (base == "R2UR" and not modifiers):  # R2UR.OR joins lanes
            return values[:1]
        if base == "LDG" and self.public:  # numbers: what is stored through a pointer from memory is no known place
            return [ANY] * len(self.operands[0].register.locations(4)) if self.operands[0].register else []
        if base in ("S2R", "S2UR", "CS2R"):
            name = sources[0].text
            if name in _SPECIAL:
                most = min(_SPECIAL[name], self.threads - 1) if name.startswith("SR_TID") else _SPECIAL[name]
                value = Value("", 0, most, 1) if most else single(0)
                return [value, single(0)] if base == "CS2R" and "32" not in modifiers else [value]
            if name == "SR_SWINHI":
                return [Value(SHARED_HIGH, 0, 0, 0)]
            return [ANY if _PLAIN_SPECIAL.fullmatch(name) else UNTRACKED]
        if base in ("LDC", "ULDC") and modifiers <= {"64"}:
            return [self.of(sources[0], read, second) for second in ((False, True) if modifiers else (False,))]
        if base in ("SEL", "USEL"):
            taken = [chooses(sources[2], sources[0], values[0])]
            taken.append(chooses(_negated(sources[2]), sources[1], values[1]))
            kept = [value for value in taken if value is not None]
            return [join(kept[0], kept[-1]) if kept else ANY]
        # one of the two, which the predicate chooses; with .RELU or of halves it may be neither
        if base in ("VIMNMX", "IMNMX", "UIMNMX") and modifiers <= {"U32"} and len(sources) == 3:
            return [join(values[0], values[1])]
        adds_halves = len(sources) == 4 and all(s.text in ("RZ", "-RZ") for s in sources[:2])
        if base == "HFMA2" and modifiers <= {"MMA"} and adds_halves:
            return [_halves(sources[2].text, sources[3].text)]
        if base in ("IADD3", "UIADD3", "VIADD", "IADD") and modifiers <= {"X", "64"}:  # not of halves
            return self.sums(sources, values, read)
        if base in ("IMAD", "UIMAD"):
            return self.products(sources, values, read)
        if base in ("LEA", "ULEA"):
            return self.scaled(sources, values)
        if base in ("SHF", "USHF", "SHL", "SHR") and isinstance(sources[-1].value or sources[1].value, int):
            return [self.shifted(sources, values)]
        if base in ("LOP3", "ULOP3"):
            numbers = [s for s in sources if s.kind not in ("P", "UP")]
            if len(numbers) == 4 and numbers[3].value is not None:
                plain = [self.of(s, read) for s in numbers[:3]]
                return [logic(numbers[3].value, plain[0], plain[1], plain[2])]
        is_mapa = base in ("PRMT", "UPRMT") and not modifiers and len(sources) == 3 and sources[1].value == 0x654
        if is_mapa:  # CTA above address
            inside = keep_bits(values[2], 0xFFFFFF) if values[2].base or not values[2].page else values[2]
            return [Value("", inside.lo, inside.hi, inside.step, page=True) if inside.hi < 1 << 24 else ANY]
        return [UNTRACKED]

    def sums(self, sources: list[Operand], values: list[Value], read: Read) -> list[Value]:
        numbers = [v for v, s in zip(values, sources, strict=True) if s.kind not in ("P", "UP")]
        predicates = [s for s in sources if s.kind in ("P", "UP")]
        if "X" in self.modifiers:
            return [_upper(numbers, [_carry(p, read) for p in predicates])]
        total = single(0)
        for number in numbers:
            total = add(total, number)
        if "64" in self.modifiers:
            lower = total
            if lower.base == WINDOW:
                return [lower, Value(WINDOW_HIGH, lower.lo, lower.hi, lower.step)]
            return [lower, _upper([self.of(s, read, second=True) for s in sources if s.kind not in ("P", "UP")], [])]
        return [total, Value(CARRY, total.lo, total.hi, total.step) if total.base == WINDOW else ANY]

    def products(self, sources: list[Operand], values: list[Value], read: Read) -> list[Value]:
        if "X" in self.modifiers:  # sources: a, b, c, carry
            product = multiply(values[0], values[1])
            return [_upper([product, values[2]], [_carry(p, read) for p in sources[3:]])]
        if "HI" in self.modifiers:
            return [ANY]
        lower = add(multiply(values[0], values[1]), values[2])
        if "WIDE" not in self.modifiers:
            return [lower]
        if lower.base == WINDOW:
            return [lower, Value(WINDOW_HIGH, lower.lo, lower.hi, lower.step)]
        return [lower, _upper([self.of(sources[2], read, second=True)], [])]

    def scaled(self, sources: list[Operand], values: list[Value]) -> list[Value]:
        """LEA: a << shift plus b; LEA.HI: the upper word of that, where a is extended by zeros."""
        shifts = [s for s in sources if s.kind == "imm" and s is not sources[0]]
        if not shifts or shifts[-1].value is None:
            return [UNTRACKED]
        by = shifts[-1].value
        if "HI" in self.modifiers:
            if self.modifiers == ["HI"] and len(sources) == 4 and sources[2].text in ("RZ", "URZ"):
                return [add(shift_right(values[0], 32 - by, signed=False), values[1])]
            return [_upper(values[1:2], [])]
        total = add(multiply(values[0], single(1 << by)), values[1])
        return [total, Value(CARRY, total.lo, total.hi, total.step) if total.base == WINDOW else ANY]

    def shifted(self, sources: list[Operand], values: list[Value]) -> Value:
        """SHF.L.U32 a, by, RZ and SHF.R.x.HI RZ, by, a."""
        by = sources[1].value
        if by is None or not 0 <= by < 32 or "U64" in self.modifiers or "S64" in self.modifiers:
            return ANY
        if "L" in self.modifiers and "HI" not in self.modifiers:
            return multiply(values[0], single(1 << by))
        if "R" in self.modifiers and "HI" in self.modifiers and sources[0].text in ("RZ", "URZ"):
            return shift_right(values[2], by, "S32" in self.modifiers)
        return ANY


def _negated(predicate: Operand) -> Operand:
    return parse(predicate.text[1:] if predicate.negated else f"!{predicate.text}")


def _carry(predicate: Operand, read: Read) -> Value:
    if not predicate.register or predicate.register.index < 0 or predicate.negated:
        return ANY
    return read(predicate.register.locations()[0])


def _upper(numbers: list[Value], carries: list[Value]) -> Value:
    """The upper word of a sum: of the parameters' address if the carry is that of its lower word. An index that is
    added to a pointer leaves it in the memory that it points to."""
    bases = {value.base for value in numbers} - {""}
    if bases == {WINDOW_HIGH}:
        plain = all(value.number == 0 for value in numbers if not value.base)
        carry = next((c for c in carries if c.base == CARRY), None)
        return Value(WINDOW_HIGH, carry.lo, carry.hi, carry.step) if plain and carry else UNTRACKED
    if bases == {SHARED_HIGH} or (len(bases) == 1 and is_declared(min(bases))):
        return Value(min(bases), 0, 0, 0)
    return Value(POINTER) if bases == {POINTER} else UNTRACKED if bases else ANY


def _halves(high: str, low: str) -> Value:
    """Two halves that are added to zero: how the compiler writes some integers."""
    try:
        return single(int.from_bytes(struct.pack("<ee", float(low), float(high)), "little"))
    except (ValueError, OverflowError, struct.error):
        return ANY


def driver_word(operand: Operand) -> Value | None:
    """What a word of constant bank 0 in front of the parameters is; None for any other operand."""
    if operand.kind != "mem" or operand.space != "c" or not operand.text.lstrip("-|").startswith("c[0x0]["):
        return None
    return constant(operand.offset, 0, second=False) if operand.offset < _PARAMETERS_AT else None


def transfer(instruction: Instruction, threads: int = THREADS, public: Collection[int] = ()) -> Transfer | None:
    """threads: in a block at most. public: see `constant`. None for an instruction whose operands are of no known form,
    which the analysis of secrets reports."""
    try:
        return Transfer(instruction, threads, public)
    except UnknownInstruction:
        return None
