"""The gate timing with a clock that makes its times up: verdicts, controls, inputs, the picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dhp_safe_fa.gates import cli, controls
from dhp_safe_fa.gates.inputs import Shape
from dhp_safe_fa.gates.subjects import Subject
from dhp_safe_fa.gates.timing import clock as timing_clock
from dhp_safe_fa.gates.timing import controls as timing_controls
from dhp_safe_fa.gates.timing import gate as timing
from dhp_safe_fa.gates.timing import inputs as timing_inputs
from dhp_safe_fa.gates.timing.clock import Job, Sample
from dhp_safe_fa.gates.timing.inputs import MATCHED, REFERENCE, SAME
from dhp_safe_fa.gates.timing.judge import LEAST_CYCLES, Judged, Resolution, Study, first_look, judge, look
from dhp_safe_fa.gates.tools import NotRun
from dhp_safe_fa.gates.verdict import FAIL, INVALID, NOT_RUN, PASS, ControlOutcome, GateResult

BLOCKS = 150
CYCLES, GHZ = 30_000.0, 1.7
SHAPE = Shape(1, 4, 2, 40, 50, 64, "float16", True)

# What a class adds to the cycles of a launch of some job: (job, class) -> cycles.
Extra = Callable[[Job, str], float]


class FakeClock:
    """Normal noise, by default of 100 cycles, 0.3 %; noise_of: class to what it has instead; frequency: class to a
    factor of the clock's frequency. No launch takes less than a cycle, unless it is told to."""

    def __init__(
        self,
        extra: Extra,
        frequency: dict[str, float] | None = None,
        noise: float = 100.0,
        noise_of: dict[str, float] | None = None,
    ) -> None:
        self.extra, self.frequency = extra, frequency or {}
        self.noise, self.noise_of = noise, noise_of or {}
        self.measured = 0

    def interleaved(self, job: Job, columns: Sequence[str], blocks: int, rng: np.random.Generator) -> Sample:
        self.measured += 1
        noise = np.random.default_rng(self.measured).normal(0, 1, (blocks, len(columns)))
        noise *= [self.noise_of.get(name, self.noise) for name in columns]
        cycles = np.maximum(CYCLES + noise, 1.0) + [self.extra(job, name) for name in columns]
        return Sample(cycles / [GHZ * self.frequency.get(name, 1.0) for name in columns], cycles)

    def sustained(self, job: Job, name: str, seconds: float) -> float:
        return CYCLES / self.frequency.get(name, 1.0)


def clock(
    effects: dict[str, float] | None = None,
    frequency: dict[str, float] | None = None,
    noise: float = 100.0,
    noise_of: dict[str, float] | None = None,
) -> FakeClock:
    return FakeClock(lambda _, name: (effects or {}).get(name, 0.0), frequency, noise, noise_of)


def study(name: str = "study", tested: tuple[str, ...] = MATCHED) -> Study:
    def make() -> Job:
        return Job(lambda: None, [], dict.fromkeys((REFERENCE, *SAME, *tested), ()))

    return Study(name, make, REFERENCE, SAME, tested)


def judged(clock: FakeClock) -> Judged:
    (one,) = look([study()], clock, BLOCKS, np.random.default_rng(1))
    return one


# ---- judging ---------------------------------------------------------------------------------------------------------


def test_nothing_is_found_where_nothing_is() -> None:
    fake = clock()
    one = judged(fake)
    assert (one.differences, one.invalid, one.clock) == ([], [], [])
    assert 0.05 < one.detectable_percent < 0.3
    assert one.detectable_ns == pytest.approx(one.detectable_percent / 100 * CYCLES / GHZ, rel=0.01)


def judged_until(resolution: Resolution, clock: FakeClock) -> Judged:
    rng, tests = np.random.default_rng(1), len(MATCHED)
    (one,) = judge([first_look(study(), clock, BLOCKS, tests, rng, resolution)], clock, tests, rng)
    return one


@pytest.mark.parametrize("noise", [100.0, 1000.0, 3000.0])
def test_more_noise_takes_more_blocks(noise: float) -> None:
    """Until what is asked for would be found, and no more."""
    one = judged_until(Resolution(1.0, 100 * BLOCKS), clock(noise=noise))
    blocks = len(one.first.sample.cycles)
    assert one.detectable_percent < 1.2
    assert blocks == BLOCKS if noise == 100 else one.detectable_percent > 0.5 and BLOCKS < blocks < 100 * BLOCKS


