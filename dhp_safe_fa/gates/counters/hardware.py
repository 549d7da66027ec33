"""Counts by the hardware, of every kernel of a call: in this process, by CUPTI.

Metrics take several passes, and each pass makes all of a shape's calls again: with every class of data, one after the
other. A call takes 5 ms for each pass so, where Nsight Compute took 7 to 30 for a launch (H200).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..subjects import require_gpu
from ..tools import NotRun
from .calls import Calls, Cold, calls_of
from .counting import Count, Request, Row, Step, combine, require_complete
from .cupti import Cupti, Launch, count, launches
from .metrics import REGISTERS

# Room for kernels, in multiples of what a call launches with the data that it is first made with: data that make it
# launch more than twice as many are no finding, but NOT RUN.
_ROOM = 2


def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
    """Count all calls of a request. tell: calls done, and of what. NotRun says why it could not."""
    require_gpu()
    torch.cuda.current_stream().synchronize()  # makes torch's context current in this thread
    cupti = Cupti()
    steps: list[Step] = []
    rows: list[Row] = []
    with torch.no_grad(), launches(cupti) as heard:
        cold = Cold()
        for calls in calls_of(request):
            for number, kernel, values in _count(cupti, request, calls, heard, cold):
                rows.append((len(steps) + number, kernel, values))
            steps += [calls.step(data) for data in calls.data]
            tell(len(steps), calls.name)
    counts = combine(steps, rows, request.parts)
    require_complete(request, counts)
    return counts


def _count(cupti: Cupti, request: Request, calls: Calls, heard: list[Launch], cold: Cold) -> list[Row]:
    """The kernels of all calls with these data, each with the number of its call among them."""
    passes: list[list[tuple[int, Launch]]] = []
    outside: list[int] = []
    where = f"{calls.name} ({calls.label})"

    def make_all() -> None:
        heard.clear()
        launched: list[tuple[int, Launch]] = []
        for number, data in enumerate(calls.data):
            calls.fill(data)
            cold.make()
            before = len(heard)
            calls.call()
            torch.cuda.synchronize()
            launched += [(number, launch) for launch in heard[before:]]
        outside.append(len(heard) - len(launched))
        passes.append(launched)

    calls.fill(calls.data[0])
    heard.clear()
    calls.call()
    torch.cuda.synchronize()
    kernels = _ROOM * max(1, len(heard)) * len(calls.data)
    metrics = [metric for metric in request.metrics if metric != REGISTERS]
    counted = count(cupti, metrics, kernels, make_all)
    launched = passes[0]
    if any(outside):
        raise NotRun(f"{where}: a kernel was launched outside of every call")
    if any(again != launched for again in passes):
        raise NotRun(f"{where}: passes over the same calls launch different kernels")
    if len(counted) != len(launched):
        raise NotRun(f"{where}: {len(counted)} kernels were counted of {len(launched)}")
    rows: list[Row] = []
    for (number, launch), values in zip(launched, counted, strict=True):
        if unusable := [metric for metric, value in values.items() if not math.isfinite(value)]:
            raise NotRun(f"CUPTI gives no number for {', '.join(unusable)}")  # which would compare as no difference
        if REGISTERS in request.metrics:
            values = {**values, REGISTERS: float(launch.registers)}
        rows.append((number, launch.kernel, values))
    return rows
