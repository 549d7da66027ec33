"""Work on another stream, so that the kernel under test shares multiprocessors, caches and memory with it."""

from __future__ import annotations

import math

import torch

# On an H200 a product of this size takes some 0.03 ms, the copy 0.05: a short part of the shortest run, so that a load
# can be as long as a run, and no kernel waits long for multiprocessors. The copy is more than the L2 holds.
_MATRIX = 2048
_COPY_BYTES = 64 * 2**20
_TIMED = 8  # of both, to find out how long they take


class Load:
    """Matrix products and copies, started on another stream whenever it is called, not before the work that was
    submitted to the current stream until then. They are so many that alone they take `milliseconds` at least, which
    should be those of the work that they run beside; a CUDA graph, because to start each alone would take the host
    longer than that."""

    def __init__(self, milliseconds: float) -> None:
        self._stream = torch.cuda.Stream()
        self._matrix = torch.randn(_MATRIX, _MATRIX, device="cuda").half()
        self._product = torch.empty_like(self._matrix)
        self._bytes = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._copy = torch.empty_like(self._bytes)
        self._calls: list[tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]] = []  # called, begin, end
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._work()  # the first one sets the libraries up
        self._graph = self._capture(_TIMED)
        self()
        self()
        torch.cuda.synchronize()
        _, begin, end = self._calls[-1]
        self._graph = self._capture(max(1, math.ceil(_TIMED * milliseconds / begin.elapsed_time(end))))
        self._calls.clear()

    def _work(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._product)
        self._copy.copy_(self._bytes, non_blocking=True)

    def _capture(self, times: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            for _ in range(times):
                self._work()
        return graph

    def __call__(self) -> None:
        called, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        called.record()
        self._stream.wait_event(called)
        with torch.cuda.stream(self._stream):
            begin.record()
            self._graph.replay()
            end.record()
        self._calls.append((called, begin, end))

    def busy_share(self) -> float:
        """For which part of the time between the first call and the last the load was running, 0 to 1."""
        torch.cuda.synchronize()
        first = self._calls[0][0]
        last = first.elapsed_time(self._calls[-1][0])
        running = 0.0
        for _, begin, end in self._calls:
            running += max(0.0, min(last, first.elapsed_time(end)) - first.elapsed_time(begin))
        return running / last if last else 0.0
