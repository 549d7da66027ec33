"""One build of the host core with its cubins, opened by itself and called through the C ABI, without torch's operator.

Several builds live side by side in one process: the current one, the one it has to beat, and a second copy of the
current one, against which the noise of a run is measured.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dhp_safe_fa.bench import Case
from dhp_safe_fa.burn.builds import abi

LIBRARY, HEADER = "libdhp_fa.so", "dhp_fa.h"

# What is called, as the header has to declare it. Another signature cannot be called blindly. A build from before the
# backward has no more than the first part.
_PROTOTYPES = (
    "dhp_status dhp_attention_cpu(const dhp_attention *args, const dhp_executor *executor, dhp_error *error)",
    "dhp_status dhp_attention_cuda(const dhp_attention *args, int device, void *stream, dhp_error *error)",
    "dhp_status dhp_plan_attention(const dhp_attention *args, dhp_plan *plan, dhp_error *error)",
    "int dhp_kernel_count(void)",
    "const dhp_kernel_info *dhp_kernel(int index)",
)
_BACKWARD_PROTOTYPES = (
    "dhp_status dhp_backward_cpu(const dhp_backward *args, const dhp_executor *executor, dhp_error *error)",
    "dhp_status dhp_backward_cuda(const dhp_backward *args, int device, void *stream, dhp_error *error)",
    "size_t dhp_backward_workspace(const dhp_backward *args, int on_cuda)",
    "dhp_status dhp_plan_backward(const dhp_backward *args, dhp_backward_plan *plan, dhp_error *error)",
)


@dataclass(frozen=True)
class ShippedKernel:
    """One cubin inside a library. registers are per thread, shared_bytes per CTA."""

    name: str
    cubin: bytes
    sha256: str
    registers: int
    spill_bytes: int
    shared_bytes: int


class Library:
    """A libdhp_fa.so beside the dhp_fa.h that it was built with."""

    def __init__(self, folder: Path) -> None:
        """OSError or ValueError with one sentence if the folder holds no library that can be called."""
        self.path = folder / LIBRARY
        self._header = abi.parse((folder / HEADER).read_text(encoding="utf-8"))
        self._require(_PROTOTYPES)
        # deep binding: the library calls its own functions, whatever other build is loaded
        self._core = ctypes.CDLL(str(self.path.resolve()), mode=os.RTLD_LOCAL | os.RTLD_NOW | os.RTLD_DEEPBIND)
        self._core.dhp_kernel.restype = ctypes.c_void_p

    def _require(self, prototypes: tuple[str, ...]) -> None:
        """ValueError names a function that the header declares in another way, or not at all."""
        for prototype in prototypes:
            name = prototype.partition("(")[0].split()[-1].lstrip("*")
            if self._header.prototypes.get(name) != prototype:
                raise ValueError(f"{self.path.parent / HEADER}: {name} is declared differently from '{prototype}'")

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.path.read_bytes()).hexdigest()

    @cached_property
    def kernels(self) -> list[ShippedKernel]:
        """Read from the loaded library; hashes are computed from the cubins' own bytes."""
        return [self._kernel(self._core.dhp_kernel(i)) for i in range(self._core.dhp_kernel_count())]

    def cubins(self) -> dict[str, str]:
        """Kernel name → SHA-256."""
        return {kernel.name: kernel.sha256 for kernel in self.kernels}

    def launch(self, case: Case) -> str:
        """What a call of this shape launches: the cubin and the plan, in words that are equal if the launches are.

        Raises:
            ValueError: the library does not serve the shape; the text is its own sentence.
        """
        args, error = self._arguments(case), self._struct("dhp_error")
        plan = self._struct("dhp_plan")
        if self._core.dhp_plan_attention(ctypes.byref(args), ctypes.byref(plan), ctypes.byref(error)):
            raise ValueError(error.text.decode())
        numbers = [f"{name} {getattr(plan, name)}" for name, _ in plan._fields_ if name != "kernel"]
        return ", ".join([self._kernel(plan.kernel).sha256[:16], *numbers])

    def attend(self, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        """out [B, Hq, Sq, D] of contiguous q, k and v [B, Hk, Sk, D], on the current stream; the scale is 1 / √D.

        Raises:
            RuntimeError: the library refused; the text is its own sentence.
        """
        out = torch.empty_like(q)
        args, error = self._struct("dhp_attention"), self._struct("dhp_error")
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            self._describe(getattr(args, name), tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr())
        args.scale, args.is_causal = q.size(3) ** -0.5, is_causal
        pointers = ctypes.byref(args), ctypes.byref(error)
        workspace = self._workspace("dhp_attention_workspace", pointers[0], q)
        if workspace is not None:
            args.workspace = workspace.data_ptr()
        if q.is_cuda:
            stream = ctypes.c_void_p(torch.cuda.current_stream(q.device).cuda_stream)
            status = self._core.dhp_attention_cuda(pointers[0], q.device.index, stream, pointers[1])
        else:
            status = self._core.dhp_attention_cpu(pointers[0], None, pointers[1])
        if status:
            raise RuntimeError(error.text.decode())
        return out

    def launch_backward(self, case: Case) -> str:
        """The same of a call that computes all gradients: cubins and CTAs.

        Raises:
            ValueError: the library has no backward, or does not serve the shape.
        """
        self._require(_BACKWARD_PROTOTYPES)
        args, error, plan = self._struct("dhp_backward"), self._struct("dhp_error"), self._struct("dhp_backward_plan")
        args.forward = self._arguments(case)
        # a plan looks at which tensors are wanted, and reads none
        args.forward.lse = ctypes.addressof(error)
        for name, like in (("grad_out", "q"), ("dq", "q"), ("dk", "k"), ("dv", "v")):
            setattr(args, name, getattr(args.forward, like))
            getattr(args, name).data = ctypes.addressof(error)
        if self._core.dhp_plan_backward(ctypes.byref(args), ctypes.byref(plan), ctypes.byref(error)):
            raise ValueError(error.text.decode())
        launches = plan.launches[: plan.count]
        return ", ".join(f"{self._kernel(one.kernel).sha256[:16]} grid {one.grid}" for one in launches)

    def differentiate(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, is_causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of any strides that the library takes; lse is contiguous. Otherwise as `attend`."""
        self._require(_BACKWARD_PROTOTYPES)
        args, error = self._struct("dhp_backward"), self._struct("dhp_error")
        dq, dk, dv = (torch.empty_like(tensor) for tensor in (q, k, v))
        for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
            self._describe(
                getattr(args.forward, name), tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr()
            )
        for name, tensor in (("grad_out", grad_out), ("dq", dq), ("dk", dk), ("dv", dv)):
            self._describe(getattr(args, name), tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr())
        args.forward.lse = lse.data_ptr()
        args.forward.scale, args.forward.is_causal = q.size(3) ** -0.5, is_causal
        pointers = ctypes.byref(args), ctypes.byref(error)
        workspace = self._workspace("dhp_backward_workspace", pointers[0], q)
        args.workspace = 0 if workspace is None else workspace.data_ptr()
        if q.is_cuda:
            stream = ctypes.c_void_p(torch.cuda.current_stream(q.device).cuda_stream)
            status = self._core.dhp_backward_cuda(pointers[0], q.device.index, stream, pointers[1])
        else:
            status = self._core.dhp_backward_cpu(pointers[0], None, pointers[1])
        if status:
            raise RuntimeError(error.text.decode())
        return dq, dk, dv

    def _workspace(self, function: str, args: Any, q: Tensor) -> Tensor | None:
        """What this function says that a call needs; None: nothing, as in a build from before there was one."""
        if function not in self._header.prototypes:
            return None
        size_of = getattr(self._core, function)
        size_of.restype = ctypes.c_size_t
        size = size_of(args, int(q.is_cuda))
        return torch.empty(size, dtype=torch.uint8, device=q.device) if size else None

    def _struct(self, name: str) -> Any:
        return self._header.structs[name]()

    def _describe(
        self, field: Any, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, pointer: int
    ) -> None:
        field.data, field.size[:], field.stride[:] = pointer, shape, stride
        field.dtype = self._header.enumerators[f"DHP_{str(dtype).removeprefix('torch.').upper()}"]

    def _arguments(self, case: Case) -> Any:
        """A call of this shape without data."""
        args = self._struct("dhp_attention")
        shapes = {"q": case.shape, "k": case.key_shape, "v": case.key_shape, "out": case.shape}
        for name, (b, h, s, d) in shapes.items():
            self._describe(getattr(args, name), (b, h, s, d), (h * s * d, s * d, d, 1), case.torch_dtype, 0)
        args.scale, args.is_causal = case.head_dim**-0.5, case.causal
        return args

    def _kernel(self, address: int) -> ShippedKernel:
        info: Any = self._header.structs["dhp_kernel_info"].from_address(address)
        cubin = ctypes.string_at(info.cubin, info.cubin_size)
        digest = hashlib.sha256(cubin).hexdigest()
        return ShippedKernel(
            info.name.decode(), cubin, digest, info.registers, info.spill_bytes, info.shared_bytes
        )