def test_there_is_an_end_to_it() -> None:
    one = judged_until(Resolution(0.01, 3 * BLOCKS), clock(noise=1000.0))
    assert len(one.first.sample.cycles) == 3 * BLOCKS and one.detectable_percent > 0.01


def test_what_is_found_does_not_decide_how_long_is_looked() -> None:
    """Or what chance did to the first blocks would be in the verdict."""
    leaks = ({}, {"ascending": 20_000.0}, {SAME[0]: 20_000.0})
    asked = Resolution(1.0, 100 * BLOCKS)
    lengths = {len(judged_until(asked, clock(leak, noise=1000.0)).first.sample.cycles) for leak in leaks}
    assert len(lengths) == 1 and min(lengths) > BLOCKS


def test_a_leak_that_the_first_blocks_would_miss_is_found() -> None:
    fake = clock({"ascending": 0.02 * CYCLES}, noise=3000.0)
    assert judged(fake).differences == []
    fake = clock({"ascending": 0.02 * CYCLES}, noise=3000.0)
    one = judged_until(Resolution(1.0, 100 * BLOCKS), fake)
    assert one.differences == ["ascending"] and fake.measured == 3, "first blocks, the rest, all of them once more"


def test_the_same_seed_gives_the_same_p_values() -> None:
    """Whichever thread comes first."""
    first, *again = [[one.p for one in judged(clock()).first.cycles.of.values()] for _ in range(5)]
    assert len(set(first)) > 1 and all(p == first for p in again)


@pytest.mark.parametrize("cycles", [-150.0, 150.0])
def test_a_difference_is_found_by_name_and_measured_again(cycles: float) -> None:
    fake = clock({"ascending": cycles})
    one = judged(fake)
    assert one.differences == ["ascending"] and not one.clock
    assert fake.measured == 2
    assert f"ascending: {100 * cycles / CYCLES:+.1f}"[:-1] in one.describe("ascending")


def test_a_difference_that_does_not_come_again_is_none() -> None:
    fake = clock()
    fake.extra = lambda _, name: 150.0 if name == "descending" and fake.measured == 1 else 0.0
    one = judged(fake)
    assert (one.differences, one.unconfirmed) == ([], ["descending"])


def test_a_difference_that_changes_its_sign_is_none() -> None:
    fake = clock()
    fake.extra = lambda _, name: (150.0 if fake.measured == 1 else -150.0) if name == "descending" else 0.0
    one = judged(fake)
    assert (one.differences, one.unconfirmed) == ([], ["descending"])


def test_identical_inputs_that_differ_are_no_verdict() -> None:
    one = judged(clock({"same 2": 150.0}))
    assert one.invalid == ["same 2"] and one.differences == []


def test_less_than_identical_inputs_differ_by_is_no_difference() -> None:
    one = judged(clock({"same 2": 150.0, "ascending": 100.0}))
    assert "ascending" not in one.differences


@pytest.mark.parametrize(
    ("cycles", "invalid", "differences"), [(6.0, [], []), (-6.0, [], []), (12.0, ["same 1"], ["ascending"])]
)
def test_what_another_address_may_do_is_no_difference(
    cycles: float, invalid: list[str], differences: list[str]
) -> None:
    """However little noise there is."""
    least = 100 * LEAST_CYCLES / CYCLES
    assert judged(clock({"same 1": cycles}, noise=1.0)).invalid == invalid
    one = judged(clock({"ascending": cycles}, noise=1.0))
    assert one.differences == differences and least < one.detectable_percent < 1.5 * least


def test_a_lower_clock_is_told_from_more_cycles() -> None:
    one = judged(clock(frequency={"ascending": 0.99}))
    assert (one.differences, one.clock) == ([], ["ascending"])
    assert one.first.percent_ns("ascending") == pytest.approx(1.0, abs=0.1)
    assert one.first.percent("ascending") == pytest.approx(0.0, abs=0.1)


def test_many_studies_are_corrected_together() -> None:
    studies = [study(f"study {i}") for i in range(5)]
    together = look(studies, clock({"ascending": 150.0}), BLOCKS, np.random.default_rng(1))
    assert all(one.differences == ["ascending"] for one in together)
    nothing = look(studies, clock(), BLOCKS, np.random.default_rng(1))
    assert nothing[0].detectable_percent > judged(clock()).detectable_percent


