"""Compiles a family's kernels for the host, with stubs in place of their instructions, for the tests of this folder.

`CXX` names the compiler (default `c++`), `CC` that of C (default `cc`).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
SCHEDULE = ROOT / "tests" / "schedule"

sys.path.insert(0, str(CSRC / "kernels"))
import families  # noqa: E402

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffunction-sections"]
# Warnings that only the host's compiler has for device sources.
OF_KERNELS = ["-Wno-parentheses", "-Wno-int-in-bool-context", "-Wno-missing-field-initializers"]
VIOLATION = 1  # exit status of a program that found one

needs_compiler = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None, reason=f"no C++ compiler: {COMPILER[0]} was not found (CXX names another)"
)

Substitution = tuple[str, str]


@dataclass(frozen=True)
class Mutation:
    """A mistake in a kernel that the simulator has to find in at least one of the family's kernels."""

    name: str
    substitutions: tuple[Substitution, ...]
    time_outs: bool = False  # only they bring it to light


@dataclass(frozen=True)
class Simulated:
    """What the simulator needs of a family, beside its folder here (model.cpp, kernel.cpp, and its stub of wgmma.h).

    Attributes:
        name: of the family.
        model: the files of its folder here that are linked with each kernel.
        scheduled: substitutions by which the simulator chooses what a CTA computes.
        tiles_and_steps: all sequences of up to this many tiles with loops of 1 to this many steps are run: short ones
            next to each other, and ones that are longer than the stages.
        mutations: mistakes that must be found.
        source: the file of the family whose kernels these are, if it is another than the family's own.
    """

    name: str
    scheduled: tuple[Substitution, ...]
    tiles_and_steps: tuple[tuple[int, int], ...]
    mutations: tuple[Mutation, ...]
    model: tuple[str, ...] = ("model.cpp",)
    source: str = ""

    @property
    def family(self) -> families.Family:
        return next(family for family in families.families() if family.name == self.name)

    @property
    def kernels(self) -> list[families.Kernel]:
        """One of each choice of constants: the dtype does not matter to a schedule."""
        of_source = [kernel for kernel in self.family.kernels if kernel.source == self.source]
        return [kernel for kernel in of_source if kernel.dtype == "float16"]

    @property
    def label(self) -> str:
        """For the names of tests."""
        return Path(self.source).stem or self.name


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, timeout=300)
    print(shlex.join(map(str, command)), result.stdout, result.stderr, sep="\n")
    return result


def compile_object(source: Path, target: Path, *options: str) -> Path:
    result = run(*COMPILER, *FLAGS, *options, "-c", source, "-o", target)
    assert result.returncode == 0, result.stderr
    return target


def copy_sources(family: families.Family, source: str, folder: Path, changes: tuple[Substitution, ...]) -> Path:
    """The family's headers and its file `source` under `folder`, each change made in the one place where its text
    stands, and the stub of ptx.cuh. Returns the copy of the family's folder."""
    texts = {
        path.relative_to(CSRC): path.read_text()
        for part in (CSRC / "hopper", family.folder)
        for path in sorted(part.iterdir())
        if path.suffix in (".cuh", ".h") or path.name == source
    }
    texts[Path("ct.h")] = (CSRC / "ct.h").read_text()
    for old, new in changes:
        # any white space stands for any other: how a macro's lines are aligned and continued does not matter
        pattern = re.compile(r"[\s\\]+".join(re.escape(word) for word in re.split(r"\s+", old)))
        places = [(path, found.span()) for path, text in texts.items() for found in pattern.finditer(text)]
        assert len(places) == 1, f"{len(places)} places have the text {old!r}; this test needs exactly one"
        path, (start, end) = places[0]
        texts[path] = texts[path][:start] + new + texts[path][end:]
    texts[Path("hopper/ptx.cuh")] = (SCHEDULE / "stubs" / "ptx.cuh").read_text()
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder / family.folder.relative_to(CSRC)


def compile_kernel(
    simulated: Simulated,
    kernel: families.Kernel,
    source: str,
    folder: Path,
    changes: tuple[Substitution, ...],
    optimization: str = "-O2",
) -> Path:
    """An object: `source` of the family's folder here, which includes the changed kernel with these constants."""
    kernel_source = kernel.source or simulated.family.source
    sources = copy_sources(simulated.family, kernel_source, folder, changes)
    includes = [sources, SCHEDULE / simulated.name, SCHEDULE / "stubs", SCHEDULE]
    macros = {**kernel.macros, "KERNEL_SOURCE": f'"{kernel_source}"'}
    options = [*OF_KERNELS, optimization, *(f"-D{name}={value}" for name, value in macros.items())]
    return compile_object(
        SCHEDULE / simulated.name / source, folder / "kernel.o", *options, *(f"-I{path}" for path in includes)
    )
