"""Work on another stream, so that the kernel under test shares multiprocessors, caches and memory with it."""

from __future__ import annotations

import math

import torch

# A product of this size keeps an H100 busy for about 0.2 ms, the copy for about 0.05 ms: as long as a short repeat.
_MATRIX = 4096
_COPY_BYTES = 64 * 2**20


class Load:
    """A matrix product and a copy, started on another stream whenever it is called, not before the work that was
    submitted to the current stream until then. Both are done so often that alone they take `milliseconds` at least,
    which should be those of the work that they run beside."""

    def __init__(self, milliseconds: float) -> None:
        self._stream = torch.cuda.Stream()
        self._matrix = torch.randn(_MATRIX, _MATRIX, device="cuda").half()
        self._product = torch.empty_like(self._matrix)
        self._bytes = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._copy = torch.empty_like(self._bytes)
        self._calls: list[tuple[torch.cuda.Event, torch.cuda.Event, torch.cuda.Event]] = []  # called, begin, end
        self._times = 1
        self()  # the first one sets the libraries up
        self()
        torch.cuda.synchronize()
        _, begin, end = self._calls[-1]
        self._times = max(1, math.ceil(milliseconds / begin.elapsed_time(end)))
        self._calls.clear()

    def __call__(self) -> None:
        called, begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        called.record()
        self._stream.wait_event(called)
        with torch.cuda.stream(self._stream):
            begin.record()
            for _ in range(self._times):
                torch.mm(self._matrix, self._matrix, out=self._product)
                self._copy.copy_(self._bytes, non_blocking=True)
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
