"""Host code, and a kernel of the forward or of decode with the one that lists query tiles for it if it goes through a
list, or the kernels of gradients, as a library for the CPU, run on the machine of machine.h. For small shapes: a key
tile takes some milliseconds."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
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
    "backward.c",
    "kernel_info.c",
    "cuda/layout.c",
    "families/backward/plan.c",
    "families/backward/workspace.c",
    "families/backward/launch.c",
    "families/bounds/launch.c",
    "families/decode/plan.c",
    "families/decode/launch.c",
    "families/delta/launch.c",
    "families/dq_out/launch.c",
    "families/fold/launch.c",
    "families/forward/plan.c",
    "families/forward/schedule.c",
    "families/forward/launch.c",
    "families/forward/packed.c",
    "families/tiles/launch.c",
    "varlen.c",
]

Shipped = tuple[families.Family, families.Kernel]

FAMILY = {family.name: family for family in families.families()}
OF_FORWARD = [kernel for kernel in FAMILY["forward"].kernels if kernel.dtype == "bfloat16"]
KERNELS = [kernel for kernel in OF_FORWARD if kernel.part == "out"]
WINDOWED = [kernel for kernel in OF_FORWARD if kernel.part == "window out"]
LISTED = [kernel for kernel in OF_FORWARD if kernel.part == "packed out"]
FORMED = [kernel for kernel in OF_FORWARD if kernel.part.startswith("packed out ")]  # soft caps, sinks
DECODE = [kernel for kernel in FAMILY["decode"].kernels if kernel.dtype == "bfloat16"]
OF_GRADIENTS = ("bounds", "delta", "backward", "dq_out")
ONE_PASS = [kernel.head_dim for kernel in FAMILY["dq_out"].kernels if kernel.dtype == "bfloat16"]


def compile_host(folder: Path) -> list[Path]:
    """Objects of what does not depend on the kernel."""
    objects = [
        compile_with(C_COMPILER, CSRC / source, folder / (source.replace("/", "_") + ".o"), *FLAGS, *OF_HOST)
        for source in HOST
    ]
    for name in ("machine", "products", "session"):
        objects.append(compile_with(COMPILER, EMULATED / f"{name}.cpp", folder / f"{name}.o", *FLAGS, "-std=c++17"))
    return objects


def compile_table(shipped: list[Shipped], folder: Path) -> Path:
    """The table of a build that ships these kernels alone; their machine code is empty."""
    cubin, source = folder / "empty.cubin", folder / "kernel_table.c"
    cubin.touch()
    by_family = sorted(shipped, key=lambda one: one[0].name)  # as the table has them
    cubins = [build_cubins.Cubin(family, kernel, cubin, "", 0, 0) for family, kernel in by_family]
    source.write_text(build_cubins.table_source(cubins, list(FAMILY.values())))
    return compile_with(C_COMPILER, source, folder / "kernel_table.o", *FLAGS, *OF_HOST)


def source_of(shipped: Shipped) -> Path:
    family, kernel = shipped
    return family.folder / (kernel.source or family.source)


def compile_kernel(shipped: Shipped, of_call: list[Path], folder: Path, changes: tuple[Substitution, ...]) -> Path:
    """of_call: the sources in one of which each change is made."""
    family, kernel = shipped
    source = source_of(shipped)
    copy = copy_sources(list(dict.fromkeys((source, *of_call))), folder, changes, STUBS / "ptx.cuh")
    includes = [f"-I{path}" for path in (copy, STUBS, SHARED_STUBS)]
    options = ["-std=c++17", *OF_KERNELS, "-Wno-maybe-uninitialized", "-Wno-unused-function", *includes]
    macros = [f"-D{name}={value}" for name, value in kernel.macros.items()]
    named = [f'-DKERNEL_NAME="{kernel.name}"', f'-DKERNEL_SOURCE="{source.name}"', f"-DOF_{family.name.upper()}=1"]
    named.append(f"-D{family.entry}={family.entry}_{kernel.name}")  # a library has several of some
    target = folder / f"{kernel.name}.o"
    return compile_with(COMPILER, EMULATED / "kernel.cpp", target, *FLAGS, *options, *macros, *named)


def build(folder: Path, kernel: families.Kernel, host: list[Path], changes: tuple[Substitution, ...] = ()) -> Emulator:
    """A library in which this kernel, changed as told, is all there is; `host`: of compile_host."""
    folder.mkdir(exist_ok=True)
    is_decode = kernel.name.startswith("dec_")
    of_call = [FAMILY[name] for name in ("decode" if is_decode else "forward", "fold", "tiles")]
    shipped: list[Shipped] = [(of_call[0], kernel)]
    sources = [family.folder / family.source for family in of_call]
    if kernel.part.startswith("packed"):
        shipped += [(FAMILY["tiles"], lister) for lister in FAMILY["tiles"].kernels]
    else:
        fold, serves = FAMILY["fold"], (kernel.dtype, kernel.head_dim)
        shipped += [(fold, one) for one in fold.kernels if (one.dtype, one.head_dim) == serves]
    table = shipped
    if is_decode:  # the host compares it with one of the forward: with one that would take forever
        other = next(one for one in KERNELS if one.head_dim == kernel.head_dim and not one.is_short)
        slow = replace(other, step_cycles=10**9, segment_tiles=kernel.segment_tiles)
        table = [*shipped, (FAMILY["forward"], slow)]
    return link(folder, shipped, table, sources, host, changes)


def build_gradients(folder: Path, head_dim: int, host: list[Path], changes: tuple[Substitution, ...] = ()) -> Emulator:
    """A library of the kernels of gradients that serve this head_dim."""
    folder.mkdir(exist_ok=True)
    of_call = [FAMILY[name] for name in OF_GRADIENTS]
    serves = ("bfloat16", head_dim)
    shipped = [(family, one) for family in of_call for one in family.kernels if (one.dtype, one.head_dim) == serves]
    return link(folder, shipped, shipped, list(map(source_of, shipped)), host, changes)


def link(
    folder: Path, shipped: list[Shipped], table: list[Shipped], of_call: list[Path], host: list[Path],
    changes: tuple[Substitution, ...],
) -> Emulator:  # fmt: skip
    kernels = [compile_kernel(one, of_call, folder, changes) for one in shipped]
    library = folder / "libemulated.so"
    result = run(*COMPILER, "-shared", *kernels, compile_table(table, folder), *host, "-o", library)
    assert result.returncode == 0, result.stderr
    return Emulator(ctypes.CDLL(str(library)))


# ---- the C ABI, as far as it is needed here (csrc/dhp_fa.h) ----------------------------------------------------------


class CTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("size", ctypes.c_int64 * 4), ("stride", ctypes.c_int64 * 4), ("dtype", ctypes.c_int)
    ]  # fmt: skip


class CAttention(ctypes.Structure):
    _fields_ = [
        ("q", CTensor), ("k", CTensor), ("v", CTensor), ("out", CTensor), ("lse", ctypes.c_void_p),
        ("scale", ctypes.c_double), ("is_causal", ctypes.c_int), ("causal_offset", ctypes.c_int64),
        ("is_windowed", ctypes.c_int), ("window_left", ctypes.c_int64), ("window_right", ctypes.c_int64),
        ("softcap", ctypes.c_double), ("sinks", ctypes.c_void_p), ("workspace", ctypes.c_void_p),
    ]  # fmt: skip


class CVarlen(ctypes.Structure):
    _fields_ = [
        ("packed", CAttention), ("sequences", ctypes.c_int64), ("cu_seqlens_q", ctypes.c_void_p),
        ("cu_seqlens_k", ctypes.c_void_p), ("seqused_k", ctypes.c_void_p), ("leftpad_k", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p), ("page_table_width", ctypes.c_int64), ("max_seqlen_q", ctypes.c_int64),
        ("max_seqlen_k", ctypes.c_int64), ("is_bottom_right", ctypes.c_int), ("workspace", ctypes.c_void_p),
    ]  # fmt: skip


class CBackward(ctypes.Structure):
    _fields_ = [
        ("forward", CAttention), ("grad_out", CTensor), ("grad_lse", ctypes.c_void_p), ("dq", CTensor), ("dk", CTensor),
        ("dv", CTensor), ("workspace", ctypes.c_void_p),
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


def c_attention(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, causal_offset: int, scale: float | None,
    window: tuple[int, int] = (-1, -1),
) -> CAttention:  # fmt: skip
    return CAttention(
        q=c_tensor(q), k=c_tensor(k), v=c_tensor(v), out=c_tensor(out), lse=lse.data_ptr(),
        scale=q.shape[3] ** -0.5 if scale is None else scale, is_causal=is_causal, causal_offset=causal_offset,
        is_windowed=window != (-1, -1), window_left=window[0], window_right=window[1],
    )  # fmt: skip


def c_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor | None,
    dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, is_causal: bool, scale: float | None, causal_offset: int,
) -> CBackward:  # fmt: skip
    forward = c_attention(q, k, v, out, lse, is_causal, causal_offset, scale)
    wanted = {name: c_tensor(t) for name, t in (("dq", dq), ("dk", dk), ("dv", dv)) if t is not None}
    rows = None if grad_lse is None else grad_lse.data_ptr()
    return CBackward(forward=forward, grad_out=c_tensor(grad_out), grad_lse=rows, **wanted)


@dataclass(frozen=True)
class Emulator:
    """The operator on the emulated machine."""

    library: ctypes.CDLL

    def disturb(self, seed: int, lost_load: int = -1) -> None:
        """Of the launches to come: a seed of what is random, and which of a launch's loads never comes; -1: none."""
        self.library.emulated_disturb(seed, lost_load)

    def _run(self, name: str, args: CAttention | CBackward | CVarlen) -> None:
        """dhp_NAME_cuda, with the workspace that dhp_NAME_workspace asks for."""
        bytes_needed, call = (getattr(self.library, f"dhp_{name}_{part}") for part in ("workspace", "cuda"))
        bytes_needed.restype = ctypes.c_size_t
        workspace = poisoned(bytes_needed(ctypes.byref(args), 1))
        args.workspace = aligned(workspace)
        error = CError()
        if call(ctypes.byref(args), 0, None, ctypes.byref(error)) != 0:
            raise Violation(error.text.decode())

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, is_causal: bool = False, causal_offset: int = 0,
        scale: float | None = None, window: tuple[int, int] = (-1, -1),
    ) -> Tensor:  # fmt: skip
        """Writes `out`, returns lse; tensors as the operator's, in bfloat16."""
        lse = torch.full(q.shape[:3], torch.nan)
        self._run("attention", c_attention(q, k, v, out, lse, is_causal, causal_offset, scale, window))
        return lse

    def gradients(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dq: Tensor | None,
        dk: Tensor | None, dv: Tensor | None, is_causal: bool = False, causal_offset: int = 0,
        grad_lse: Tensor | None = None, scale: float | None = None,
    ) -> None:  # fmt: skip
        """Writes those of dq, dk and dv that there are; tensors as those of attention_backward, in bfloat16."""
        given = q, k, v, out, lse, grad_out, grad_lse, dq, dk, dv
        self._run("backward", c_backward(*given, is_causal, scale, causal_offset))

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        cu_seqlens_k: Tensor | None = None, seqused_k: Tensor | None = None, leftpad_k: Tensor | None = None,
        page_table: Tensor | None = None, is_causal: bool = False, window: tuple[int, int] = (-1, -1),
        is_bottom_right: bool = True, softcap: float = 0.0, sinks: Tensor | None = None, scale: float | None = None,
    ) -> Tensor:  # fmt: skip
        """Writes `out`, returns lse; tensors as those of attention_varlen, in bfloat16 and int32."""
        lse = torch.full((q.shape[1], q.shape[0]), torch.nan)
        keys = [t.transpose(1, 2) if page_table is not None else packed(t) for t in (k, v)]
        call = CAttention(
            q=c_tensor(packed(q)), k=c_tensor(keys[0]), v=c_tensor(keys[1]), out=c_tensor(packed(out)),
            lse=lse.data_ptr(), scale=q.shape[2] ** -0.5 if scale is None else scale, is_causal=is_causal,
            is_windowed=window != (-1, -1), window_left=window[0], window_right=window[1], softcap=softcap,
            sinks=None if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
        numbers = [t if t is None else t.data_ptr() for t in (cu_seqlens_k, seqused_k, leftpad_k, page_table)]
        args = CVarlen(
            call, cu_seqlens_q.numel() - 1, cu_seqlens_q.data_ptr(), *numbers,
            0 if page_table is None else page_table.shape[1], max_seqlen_q, max_seqlen_k, is_bottom_right,
        )  # fmt: skip
        self._run("varlen", args)
        return lse


def poisoned(size: int) -> Tensor:
    """Memory for a workspace, of NaN."""
    return torch.full((size + 16,), 255, dtype=torch.uint8)


def aligned(workspace: Tensor) -> int:
    return (workspace.data_ptr() + 15) // 16 * 16


def packed(t: Tensor) -> Tensor:
    """[tokens, H, D] as [1, H, tokens, D]."""
    return t.transpose(0, 1)[None]
