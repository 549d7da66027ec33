"""NVIDIA's command-line tools: where they are, how they are called. A tool that is missing is a reason not to run."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path


class NotRun(Exception):
    """The gate cannot run here; the text is the cause. Exit code 2, never a silent pass."""


def _site_packages() -> Iterator[Path]:
    folders = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()]
    folders.append(site.getusersitepackages())
    for folder in dict.fromkeys(folders):
        yield Path(folder)


def _candidates(name: str) -> Iterator[Path]:
    if found := shutil.which(name):
        yield Path(found)
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home:
            yield Path(home) / "bin" / name
    for folder in _site_packages():  # pip: nvidia-cuda-nvdisasm and its like, and triton's own copies
        yield from sorted(folder.glob(f"nvidia/*/bin/{name}"), reverse=True)
        yield folder / "triton" / "backends" / "nvidia" / "bin" / name


def find(name: str) -> Path:
    """A tool of the CUDA toolkit: PATH, CUDA_HOME, /usr/local/cuda, then the pip packages. NotRun if there is none."""
    for path in _candidates(name):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    hint = {"nvdisasm": " (pip install nvidia-cuda-nvdisasm)", "cuobjdump": " (pip install nvidia-cuda-cuobjdump)"}
    raise NotRun(f"{name} was not found in PATH, CUDA_HOME, /usr/local/cuda or the pip packages{hint.get(name, '')}")


def run(command: list[str | Path], cwd: Path | None = None) -> str:
    """Standard output of a command. NotRun quotes the first line of what a failing one said."""
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=cwd)
    if result.returncode != 0:
        said = (result.stderr or result.stdout).strip().splitlines()
        raise NotRun(f"{Path(command[0]).name} failed: {said[0] if said else f'exit code {result.returncode}'}")
    return result.stdout


@cache
def nvcc_version(nvcc: Path) -> str:
    """The last line of ``nvcc --version``, which names the build."""
    return run([nvcc, "--version"]).strip().splitlines()[-1]


def disassemble(cubin: bytes) -> str:
    """The listing of a cubin, with resolved branch targets, and source lines where the cubin has them."""
    nvdisasm = find("nvdisasm")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "image.cubin"
        path.write_bytes(cubin)
        return run([nvdisasm, "-c", "-gi", path])


def extract_cubins(library: Path, pattern: str = "", holds: str = "") -> dict[str, bytes]:
    """The cubins inside a shared library, executable or fat binary: file name to content.

    pattern: part of the cubin's name. holds: part of the name of a kernel in it.
    """
    cuobjdump = find("cuobjdump")
    with tempfile.TemporaryDirectory() as folder:
        run([cuobjdump, "-xelf", pattern or "all", library.resolve()], cwd=Path(folder))
        found = {path.name: path.read_bytes() for path in sorted(Path(folder).glob("*.cubin"))}
    return {name: data for name, data in found.items() if holds.encode() in data}
