"""A GPU whose time is arithmetic: kernels queue up behind one another, and the host's clock moves as it waits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

# What a replay costs the host, in microseconds.
REPLAY_US = 1.0


class FakeGpu:
    """Attributes: host, end: microseconds; when the host is, and when the queued work ends. idle: how long the GPU had
    nothing to do since the last reset. slow: factor on all kernels, by the time at which they begin."""

    def __init__(self) -> None:
        self.host = 0.0
        self.end = 0.0
        self.idle = 0.0
        self.last: str | None = None
        self.captured: list[tuple[str, float, float]] | None = None
        self.slow_until, self.slow = 0.0, 1.0

    def launch(self, name: str, us: float, overlap: float = 0.0) -> None:
        """A kernel that begins this much before the end of the one before it, if that is the same."""
        if self.captured is not None:
            self.captured.append((name, us, overlap))
            return
        if self.host > self.end:
            self.idle += self.host - self.end
            self.end, self.last = self.host, None
        factor = self.slow if self.end < self.slow_until else 1.0
        self.end += factor * us - (overlap if name == self.last else 0.0)
        self.last = name

    def wait(self, until: float | None = None) -> None:
        self.host = max(self.host, self.end if until is None else until)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """In place of torch's GPU and of the clock, for dhp_safe_fa.bench.timing."""
        gpu = self

        class Graph:
            kernels: list[tuple[str, float, float]]

            def replay(self) -> None:
                gpu.host += REPLAY_US
                for kernel in self.kernels:
                    gpu.launch(*kernel)

        class Event:
            at = 0.0

            def __init__(self, enable_timing: bool = False) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = max(gpu.end, gpu.host)

            def synchronize(self) -> None:
                gpu.wait(self.at)

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        @contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            gpu.captured = graph.kernels = []
            try:
                yield
            finally:
                gpu.captured = None

        for name, fake in {"CUDAGraph": Graph, "graph": capture, "Event": Event, "synchronize": gpu.wait}.items():
            monkeypatch.setattr(torch.cuda, name, fake)
        clock = SimpleNamespace(perf_counter=lambda: gpu.host / 1e6, perf_counter_ns=lambda: int(gpu.host * 1e3))
        monkeypatch.setattr("dhp_safe_fa.bench.timing.time", clock)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    fake = FakeGpu()
    fake.install(monkeypatch)
    return fake
