"""Times single launches on the GPU itself: a stamp, the launch, a stamp, in one CUDA graph. Of a launch of several
kernels, the one under test can be timed alone (nodes.py).

A stamp is a kernel of one thread that stores %globaltimer, in nanoseconds and in steps of 32 on an H100, and %clock64
of its multiprocessor. CUDA events around the same launch had a standard error 15 times as large at 7 µs, and 1.2 times
at 100 µs (docs/gates-timing.md).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from .. import l2
from ..subjects import require_gpu
from ..tools import NotRun
from .nodes import close_around
from .stats import Times

# PTX ISA, "Special Registers": %globaltimer, %clock64, %smid. Text, because no compiler is needed where a gate runs;
# this is an instrument, not a shipped kernel.
_STAMP = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry stamp(.param .u64 record) {
  .reg .b64 %address, %time, %cycles, %where;
  .reg .b32 %multiprocessor;
  ld.param.u64 %address, [record];
  cvta.to.global.u64 %address, %address;
  mov.u64 %time, %globaltimer;
  mov.u64 %cycles, %clock64;
  mov.u32 %multiprocessor, %smid;
  cvt.u64.u32 %where, %multiprocessor;
  st.global.u64 [%address], %time;
  st.global.u64 [%address+8], %cycles;
  st.global.u64 [%address+16], %where;
  ret;
}
"""
_FIELDS = 3  # of a stamp: nanoseconds, cycles, multiprocessor

# Between two launches the GPU does next to nothing for this long, or for as long as a launch takes if that is longer:
# so the power drawn by one class is not still felt in the next, and an H200 stays below its power limit (600 W of 700,
# where 30 us behind launches of 0.2 and 0.5 ms let it run at 690), at which its clock is changed in mid-launch. Eight
# times as long changed nothing, nor did a hundred us behind short launches.
GAP_US = 30.0
_CYCLES_PER_US = 1980  # of an H100 at its highest clock; a lower clock only makes the gap longer
# Part of the blocks in which the second stamp of every launch lands where the first one did: an otherwise idle GPU
# starts a single CTA always on the same multiprocessor. Other blocks are dropped.
_USABLE = 0.5
# Launches in the graph that is replayed back to back: the gap between replays is then a small part.
_SUSTAINED = 20


@dataclass(frozen=True)
class Job:
    """A launch whose time is asked for, and what it is to be fed with.

    Attributes:
        launch: starts the work on the current stream; always the same shapes and pointers.
        buffers: what it reads.
        contents: class name to tensors that are copied into the buffers before a launch.
        context: to be entered around every use.
        entry: name of the one kernel of the launch whose time is asked for; empty for all that is launched.
    """

    launch: Callable[[], object]
    buffers: Sequence[Tensor]
    contents: Mapping[str, Sequence[Tensor]]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    entry: str = ""


@dataclass(frozen=True)
class Sample:
    """[blocks, columns] each: nanoseconds, and cycles of the multiprocessor that took both stamps."""

    ns: Times
    cycles: Times


class Clock(Protocol):
    """What the gate needs of a GPU."""

    def interleaved(self, job: Job, columns: Sequence[str], blocks: int, rng: np.random.Generator) -> Sample:
        """One launch of each column (a class; classes may come more than once) per block, in random order."""
        ...

    def sustained(self, job: Job, name: str, seconds: float) -> float:
        """Nanoseconds per launch of one class, back to back, in the second half of so many seconds."""
        ...