# ---- the verdict on a subject ----------------------------------------------------------------------------------------

RIGHT = [ControlOutcome("planted", controls.CAUGHT, "something")]
WRONG = [ControlOutcome("planted", controls.CAUGHT, "nothing", "the planted leak was not seen")]
EXTENT = timing.Extent(
    shapes=1,
    blocks=BLOCKS,
    resolution=Resolution(timing.CEILING_PERCENT, BLOCKS),
    control_blocks=BLOCKS,
    power_blocks=50,
    sustained_s=0,
    repeats=2,
)


def subject(name: str) -> Subject:
    """On the CPU, whatever device is asked for."""
    return Subject(
        name,
        lambda given, is_causal: given[:1],
        nullcontext,
        (name,),
        (SHAPE, SHAPE),
        matched=lambda shape, seed, _: timing_inputs.matched(shape, seed, "cpu"),
        power=lambda shape, seed, _: timing_inputs.power(shape, seed, "cpu"),
    )


def results(
    monkeypatch: pytest.MonkeyPatch, fake: FakeClock, outcomes: list[ControlOutcome] = RIGHT
) -> list[GateResult]:
    monkeypatch.setattr(timing, "_control_outcomes", lambda *_: outcomes)
    monkeypatch.setattr(controls, "load_controls", lambda *_: controls.Controls({"planted": "branch"}, []))
    told: list[tuple[int, int]] = []
    found = timing.run_on(fake, [subject("a"), subject("b")], EXTENT, lambda _, done, total: told.append((done, total)))
    assert told == sorted(told) and all(done <= total for done, total in told)
    return found


def test_pass_says_what_would_have_been_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, clock(frequency={"zeros": 1.04, "large": 1.01}))
    assert [(r.subject, r.verdict, r.problems) for r in found] == [("a", PASS, []), ("b", PASS, [])]
    figures = found[0].figures
    assert figures["difference"].startswith("none found at 0.") and " ns)" in figures["difference"]
    assert figures["by the clock alone"] == "none found"
    assert figures["power: interleaved %"] == pytest.approx(-3.85, abs=0.2)
    assert figures["sustained %"] == pytest.approx(-3.85, abs=0.01)
    assert figures["power"]["zeros"]["interleaved_cycles_percent"] == pytest.approx(0, abs=0.2)
    json.dumps([r.as_json() for r in found], allow_nan=False)


