"""Looking again: what chance does is outvoted, and a leak is not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from without_gpu import EXACT, WITHIN, counted_by, right_controls

from dhp_safe_fa.gates import controls
from dhp_safe_fa.gates.counters import gate as counters
from dhp_safe_fa.gates.counters import looks as looks_again
from dhp_safe_fa.gates.counters import metrics
from dhp_safe_fa.gates.counters.counting import Count, Request
from dhp_safe_fa.gates.inputs import Shape
from dhp_safe_fa.gates.subjects import Subject
from dhp_safe_fa.gates.verdict import FAIL, INVALID, PASS, GateResult


@pytest.mark.parametrize(
    ("metric", "off", "verdict"),
    [
        (EXACT, {}, PASS),
        (EXACT, {1: "ascending"}, PASS),
        (EXACT, {1: "ascending", 2: "large"}, PASS),  # chance, twice
        (EXACT, {1: "ascending", 2: "ascending", 3: "ascending"}, FAIL),
        (EXACT, {1: "large", 2: "ascending", 3: "ascending"}, FAIL),  # a leak that the first look saw elsewhere
        (WITHIN, {1: "ascending"}, PASS),
        (WITHIN, {1: "ascending", 2: "ascending", 3: "ascending"}, FAIL),
        (metrics.INSTRUCTIONS, {1: "ascending"}, FAIL),
    ],
)
def test_a_rare_event_is_outvoted_and_a_leak_is_not(
    metric: str, off: dict[int, str], verdict: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """off: in which look which class has one more. Chance is given two more looks, and none if it is none."""
    subject = Subject("fwd", lambda *_: (), nullcontext, ("fwd",), (Shape(1, 1, 1, 64, 64, 64, "float16", False),))
    right_controls(monkeypatch, {})
    asked: list[Request] = []

    def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
        if set(request.metrics) <= set(metrics.HARDWARE):
            asked.append(request)
        found = []
        for data in request.subjects["fwd"]:
            values = {one: 5.0 + (one == metric and data == off.get(len(asked))) for one in request.metrics}
            found.append(Count("fwd", "shape", data, ("kernel",), values))
        return found

    counted_by(monkeypatch, measure)
    (result,) = counters.run([subject], True, lambda *_: None)
    looks = 1 if metric == metrics.INSTRUCTIONS else min(len(off), 2) + 1
    assert (result.verdict, len(asked), result.figures["looks"]) == (verdict, looks, looks)
    assert len(result.figures["in doubt"]) == looks - 1
    for again in asked[1:]:
        assert not again.controls and again.parts == {"fwd": ("fwd",)}
        assert set(again.metrics) == {metrics.INSTRUCTIONS, metric}, "what was in no doubt is not counted again"
    few, many = looks_again.LOOKS_AGAIN
    if looks > 1:
        assert Counter(asked[1].subjects["fwd"]) == {
            one: few * n for one, n in Counter(asked[0].subjects["fwd"]).items()
        }
    if looks > 2:
        assert Counter(asked[2].subjects["fwd"]) == dict.fromkeys(("zeros", "normal", off[2]), many)


REQUESTS = "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum"
Event = Callable[[int, str, str, int], float]  # look, shape, class, which run of it


def looked_at_with(
    event: Event, monkeypatch: pytest.MonkeyPatch, of: str = EXACT, others_in_look: int = 0
) -> GateResult:
    """A kernel on two shapes, of which one metric has 500 and so much more. others_in_look: where it launches others
    once."""
    shapes = tuple(Shape(1, 1, 1, seqlen, seqlen, 64, "float16", False) for seqlen in (64, 65))
    right_controls(monkeypatch, {})
    looks = 0

    def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
        nonlocal looks
        looks += of in request.metrics
        found = []
        for shape in request.labels.get("fwd", ("s0", "s1")[: request.shapes]):
            seen: Counter[str] = Counter()
            for data in request.subjects["fwd"]:
                more = event(looks, shape, data, seen[data])
                values = {metric: 500 + (metric == of) * more for metric in request.metrics}
                is_other = (looks, data, seen[data]) == (others_in_look, "normal", 0) and of in request.metrics
                found.append(Count("fwd", shape, data, ("other",) if is_other else ("k",), values))
                seen[data] += 1
        return found

    counted_by(monkeypatch, measure)
    (result,) = counters.run([Subject("fwd", lambda *_: (), nullcontext, ("fwd",), shapes)], True, lambda *_: None)
    return result


@pytest.mark.parametrize(
    "event",
    [
        lambda look, shape, data, run: 0,
        lambda look, shape, data, run: look == 2 and data == "Inf rows" and run < 2,
        lambda look, shape, data, run: 2 * (look == 3 and data == "zeros" and run < 2),
        lambda look, shape, data, run: (look == 3 and data == "zeros") * (1, -1, 0)[min(run, 2)],
        lambda look, shape, data, run: look == 2 and shape == "s0" and run == 0,
        lambda look, shape, data, run: look == 1 and shape == "s0" and (data, run) == ("zeros", 1),
    ],
    ids=["none", "another class is as far apart", "twice", "either way", "on one shape", "in a pair"],
)
@pytest.mark.parametrize("leak", [0, 1])
@pytest.mark.parametrize("of", [EXACT, REQUESTS])
def test_events_hide_no_leak_and_are_none(of: str, event: Event, leak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def values(look: int, shape: str, data: str, run: int) -> float:
        return leak * (data == "large") + event(look, shape, data, run)

    result = looked_at_with(values, monkeypatch, of)
    assert result.verdict == (FAIL if leak else PASS), result.problems


@pytest.mark.parametrize("of", [EXACT, REQUESTS])
@pytest.mark.parametrize("look", [1, 2, 3])
def test_other_kernels_are_found_in_whichever_look(look: int, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice there are events, and the third look acquits."""

    def values(look: int, shape: str, data: str, run: int) -> float:
        return (look, data) in ((1, "large"), (2, "large"))

    assert looked_at_with(values, monkeypatch, of).verdict == PASS
    result = looked_at_with(values, monkeypatch, of, others_in_look=look)
    assert (result.verdict, result.figures["looks"]) == (FAIL, 3)
    assert "launches other kernels" in result.problems[0]


