"""The machine: what it is, and the three floors under the time of an attention call on it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from dhp_safe_fa.bench import Case
from dhp_safe_fa.bench.environment import environment
from dhp_safe_fa.burn.log.records import Chip

# Dense float16 or bfloat16 operations per clock and multiprocessor of a Hopper chip: four tensor cores of 512 fused
# multiply-adds (NVIDIA H100 Tensor Core GPU Architecture, table of SM features).
TENSOR_FLOPS = 4096
# ex2 per clock and multiprocessor, compute capability 9.0 (CUDA C++ Programming Guide, arithmetic throughput).
EXPONENTIALS = 16

# CUdevice_attribute of cuda.h.
_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS = 36, 37


@dataclass(frozen=True)
class Floors:
    """Least µs of a case: matrix products at the peak of the tensor cores, q, k, v and out once through the memory, one
    exponential for each score. memory is None if the chip's bandwidth is not recorded."""

    tensor: float
    memory: float | None
    exponentials: float

    @property
    def name(self) -> str:
        """Of the highest floor."""
        return max(("tensor", "memory", "exponentials"), key=lambda name: getattr(self, name) or 0.0)

    @property
    def highest(self) -> float:
        return float(getattr(self, self.name))


def floors(case: Case, chip: Chip) -> Floors:
    clocks_per_us = chip.multiprocessors * chip.clock_mhz
    scores = case.scores / (2 if case.causal else 1)
    return Floors(
        tensor=case.flops / (TENSOR_FLOPS * clocks_per_us),
        memory=None if chip.dram_gbs is None else case.bytes / (chip.dram_gbs * 1e3),
        exponentials=scores / (EXPONENTIALS * clocks_per_us),
    )


def of_environment(env: dict[str, Any], dram_gbs: float | None) -> Chip:
    """From what bench records of a CUDA run. ValueError names what it lacks."""
    try:
        smi = env["nvidia_smi"]
        return Chip(
            gpu=env["device"],
            multiprocessors=env["multiprocessors"],
            clock_mhz=int(smi["clocks.max.sm"].removesuffix(" MHz")),
            dram_gbs=dram_gbs,
            power_limit=smi["power.limit"],
            driver=smi["driver_version"],
            cuda=env["cuda"],
            cudnn=env["cudnn"],
            torch=env["torch"],
        )
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"not a CUDA run with its chip recorded: {error!r}") from error


def here() -> Chip:
    """The current GPU."""
    return of_environment(environment("cuda"), _dram_gbs())


def _dram_gbs() -> float:
    """Peak of the current GPU's memory: two transfers a clock (HBM) over the width of its bus."""
    driver, device = ctypes.CDLL("libcuda.so.1"), torch.cuda.current_device()
    values = []
    for attribute in (_MEMORY_CLOCK_KHZ, _MEMORY_BUS_BITS):
        value = ctypes.c_int()
        if code := driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            raise ValueError(f"cuDeviceGetAttribute({attribute}) failed with code {code}")
        values.append(value.value)
    return 2 * values[0] * 1e3 * values[1] / 8 / 1e9
