"""How long a call takes: samplers, each of which returns the time per call of one long enough region.

A call is ``call(i)``, which works on input set i. All times are in microseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

Call = Callable[[int], object]
Sampler = Callable[[], float]

# Length of one captured graph. The gap between two replays is about 2 µs: 0.1 % of it.
GRAPH_US = 2000.0
MAX_GRAPH_CALLS = 500

# Calls enqueued to time the host alone: few enough that the launch queue (about a thousand kernels) never fills, also
# with a peer that launches several kernels.
HOST_CALLS = 100


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _wall_us(call: Call, calls: int, device: str) -> float:
    """Wall time of all the calls, their work included."""
    synchronize(device)
    start = time.perf_counter_ns()
    for i in range(calls):
        call(i)
    synchronize(device)
    return (time.perf_counter_ns() - start) / 1e3


def _calls_for(sample_us: float, call: Call, device: str) -> int:
    """How many calls last about sample_us, from a rough measurement."""
    calls = 1
    elapsed = _wall_us(call, calls, device)
    if elapsed < sample_us:
        calls = 10
        elapsed = _wall_us(call, calls, device)
    return max(1, math.ceil(sample_us * calls / elapsed))


def eager_sampler(call: Call, sample_ms: float, device: str) -> Sampler:
    """Python calls back to back, as a model makes them: on CUDA between two events, on the CPU by the wall clock.

    A call that is not timed comes first, so that no sample pays for what the neighbour left in the caches; where one
    call alone is long enough for a sample that makes no difference.
    """
    calls = _calls_for(sample_ms * 1e3, call, device)
    if device == "cpu":

        def cpu() -> float:
            if calls > 1:
                call(0)
            return _wall_us(call, calls, device) / calls

        return cpu

    def cuda() -> float:
        call(0)
        return _event_us(call, calls) / calls

    return cuda


def graph_sampler(call: Call, sample_ms: float, input_sets: int) -> Sampler:
    """Replays of a CUDA graph that holds many calls: no host time, no launch gaps.

    The call must have run before (what libraries set up at first use cannot be captured). Its outputs are dropped
    while it is captured, so all calls of the graph share their memory.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    calls = min(MAX_GRAPH_CALLS, _calls_for(GRAPH_US, call, "cuda"))
    calls = math.ceil(calls / input_sets) * input_sets
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)

    def replay(_: int) -> None:
        graph.replay()

    replays = _calls_for(sample_ms * 1e3, replay, "cuda")

    def sample() -> float:
        graph.replay()  # not timed: keeps the GPU busy while the first event and the timed replays are enqueued
        return _event_us(replay, replays) / (replays * calls)

    return sample


def host_sampler(call: Call, device: str) -> Sampler:
    """What the calling thread spends on a call: on CUDA the work is enqueued and not waited for."""

    def sample() -> float:
        synchronize(device)
        start = time.perf_counter_ns()
        for i in range(HOST_CALLS):
            call(i)
        elapsed = time.perf_counter_ns() - start
        synchronize(device)
        return elapsed / 1e3 / HOST_CALLS

    return sample


def _event_us(call: Call, calls: int) -> float:
    """Time on the GPU from before the first call to after the last, on the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for i in range(calls):
        call(i)
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3
