"""What the build knows of a family of kernels: one source, and the constants that make each of its kernels.

A family is a folder of csrc/families with a file family.py, which defines FAMILY. Nothing else names it: the build
finds it there, setup.py compiles its C files into the host core, and kernel_table.c gives its code the table of its
kernels.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from wgmma import header

FAMILIES = Path(__file__).resolve().parent.parent / "families"


@dataclass(frozen=True)
class Kernel:
    """The constants of one kernel. The C struct dhp_kernel_info (csrc/dhp_fa.h) says what each is; `extra` are macros
    that only this family's source reads; `source` is another file of the family's folder than the family's own."""

    name: str
    dtype: str
    head_dim: int
    tile_k: int
    warpgroups: int
    rows: int
    stages: int
    ctas_per_sm: int
    step_cycles: int
    part: str = "out"
    extra: tuple[tuple[str, int], ...] = ()
    source: str = ""
    shares_rows: bool = False  # the warpgroups of a CTA compute the same rows
    segment_tiles: int = 0  # key tiles of a segment, where rows are folds over segments: a power of two
    is_short: bool = False  # it computes rows whose keys are in one segment, and no others
    cluster: int = 1  # CTAs that compute the same rows, each its columns
    unit_cycles: int = 0  # beside its steps, where the plan counts them

    @property
    def tile_q(self) -> int:
        """Query rows of a CTA."""
        return self.rows if self.shares_rows else self.warpgroups * self.rows

    @property
    def macros(self) -> dict[str, int]:
        """What the source is compiled with."""
        return {
            "HEAD_DIM": self.head_dim,
            "TILE_K": self.tile_k,
            "WARPGROUPS": self.warpgroups,
            "ROWS": self.rows,
            "STAGES": self.stages,
            "CTAS_PER_SM": self.ctas_per_sm,
            "SEGMENT_TILES": self.segment_tiles,
            "ONE_SEGMENT": int(self.is_short),
            "ELEMENT_IS_BFLOAT16": int(self.dtype == "bfloat16"),
            **dict(self.extra),
        }


@dataclass(frozen=True)
class Family:
    """A family of kernels.

    Attributes:
        name: of the folder, and in C: the table of its kernels is dhp_family_NAME.
        source: the CUDA file, relative to the folder.
        entry: the name of its kernel function.
        params: the header with its launch parameters, relative to the folder.
        shared_bytes: a macro of that header: shared memory of a CTA from head_dim, tile_k, warpgroups, rows,
            stages and the kernel's extra macros.
        kernels: all of them; their names are unique over all families.
        products: a kernel to the text of its wgmma.h.
    """

    name: str
    source: str
    entry: str
    params: str
    shared_bytes: str
    kernels: tuple[Kernel, ...]
    products: Callable[[Kernel], str] = field(compare=False)

    @property
    def folder(self) -> Path:
        return FAMILIES / self.name


def family_of_rows(name: str, shapes: list[tuple[int, int, int, int]]) -> Family:
    """A family whose CTAs read their rows once: no step of keys, no stage and no matrix product; everything in it is
    called after it.

    shapes: (head_dim, warpgroups, rows, ctas_per_sm) of its kernels, each for float16 and bfloat16.
    """
    kernels = (
        Kernel(f"{name.replace('_', '')}_{dtype}_d{d}", dtype, d, 0, groups, rows, 0, ctas, 0, name.replace("_", " "))
        for dtype in ("float16", "bfloat16")
        for d, groups, rows, ctas in shapes
    )
    return Family(
        name=name,
        source=f"{name}.cu",
        entry=f"dhp_attention_{name}",
        params="params.h",
        shared_bytes=f"DHP_{name.upper()}_SHARED_BYTES",
        kernels=tuple(kernels),
        products=lambda of: header(),
    )


def families() -> list[Family]:
    """Every family there is, by name."""
    found = []
    for path in sorted(FAMILIES.glob("*/family.py")):
        spec = importlib.util.spec_from_file_location(f"dhp_family_{path.parent.name}", path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        family: Family = module.FAMILY
        if family.name != path.parent.name:
            raise ValueError(f"{path}: the family is called {family.name}, its folder {path.parent.name}")
        found.append(family)
    names = [kernel.name for family in found for kernel in family.kernels]
    if len(set(names)) != len(names):
        raise ValueError(f"two kernels are called {next(name for name in names if names.count(name) > 1)}")
    return found
