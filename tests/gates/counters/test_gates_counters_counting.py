"""What was counted in which call, without a GPU: kernels told apart, and calls that are missing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest

from dhp_safe_fa.gates import controls, tools
from dhp_safe_fa.gates.counters import metrics, study
from dhp_safe_fa.gates.counters.counting import Count, Request, Row, Step, combine, require_complete

EXACT = "idc__requests.sum"


@pytest.mark.parametrize(
    ("left_out", "cause"),
    [
        (lambda one: one.label == "other shape", "all calls of attn were counted: 2 of 4"),
        (lambda one: one.label == "other shape" and one.data == "normal", "all calls of attn were counted: 3 of 4"),
        (lambda one: one.label == "leak", "all calls of loop_bound were counted: 1 of 2"),
        (lambda one: one.name == "attn", "all calls of attn were counted: 0 of 4"),
    ],
)
def test_a_call_that_is_missing_is_no_equal_one(left_out: Callable[[Count], bool], cause: str) -> None:
    request = Request((EXACT,), {"attn": ("zeros", "normal")}, 2, ("loop_bound",), ("zeros",))
    shapes = product(("shape", "other shape"), request.subjects["attn"])
    all_calls = [Count("attn", label, data, ("kernel",), {EXACT: 5}) for label, data in shapes]
    all_calls += [Count("loop_bound", twin, "zeros", ("kernel",), {EXACT: 5}) for twin in controls.TWINS]
    assert request.calls == len(all_calls)
    require_complete(request, all_calls)
    with pytest.raises(tools.NotRun, match=cause):
        require_complete(request, [one for one in all_calls if not left_out(one)])


def test_kernels_of_one_call_are_combined() -> None:
    step = Step("sdpa-cudnn", "shape", "zeros")
    rows: list[Row] = [
        (0, "first", {EXACT: 3.0, metrics.REGISTERS: 100.0, f"{metrics.OPCODES}:FFMA": 1.0}),
        (0, "second", {EXACT: 4.0, metrics.REGISTERS: 64.0, f"{metrics.OPCODES}:FFMA": 2.0}),
    ]
    (count,) = combine([step], rows)
    assert count.kernels == ("first", "second")
    assert count.values == {EXACT: 7, metrics.REGISTERS: 100, f"{metrics.OPCODES}:FFMA": 3}


# Of three launches two are of one function.
LAUNCHES = [["delta_64", "delta"], ["dk_64", "bwd"], ["dv_64", "bwd"]]


def launched(number: int, *entries: str) -> list[Row]:
    return [(number, entry, {EXACT: 3.0 + at}) for at, entry in enumerate(entries)]


def test_each_kernel_of_a_planned_call_is_counted_alone() -> None:
    step = Step("dk_64", "shape", "zeros", LAUNCHES)
    counts = combine([step], launched(0, "delta", "bwd", "bwd"))
    assert [(count.name, count.values) for count in counts] == [
        ("delta_64", {EXACT: 3}), ("dk_64", {EXACT: 4}), ("dv_64", {EXACT: 5})
    ]  # fmt: skip
    assert {count.kernels for count in counts} == {("delta", "bwd", "bwd")}


def test_a_kernel_of_two_calls_is_counted_in_its_own() -> None:
    steps = [
        Step("dk_64", "shape", "zeros", LAUNCHES),
        Step("all_64", "shape", "zeros", [LAUNCHES[0], ["all_64", "bwd"]]),
    ]
    request = Request(
        (EXACT,),
        {"dk_64": ("zeros",), "all_64": ("zeros",)},
        1,
        parts={"dk_64": ("dk_64", "dv_64"), "all_64": ("all_64", "delta_64")},
    )
    rows = [*launched(0, "delta", "bwd", "bwd"), *launched(1, "delta", "bwd")]
    counts = combine(steps, rows, request.parts)
    assert [count.name for count in counts] == ["dk_64", "dv_64", "delta_64", "all_64"]
    require_complete(request, counts)
    with pytest.raises(tools.NotRun, match="all calls of delta_64 were counted: 2 of 1"):
        require_complete(request, combine(steps, rows))


def test_data_that_decide_what_a_planned_call_launches_are_found() -> None:
    """In every kernel of the call: nobody can tell what was left out."""
    steps = [Step("dk_64", "shape", data, LAUNCHES) for data in ("a", "a", "b")]
    rows = [*launched(0, "delta", "bwd", "bwd"), *launched(1, "delta", "bwd", "bwd"), *launched(2, "delta", "bwd")]
    counts = combine(steps, rows)
    assert [count.values for count in counts if count.data == "b"] == [{}, {}, {}]
    for name in ("delta_64", "dk_64", "dv_64"):
        assert study.findings(study.study([count for count in counts if count.name == name]), {})


@pytest.mark.parametrize("entries", [("delta", "bwd"), ("bwd", "delta", "bwd"), ("delta", "bwd", "bwd", "bwd")])
def test_another_plan_than_what_ran_is_not_run(entries: tuple[str, ...]) -> None:
    step = Step("dk_64", "shape", "zeros", LAUNCHES)
    with pytest.raises(tools.NotRun, match=r"call of delta_64 \(shape\) launched .*, which is not what was planned"):
        combine([step], launched(0, *entries))


def test_a_kernel_of_a_call_that_was_not_counted_is_missed() -> None:
    request = Request((EXACT,), {"dk_64": ("zeros",)}, 1, parts={"dk_64": ("dk_64", "delta_64")})
    counts = [Count(name, "shape", "zeros", ("kernel",), {EXACT: 5}) for name in ("dk_64", "delta_64")]
    require_complete(request, counts)
    with pytest.raises(tools.NotRun, match="all calls of delta_64 were counted: 0 of 1"):
        require_complete(request, counts[:1])


def test_a_row_of_no_call_is_not_run() -> None:
    step = Step("attn", "shape", "zeros")
    with pytest.raises(tools.NotRun, match="call 1, where 1 calls were made"):
        combine([step], [(0, "attn", {EXACT: 3.0}), (1, "attn", {EXACT: 3.0})])


def test_a_call_that_was_not_counted_is_not_run() -> None:
    with pytest.raises(tools.NotRun, match=r"no kernel of bank_conflict was counted \(leak, zeros\)"):
        combine([Step("bank_conflict", "leak", "zeros")], [])
