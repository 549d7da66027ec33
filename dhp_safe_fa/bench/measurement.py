"""One case: check every candidate, then time all of them in turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dhp_safe_fa.bench import reference, timing
from dhp_safe_fa.bench.cases import Case
from dhp_safe_fa.bench.peers import Candidate, one_line, sdpa
from dhp_safe_fa.bench.results import Outcome, Result, Stats


class WrongResult(Exception):
    """The first candidate's output is wrong, or there is none; the text is one sentence."""


@dataclass(frozen=True)
class Settings:
    """rounds: samples of each candidate. sample_ms: length of one. cold: inputs rotate so that L2 never holds them.
    eager: eager calls are timed beside CUDA graphs, and not only where there is no graph."""

    rounds: int = 7
    sample_ms: float = 20.0
    cold: bool = False
    eager: bool = True


DEFAULT_SETTINGS = Settings()


@dataclass
class _Runner:
    """A checked candidate with its samplers and what they returned."""

    candidate: Candidate
    relative_error: float
    eager: timing.Sampler | None
    graph: timing.Sampler | None
    graph_reason: str | None
    eager_us: list[float]
    graph_us: list[float]

    def round(self) -> None:
        with self.candidate.context():
            if self.graph:
                self.graph_us.append(self.graph())
            if self.eager:
                self.eager_us.append(self.eager())

    def outcome(self) -> Outcome:
        graph = Stats.of(self.graph_us) if self.graph_us else None
        eager = Stats.of(self.eager_us) if self.eager_us else None
        return Outcome(self.candidate.name, self.relative_error, graph, eager, self.graph_reason)


def measure(
    case: Case,
    candidates: Sequence[Candidate],
    settings: Settings = DEFAULT_SETTINGS,
    device: str = "cpu",
    generator: torch.Generator | None = None,
) -> Result:
    """Times the candidates on fresh standard normal inputs, A B C, then C B A, and so on for settings.rounds rounds.

    Args:
        candidates: ours first; it is the one whose result has to be right, the others are its peers.
        generator: of that device; a freshly seeded one by default.

    Raises:
        WrongResult: the first candidate fails, or is not accurate enough; nothing was timed.
    """
    if generator is None:
        generator = torch.Generator(device)
        generator.seed()
    inputs = [_draw(case, device, generator) for _ in range(_input_sets(case, settings, device))]
    q, k, v = inputs[0]
    true = reference.sample(q, k, v, case.causal, generator)
    max_diff = 0.0
    runners: list[_Runner] = []
    absent: dict[str, Outcome] = {}
    for candidate in candidates:
        out = candidate.first_run(case, q, k, v)
        if candidate is candidates[0]:
            if isinstance(out, str):
                raise WrongResult(f"{candidate.name} failed: {out}")
            relative, max_diff, wrong = reference.verdict(case, out, true, sdpa(q, k, v, case.causal))
            if wrong:
                raise WrongResult(f"{candidate.name} is wrong: {wrong}")
        elif isinstance(out, str):
            absent[candidate.name] = Outcome(candidate.name, reason=out)
            continue
        else:
            relative, _ = true.errors(out)
            if not relative <= reference.PEER_FACTOR * reference.RELATIVE_ERROR[case.dtype]:
                reason = f"wrong: relative error {relative:.2e}"
                absent[candidate.name] = Outcome(candidate.name, relative, reason=reason)
                continue
        runners.append(_prepare(candidate, relative, case, inputs, settings, device))
    for round_number in range(settings.rounds):
        for runner in runners if round_number % 2 == 0 else reversed(runners):
            runner.round()
    measured = {runner.candidate.name: runner.outcome() for runner in runners}
    outcomes = tuple((measured | absent)[candidate.name] for candidate in candidates)
    return Result(case, outcomes, max_diff)


def host_overhead(
    candidates: Sequence[Candidate], device: str, generator: torch.Generator, rounds: int
) -> dict[str, Stats]:
    """What one eager call costs the calling thread, by candidate, on a shape whose own work is short.

    On CUDA that is the smallest start shape, where the call returns before the work is done; on the CPU one query and
    one key, which is next to no work.
    """
    case = Case(1, 8, 512, 64, False, "float16") if device == "cuda" else Case(1, 1, 1, 64, False, "float32")
    q, k, v = _draw(case, device, generator)
    present = [c for c in candidates if not isinstance(c.first_run(case, q, k, v), str)]
    samplers = [(c, timing.host_sampler(_on_inputs(c, case, [(q, k, v)]), device)) for c in present]
    times: dict[str, list[float]] = {c.name: [] for c in present}
    for _ in range(rounds):
        for candidate, sampler in samplers:
            with candidate.context():
                times[candidate.name].append(sampler())
    return {name: Stats.of(values) for name, values in times.items()}


def _draw(case: Case, device: str, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Standard normal q, k, v."""

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.torch_dtype)

    return normal(case.shape), normal(case.key_shape), normal(case.key_shape)


def _input_sets(case: Case, settings: Settings, device: str) -> int:
    """How many sets of inputs the calls rotate through: 1, or for cold calls as many as exceed twice the L2 cache."""
    if not settings.cold or device != "cuda":
        return 1
    cache = torch.cuda.get_device_properties().L2_cache_size
    return 1 + 2 * cache // case.input_bytes


def _on_inputs(candidate: Candidate, case: Case, inputs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> timing.Call:
    attend, causal = candidate.attend, case.causal
    if len(inputs) == 1:
        q, k, v = inputs[0]
        return lambda _: attend(q, k, v, causal)
    return lambda i: attend(*inputs[i % len(inputs)], causal)


def _prepare(
    candidate: Candidate,
    relative_error: float,
    case: Case,
    inputs: Sequence[tuple[Tensor, Tensor, Tensor]],
    settings: Settings,
    device: str,
) -> _Runner:
    call = _on_inputs(candidate, case, inputs)
    graph, eager, reason = None, None, None
    with candidate.context():
        if device == "cuda":
            try:
                graph = timing.graph_sampler(call, settings.sample_ms, len(inputs))
            except RuntimeError as error:
                reason = f"no CUDA graph, eager times compared: {one_line(error)}"
        if settings.eager or graph is None:
            eager = timing.eager_sampler(call, settings.sample_ms, device)
    return _Runner(candidate, relative_error, eager, graph, reason, [], [])
