"""Which machine code a run looks at: the shipped kernels, or anybody's cubin, library or installed package."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from .sass import Cubin
from .tools import NotRun, extract_cubins

_ROOT = Path(__file__).resolve().parents[2]
_JIT = "it generates its kernels when it runs: dump one and audit it with --cubin"

# Library of a peer below site-packages, and the part of the names of its cubins that says attention.
PEERS: dict[str, tuple[str, str]] = {
    "sdpa-flash": ("torch/lib/libtorch_cuda.so", "flash_fwd"),
    "sdpa-efficient": ("torch/lib/libtorch_cuda.so", "cutlassF"),
    "sdpa-cudnn": ("", _JIT),
    "fa3": ("flash_attn_3/_C*.so", ""),
}


def shipped() -> list[Cubin]:
    """The kernels inside the installed library, else those under build/cubins/ of a checkout. NotRun without any."""
    try:
        inspect = importlib.import_module("dhp_safe_fa._inspect")
        names = [str(kernel["name"]) for kernel in inspect.kernels()]
        cubins = [Cubin(name, bytes(inspect.cubin(name))) for name in names]
    except ImportError:
        cubins = []
    if not cubins:
        cubins = [Cubin(path.stem, path.read_bytes()) for path in sorted((_ROOT / "build" / "cubins").glob("*.cubin"))]
    if not cubins:
        raise NotRun("no shipped kernel: the package was built without nvcc, and build/cubins/ is empty")
    return cubins


def select(cubins: list[Cubin], name: str | None) -> list[Cubin]:
    """The shipped kernel of that name, or all. NotRun names what there is."""
    chosen = [cubin for cubin in cubins if name is None or cubin.name == name]
    if not chosen:
        raise NotRun(f"--kernel {name}: there is no such kernel; shipped are {', '.join(c.name for c in cubins)}")
    return chosen


def from_files(paths: list[Path]) -> list[Cubin]:
    """Cubins given as files, each reported by the names of its kernels."""
    for path in paths:
        if not path.is_file():
            raise NotRun(f"--cubin {path}: there is no such file")
    return [Cubin("", path.read_bytes(), str(path)) for path in paths]


def from_library(path: Path, pattern: str = "") -> list[Cubin]:
    """Every cubin inside a library, executable or fat binary; pattern: a part of the cubin's name."""
    if not path.is_file():
        raise NotRun(f"--library {path}: there is no such file")
    cubins = extract_cubins(path, pattern)
    if not cubins:
        raise NotRun(f"{path}: holds no cubin{f' whose name has {pattern} in it' if pattern else ''}")
    return [Cubin("", data, f"{path.name}: {name}") for name, data in cubins.items()]


def _libraries(pattern: str) -> Iterator[Path]:
    for folder in dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]):
        yield from sorted(Path(folder).glob(pattern))


def from_peer(name: str) -> list[Cubin]:
    """The attention kernels of an installed peer. NotRun if it is not installed, or has no cubin to look at."""
    pattern, part = PEERS[name]
    if not pattern:
        raise NotRun(f"--peer {name}: {part}")
    library = next(_libraries(pattern), None)
    if library is None:
        raise NotRun(f"--peer {name}: {pattern} is not in this environment (a CUDA build of it is needed)")
    return from_library(library, part)