@pytest.mark.parametrize("varies", [("s0",), ("s0", "s1")])
def test_only_where_a_metric_varies_it_is_counted_again(
    varies: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On one shape a class has an event, which nothing tells from a leak; on the other perhaps one of a pair, which A/A
    explains: but not if the next look shows none elsewhere."""
    seen: dict[int, set[str]] = {}

    def values(look: int, shape: str, data: str, run: int) -> float:
        seen.setdefault(look, set()).add(shape)
        return look == 1 and (shape, data, run) in (("s0", "large", 0), *((shape, "zeros", 1) for shape in varies[1:]))

    assert looked_at_with(values, monkeypatch).verdict == PASS
    assert seen == {1: {"s0", "s1"}, 2: {*varies}}


@pytest.mark.parametrize("of", [EXACT, REQUESTS])
@pytest.mark.parametrize("often", [0.02, 0.1, 0.25, 0.5])
def test_an_event_is_no_finding_however_often_it_comes(often: float, of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    found = [looked_at_with(lambda *_: rng.random() < often, monkeypatch, of) for _ in range(30)]
    assert sum(result.verdict == FAIL for result in found) <= 1
    assert often < 0.1 or max(result.figures["looks"] for result in found) == 3


def test_a_leak_in_most_runs_of_a_class_is_found_among_rare_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the looks before have not acquitted the class, by chance."""
    rng = np.random.default_rng(0)

    def values(look: int, shape: str, data: str, run: int) -> float:
        return rng.random() < (0.75 if look == 3 else 1) if data == "ascending" else rng.random() < 0.1

    assert all(looked_at_with(values, monkeypatch).verdict == FAIL for _ in range(30))


Values = Callable[[int, str, str, str], float | None]  # look, kernel, class, metric; none if the call launches others


def looked_at(times: int, values: Values, monkeypatch: pytest.MonkeyPatch) -> dict[str, GateResult]:
    """Two kernels of one call, dk and dv, of which what `values` says is counted, in so many looks."""
    shape = Shape(1, 1, 1, 64, 64, 64, "float16", False)
    whole = Subject("dk dv", lambda *_: (), nullcontext, ("dk", "dv"), (shape,))
    some = [Subject(name, lambda *_: (), nullcontext, (name,), (shape,), whole=lambda: whole) for name in ("dk", "dv")]
    right_controls(monkeypatch, {})
    looks = 0

    def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
        nonlocal looks
        looks += set(request.metrics) <= set(metrics.HARDWARE)
        found = []
        for data, name in product(request.subjects["dk"], ("dk", "dv")):
            told = {one: values(looks, name, data, one) for one in request.metrics}
            counted = {one: value for one, value in told.items() if value is not None}
            found.append(Count(name, "shape", data, ("k",) if counted else ("other",), counted))
        return found

    counted_by(monkeypatch, measure)
    results = counters.run(some, True, lambda *_: None)
    assert looks == times
    return {result.subject: result for result in results}


@pytest.mark.parametrize("leak", [0, 1, 3])
def test_what_differs_between_the_looks_hides_no_leak(leak: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another look counts other metrics, in other passes: all of its counts may lie elsewhere."""

    def values(look: int, name: str, data: str, metric: str) -> float:
        event = (look, name, data) == (1, "dk", "large") or (leak and data == "ascending")
        return 500 + (metric == EXACT) * (3 * (look == 2) + (leak or 1) * bool(event))

    found = looked_at(3 if leak else 2, values, monkeypatch)
    verdicts = {name: result.verdict for name, result in found.items()}
    assert verdicts == ({"dk": FAIL, "dv": FAIL} if leak else {"dk": PASS, "dv": PASS})


def test_who_is_in_no_doubt_is_judged_by_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(look: int, name: str, data: str, metric: str) -> float:
        first = (look, name, data) == (1, "dk", "ascending")
        second = (look, name, data) == (2, "dv", "ascending")
        return 5 + (metric == EXACT) * (first or second)

    found = looked_at(2, values, monkeypatch)
    assert {name: (result.verdict, result.figures["looks"]) for name, result in found.items()} == {
        "dk": (PASS, 2),
        "dv": (PASS, 1),
    }


def test_other_kernels_in_another_look_speak_against_all_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(look: int, name: str, data: str, metric: str) -> float | None:
        if (look, data) == (2, "NaN rows"):
            return None
        return 5 + ((look, name, data, metric) == (1, "dk", "ascending", EXACT))

    assert {result.verdict for result in looked_at(2, values, monkeypatch).values()} == {FAIL}


def test_instructions_are_counted_in_both_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    def values(look: int, name: str, data: str, metric: str) -> float:
        first = (look, name, data, metric) == (1, "dk", "ascending", EXACT)
        return 5 + (first or (look, name, data, metric) == (2, "dk", "ascending", metrics.INSTRUCTIONS))

    found = looked_at(2, values, monkeypatch)
    assert (found["dk"].verdict, found["dv"].verdict) == (FAIL, PASS)
    assert any(metrics.INSTRUCTIONS in problem for problem in found["dk"].problems)


@pytest.mark.parametrize(
    ("twin_off", "metric", "comes", "is_seen", "verdict", "looks"),
    [
        ("clean", EXACT, 1, True, PASS, 2),
        ("clean", EXACT, 2, True, PASS, 3),
        ("clean", EXACT, 3, True, INVALID, 3),
        ("clean", WITHIN, 1, True, PASS, 2),
        ("clean", WITHIN, 3, True, INVALID, 3),
        ("clean", metrics.INSTRUCTIONS, 1, True, INVALID, 1),
        ("clean", EXACT, 1, False, INVALID, 2),  # a leak that was missed has no second chance
        ("clean", EXACT, 2, False, INVALID, 3),
        ("blind", EXACT, 1, True, PASS, 2),
        ("blind", EXACT, 3, True, INVALID, 3),
    ],
)
def test_a_rare_event_in_a_control_makes_no_run_invalid(
    twin_off: str,
    metric: str,
    comes: int,
    is_seen: bool,
    verdict: str,
    looks: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three controls, two caught by their instructions (one of them in the second look alone, if not is_seen) and one
    seen by nobody. Of one a twin that should not be seen differs in so many looks."""
    shape = Shape(1, 1, 1, 64, 64, 64, "float16", False)
    subject = Subject("fwd", lambda *_: (), nullcontext, ("fwd",), (shape,))
    expected = {"loop_bound": controls.CAUGHT, "spin_loop": controls.CAUGHT, "clock_read": controls.BLIND}
    off = ("clock_read", "leak") if twin_off == "blind" else ("spin_loop", "clean")
    monkeypatch.setattr(controls, "load_controls", lambda tell: SimpleNamespace(expected_of=lambda gate: expected))
    asked: list[Request] = []

    def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
        asked.append(request)
        base = dict.fromkeys(request.metrics, 500.0)
        found = [Count("fwd", "shape", data, ("k",), base) for data in request.subjects.get("fwd", ())]
        for name, twin, data in product(request.controls, controls.TWINS, request.control_data):
            values = dict(base)
            is_caught = name == "loop_bound" or (name == "spin_loop" and (is_seen or len(asked) > 1))
            if is_caught and twin == "leak" and data == "ascending":
                values[metrics.INSTRUCTIONS] = 600.0
            is_off = (name, twin, data) == (*off, "large") and max(1, len(asked) - 1) <= comes  # 2: by patched code
            if is_off and metric in request.metrics:
                values[metric] = 900.0
            found.append(Count(name, twin, data, ("k",), values))
        return found

    counted_by(monkeypatch, measure)
    (result,) = counters.run([subject], True, lambda *_: None)
    assert result.verdict == verdict
    assert len(asked) == looks + 1  # and by patched code
    for again, times in zip(asked[2:], looks_again.LOOKS_AGAIN, strict=False):
        assert again.controls == off[:1] and not again.subjects, "nobody else is counted again"
        assert result.figures["controls in doubt at first"] == {off[0]: [metric]}
        assert set(again.metrics) == {metrics.INSTRUCTIONS, metric}
        assert Counter(again.control_data)["large"] == times
