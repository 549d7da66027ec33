"""How long a call takes: samplers, each of which returns the time per call of one long enough region.

A call is ``call(i)``, which works on input set i (modulo their number). All times are in microseconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[int], object]
Sampler = Callable[[], float]

# Length of one captured graph. The gap between two replays is about 2 µs: 0.1 % of it.
GRAPH_US = 2000.0
MAX_GRAPH_CALLS = 500

# What runs between the calls of a small shape: it reads and writes this many bytes. That takes some 2 µs, longer than a
# launch may begin early, and leaves the inputs in L2.
FILLER_BYTES = 2**20

# A region of seconds is enqueued in chunks of about this length, of which two are in flight: the GPU never waits.
CHUNK_US = 20_000.0

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


@dataclass(frozen=True)
class Graph:
    """A captured CUDA graph: ``repeats`` times the same sequence of calls."""

    graph: torch.cuda.CUDAGraph
    repeats: int

    def replay(self, _: int = 0) -> None:
        self.graph.replay()

    def sampler(self, sample_ms: float) -> Sampler:
        """Of the time of one repeat."""
        replays = _calls_for(sample_ms * 1e3, self.replay, "cuda")

        def sample() -> float:
            self.replay()  # not timed: keeps the GPU busy while the first event and the timed replays are enqueued
            return _event_us(self.replay, replays) / (replays * self.repeats)

        return sample


def capture(calls: Sequence[Call], input_sets: int, repeats: int | None = None) -> Graph:
    """The calls one after another, ``repeats`` times, in a CUDA graph; by default as often as last about GRAPH_US.

    The calls must have run before (what libraries set up at first use cannot be captured). Their outputs are dropped
    while they are captured, so all of the graph share their memory.

    Raises:
        RuntimeError: a call cannot be captured.
    """

    def once(i: int) -> None:
        for call in calls:
            call(i)

    if repeats is None:
        repeats = min(MAX_GRAPH_CALLS, _calls_for(GRAPH_US, once, "cuda"))
        repeats = math.ceil(repeats / input_sets) * input_sets
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats):
            once(i)
    return Graph(graph, repeats)


def filler(device: str) -> Call:
    """A small kernel that touches memory of its own."""
    memory = torch.zeros(FILLER_BYTES // 4, device=device)  # float32, which is 4 bytes
    return lambda _: memory.add_(1)


def alone_sampler(call: Call, between: Call, sample_ms: float, input_sets: int) -> Sampler:
    """What a call adds to a graph where another kernel runs before and after each call.

    Launches that do not fill the GPU may begin while the same kernel's launch before them ends; back to back they take
    less time than one of them does between the other kernels of a model. Two graphs are timed in turn, of ``between``
    and of ``between`` and the call: the difference is the call's.

    Raises:
        RuntimeError: the call cannot be captured.
    """
    both = capture([between, call], input_sets)
    fillers = capture([between], 1, both.repeats)
    sample_both, sample_fillers = both.sampler(sample_ms), fillers.sampler(sample_ms)
    return lambda: sample_both() - sample_fillers()


def sustained_us(
    graph: Graph, settle_s: float, seconds: float, begin: Callable[[], None], end: Callable[[], None]
) -> float:
    """The mean time per repeat over at least ``seconds`` in which the GPU does nothing else and never waits.

    Args:
        settle_s: seconds of the same work beforehand, which are not timed: clock and power change there.
        begin, end: called on the host as the timed region begins and after it ended, while the work goes on.
    """
    replays = _calls_for(CHUNK_US, graph.replay, "cuda")

    def enqueue() -> torch.cuda.Event:
        for _ in range(replays):
            graph.replay()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    running, following = enqueue(), enqueue()
    settled = time.perf_counter() + settle_s
    first, started, chunks = None, 0.0, 0
    while True:
        running.synchronize()
        now = time.perf_counter()
        if first is None:
            if now >= settled:
                first, started = running, now
                begin()
        else:
            chunks += 1
            if now - started >= seconds:
                end()
                break
        running, following = following, enqueue()
    us = float(first.elapsed_time(running)) * 1e3 / (chunks * replays * graph.repeats)
    following.synchronize()  # what comes next finds an idle GPU
    return us


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
