"""Compiles a family's kernels for the host, with stubs in place of their instructions, for the tests of this folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from compiling import COMPILER, CSRC, OF_KERNELS, ROOT, SHARED_STUBS, Substitution, compile_with, copy_sources, families

SCHEDULE = ROOT / "tests" / "schedule"

FLAGS = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas", "-ffunction-sections"]
VIOLATION = 1  # exit status of a program that found one


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
        part: of these kernels, if the file makes several forms.
        macros: constants in place of the kernels' own, and of kernel.cpp.
        variant: what these make of the kernels, for the names of tests.
    """

    name: str
    scheduled: tuple[Substitution, ...]
    tiles_and_steps: tuple[tuple[int, int], ...]
    mutations: tuple[Mutation, ...]
    model: tuple[str, ...] = ("model.cpp",)
    source: str = ""
    part: str = ""
    macros: tuple[tuple[str, int], ...] = ()
    variant: str = ""

    @property
    def family(self) -> families.Family:
        return next(family for family in families.families() if family.name == self.name)

    @property
    def kernels(self) -> list[families.Kernel]:
        """One of each choice of constants: the dtype does not matter to a schedule."""
        of_source = [kernel for kernel in self.family.kernels if kernel.source == self.source]
        if "SEGMENT_TILES" in dict(self.macros):  # rows have several segments
            of_source = [kernel for kernel in of_source if not kernel.is_short]
        if self.part:
            of_source = [kernel for kernel in of_source if kernel.part == self.part]
        return [kernel for kernel in of_source if kernel.dtype == "float16"]

    @property
    def label(self) -> str:
        """For the names of tests."""
        return "-".join(filter(None, (Path(self.source).stem or self.name, self.variant)))

    def label_of(self, kernel: families.Kernel) -> str:
        """Likewise."""
        return "-".join(filter(None, (kernel.name, self.variant)))


def compile_object(source: Path, target: Path, *options: str) -> Path:
    return compile_with(COMPILER, source, target, *FLAGS, *options)


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
    stub = SCHEDULE / "stubs" / "ptx.cuh"
    with_headers = [
        CSRC / "families" / family / "params.h" for family in ("fold", "tiles")
    ]  # that the forward includes
    sources = copy_sources([simulated.family.folder / kernel_source, *with_headers], folder, changes, stub)
    includes = [sources, SCHEDULE / simulated.name, SCHEDULE / "stubs", SHARED_STUBS, SCHEDULE]
    macros = {**kernel.macros, **dict(simulated.macros), "KERNEL_SOURCE": f'"{kernel_source}"'}
    options = [*OF_KERNELS, optimization, *(f"-D{name}={value}" for name, value in macros.items())]
    return compile_object(
        SCHEDULE / simulated.name / source, folder / "kernel.o", *options, *(f"-I{path}" for path in includes)
    )
