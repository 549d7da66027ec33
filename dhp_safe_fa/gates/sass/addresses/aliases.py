"""Memory that counts as public because nothing writes to it but what should: whether any other store may touch it.

- The results of SYNCS are public because an mbarrier's word holds nothing but counts. So every other write to shared
  memory has to be told apart by its address from every mbarrier of the kernel, and every mbarrier is initialised before
  all threads meet, and used after that, or by who has initialised it.
- A tensor map says where a copy reads, and is public because it is a parameter of the kernel. So the address of every
  map is the parameters' address plus a constant.
- Declared memory, cu_seqlens and the like, is public because the host says so of a pointer parameter, and because the
  kernel does not write there: every store to global memory goes through another pointer parameter or a global variable.
  What a launch before this one writes there is read after its end.
- Constants and parameters are public because kernels only read them. A kernel that can know where they lie (it asks the
  driver, takes the address of its parameters, or reads constants, one of which may be the address of another) may only
  store through pointers that are parameters or addresses of global variables.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from ..isa.operands import Operand, Register, UnknownInstruction, parse, split
from ..isa.widths import moved
from ..listing import Instruction, Program
from .fixpoint import Addresses
from .transfer import driver_word
from .values import (
    POINTER,
    SHARED_HIGH,
    UNKNOWN,
    WINDOW,
    WINDOW_HIGH,
    Value,
    declared,
    is_declared,
    is_upper_of,
    may_meet,
    multiply,
    single,
)

MBARRIER, TENSOR_MAP, CONSTANT, DECLARED = "mbarrier", "tensor-map", "constant", "declared-memory"
_MBARRIER, _INIT, _STORE, _GENERIC, _GLOBAL, _MAP = "mbarrier", "init", "store", "generic", "global", "map"
_LOAD, _SURFACE, _SPILL = "load", "surface", "spill"
_SHARED_STORES = ("STS", "STSM", "ATOMS", "LDGSTS", "STAS", "REDAS")
_GENERIC_STORES = ("ST", "ATOM", "RED")
_GLOBAL_STORES = ("STG", "ATOMG", "REDG")
_BULK = ("UBLKCP", "UBLKRED")
_SURFACES = ("SUST", "SURED")
_MAPPED = ("UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF")
_LOOKED_AT = {
    *_SHARED_STORES, *_GENERIC_STORES, *_GLOBAL_STORES, *_BULK, *_MAPPED, *_SURFACES, "SYNCS", "ARRIVES",
    "UTMACCTL", "LDG", "STL", "CCTL",
}  # fmt: skip
_MAP_BYTES, _PARAMETER_BYTES = 128, 32764  # of a tensor map; of all parameters of a kernel (programming guide)
_LEAST_COPY = 16  # bytes that a tensor copy writes at least; how many it does is said by its map
_TENSOR_ALIGNMENT = 128  # bytes, of where a tensor copy goes
_WORD = 8  # bytes of an mbarrier


@dataclass(frozen=True)
class Access:
    """registers: added up. size: bytes, or the register that holds them in units of 16, or None for unknown."""

    role: str
    registers: tuple[Register, ...]
    offset: int = 0
    size: int | Register | None = _WORD
    is_tensor: bool = False

    @property
    def locations(self) -> set[int]:
        """What its address is made from; both words of a generic one."""
        words = 2 if self.role in (_MAP, _GENERIC, _GLOBAL, _LOAD) else 1
        read = {x for register in self.registers for x in register.locations(words)}
        return read | (set(self.size.locations()) if isinstance(self.size, Register) else set())


def accesses(instruction: Instruction) -> list[Access]:
    """What an instruction does to mbarriers, to shared memory that might hold one, and with tensor maps."""
    if instruction.base not in _LOOKED_AT:
        return []
    try:
        operands = [parse(part) for part in split(instruction.operands)]
        return list(_accesses(instruction.base, instruction.modifiers, operands))
    except UnknownInstruction:  # reported by the analysis of secrets
        return []


def is_store(instruction: Instruction) -> bool:
    """Of what is in registers, to global memory, or to an address that may lie there."""
    return instruction.base in _GENERIC_STORES or instruction.base in _GLOBAL_STORES


def writes_global(instruction: Instruction) -> bool:
    """A store, a copy, or one that throws away what was stored."""
    roles = {access.role for access in accesses(instruction)}
    return bool(roles & {_GENERIC, _GLOBAL, _SURFACE}) or instruction.base in ("UTMASTG", "UTMAREDG")


def _accesses(base: str, modifiers: list[str], operands: list[Operand]) -> Iterator[Access]:
    memory = [operand for operand in operands if operand.kind == "mem"]
    if not memory:
        return
    first, registers = memory[0], memory[0].inside[-1]
    if base in ("SYNCS", "ARRIVES"):
        yield Access(_INIT if "EXCH" in modifiers else _MBARRIER, registers, first.offset)
    elif base in _GENERIC_STORES or base in _GLOBAL_STORES:
        yield Access(_GENERIC if base in _GENERIC_STORES else _GLOBAL, registers, first.offset, _bytes(base, modifiers))
    elif base == "CCTL" and "RML2" in modifiers:  # throws a line of the cache away with what was written there
        yield Access(_GLOBAL, registers, first.offset)
    elif base == "LDG":
        yield Access(_LOAD, registers, first.offset)
    elif base == "STL" and operands[-1].register:
        yield from (Access(_SPILL, (Register("R", x, ""),)) for x in operands[-1].register.locations(moved(modifiers)))
    elif base in _SURFACES:
        yield Access(_SURFACE, ())
    elif base in ("STAS", "REDAS"):
        yield from _with_barrier(registers, _bytes(base, modifiers))
    elif base in _SHARED_STORES:
        yield Access(_STORE, registers, first.offset, _bytes(base, modifiers))
    elif base in _BULK and modifiers[:1] == ["G"]:
        yield Access(_GLOBAL, registers)
    elif base in _BULK:
        # A copy for several CTAs has its size and their mask in one register.
        is_plain = len(operands) > 2 and operands[2].kind == "UR" and "MULTICAST" not in modifiers
        yield from _with_barrier(registers, operands[2].register if is_plain else None)
    elif base == "UTMALDG":
        yield from _with_barrier(registers, _LEAST_COPY, is_tensor=True)
    if base in _MAPPED and len(memory) > 1:
        yield Access(_MAP, memory[1].inside[-1])
    elif base == "UTMACCTL":
        yield Access(_MAP, registers)


def _bytes(base: str, modifiers: list[str]) -> int:
    """Bytes that a thread stores."""
    return 16 if base in ("LDGSTS", "STSM") else 4 * moved(modifiers)


def _with_barrier(
    registers: tuple[Register, ...], size: int | Register | None, is_tensor: bool = False
) -> Iterator[Access]:
    """Two registers in a row: where the copy goes, and the mbarrier that hears of its end."""
    for register in registers[:1]:
        yield Access(_STORE, (register,), 0, size, is_tensor)
        yield Access(_MBARRIER, (Register(register.file, register.index + 1, ""),))


def _value(addresses: Addresses, position: int, access: Access) -> Value:
    return addresses.address(position, access.registers, access.offset)


def _size(addresses: Addresses, position: int, access: Access) -> int | None:
    """Bytes at most; None if that is not known."""
    if access.size is None or isinstance(access.size, int):
        return access.size
    units = multiply(addresses.address(position, [access.size], 0), single(16))
    return units.hi if units.is_plain else None


def _is_parameter(addresses: Addresses, position: int, access: Access) -> bool:
    """The address of a map lies in the parameters, whose two words it is made from."""
    pair = access.registers[0].locations(2) if len(access.registers) == 1 else ()
    if len(pair) != 2:
        return False
    low, high = (addresses.value(position, location) for location in pair)
    return (
        (low.base, high.base) == (WINDOW, WINDOW_HIGH)
        and (low.lo, low.hi, low.step) == (high.lo, high.hi, high.step)
        and 0 <= low.lo <= low.hi <= _PARAMETER_BYTES - _MAP_BYTES
    )


def _uppers(addresses: Addresses, position: int, access: Access) -> set[str]:
    """What the upper word of a 64-bit address is made from."""
    pairs = [register.locations(2) for register in access.registers if "U32" not in register.suffix]
    return {addresses.value(position, pair[1]).base for pair in pairs if len(pair) == 2}


def _driver_words(program: Program, positions: Iterable[int]) -> set[str]:
    """What the words of the driver are that the kernel reads. UNKNOWN: an address perhaps, as that of the constants is.
    Which words these are is known of sm_90."""
    found: set[str] = set()
    if program.target and not program.target.startswith("sm_90"):
        return found
    for position in positions:
        if "c[0x0][" in program.code[position].operands:
            for part in split(program.code[position].operands):
                try:
                    word = driver_word(parse(part))
                except UnknownInstruction:
                    continue
                if word is not None:
                    found.add(word.base)
    return found


class Aliases:
    """The rules for one kernel. `wanted` are the registers whose values they ask for, by position. public: the pointer
    parameters to declared memory."""

    def __init__(self, program: Program, positions: list[int], public: Collection[int] = ()) -> None:
        self.has_declared = bool(public)
        self.guards = {position: program.code[position].guard for position in positions}
        found = {position: accesses(program.code[position]) for position in positions}
        self.all = [(position, access) for position, some in found.items() for access in some]
        roles = {access.role for _, access in self.all}
        words = _driver_words(program, positions)
        reads_constants = any("c[0x3][" in program.code[position].operands for position in positions)
        self.guards_constants = bool(words & {UNKNOWN, WINDOW}) or reads_constants
        asked = {_MAP} | ({_MBARRIER, _INIT, _STORE, _GENERIC} if roles & {_MBARRIER, _INIT} else set())
        if self.guards_constants or self.has_declared:
            asked |= {_GLOBAL, _GENERIC}
        if self.has_declared:
            asked |= {_LOAD, _SURFACE, _SPILL}
        self.all = [(position, access) for position, access in self.all if access.role in asked]
        self.wanted: dict[int, set[int]] = {}
        for position, access in self.all:
            self.wanted.setdefault(position, set()).update(access.locations)

    def counting_for(self, position: int) -> set[int]:
        """The initialisations of which a use that comes by them can say that this thread has made them: not those under
        a guard, unless it is under one itself. That the two guards are the same is taken for granted."""
        return {start for start in self.initialisations if self.guards[position] or not self.guards[start]}

    @property
    def initialisations(self) -> set[int]:
        """Where an mbarrier is initialised."""
        return {position for position, access in self.all if access.role == _INIT}

    def judge(
        self, addresses: Addresses, early: Collection[int], reached_without: Callable[[frozenset[int]], Collection[int]]
    ) -> Iterator[tuple[str, int]]:
        """(kind of finding, position) for every access that breaks a rule.

        early: positions that are reached before all threads have met; reached_without(others): those of them that are
        reached without coming by one of these others, too.
        """
        words = {_value(addresses, p, a) for p, a in self.all if a.role in (_INIT, _MBARRIER)}
        starts = {p: _value(addresses, p, a) for p, a in self.all if a.role == _INIT and p in early}
        for position, access in self.all:
            where = _value(addresses, position, access)
            if access.role == _MAP and not _is_parameter(addresses, position, access):
                yield TENSOR_MAP, position
            elif access.role == _MBARRIER:
                own = frozenset(p for p, start in starts.items() if may_meet(where, _WORD, start, _WORD))
                if not own or (position in early and position in reached_without(own & self.counting_for(position))):
                    yield MBARRIER, position
            elif access.role in (_GENERIC, _GLOBAL):
                yield from self.judge_global(addresses, position, access, words)
                if self.has_declared and not self.is_elsewhere(addresses, position, access):
                    yield DECLARED, position
            elif access.role == _SURFACE or (access.role == _SPILL and is_declared(where.base)):
                # Where a surface lies, its handle says. What comes back out of local memory is no known pointer.
                yield DECLARED, position
            elif access.role == _STORE and words and self.may_touch(addresses, position, access, words):
                yield MBARRIER, position

    @staticmethod
    def is_elsewhere(addresses: Addresses, position: int, access: Access) -> bool:
        """A store that cannot reach declared memory: both words of its address are made from other pointers, or it goes
        to shared memory. That the host passes no other pointer into declared memory is the host's duty."""
        where, uppers = _value(addresses, position, access), _uppers(addresses, position, access) - {""}
        return uppers == {SHARED_HIGH} or (uppers == {POINTER} and where.base == POINTER)

    def public_loads(self, addresses: Addresses, made: Collection[int], early: Collection[int]) -> set[int]:
        """Positions that load from declared memory: a declared pointer plus an index, in both words. made: parameters
        to what a launch before this one writes, which is not there yet at the positions `early`."""
        too_early = {declared(parameter) for parameter in made}
        found = set()
        for position, access in self.all:
            if access.role == _LOAD:
                uppers = _uppers(addresses, position, access) - {""}
                base = _value(addresses, position, access).base
                is_there = position not in early or base not in too_early
                if len(uppers) == 1 and is_upper_of(min(uppers), base) and is_there:
                    found.add(position)
        return found

    def judge_global(
        self, addresses: Addresses, position: int, access: Access, words: set[Value]
    ) -> Iterator[tuple[str, int]]:
        """A 64-bit address. One made from a pointer that the host passes is in global memory and is no constant's, as
        nobody outside knows an address in shared memory, and the host has no reason to pass that of a constant."""
        uppers = _uppers(addresses, position, access)
        is_shared = SHARED_HIGH in uppers and not self.may_touch(addresses, position, access, words)
        if access.role == _GENERIC and words and POINTER not in uppers and not is_shared:
            yield MBARRIER, position
        is_known = bool(uppers & {POINTER, SHARED_HIGH}) and not uppers & {WINDOW_HIGH, UNKNOWN}
        if self.guards_constants and not is_known:
            yield CONSTANT, position

    @staticmethod
    def may_touch(addresses: Addresses, position: int, access: Access, words: set[Value]) -> bool:
        """Whether a store to shared memory may reach an mbarrier. A tensor copy into a ring of tiles is trusted to
        stay in the ring, as it is trusted to fill no more than its tile: how much that is, the host's map says."""
        where, size = _value(addresses, position, access), _size(addresses, position, access)
        if access.is_tensor and not where.base and where.step >= _TENSOR_ALIGNMENT:
            return False
        return size is None or any(may_meet(where, size, word, _WORD) for word in words)
