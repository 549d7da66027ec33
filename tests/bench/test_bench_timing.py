"""How times are taken on a GPU, on one whose times are known."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bench_samples import TINY
from fake_gpu import FakeGpu

from dhp_safe_fa.bench import Candidate, Case, Settings, measure, timing
from dhp_safe_fa.bench.cases import parse_case
from dhp_safe_fa.bench.peers import sdpa

# A launch that does not fill the GPU: alone it takes KERNEL, and begins OVERLAP before its like ends.
KERNEL, OVERLAP, FILLER = 5.4, 0.8, 2.0


@dataclasses.dataclass(frozen=True)
class HostCase(Case):
    """Its inputs lie on the CPU, whatever the device."""

    def draw(self, device: str, generator: torch.Generator, layout: str) -> tuple[torch.Tensor, ...]:
        return super().draw("cpu", generator, layout)


def case() -> HostCase:
    return HostCase(**dataclasses.asdict(parse_case(TINY, "float32")))


def kernel(gpu: FakeGpu, name: str, us: float, overlap: float = 0.0) -> Candidate:
    """A candidate with such a kernel. Its output is computed at the first call, on the one set of inputs."""
    out: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        gpu.launch(name, us, overlap)
        if not out:
            out.append(sdpa(q, k, v, is_causal))
        return out[0]

    return Candidate(name, attend)


@pytest.fixture
def filler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "filler", lambda device: lambda _: gpu.launch("filler", FILLER))


def on_cuda(gpu: FakeGpu, settings: Settings, *candidates: Candidate) -> dict[str, tuple[float | None, float | None]]:
    """(back to back, alone) by candidate."""
    result = measure(case(), candidates, settings, "cuda", torch.Generator())
    found = {}
    for outcome in result.outcomes:
        stats = (outcome.graph_us, outcome.alone_us)
        found[outcome.name] = tuple(s and s.median for s in stats)
    return found  # type: ignore[return-value]


SETTINGS = Settings(rounds=3, sample_ms=1, eager=False, alone_below_us=50)


@pytest.mark.usefixtures("filler")
def test_alone_and_back_to_back(gpu: FakeGpu) -> None:
    """Launches that overlap take less time back to back; others the same, but for the gaps between replays."""
    found = on_cuda(gpu, SETTINGS, kernel(gpu, "ours", KERNEL, OVERLAP), kernel(gpu, "peer", 60.0))
    ours, peer = found["ours"], found["peer"]
    assert ours[0] == pytest.approx(KERNEL - OVERLAP, rel=0.01) and ours[1] == pytest.approx(KERNEL, rel=0.01)
    assert peer == (pytest.approx(60.0, rel=0.01), pytest.approx(60.0, rel=0.01)), "beside a small one, alone as well"


@pytest.mark.usefixtures("filler")
@pytest.mark.parametrize("limit, us", [(50.0, 51.0), (0.0, KERNEL), (4.0, KERNEL)])
def test_what_is_not_small_is_not_timed_alone(gpu: FakeGpu, limit: float, us: float) -> None:
    settings = dataclasses.replace(SETTINGS, alone_below_us=limit)
    found = on_cuda(gpu, settings, kernel(gpu, "ours", us, OVERLAP), kernel(gpu, "peer", KERNEL))
    assert all(graph and alone is None for graph, alone in found.values())


def test_the_filler_touches_memory_of_its_own() -> None:
    between = timing.filler("cpu")
    for _ in range(3):
        touched = between(0)
    assert isinstance(touched, torch.Tensor)
    assert touched.nbytes == timing.FILLER_BYTES and bool((touched == 3).all())


def test_graphs_rotate_through_all_inputs(gpu: FakeGpu) -> None:
    seen: list[int] = []

    def call(i: int) -> None:
        seen.append(i % 7)
        gpu.launch("call", 5.0)

    graph = timing.capture([call], 7)
    assert graph.repeats % 7 == 0 and seen[-graph.repeats :] == [i % 7 for i in range(graph.repeats)]
    assert graph.sampler(1)() == pytest.approx(5.0)


def test_a_sustained_time_is_of_steady_work(gpu: FakeGpu) -> None:
    """At least the seconds that were asked for; what is slower at the beginning is not in it; the GPU never waits."""
    graph = timing.capture([lambda _: gpu.launch("call", 100.0)], 1)
    gpu.wait()
    gpu.idle, gpu.slow, gpu.slow_until = 0.0, 2.0, gpu.host + 140e3
    marks: list[float] = []
    us = timing.sustained_us(graph, 0.2, 1.0, lambda: marks.append(gpu.host), lambda: marks.append(gpu.host))
    begin, end = marks
    assert us == pytest.approx(100.0, rel=1e-6)
    assert 1e6 <= end - begin <= 1.05e6 and gpu.idle <= 20.0, "only what it takes to begin"
    assert gpu.host >= gpu.end, "nothing is left in the queue"
