"""The gate `counters` without a GPU: what counts as exact, what chance explains, what is a finding."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from without_gpu import EXACT, RIGHT, WITHIN, counted_by, right_controls

from dhp_safe_fa.gates import controls, inputs, tools
from dhp_safe_fa.gates.counters import gate as counters
from dhp_safe_fa.gates.counters import metrics, study
from dhp_safe_fa.gates.counters.counting import Count, Request
from dhp_safe_fa.gates.counters.looks import Settled
from dhp_safe_fa.gates.inputs import Shape
from dhp_safe_fa.gates.sass.listing import Program, parse_listing
from dhp_safe_fa.gates.subjects import Subject
from dhp_safe_fa.gates.verdict import FAIL, INVALID, PASS, ControlOutcome, GateResult

CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum"
CLASSES = ("zeros", "normal", "ascending", "NaN rows")
# Classes that A/A runs show to vary by 1: chance brings the medians of four such classes 5.9 apart.
NOISY = (("zeros", 4), ("zeros", 5), ("normal", 5), ("normal", 6), ("ascending", 6), ("ascending", 7))


# ---- exactness and findings ------------------------------------------------------------------------------------------


def counts(metric: str, *runs: tuple[str, float], name: str = "attn", label: str = "shape") -> list[Count]:
    return [Count(name, label, data, ("kernel",), {metric: value}) for data, value in runs]


@pytest.mark.parametrize(
    ("runs", "is_exact", "is_equal"),
    [
        ((("zeros", 5), ("zeros", 5), ("normal", 5)), True, True),
        ((("zeros", 5), ("zeros", 5), ("normal", 6)), True, False),
        ((("zeros", 5), ("zeros", 6), ("normal", 5)), False, False),
    ],
)
def test_exact_and_equal(runs: tuple[tuple[str, float], ...], is_exact: bool, is_equal: bool) -> None:
    seen = study.study(counts(EXACT, *runs))[EXACT]
    assert (seen.is_exact, seen.is_equal) == (is_exact, is_equal)


def test_spreads() -> None:
    seen = study.study(counts(metrics.TIME, ("a", 90), ("a", 110), ("b", 200), ("b", 200)))[metrics.TIME]
    assert (seen.aa_percent, seen.value) == (20, 150)
    assert seen.classes_percent == pytest.approx(100 * 100 / 150)
    assert seen.by_class == {"a": 100, "b": 200}


def test_an_opcode_that_a_run_lacks_is_a_difference() -> None:
    opcode = f"{metrics.OPCODES}:CALL"
    runs = [Count("a", "s", "zeros", ("k",), {}), Count("a", "s", "normal", ("k",), {opcode: 4.0})]
    assert study.findings(study.study([*runs, runs[0]]), {}) == {opcode: f"{opcode}: 0 (zeros) to 4 (normal)"}


@pytest.mark.parametrize(
    ("metric", "runs", "finding"),
    [
        (EXACT, (("zeros", 5), ("zeros", 5), ("normal", 6)), f"{EXACT}: 5 (zeros) to 6 (normal)"),
        (EXACT, (("zeros", 5), ("zeros", 6), ("normal", 50)), ""),  # one A/A pair says little of chance
        (EXACT, (*NOISY, ("large", 8), ("large", 9)), ""),
        (EXACT, (*NOISY, ("large", 20), ("large", 21)), "4 (zeros) to 20 (large), of which chance explains 6"),
        (CONFLICTS, (("zeros", 0), ("zeros", 1), ("normal", 0), ("normal", 0), ("large", 50_000)), "50000 (large)"),
        (metrics.INSTRUCTIONS, (("zeros", 99), ("zeros", 101), ("normal", 100)), "varies by 2 %"),
        (WITHIN, (("zeros", 100), ("zeros", 101), ("normal", 103)), ""),
        (WITHIN, (("zeros", 100), ("zeros", 101), ("normal", 110)), "100 (zeros) to 110 (normal)"),
        (WITHIN, (("zeros", 20), ("zeros", 28), ("NaN", 32)), ""),  # as a clean control was accused
        (metrics.TIME, (("zeros", 5), ("zeros", 5), ("normal", 50)), ""),
    ],
)
def test_findings(metric: str, runs: tuple[tuple[str, float], ...], finding: str) -> None:
    seen = study.study(counts(metric, *runs))
    found = study.findings(seen, study.explained_elsewhere([seen]))
    assert len(found) == bool(finding)
    assert finding in "".join(found.values())


def test_noise_on_one_shape_switches_no_other_off() -> None:
    """What is exact on a shape may lie as far apart there as chance explains elsewhere, and no farther."""
    noisy = study.study(counts(EXACT, *NOISY))
    elsewhere = study.explained_elsewhere([noisy])
    for value, is_found in ((6, False), (50_000, True)):
        exact = study.study(counts(EXACT, *zip(CLASSES * 2, (5, 5, 5, value) * 2, strict=True)))
        assert bool(study.findings(exact, elsewhere)) == is_found
        enough = study.study(counts(EXACT, *zip(CLASSES * 3, (5, 5, 5, value) * 3, strict=True)))
        assert study.findings(enough, elsewhere), "so many runs show for themselves what chance does"


def test_few_sectors_are_merged_by_chance() -> None:
    """What A/A shows on one label is no finding on another, but several times as many are."""
    noisy = study.study(counts(WITHIN, ("zeros", 20), ("zeros", 28), ("normal", 24)))
    elsewhere = study.explained_elsewhere([noisy])
    for fewest, most, is_found in ((24, 32, False), (4, 28, True)):
        exact = study.study(counts(WITHIN, ("zeros", fewest), ("zeros", fewest), ("large", most)))
        assert bool(study.findings(exact, elsewhere)) == is_found
        assert study.findings(exact, {}), "without noise anywhere both are"


def test_noise_on_a_large_shape_is_no_leave_for_a_small_one() -> None:
    large = study.study(counts(WITHIN, ("zeros", 70_000), ("zeros", 71_000), ("normal", 70_500)))
    elsewhere = study.explained_elsewhere([large])
    small = study.study(counts(WITHIN, ("zeros", 100), ("zeros", 100), ("large", 200)))
    assert not study.findings(large, elsewhere) and study.findings(small, elsewhere)


def test_chance_brings_classes_no_farther_apart_than_is_said() -> None:
    """Classes that differ by nothing but normal noise: accused in a thousandth of all cases."""
    rng = np.random.default_rng(1)
    accused = 0
    for _ in range(2000):
        runs = counts(EXACT, *zip(CLASSES * 2, rng.normal(1000, 10, 2 * len(CLASSES)), strict=True))
        accused += bool(study.findings(study.study(runs), {}))
    assert accused <= 8


@pytest.mark.parametrize("runs", [(), (("zeros", 5), ("zeros", 5)), (("zeros", 5), ("normal", 5))])
def test_without_classes_or_a_repeat_nothing_can_be_said(runs: tuple[tuple[str, float], ...]) -> None:
    with pytest.raises(ValueError, match="one of them twice"):
        study.study(counts(EXACT, *runs))


def planted(name: str, leak: float, clean: float = 5) -> list[Count]:
    return [
        *counts(EXACT, ("zeros", 5), ("zeros", 5), ("large", leak), name=name, label="leak"),
        *counts(EXACT, ("zeros", 5), ("zeros", 5), ("large", clean), name=name, label="clean"),
    ]


@pytest.mark.parametrize(
    ("expects", "leak", "clean", "problem"),
    [
        ("caught", 6, 5, ""),
        ("caught", 5, 5, "was not seen"),
        ("caught", 6, 6, "clean twin failed"),
        ("blind", 5, 5, ""),
        ("blind", 6, 5, "where nothing was expected"),
        ("may", 5, 5, ""),
        ("may", 6, 5, ""),
    ],
)
def test_controls_are_judged(expects: str, leak: float, clean: float, problem: str) -> None:
    (outcome,) = counters.judge_controls(planted("one", leak, clean), [], {"one": expects})
    assert problem in outcome.problem and bool(outcome.problem) == bool(problem)


def test_noise_in_any_clean_twin_is_noise_in_all() -> None:
    noisy = counts(EXACT, *NOISY, name="other", label="clean")
    other = [*noisy, *counts(EXACT, *NOISY, name="other", label="leak")]
    expected = {"one": "caught", "other": "blind"}
    first, _ = counters.judge_controls([*planted("one", 6), *other], [], expected)
    assert first.problem == "the planted leak was not seen"
    first, _ = counters.judge_controls([*planted("one", 50_000), *other], [], expected)
    assert first.problem == ""


@pytest.mark.parametrize(
    ("metric", "leak", "clean", "problems"),
    [
        (metrics.OPCODES + ":FADD", 6, 5, ["", ""]),
        (metrics.OPCODES + ":FADD", 5, 5, ["the planted leak was not seen"] * 2),
        (metrics.OPCODES + ":FADD", 6, 6, ["clean twin failed"] * 2),
        (metrics.GUARDS + ":FADD", 6, 5, ["", "the planted leak was not seen"]),  # but not by what is to see it
    ],
)
def test_what_only_patched_code_sees_is_asked_of_it(
    metric: str, leak: float, clean: float, problems: list[str]
) -> None:
    name, runs = "swapped_opcodes", []
    for twin, value in (("leak", leak), ("clean", clean)):
        of_twin = (("zeros", 5.0), ("zeros", 5.0), ("ascending", value))
        runs += counts(metric, *of_twin, name=name, label=twin)
    outcomes = counters.judge_controls(planted(name, 5), runs, {name: "caught"})
    assert [outcome.name for outcome in outcomes] == [name, f"{name}: {metrics.OPCODES}"]
    for outcome, problem in zip(outcomes, problems, strict=True):
        assert problem in outcome.problem and bool(outcome.problem) == bool(problem)


def test_each_metric_that_can_be_shown_alive_has_to_see_a_leak() -> None:
    declared = {path.stem: controls.read_header(path).executing["counters"] for path in controls.SOURCES.rglob("*.cu")}
    judged_by = {*metrics.DEMANDED, *metrics.CANDIDATES, *metrics.WITHIN, *metrics.PATCHED}
    assert set(metrics.ALIVE) <= judged_by
    assert len(judged_by - set(metrics.ALIVE)) == 4, "docs/gates.md names those without a leak"
    assert {declared[name] for name in (*metrics.ALIVE.values(), *metrics.PATCHED_CONTROLS)} == {controls.CAUGHT}
    assert {metrics.ALIVE[metric] for metric in metrics.PATCHED} <= set(metrics.PATCHED_CONTROLS)


def test_a_metric_that_does_not_see_its_leak_makes_the_run_invalid() -> None:
    """Although another sees it."""
    outcomes = counters.judge_controls(planted("secret_gather", 6), [], {"secret_gather": "caught"})
    assert [outcome.problem for outcome in outcomes] == ["", *["the planted leak was not seen"] * 2]


@pytest.mark.parametrize(("opcode", "is_found"), [("SYNCS", False), ("FADD", True)])
def test_guards_have_to_be_exact_but_for_those_of_tries(opcode: str, is_found: bool) -> None:
    runs = [
        Count("attn", "shape", data, ("kernel",), {metrics.GUARDS: value, f"{metrics.GUARDS}:{opcode}": value})
        for data, value in (("zeros", 5.0), ("zeros", 6.0), ("normal", 9.0))
    ]
    assert list(study.findings(study.study(runs), {})) == [f"{metrics.GUARDS}:{opcode}"] * is_found


def ways(listing: Program, kernel: str) -> Iterator[list[str]]:
    """The opcodes that a warp executes, for each way to take two conditional branches or not."""
    for choices in product((False, True), repeat=2):
        left, at, executed = list(choices), listing.labels[kernel], list[str]()
        while not executed or executed[-1] != "EXIT":
            instruction = listing.code[at]
            is_taken = instruction.base == "BRA" and (not instruction.guard or left.pop(0))
            executed.append(f"{instruction.base}{' taken' if is_taken else ''}")
            at = listing.labels[instruction.operands.strip("`()")] if is_taken else at + 1
        yield executed


def test_what_swaps_opcodes_changes_no_other_count(planted: controls.Controls) -> None:
    """Or the metrics of all shapes would see the leak that only counts of single opcodes are to see."""
    kernel = "swapped_opcodes_leak"
    (listing,) = (one for one in map(parse_listing, map(tools.disassemble, planted.cubins)) if kernel in one.kernels)
    adds, multiplies = (
        next(Counter(way) for way in ways(listing, kernel) if not Counter(way)[other]) for other in ("FMUL", "FADD")
    )
    assert (adds["FADD"], multiplies["FMUL"]) == (32, 32)
    del adds["FADD"], multiplies["FMUL"]
    assert adds == multiplies


def test_a_control_without_runs_is_an_error() -> None:
    with pytest.raises(KeyError):
        counters.judge_controls([], [], {"one": "caught"})
    name = metrics.PATCHED_CONTROLS[0]
    with pytest.raises(KeyError):
        counters.judge_controls(planted(name, 6), [], {name: "caught"})


def judged(often: Sequence[Count], patched: Sequence[Count], outcomes: list[ControlOutcome] = RIGHT) -> GateResult:
    return counters.judge_subject("attn", Settled(often), patched, outcomes)


def subject_runs(value: float) -> tuple[list[Count], list[Count]]:
    base = {metric: 5.0 for metric in (*metrics.DEMANDED, *metrics.CANDIDATES)}
    often = [
        Count("attn", "shape", "zeros", ("kernel",), {**base, metrics.TIME: 100.0}),
        Count("attn", "shape", "zeros", ("kernel",), {**base, metrics.TIME: 102.0}),
        Count("attn", "shape", "normal", ("kernel",), {**base, metrics.TIME: 110.0, EXACT: value}),
    ]
    return often, counts(f"{metrics.OPCODES}:FFMA", ("zeros", 7), ("zeros", 7), ("normal", 7))


@pytest.mark.parametrize(
    ("value", "outcomes", "verdict"),
    [
        (5, RIGHT, PASS),
        (6, RIGHT, FAIL),
        (6, [ControlOutcome("loop_bound", "caught", "nothing", "the planted leak was not seen")], INVALID),
        (5, [], INVALID),
    ],
)
def test_verdict(value: float, outcomes: list[ControlOutcome], verdict: str) -> None:
    result = judged(*subject_runs(value), outcomes)
    assert result.verdict == verdict
    assert len(result.problems) == (value != 5)
    assert result.figures["differ"] == (value != 5)
    assert result.figures["kernels"] == ["kernel"]
    assert result.figures["time: classes (A/A)"] == "8.5 (2.0) %"
    json.dumps(result.as_json())


def test_data_that_decide_what_is_launched_are_found() -> None:
    often, once = subject_runs(5)
    often[-1] = replace(often[-1], kernels=("kernel", "another"))
    result = judged(often, once)
    assert (result.verdict, result.problems) == (FAIL, ["shape: normal launches other kernels than zeros"])
    often, _ = subject_runs(5)
    often[0] = replace(often[0], kernels=("another",))
    assert "shape: zeros launches other kernels than zeros" in judged(often, once).problems


def test_a_kernel_that_executed_nothing_fails() -> None:
    often, once = subject_runs(5)
    nothing = [replace(one, values={**one.values, metrics.INSTRUCTIONS: 0.0}) for one in often]
    result = judged(nothing, once)
    assert (result.verdict, result.problems) == (FAIL, ["shape: no instruction was counted"])


def test_every_class_and_an_aa_pair_are_run() -> None:
    for extent in (counters.QUICK, counters.FULL):
        classes = tuple(inputs.CLASSES)
        assert set(extent.data(classes)) == set(classes)
        for data in (extent.data(classes), extent.data_patched(classes), extent.control_data):
            assert len(set(data)) < len(data)


@pytest.mark.parametrize(
    ("off", "verdict"),
    [
        ({("ascending", 0): 1}, PASS),  # a rare event
        ({("ascending", 0): 1, ("zeros", 1): 1}, PASS),  # two
        ({("ascending", 0): 1, ("ascending", 1): 1, ("ascending", 2): 1, ("zeros", 1): 1}, FAIL),  # a leak, and one
        ({("ascending", 0): 9, ("ascending", 2): 9}, FAIL),  # a leak in most runs
        ({("ascending", 0): 5, ("ascending", 1): 5, ("ascending", 2): 5, ("normal", 0): 4}, FAIL),
    ],
)
def test_rare_events_hide_no_leak(off: dict[tuple[str, int], float], verdict: str) -> None:
    runs = [(data, number, 5.0 + off.get((data, number), 0.0)) for number in range(3) for data in inputs.CLASSES]
    base = {metric: 5.0 for metric in metrics.HARDWARE}
    often = [Count("attn", "shape", data, ("kernel",), {**base, EXACT: value}) for data, _, value in runs]
    _, patched = subject_runs(5)
    assert judged(often, patched).verdict == verdict


def test_the_kernels_of_a_call_are_counted_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call once, every kernel by itself: a difference in one is no other's."""
    shape = Shape(1, 1, 1, 64, 64, 64, "float16", False)

    def subject(name: str, call: str = "") -> Subject:
        own = Subject(name, lambda *_: (), nullcontext, (name,), (shape,), classes=CLASSES)
        whole = Subject(call, lambda *_: (), nullcontext, (name,), (shape,), classes=CLASSES)
        return replace(own, whole=lambda: whole) if call else own

    right_controls(monkeypatch, {"loop_bound": controls.CAUGHT})
    asked: list[Request] = []

    def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
        asked.append(request)
        found = []
        for call, data in request.subjects.items():
            for name, chosen in product(request.parts[call], data):
                value = 6.0 if (name, chosen) == ("dv", "zeros") else 5.0
                found.append(Count(name, "shape", chosen, ("kernel",), dict.fromkeys(request.metrics, value)))
        return found

    counted_by(monkeypatch, measure)
    some = [subject("fwd"), subject("dk", "dk dv"), subject("dv", "dk dv")]
    results = counters.run(some, True, lambda *_: None)
    assert [(result.subject, result.verdict) for result in results] == [("fwd", PASS), ("dk", PASS), ("dv", FAIL)]
    for request in asked:
        assert list(request.subjects) == ["fwd", "dk"] and request.parts == {"fwd": ("fwd",), "dk": ("dk", "dv")}


@pytest.mark.parametrize("quick", [True, False])
def test_the_hardware_counts_on_all_shapes_and_patched_code_on_one(
    quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = tuple(Shape(1, 1, 1, seqlen, seqlen, 64, "float16", False) for seqlen in (64, 65, 66, 67))
    subject = Subject("fwd", lambda *_: (), nullcontext, ("fwd",), shapes, cubin_sha256="1f")
    right_controls(monkeypatch, {})
    asked: list[tuple[tuple[str, ...], int]] = []

    def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
        asked.append((request.metrics, request.shapes))
        values = dict.fromkeys(request.metrics, 5.0)
        made = product(map(str, range(request.shapes)), request.subjects["fwd"])
        return [Count("fwd", label, data, ("k",), values) for label, data in made]

    counted_by(monkeypatch, measure)
    (result,) = counters.run([subject], quick, lambda *_: None)
    assert asked == [(metrics.HARDWARE, 2 if quick else 4), (metrics.PATCHED, 1)]
    assert result.figures["time: classes (A/A)"] == "0.0 (0.0) %"
    assert result.figures["shapes"] == asked[0][1] and list(result.figures["counted once"]) == ["0"]