class GpuClock:
    """The current CUDA device. NotRun without a Hopper GPU, or where the driver cannot load the stamp."""

    def __init__(self) -> None:
        require_gpu()
        torch.cuda.current_stream().synchronize()  # makes torch's context current in this thread
        self._cuda = ctypes.CDLL("libcuda.so.1")
        module, self._stamp_kernel = ctypes.c_void_p(), ctypes.c_void_p()
        for status in (
            self._cuda.cuModuleLoadData(ctypes.byref(module), _STAMP),
            self._cuda.cuModuleGetFunction(ctypes.byref(self._stamp_kernel), module, b"stamp"),
        ):
            if status:
                raise NotRun(f"the driver does not load the kernel that reads the time (CUDA error {status})")

    def _stamp(self, record: Tensor) -> None:
        pointer = ctypes.c_void_p(record.data_ptr())
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(pointer))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        status = self._cuda.cuLaunchKernel(self._stamp_kernel, 1, 1, 1, 1, 1, 1, 0, stream, parameters, None)
        if status:
            raise RuntimeError(f"cuLaunchKernel failed with CUDA error {status}")

    def _capture(self, job: Job, launches: int, record: Tensor | None) -> torch.cuda.CUDAGraph:
        """With a record, stamps are around the launch, or around the one kernel in it that the job names. NotRun if the
        launch is refused, or cannot be captured."""
        self._fill(job, next(iter(job.contents)))
        is_part = record is not None and job.entry != ""
        graph = torch.cuda.CUDAGraph(keep_graph=True) if is_part else torch.cuda.CUDAGraph()
        try:
            job.launch()  # what libraries set up at first use cannot be captured
            with torch.cuda.graph(graph):
                if record is not None:
                    self._stamp(record[0])
                for _ in range(launches):
                    job.launch()
                if record is not None:
                    self._stamp(record[1])
        except RuntimeError as error:
            raise NotRun(f"cannot be run in a CUDA graph: {str(error).splitlines()[0]}") from error
        if is_part:
            close_around(self._cuda, graph.raw_cuda_graph(), job.entry)
            graph.instantiate()
        return graph

    @staticmethod
    def _fill(job: Job, name: str) -> None:
        for buffer, tensor in zip(job.buffers, job.contents[name], strict=True):
            buffer.copy_(tensor)

    @staticmethod
    def _gap(graph: torch.cuda.CUDAGraph) -> int:
        """How long to idle between two launches, in cycles of the highest clock."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        graph.replay()  # the first one also sets up
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return int(max(GAP_US, 1e3 * begin.elapsed_time(end)) * _CYCLES_PER_US)

    def interleaved(self, job: Job, columns: Sequence[str], blocks: int, rng: np.random.Generator) -> Sample:
        record = torch.zeros(2, _FIELDS, dtype=torch.int64, device="cuda")
        records = torch.zeros(blocks, len(columns), 2, _FIELDS, dtype=torch.int64, device="cuda")
        evict = l2.eviction_buffer()
        with job.context():
            graph = self._capture(job, 1, record)
            gap = self._gap(graph)
            for block in range(blocks):
                for column in rng.permutation(len(columns)):
                    self._fill(job, columns[column])
                    # every class is copied from a place of its own: what of that is still in L2, and where, goes
                    evict.zero_()
                    # not timed: leaves caches and TLBs as every launch finds them
                    graph.replay()
                    torch.cuda._sleep(gap)
                    graph.replay()
                    records[block, column].copy_(record)
                torch.cuda.synchronize()
        start, end = records.cpu().numpy().transpose(2, 3, 0, 1)
        usable = (start[2] == end[2]).all(axis=1)
        if usable.mean() < _USABLE:
            raise NotRun("the stamps before and after a launch do not run on the same multiprocessor")
        ns, cycles = (end[:2] - start[:2])[:, usable].astype(np.float64)  # in this order: floats are too coarse
        return Sample(ns, cycles)

    def sustained(self, job: Job, name: str, seconds: float) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with job.context():
            graph = self._capture(job, _SUSTAINED, None)
            self._fill(job, name)
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            replays = max(1, math.ceil(seconds / 2 * 1e3 / begin.elapsed_time(end)))
            for event in (begin, end):
                for _ in range(replays):
                    graph.replay()
                event.record()
            end.synchronize()
        return float(begin.elapsed_time(end) * 1e6 / (replays * _SUSTAINED))
