"""The few facts that only the cubin's ELF file holds: registers per thread, and threads per block, of each kernel."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from ..tools import NotRun

_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_SHT_SYMTAB = 2
_EIFMT_SVAL = 4  # of .nv.info: a record with a sized payload; all other formats are 4 bytes long
_EIATTR_REGCOUNT = 0x2F  # payload: symbol index, register count
_EIATTR_MAX_THREADS, _EIATTR_REQNTID = 0x05, 0x10  # payload: the launch bounds x, y, z


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def register_counts(cubin: bytes) -> dict[str, int]:
    """Registers per thread by function name, as ptxas recorded them. NotRun if this is not a 64-bit CUDA ELF file."""
    return _checked(cubin, _register_counts)


def thread_bounds(cubin: bytes) -> dict[str, int]:
    """Threads per block at most, by the name of each kernel that says so. NotRun as above."""
    return _checked(cubin, _thread_bounds)


def _checked(cubin: bytes, read: Callable[[bytes], dict[str, int]]) -> dict[str, int]:
    if cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, 18)[0] != 190:  # EM_CUDA
        raise NotRun("not a cubin: no 64-bit CUDA ELF header")
    try:
        return read(cubin)
    except (struct.error, ValueError, IndexError) as error:
        raise NotRun(f"not a cubin: damaged ELF file ({error})") from error


def _sections(cubin: bytes) -> Iterator[tuple[str, int, bytes, int]]:
    """Name, type, content and linked section of each section."""
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [_SECTION.unpack_from(cubin, offset + i * size) for i in range(count)]
    for name, kind, _, _, start, length, link, *_ in headers:
        yield _text(cubin, headers[names][4] + name), kind, cubin[start : start + length], headers[link][4]


def _records(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Attribute and payload of each record that has a sized one."""
    position = 0
    while position < len(info):
        kind, attribute, length = struct.unpack_from("<BBH", info, position)
        if kind == _EIFMT_SVAL:
            yield attribute, info[position + 4 : position + 4 + length]
        position += 4 + (length if kind == _EIFMT_SVAL else 0)


def _register_counts(cubin: bytes) -> dict[str, int]:
    symbols: list[str] = []
    info = b""
    for name, kind, content, strings in _sections(cubin):
        if kind == _SHT_SYMTAB:
            symbols = [_text(cubin, strings + symbol[0]) for symbol in _SYMBOL.iter_unpack(content)]
        if name == ".nv.info":
            info = content
    found: dict[str, int] = {}
    for attribute, payload in _records(info):
        if attribute == _EIATTR_REGCOUNT:
            symbol, registers = struct.unpack_from("<II", payload)
            found[symbols[symbol]] = registers
    return found


def _thread_bounds(cubin: bytes) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, _, content, _ in _sections(cubin):
        if name.startswith(".nv.info."):
            for attribute, payload in _records(content):
                if attribute in (_EIATTR_MAX_THREADS, _EIATTR_REQNTID):
                    x, y, z = struct.unpack_from("<III", payload)
                    found[name.removeprefix(".nv.info.")] = x * y * z
    return found
