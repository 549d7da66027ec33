"""The forward's host code and kernels as a library for the CPU: kernels are compiled by the C++ compiler with stubs in
place of their instructions, and run on the machine of machine.h. For small shapes: a key tile takes some milliseconds.

`CXX` names the compiler (default `c++`), `CC` that of C (default `cc`).
"""

from __future__ import annotations

import ctypes
import os
import shlex
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
EMULATED = ROOT / "tests" / "emulated"

sys.path.insert(0, str(CSRC / "kernels"))
import families  # noqa: E402

COMPILER = shlex.split(os.environ.get("CXX", "c++"))
C_COMPILER = shlex.split(os.environ.get("CC", "cc"))
FLAGS = ["-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Werror", "-ffp-contract=off", "-march=x86-64-v3"]
# Warnings that only the host's compiler has for device sources.
OF_KERNELS = [
    "-Wno-parentheses",
    "-Wno-int-in-bool-context",
    "-Wno-missing-field-initializers",
    "-Wno-unknown-pragmas",
    "-Wno-maybe-uninitialized",
]
HOST = [
    "error.c",
    "check.c",
    "attention.c",
    "cuda/layout.c",
    "families/forward/plan.c",
    "families/forward/schedule.c",
    "families/forward/launch.c",
]

Substitution = tuple[str, str]

needs_compilers = pytest.mark.skipif(
    shutil.which(COMPILER[0]) is None or shutil.which(C_COMPILER[0]) is None,
    reason=f"no {COMPILER[0]} (CXX names another) or no {C_COMPILER[0]} (CC names another)",
)

FAMILY = next(family for family in families.families() if family.name == "forward")
KERNELS = [kernel for kernel in FAMILY.kernels if kernel.dtype == "bfloat16"]


def compile_object(compiler: list[str], source: Path, target: Path, *options: str) -> Path:
    command = [*compiler, *FLAGS, *options, "-c", str(source), "-o", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, f"{shlex.join(command)}\n{result.stderr}"
    return target


def changed_sources(folder: Path, changes: tuple[Substitution, ...]) -> Path:
    """csrc under `folder`, each change made in the one place of the kernel's sources where its text stands."""
    copy = folder / "csrc"
    shutil.copytree(CSRC, copy)
    sources = [path for part in (copy / "hopper", copy / "families/forward") for path in sorted(part.iterdir())]
    for old, new in changes:
        places = [path for path in sources for _ in range(path.read_text().count(old))]
        assert len(places) == 1, f"{len(places)} places have the text {old!r}; this test needs exactly one"
        places[0].write_text(places[0].read_text().replace(old, new))
    return copy


def table_text(kernels: list[families.Kernel]) -> str:
    """kernel_table.c of these kernels, which have no cubins, and the function of each."""
    rows, functions, cases = [], [], []
    for k in kernels:
        functions.append(f"void run_{k.name}(void **arguments);")
        cases.append(f'  if (!strcmp(name, "{k.name}")) return run_{k.name};')
        rows.append(
            f'  {{.name = "{k.name}", .family = "forward", .entry = "", .part = "{k.part}", .cubin_sha256 = "",'
            f" .dtype = DHP_BFLOAT16, .head_dim = {k.head_dim}, .warpgroups = {k.warpgroups}, .rows = {k.rows},"
            f" .tile_q = {k.warpgroups * k.rows}, .tile_k = {k.tile_k}, .stages = {k.stages},"
            f" .ctas_per_sm = {k.ctas_per_sm}, .step_cycles = {k.step_cycles},"
            f" .threads = {k.warpgroups} * DHP_WARPGROUP_THREADS}},"
        )
    return "\n".join(
        [
            "#include <string.h>",
            f'#include "{CSRC}/kernels/kernel_table.h"',
            *functions,
            "typedef void emulated_kernel(void **arguments);",
            "emulated_kernel *emulated_kernel_of(const char *name);",
            "emulated_kernel *emulated_kernel_of(const char *name) {",
            *cases,
            "  return NULL;",
            "}",
            "const dhp_kernel_info dhp_kernel_table[] = {",
            *rows,
            "};",
            f"const int dhp_kernel_table_size = {len(kernels)};",
            f"const dhp_family dhp_family_forward = {{dhp_kernel_table, {len(kernels)}}};",
            "",
        ]
    )


def compile_kernel(kernel: families.Kernel, csrc: Path, folder: Path) -> Path:
    macros = {**kernel.macros, "RUN_KERNEL": f"run_{kernel.name}"}
    options = ["-std=c++17", *(f"-D{name}={value}" for name, value in macros.items())]
    stubs = EMULATED / "stubs"  # the stub of ptx.cuh comes first, and has its include guard
    includes = [f"-I{stubs}", f"-I{csrc / 'families/forward'}", "-include", str(stubs / "ptx.cuh")]
    return compile_object(
        COMPILER, EMULATED / "kernel.cpp", folder / f"{kernel.name}.o", *options, *includes,
        "-fvisibility=hidden", "-Wno-unused-function", *OF_KERNELS,
    )  # fmt: skip


def build(folder: Path, kernels: list[families.Kernel], csrc: Path = CSRC) -> Emulator:
    """The library, in which these kernels are all there are: so a test chooses one by building it alone."""
    table = folder / "table.c"
    table.write_text(table_text(kernels))
    jobs = [(compile_kernel, kernel, csrc, folder) for kernel in kernels]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [job.result() for job in [pool.submit(*job) for job in jobs]]
    for source in HOST:
        target = folder / (source.replace("/", "_") + ".o")
        objects.append(compile_object(C_COMPILER, CSRC / source, target, "-std=gnu11"))
    objects.append(compile_object(C_COMPILER, table, folder / "table.o", "-std=gnu11"))
    for name in ("machine", "session"):
        objects.append(compile_object(COMPILER, EMULATED / f"{name}.cpp", folder / f"{name}.o", "-std=c++17"))
    library = folder / "libemulated.so"
    command = [*COMPILER, "-shared", *map(str, objects), "-o", str(library)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
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
