"""Runs the planted leaks of tests/controls/ and their clean twins on the GPU, beside torch, through the CUDA driver.

Each control is ``NAME_leak(const float *secret, float *out, int *table)`` or ``NAME_clean(...)``, made for CTAs of 128
threads. Most do without the table, 128 public numbers from 0 to 127.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import controls
from .inputs import SECRETS
from .subjects import require_gpu
from .tools import NotRun

THREADS = 128
_NOT_FOUND = 500  # CUDA_ERROR_NOT_FOUND


def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise NotRun(f"libcuda.so.1 (the CUDA driver) cannot be opened: {error}") from error


class Planted:
    """The controls' machine code, loaded into torch's CUDA context. NotRun without a Hopper GPU or a driver."""

    def __init__(self, loaded: controls.Controls) -> None:
        require_gpu()
        self._cuda = _driver()
        torch.cuda.current_stream().synchronize()  # makes torch's primary context current in this thread
        self._modules = [self._load(cubin) for cubin in loaded.cubins]
        self._functions: dict[str, ctypes.c_void_p] = {}
        self._table = (torch.arange(THREADS, dtype=torch.int32, device="cuda") * 37) % THREADS

    def _call(self, function: str, *arguments: object) -> int:
        return int(getattr(self._cuda, function)(*arguments))

    def _check(self, function: str, *arguments: object) -> None:
        status = self._call(function, *arguments)
        if status:
            raise RuntimeError(f"{function} failed with CUDA error {status}")

    def _load(self, cubin: bytes) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        self._check("cuModuleLoadData", ctypes.byref(module), cubin)
        return module

    def _function(self, kernel: str) -> ctypes.c_void_p:
        if kernel in self._functions:
            return self._functions[kernel]
        function = ctypes.c_void_p()
        for module in self._modules:
            status = self._call("cuModuleGetFunction", ctypes.byref(function), module, kernel.encode())
            if not status:
                return self._functions.setdefault(kernel, function)
            if status != _NOT_FOUND:
                raise RuntimeError(f"cuModuleGetFunction failed with CUDA error {status}")
        raise KeyError(f"no control holds a kernel called {kernel}")

    def launch(self, control: str, twin: str, secret: Tensor, out: Tensor, grid: int = 1) -> None:
        """Start one kernel on torch's current stream.

        Args:
            control, twin: which: NAME, and leak or clean.
            secret, out: float32 [SECRETS] on the GPU, contiguous.
            grid: CTAs of 128 threads, all with the same work.
        """
        for name, tensor in (("secret", secret), ("out", out)):
            if not tensor.is_cuda or tensor.dtype != torch.float32 or not tensor.is_contiguous():
                raise ValueError(f"{name}: contiguous float32 on a GPU is needed, not {tensor.dtype} {tensor.device}")
            if tensor.numel() < SECRETS:
                raise ValueError(f"{name}: {tensor.numel()} elements; {SECRETS} are needed")
        # The driver takes as many as the kernel has.
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (secret, out, self._table)]
        places = [ctypes.cast(ctypes.byref(pointer), ctypes.c_void_p) for pointer in pointers]
        parameters = (ctypes.c_void_p * len(places))(*places)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        function = self._function(f"{control}_{twin}")
        self._check("cuLaunchKernel", function, grid, 1, 1, THREADS, 1, 1, 0, stream, parameters, None)
