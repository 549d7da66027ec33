"""The forward's host code and one of its kernels as a library for the CPU, run on the machine of machine.h. For small
shapes: a key tile takes some milliseconds."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from compiling import (
    C_COMPILER,
    COMPILER,
    CSRC,
    OF_KERNELS,
    ROOT,
    SHARED_STUBS,
    Substitution,
    compile_with,
    copy_sources,
    families,
    run,
)
from torch import Tensor

import build_cubins  # of csrc/kernels, where compiling.py finds the families

EMULATED = ROOT / "tests" / "emulated"
STUBS = EMULATED / "stubs"

FLAGS = ["-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-march=x86-64-v3"]
OF_HOST = ["-std=gnu11", f"-I{CSRC}"]
HOST = [
    "error.c",
    "check.c",
    "attention.c",
    "cuda/layout.c",
    "families/forward/plan.c",
    "families/forward/schedule.c",
    "families/forward/launch.c",
]

FAMILY = next(family for family in families.families() if family.name == "forward")
KERNELS = [kernel for kernel in FAMILY.kernels if kernel.dtype == "bfloat16"]


def compile_host(folder: Path) -> list[Path]:
    """Objects of what does not depend on the kernel."""
    objects = [
        compile_with(C_COMPILER, CSRC / source, folder / (source.replace("/", "_") + ".o"), *FLAGS, *OF_HOST)
        for source in HOST
    ]
    for name in ("machine", "session"):
        objects.append(compile_with(COMPILER, EMULATED / f"{name}.cpp", folder / f"{name}.o", *FLAGS, "-std=c++17"))
    return objects


def compile_table(kernel: families.Kernel, folder: Path) -> Path:
    """The table of a build that ships this kernel alone; its machine code is empty."""
    cubin, source = folder / "empty.cubin", folder / "kernel_table.c"
    cubin.touch()
    source.write_text(build_cubins.table_source([build_cubins.Cubin(FAMILY, kernel, cubin, "", 0, 0)], [FAMILY]))
    return compile_with(C_COMPILER, source, folder / "kernel_table.o", *FLAGS, *OF_HOST)


def compile_kernel(kernel: families.Kernel, folder: Path, changes: tuple[Substitution, ...]) -> Path:
    sources = copy_sources(FAMILY, FAMILY.source, folder, changes, STUBS / "ptx.cuh")
    includes = [f"-I{path}" for path in (sources, STUBS, SHARED_STUBS)]
    options = ["-std=c++17", *OF_KERNELS, "-Wno-maybe-uninitialized", "-Wno-unused-function", *includes]
    macros = [f"-D{name}={value}" for name, value in kernel.macros.items()]
    return compile_with(COMPILER, EMULATED / "kernel.cpp", folder / "kernel.o", *FLAGS, *options, *macros)


def build(folder: Path, kernel: families.Kernel, host: list[Path], changes: tuple[Substitution, ...] = ()) -> Emulator:
    """A library in which this kernel, changed as told, is all there is; `host`: of compile_host."""
    folder.mkdir(exist_ok=True)
    objects = [compile_kernel(kernel, folder, changes), compile_table(kernel, folder), *host]
    library = folder / "libemulated.so"
    result = run(*COMPILER, "-shared", *objects, "-o", library)
    assert result.returncode == 0, result.stderr
    return Emulator(ctypes.CDLL(str(library)))


# ---- the C ABI, as far as the forward needs it (csrc/dhp_fa.h) -------------------------------------------------------


class CTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("size", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4), ("dtype", ctypes.c_int)
    ]  # fmt: skip


class CAttention(ctypes.Structure):
    _fields_ = [
        ("q", CTensor), ("k", CTensor), ("v", CTensor), ("out", CTensor), ("lse", ctypes.c_void_p),
        ("scale", ctypes.c_double), ("is_causal", ctypes.c_int), ("causal_offset", ctypes.c_int64),
        ("is_windowed", ctypes.c_int), ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_double), ("sinks", ctypes.c_void_p),
    ]  # fmt: skip


class CError(ctypes.Structure):
    _fields_ = [("text", ctypes.c_char * 512)]


DHP_BFLOAT16 = 2


class Violation(Exception):
    """What the emulated machine, or the host's code, would not do."""


def c_tensor(t: Tensor) -> CTensor:
    """Of a bfloat16 tensor [B, H, S, D]."""
    assert t.dtype == torch.bfloat16
    return CTensor(t.data_ptr(), (ctypes.c_int64 * 4)(*t.shape), (ctypes.c_int64 * 4)(*t.stride()), DHP_BFLOAT16)


@dataclass(frozen=True)
class Emulator:
    """The operator on the emulated machine."""

    library: ctypes.CDLL

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, is_causal: bool = False, causal_offset: int = 0,
        scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes `out`, returns lse; tensors as the operator's, in bfloat16."""
        lse = torch.full(q.shape[:3], torch.nan)
        call = CAttention(
            q=c_tensor(q), k=c_tensor(k), v=c_tensor(v), out=c_tensor(out), lse=lse.data_ptr(),
            scale=q.shape[3] ** -0.5 if scale is None else scale, is_causal=is_causal, causal_offset=causal_offset,
        )  # fmt: skip
        error = CError()
        status = self.library.dhp_attention_cuda(ctypes.byref(call), 0, None, ctypes.byref(error))
        if status != 0:
            raise Violation(error.text.decode())
        return lse
