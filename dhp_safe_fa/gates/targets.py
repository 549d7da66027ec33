"""Which machine code a run looks at: the shipped kernels, or anybody's cubin, library or installed package."""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from .sass.gate import Cubin
from .tools import NotRun, extract_cubins

_ROOT = Path(__file__).resolve().parents[2]
_JIT = "it generates its kernels when it runs: dump one and audit it with --cubin"

# At the end of the name of a peer's gradients.
BACKWARD = "-backward"
# Library of a peer below site-packages, and the part of its kernels' names that no other kernel has.
PEERS: dict[str, tuple[str, str]] = {
    "sdpa-flash": ("torch/lib/libtorch_cuda.so", "flash_fwd"),
    "sdpa-efficient": ("torch/lib/libtorch_cuda.so", "fmha_cutlassF"),
    "sdpa-cudnn": ("", _JIT),
    "fa3": ("flash_attn_3/_C*.so", "FlashAttnFwd"),
    f"sdpa-flash{BACKWARD}": ("torch/lib/libtorch_cuda.so", "flash_bwd"),
    f"sdpa-efficient{BACKWARD}": ("torch/lib/libtorch_cuda.so", "fmha_cutlassB"),
    f"sdpa-cudnn{BACKWARD}": ("", _JIT),
    f"fa3{BACKWARD}": ("flash_attn_3/_C*.so", "FlashAttnBwd"),
    f"fa3-det{BACKWARD}": ("flash_attn_3/_C*.so", "FlashAttnBwd"),
}
# In the names of the cubins that a Hopper GPU runs: sm_90 and sm_90a. torch carries thousands for other GPUs.
_HOPPER = "sm_90"


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


def select(cubins: list[Cubin], names: Sequence[str] | None) -> list[Cubin]:
    """The shipped kernels of those names, or all. NotRun names what there is."""
    require_shipped(names, [cubin.name for cubin in cubins])
    return [cubin for cubin in cubins if names is None or cubin.name in names]


def require_shipped(names: Sequence[str] | None, known: Sequence[str]) -> None:
    """NotRun if there is no kernel of one of the names."""
    unknown = [name for name in names or () if name not in known]
    if unknown:
        raise NotRun(f"--kernel {unknown[0]}: there is no such kernel; shipped are {', '.join(known)}")


def from_files(paths: list[Path]) -> list[Cubin]:
    """Cubins given as files, each reported by the names of its kernels."""
    for path in paths:
        if not path.is_file():
            raise NotRun(f"--cubin {path}: there is no such file")
    return [Cubin("", path.read_bytes(), str(path)) for path in paths]


def from_library(path: Path, pattern: str = "", holds: str = "") -> list[Cubin]:
    """The cubins inside a library, executable or fat binary: all, or those with pattern in the cubin's name and holds
    in a kernel's name."""
    if not path.is_file():
        raise NotRun(f"--library {path}: there is no such file")
    try:
        cubins = extract_cubins(path, pattern, holds)
    except NotRun as error:
        if "does not contain device code" not in str(error):  # which cuobjdump takes for a failure
            raise
        cubins = {}
    if not cubins:
        which = f" with a kernel that has {holds} in its name" if holds else ""
        own = "this project's own kernels are looked at by default"
        raise NotRun(f"{path}: cuobjdump finds no cubin{which} in it; {own}")
    return [Cubin("", data, f"{path.name}: {name}") for name, data in cubins.items()]


def _libraries(pattern: str) -> Iterator[Path]:
    """Files of an installed package; the package itself may lie outside this environment's own site-packages."""
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    package = importlib.util.find_spec(pattern.partition("/")[0])
    folders += [str(Path(place).parent) for place in (package.submodule_search_locations or ())] if package else []
    for folder in dict.fromkeys(folders):
        yield from sorted(Path(folder).glob(pattern))


def from_peer(name: str) -> list[Cubin]:
    """The cubins that hold a peer's kernels for Hopper. NotRun if it is not installed, or carries none."""
    pattern, part = PEERS[name]
    if not pattern:
        raise NotRun(f"--peer {name}: {part}")
    library = next(_libraries(pattern), None)
    if library is None:
        raise NotRun(f"--peer {name}: {pattern} is not in this environment (a CUDA build of it is needed)")
    return from_library(library, _HOPPER, part)
