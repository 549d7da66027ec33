"""The launches of a backward (csrc/families/backward/part.h) on the emulated machine of tests/emulated, as the
operators that the gradients over ranks call: host code and kernels are those that ship.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel import parts

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emulated"))
from emulated import (
    ONE_PASS,
    CError,
    Emulator,
    Violation,
    build_gradients,
    c_backward,
    compile_host,
)

Libraries = dict[int, Path]  # of the kernels of a head_dim


class COffsets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("statistics", "failed", "sums", "units", "bounds", "columns")]


def build(folder: Path) -> Libraries:
    (folder / "host").mkdir()
    host = compile_host(folder / "host")
    for head_dim in ONE_PASS:
        build_gradients(folder / str(head_dim), head_dim, host)
    return {head_dim: folder / str(head_dim) / "libemulated.so" for head_dim in ONE_PASS}


def emulator_of(libraries: Libraries, q: Tensor) -> Emulator:
    return Emulator(ctypes.CDLL(str(libraries[min(d for d in libraries if d >= q.shape[3])])))


@contextlib.contextmanager
def on_cpu(libraries: Libraries) -> Iterator[None]:
    """In this process, within the block, of bfloat16."""

    def new_workspace(q: Tensor, k: Tensor) -> tuple[Tensor, int, int, int, int, int, int]:
        library = emulator_of(libraries, q).library
        args = c_backward(q, k, k, q, torch.empty(1), q, None, q, k, k, False, None, 0)
        library.dhp_backward_workspace.restype = ctypes.c_size_t
        memory = torch.full((library.dhp_backward_workspace(ctypes.byref(args), 1),), 255, dtype=torch.uint8)
        args.workspace = memory.data_ptr()
        offsets, error = COffsets(), CError()
        if library.dhp_backward_offsets_of(ctypes.byref(args), ctypes.byref(offsets), ctypes.byref(error)) != 0:
            raise Violation(error.text.decode())
        return memory, *(getattr(offsets, name) for name, _ in COffsets._fields_)  # type: ignore[return-value]

    def run_part(
        part: int, memory: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor,
        grad_lse: Tensor | None, *given: Any,
    ) -> None:  # fmt: skip
        lse, grad_lse = (t if t is None else t.contiguous() for t in (lse, grad_lse))
        args, error = c_backward(q, k, v, out, lse, grad_out, grad_lse, *given), CError()
        args.workspace = memory.data_ptr()
        library = emulator_of(libraries, q).library
        if library.dhp_backward_part_cuda(ctypes.byref(args), part, 0, None, ctypes.byref(error)) != 0:
            raise Violation(error.text.decode())

    library, serve = torch.library.Library("dhp", "IMPL"), parts.serve
    library.impl("_backward_workspace", new_workspace, "CPU")
    library.impl("_backward_part", run_part, "CPU")
    parts.serve = lambda q: q.shape[3] <= parts.WIDEST
    try:
        yield
    finally:
        parts.serve = serve
        library._destroy()
