"""One case: check every candidate, then time all of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dhp_safe_fa.bench import timing, turns
from dhp_safe_fa.bench.cases import Case
from dhp_safe_fa.bench.peers import Candidate, one_line, refused_on_cuda
from dhp_safe_fa.bench.results import Outcome, Result, Stats


class WrongResult(Exception):
    """The first candidate's output is wrong, or there is none; the text is one sentence."""


@dataclass(frozen=True)
class Settings:
    """How cases are timed.

    Attributes:
        rounds: samples of each candidate; of up to five, whole cycles of turns.order.
        sample_ms: length of one.
        cold: inputs rotate so that L2 never holds them.
        eager: eager calls are timed beside CUDA graphs, and not only where there is no graph.
        layout: how the inputs are stored, one of cases.LAYOUTS.
        alone_below_us: where the first candidate's time by graph is below this, everybody's calls are also timed alone,
            another kernel between them; 0 is never.
    """

    rounds: int = 12
    sample_ms: float = 15.0
    cold: bool = False
    eager: bool = True
    layout: str = "BSHD"
    alone_below_us: float = 0.0


DEFAULT_SETTINGS = Settings()
# Of up to four candidates whole cycles, too.
QUICK_SETTINGS = Settings(rounds=6, sample_ms=5.0)


@dataclass(frozen=True)
class Checked:
    """A candidate whose output was right, and its calls: ``call(i)`` works on input set i. found: its outcome without
    times."""

    candidate: Candidate
    found: Outcome
    call: timing.Call


@dataclass(frozen=True)
class Lineup:
    """Who is to be timed on a case, and the outcomes of those who are not."""

    present: list[Checked]
    absent: dict[str, Outcome]
    max_abs_diff_sdpa: float | None

    def result(self, case: Case, candidates: Sequence[Candidate], measured: Sequence[Outcome]) -> Result:
        """With the outcomes in the order of the candidates."""
        outcomes = self.absent | {outcome.name: outcome for outcome in measured}
        return Result(case, tuple(outcomes[candidate.name] for candidate in candidates), self.max_abs_diff_sdpa)


@dataclass
class _Runner:
    """A checked candidate with its samplers, by the name of the outcome's field, and what they returned."""

    checked: Checked
    samplers: dict[str, timing.Sampler] = field(default_factory=dict)
    reason: str | None = None
    us: dict[str, list[float]] = field(default_factory=dict)

    def round(self) -> None:
        with self.checked.candidate.context():
            for name, sample in self.samplers.items():
                self.us.setdefault(name, []).append(sample())

    def outcome(self) -> Outcome:
        stats: dict[str, Any] = {name: Stats.of(values) for name, values in self.us.items()}
        return replace(self.checked.found, reason=self.reason, **stats)


def measure(
    case: Case,
    candidates: Sequence[Candidate],
    settings: Settings = DEFAULT_SETTINGS,
    device: str = "cpu",
    generator: torch.Generator | None = None,
) -> Result:
    """Times the candidates on fresh standard normal inputs, settings.rounds times, in turns that suit everybody.

    Args:
        candidates: ours first; it is the one whose result has to be right, the others are its peers.
        generator: of that device; a freshly seeded one by default.

    Raises:
        WrongResult: the first candidate fails, or is not accurate enough; nothing was timed. It does not fail where
            the case may be refused, and is.
    """
    if generator is None:
        generator = torch.Generator(device)
        generator.seed()
    input_sets = _input_sets(case, settings, device)
    lineup = check(case, candidates, device, generator, settings.layout, input_sets)
    runners = [_prepare(checked, settings, device, input_sets) for checked in lineup.present]
    ours = next((r.samplers.get("graph_us") for r in runners if r.checked.candidate is candidates[0]), None)
    if settings.alone_below_us and ours and ours() < settings.alone_below_us:
        _add_alone(runners, settings, device, input_sets)
    for round_number in range(settings.rounds):
        for number in turns.order(round_number, len(runners)):
            runners[number].round()
    return lineup.result(case, candidates, [runner.outcome() for runner in runners])


