"""The few facts that only the cubin's ELF file holds: registers per thread of each kernel."""

from __future__ import annotations

import struct

from ..tools import NotRun

_SECTION = struct.Struct("<IIQQQQIIQQ")  # Elf64_Shdr
_SYMBOL = struct.Struct("<IBBHQQ")  # Elf64_Sym
_SHT_SYMTAB = 2
_EIFMT_SVAL = 4  # of .nv.info: a record with a sized payload; all other formats are 4 bytes long
_EIATTR_REGCOUNT = 0x2F  # payload: symbol index, register count


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def register_counts(cubin: bytes) -> dict[str, int]:
    """Registers per thread by function name, as ptxas recorded them. NotRun if this is not a 64-bit CUDA ELF file."""
    if cubin[:5] != b"\x7fELF\x02" or struct.unpack_from("<H", cubin, 18)[0] != 190:  # EM_CUDA
        raise NotRun("not a cubin: no 64-bit CUDA ELF header")
    try:
        return _register_counts(cubin)
    except (struct.error, ValueError, IndexError) as error:
        raise NotRun(f"not a cubin: damaged ELF file ({error})") from error


def _register_counts(cubin: bytes) -> dict[str, int]:
    (offset,) = struct.unpack_from("<Q", cubin, 40)
    size, count, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [_SECTION.unpack_from(cubin, offset + i * size) for i in range(count)]
    name_table = headers[names][4]
    symbols: list[str] = []
    info = b""
    for name, kind, _, _, start, length, link, *_ in headers:
        if kind == _SHT_SYMTAB:
            strings = headers[link][4]
            symbols = [_text(cubin, strings + s[0]) for s in _SYMBOL.iter_unpack(cubin[start : start + length])]
        if _text(cubin, name_table + name) == ".nv.info":
            info = cubin[start : start + length]
    found: dict[str, int] = {}
    position = 0
    while position < len(info):
        kind, attribute, length = struct.unpack_from("<BBH", info, position)
        if kind == _EIFMT_SVAL and attribute == _EIATTR_REGCOUNT:
            symbol, registers = struct.unpack_from("<II", info, position + 4)
            found[symbols[symbol]] = registers
        position += 4 + (length if kind == _EIFMT_SVAL else 0)
    return found
