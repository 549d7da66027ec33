"""Work on another stream, so that the kernel under test shares multiprocessors, caches and memory with it."""

from __future__ import annotations

from types import TracebackType

import torch

# A product of this size keeps an H100 busy for about 0.2 ms, the copy for about 0.05 ms: together longer than a
# repeat of the kernel under test, so that the load never runs dry.
_MATRIX = 4096
_COPY_BYTES = 64 * 2**20


class Load:
    """Matrix products and copies beside the current stream. Between `with` and its end, call it before each run."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._matrix = torch.randn(_MATRIX, _MATRIX, device="cuda").half()
        self._product = torch.empty_like(self._matrix)
        self._bytes = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device="cuda")
        self._copy = torch.empty_like(self._bytes)
        self._load, self._main = (
            [torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(2)
        )  # begin and end of both streams' work

    def __call__(self) -> None:
        with torch.cuda.stream(self._stream):
            torch.mm(self._matrix, self._matrix, out=self._product)
            self._copy.copy_(self._bytes, non_blocking=True)

    def __enter__(self) -> Load:
        self._stream.wait_stream(torch.cuda.current_stream())
        self._load[0].record(self._stream)
        self()
        self._main[0].record()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._main[1].record()
        self._load[1].record(self._stream)
        torch.cuda.synchronize()

    @property
    def share(self) -> float:
        """Part of the time of the work beside it, 0 to 1, before which the load had not ended. After `with`."""
        beside = self._main[0].elapsed_time(self._main[1])
        until_end = self._main[0].elapsed_time(self._load[1])
        return max(0.0, min(1.0, until_end / beside)) if beside else 0.0