@pytest.mark.parametrize(("noise", "verdict"), [(300.0, PASS), (27_000.0, INVALID)])
def test_a_measurement_that_could_only_have_found_much_is_invalid(
    noise: float, verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise of 90 %, under which a difference of 20 % is not found: that is no evidence of constant time."""
    fake = clock({"ascending": 0.2 * CYCLES} if verdict == INVALID else {}, noise=noise)
    found = results(monkeypatch, fake)
    assert {r.verdict for r in found} == {verdict}
    if verdict == INVALID:
        problem = found[0].problems[0]
        assert problem.startswith(f"{SHAPE}: ") and problem.endswith("would have been found; 2 % is needed")


def test_a_class_that_is_noisy_alone_counts_for_what_could_have_been_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, clock({"descending": 1000.0}, noise_of={"descending": 27_000.0}))
    assert {r.verdict for r in found} == {INVALID}


def test_what_was_found_in_a_coarse_measurement_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, clock({"ascending": 1.5 * CYCLES}, noise=10_000.0))
    assert {r.verdict for r in found} == {FAIL}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -40_000.0, -CYCLES * 2])
def test_times_that_are_no_times_are_no_verdict(wrong: float) -> None:
    with pytest.raises(NotRun, match="no positive number"):
        judged(clock({"descending": wrong}))


@pytest.mark.parametrize("without", ["tested", "same"])
def test_nothing_to_compare_is_an_error(without: str) -> None:
    with pytest.raises(ValueError, match="classes to be tested and identical ones"):
        look([replace(study(), **{without: ()})], clock(), BLOCKS, np.random.default_rng(1))


def test_fail_names_class_and_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, clock({"descending": 200.0}))
    assert {r.verdict for r in found} == {FAIL}
    assert found[0].problems[0].startswith(f"{SHAPE}: descending: +0.6")
    assert found[0].figures["difference"] == "1 found"


def test_the_clock_is_reported_and_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, clock(frequency={"descending": 0.99}))
    assert {r.verdict for r in found} == {PASS}
    name, percent, _ = found[0].figures["by the clock alone"].split()
    assert name == "descending" and float(percent) == pytest.approx(1.0, abs=0.1)


def test_identical_inputs_that_differ_make_it_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(monkeypatch, clock({"same 1": 200.0}))
    assert {r.verdict for r in found} == {INVALID}
    assert "identical inputs differ" in found[0].problems[0]


def test_a_wrong_control_makes_it_invalid(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {r.verdict for r in results(monkeypatch, clock(), WRONG)} == {INVALID}


def test_the_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = results(monkeypatch, clock())
    timing.plot(found, tmp_path / "times.png")
    assert (tmp_path / "times.png").read_bytes().startswith(b"\x89PNG")
    timing.plot([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_picture_that_cannot_be_drawn_spoils_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    timing.plot(results(monkeypatch, clock()), tmp_path / "times.nonsense")
    assert "not drawn: " in capsys.readouterr().err


# What is told: two shapes and the power of three subjects, and each shape again.
@pytest.mark.parametrize("place", range(3 * 3 + 3 * 2))
def test_when_time_is_up_what_was_measured_is_judged(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: a subject of which a shape is missing is not. What was found is looked at again."""
    monkeypatch.setattr(timing, "_control_outcomes", lambda *_: RIGHT)
    monkeypatch.setattr(controls, "load_controls", lambda *_: controls.Controls({"planted": "branch"}, []))
    told: list[str] = []

    def tell(text: str, done: int, total: int) -> None:
        told.append(text)
        if len(told) == place + 1:
            raise TimeoutError("time was up")

    subjects, two = [subject(name) for name in "abc"], replace(EXTENT, shapes=2)
    found = timing.run_on(clock({"ascending": 200.0}), subjects, two, tell)
    measured = min(place // 3, 3)
    assert [(one.subject, one.verdict) for one in found] == [
        (name, FAIL if at < measured else NOT_RUN) for at, name in enumerate("abc")
    ]
    assert all(one.problems == ["time was up"] for one in found[measured:])
    assert len([text for text in told if text.endswith("again")]) == 2 * measured, "both shapes of each"


def test_what_waits_is_told_by_the_class_at_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here nothing waits: cycles are the same at any clock, so that a slower one hides a quarter of itself alone."""
    found = results(monkeypatch, clock(frequency={"zeros": 1.1, "descending": 0.98}))
    assert {r.verdict for r in found} == {PASS}
    (one,) = found[0].figures["studies"]
    assert 0.25 < one["waits_at_most"] < 0.27 and 0.5 < one["detectable_percent"] < 0.8
    assert one["unlike"]["clock"]["shift"] == pytest.approx(0.1 * CYCLES, rel=0.01)
    leak = {"descending": -300.0}  # one per cent
    found = results(monkeypatch, clock(leak, {"zeros": 1.1, "descending": 0.98}))
    assert {r.verdict for r in found} == {INVALID}
    assert found[0].problems[0].startswith(f"{SHAPE}: descending: -1.0") and len(found[0].problems) == 1
    assert found[0].problems[0].endswith("its clock explains that only if launches wait longer than zeros say")
    found = results(monkeypatch, clock(leak | {"ascending": 300.0}, {"zeros": 1.1, "descending": 0.98}))
    assert {r.verdict for r in found} == {FAIL}, "what is certain is a finding, whatever is doubtful beside it"
    hidden = results(monkeypatch, clock(leak, {"descending": 0.98}))
    assert {r.verdict for r in hidden} == {INVALID}, "how much waits is not known"
    assert "2 % is needed" in hidden[0].problems[0]


# ---- planted controls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expects", "leak", "clean", "problem"),
    [
        ("caught", 200.0, 0.0, ""),
        ("caught", 0.0, 0.0, "not seen"),
        ("caught", 200.0, 200.0, "clean twin failed"),
        ("blind", 200.0, 0.0, "seen where nothing was expected"),
        ("may", 0.0, 0.0, ""),
    ],
)
def test_planted_outcome(expects: str, leak: float, clean: float, problem: str) -> None:
    extra = {"leak": leak, "clean": clean}
    jobs: dict[int, str] = {}

    def make_study(twin: str) -> Study:
        job = Job(lambda: None, [], {})
        jobs[id(job)] = twin
        return Study(twin, lambda: job, REFERENCE, SAME, ("zeros",))

    fake = FakeClock(lambda job, name: extra[jobs[id(job)]] if name == "zeros" else 0.0)
    outcome = timing_controls.planted_outcome("x", expects, make_study, fake, BLOCKS, np.random.default_rng(1))
    assert problem in outcome.problem and bool(outcome.problem) == bool(problem)


class FakeDelays:
    """Delays that take effect in part; a spin notices its end up to 20 cycles late."""

    def __init__(self, effective: float, clean_effective: float = 0.0) -> None:
        self.effective = {"leak": effective, "clean": clean_effective}
        self.cycles: dict[int, tuple[str, dict[str, float]]] = {}

    def spun(self, cycles: float) -> float:
        return float(np.ceil(cycles / 20) * 20)

    def study(self, twin: str, cycles: dict[str, float]) -> Study:
        job = Job(lambda: None, [], {})
        self.cycles[id(job)] = (twin, cycles)
        tested = tuple(name for name in cycles if name in timing_controls.MULTIPLES)
        return Study(twin, lambda: job, REFERENCE, SAME, tested)

    def extra(self, job: Job, name: str) -> float:
        twin, cycles = self.cycles[id(job)]
        return self.effective[twin] * self.spun(cycles[name])


def delays(fake: FakeDelays) -> dict[str, ControlOutcome]:
    outcomes = timing_controls.delay_outcomes(
        fake,  # type: ignore[arg-type]
        FakeClock(fake.extra),
        BLOCKS,
        np.random.default_rng(1),
    )
    return {outcome.name.split()[1]: outcome for outcome in outcomes}


def test_delays_of_twice_the_detectable_effect_are_caught() -> None:
    found = delays(FakeDelays(1.0))
    assert list(found) == ["0.5x", "1x", "2x", "10x"]
    assert not any(outcome.problem for outcome in found.values())
    assert [found[name].expects for name in found] == ["may", "may", "caught", "caught"]
    assert ": caught, 10x: +" in found["10x"].seen and found["10x"].seen.startswith("planted ")


def test_a_clock_that_cannot_see_the_delays_is_noticed() -> None:
    found = delays(FakeDelays(0.0))
    assert {name for name in found if found[name].problem} == {"2x", "10x"}


def test_a_clean_twin_that_differs_is_noticed() -> None:
    assert all("clean twin" in outcome.problem for outcome in delays(FakeDelays(1.0, 1.0)).values())


def test_what_the_controls_declare() -> None:
    declared = {path.stem: controls.read_header(path).executing for path in controls.SOURCES.rglob("*.cu")}
    assert declared[timing_controls.DELAY]["timing"] == controls.CAUGHT


# ---- where it cannot run ---------------------------------------------------------------------------------------------


def test_without_a_gpu_it_is_not_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options in (["--quick"], ["--full"], ["--kernel", "nope"], ["--peer", "sdpa-flash"]):
        assert cli.main(["timing", *options]) == 2
        assert "no CUDA GPU" in capsys.readouterr().out


def test_another_gpu_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another GPU")
    with pytest.raises(NotRun, match=r"another GPU has compute capability 8\.0"):
        timing_clock.GpuClock()


# ---- on the GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_clock_sees_twice_the_work(gpu: None) -> None:
    buffer = torch.zeros(1, dtype=torch.int64, device="cuda")
    big = torch.zeros(2**22, device="cuda")

    def make(launches: int) -> Job:
        def launch() -> None:
            for _ in range(launches):
                big.add_(1)

        return Job(launch, [buffer], {REFERENCE: [buffer.clone()]})

    rng = np.random.default_rng(1)
    one, two = (timing_clock.GpuClock().interleaved(make(n), [REFERENCE], 50, rng) for n in (10, 20))
    assert 1.5 < np.median(two.ns) / np.median(one.ns) < 2.5
    assert 0.1 < np.median(one.cycles / one.ns) < 3  # GHz


def test_the_document_says_how_long_the_gpu_idles() -> None:
    text = (Path(__file__).parents[3] / "docs/gates-timing.md").read_text()
    assert f"the GPU idles for {timing_clock.GAP_US:g} µs, or for as long as a\nlaunch takes" in text