def check(
    case: Case,
    candidates: Sequence[Candidate],
    device: str,
    generator: torch.Generator,
    layout: str,
    input_sets: int = 1,
) -> Lineup:
    """Runs every candidate on fresh inputs and judges what comes out.

    Args:
        input_sets: how many sets of inputs the calls rotate through.

    Raises:
        WrongResult: the first candidate fails, or is not accurate enough.
    """
    inputs = [case.draw(device, generator, layout) for _ in range(input_sets)]
    judge = case.judge(inputs[0], generator)
    present: list[Checked] = []
    absent: dict[str, Outcome] = {}
    difference = None
    for candidate in candidates:
        name, calls = candidate.name, [case.bind(candidate.attend, one) for one in inputs]
        out = candidate.first_run(calls[0], case.scores, device)
        is_ours = candidate is candidates[0]
        if isinstance(out, str):
            if is_ours and not (case.may_be_refused and refused_on_cuda(out)):
                raise WrongResult(f"{name} failed: {out}")
            absent[name] = Outcome(name, reason=out)
            continue
        verdict = judge.ours(out) if is_ours else judge.peer(out)
        found = Outcome(name, verdict.relative_error, errors=verdict.errors)
        if is_ours:
            difference = verdict.max_abs_diff_sdpa
            if verdict.wrong:
                raise WrongResult(f"{name} is wrong: {verdict.wrong}")
        elif verdict.wrong:
            absent[name] = replace(found, reason=f"wrong: {verdict.wrong}")
            continue
        if case.repeats:
            with candidate.context():
                found = replace(found, repeats_equal=sum(_same_bits(out, calls[0]()) for _ in range(case.repeats)))
        present.append(Checked(candidate, found, _rotating(calls)))
    return Lineup(present, absent, difference)


def _same_bits(first: Sequence[Tensor], again: Sequence[Tensor]) -> bool:
    """Of all outputs: NaN equals NaN, -0 differs from +0."""
    pairs = (
        (a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(first, again, strict=True)
    )
    return all(torch.equal(*pair) for pair in pairs)


def host_overhead(
    case: Case, candidates: Sequence[Candidate], device: str, generator: torch.Generator, layout: str, rounds: int
) -> dict[str, Stats]:
    """What one eager call costs the calling thread, by candidate, on a case whose own work is short."""
    inputs = case.draw(device, generator, layout)
    calls = [(c, case.bind(c.attend, inputs)) for c in candidates]
    present = [(c, call) for c, call in calls if not isinstance(c.first_run(call, case.scores, device), str)]
    samplers = [(c, timing.host_sampler(_rotating([call]), device)) for c, call in present]
    times: dict[str, list[float]] = {c.name: [] for c, _ in present}
    for _ in range(rounds):
        for candidate, sampler in samplers:
            with candidate.context():
                times[candidate.name].append(sampler())
    return {name: Stats.of(values) for name, values in times.items()}


def graph_reason(error: RuntimeError) -> str:
    """Why a candidate was timed by eager calls."""
    return f"no CUDA graph, eager times compared: {one_line(error)}"


def _input_sets(case: Case, settings: Settings, device: str) -> int:
    """How many sets of inputs the calls rotate through: 1, or for cold calls as many as exceed twice the L2 cache."""
    if not settings.cold or device != "cuda":
        return 1
    cache = torch.cuda.get_device_properties().L2_cache_size
    return 1 + 2 * cache // case.input_bytes


def _rotating(calls: Sequence[Callable[[], Any]]) -> timing.Call:
    if len(calls) == 1:
        only = calls[0]
        return lambda _: only()
    return lambda i: calls[i % len(calls)]()


def _prepare(checked: Checked, settings: Settings, device: str, input_sets: int) -> _Runner:
    runner = _Runner(checked)
    with checked.candidate.context():
        if device == "cuda":
            try:
                graph = timing.capture([checked.call], input_sets)
                runner.samplers["graph_us"] = graph.sampler(settings.sample_ms)
            except RuntimeError as error:
                runner.reason = graph_reason(error)
        if settings.eager or not runner.samplers:
            runner.samplers["eager_us"] = timing.eager_sampler(checked.call, settings.sample_ms, device)
    return runner


def _add_alone(runners: Sequence[_Runner], settings: Settings, device: str, input_sets: int) -> None:
    """To all that could be captured: the same filler between everybody's calls."""
    between = timing.filler(device)
    for runner in runners:
        if "graph_us" in runner.samplers:
            call = runner.checked.call
            with runner.checked.candidate.context():
                sampler = timing.alone_sampler(call, between, settings.sample_ms, input_sets)
            runner.samplers["alone_us"] = sampler
