"""Nsight Compute for the gate counters, without a GPU: what is read, what is missing, and why it did not run."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from dhp_safe_fa.gates import controls, tools
from dhp_safe_fa.gates.counters import metrics, study
from dhp_safe_fa.gates.counters import ncu as counters_ncu
from dhp_safe_fa.gates.counters.ncu import Count, Request

EXACT = "smsp__thread_inst_executed_pred_on.sum"


def ncu_log(metrics: list[str], rows: list[tuple[str, str, list[str]]]) -> str:
    """What ncu writes: rows of (NVTX message, kernel, cells)."""
    out = io.StringIO()
    writer = csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n")
    writer.writerow(["ID", counters_ncu._NVTX, "Kernel Name", "device__attribute_chip", *metrics])
    writer.writerow([""] * (4 + len(metrics)))
    for number, (message, kernel, cells) in enumerate(rows):
        writer.writerow([number, f'1  "<default domain>:{message}:none:none:none"', kernel, "384", *cells])
    return f"==PROF== Connected to process 1 (/usr/bin/python3)\n{out.getvalue()}==PROF== Disconnected\n"


# ---- reading what ncu says -------------------------------------------------------------------------------------------


def test_rows_are_read() -> None:
    log = ncu_log(
        [metrics.OPCODES, metrics.REGISTERS, metrics.TIME],
        [("dhp:12:", "attn", ["1,096 (FFMA: 1,000; MUFU.EX2: 96)", "165 (0: 165)", "2,528.5"])],
    )
    ((number, kernel, values),) = counters_ncu.read_rows(log, [metrics.OPCODES, metrics.REGISTERS, metrics.TIME])
    assert (number, kernel) == (12, "attn")
    assert values == {
        metrics.OPCODES: 1096,
        f"{metrics.OPCODES}:FFMA": 1000,
        f"{metrics.OPCODES}:MUFU.EX2": 96,
        metrics.REGISTERS: 165,
        metrics.TIME: 2528.5,
    }


def test_a_cell_may_list_every_instruction() -> None:
    """Of a kernel of 20,000, where each has an address of its own."""
    cell = f"40,000 ({'; '.join(f'{140_000_000_000_000 + 16 * at}: 2' for at in range(20_000))})"
    ((_, _, values),) = counters_ncu.read_rows(ncu_log([EXACT], [("dhp:0:", "attn", [cell])]), [EXACT])
    assert values == {EXACT: 40_000}


@pytest.mark.parametrize(("metrics", "wanted"), [(metrics.CHEAP, "none"), (metrics.COSTLY, "details")])
def test_instances_are_asked_for_where_they_are_opcodes(metrics: tuple[str, ...], wanted: str) -> None:
    command = counters_ncu._command(Path("ncu"), Request(metrics, {}, 1), Path("folder"))
    assert command[command.index("--print-metric-instances") + 1] == wanted


def test_nothing_counted_is_no_row() -> None:
    assert counters_ncu.read_rows("==WARNING== No kernels were profiled.\n", [EXACT]) == []


@pytest.mark.parametrize(
    ("metrics", "message", "cell", "cause"),
    [
        ([EXACT, "no__such.sum"], "dhp:0:", "1", r"ncu does not know no__such\.sum"),
        ([EXACT], "something else", "1", "outside of every NVTX range"),
        ([EXACT], "dhp:0:", "n/a", f"'n/a' for {EXACT}"),
        ([EXACT], "dhp:0:", "nan", f"'nan' for {EXACT}"),
        ([EXACT], "dhp:0:", "", f"'' for {EXACT}"),
    ],
)
def test_unreadable_rows(metrics: list[str], message: str, cell: str, cause: str) -> None:
    with pytest.raises(tools.NotRun, match=cause):
        counters_ncu.read_rows(ncu_log([EXACT], [(message, "attn", [cell])]), metrics)


@pytest.mark.parametrize("cell", ["", "0", "1,096", "1,096 ()", "1,096 (0: 1,096)", "1,096 (FFMA: 1,000)"])
def test_counts_of_opcodes_make_up_their_total(cell: str) -> None:
    log = ncu_log([metrics.OPCODES], [("dhp:0:", "attn", [cell])])
    with pytest.raises(tools.NotRun, match=r"make up the total|a number is expected"):
        counters_ncu.read_rows(log, [metrics.OPCODES])


@pytest.mark.parametrize(
    ("left_out", "cause"),
    [
        (lambda one: one.label == "other shape", "all calls of attn: 2 of 4"),
        (lambda one: one.label == "other shape" and one.data == "normal", "all calls of attn: 3 of 4"),
        (lambda one: one.label == "leak", "all calls of loop_bound: 1 of 2"),
        (lambda one: one.name == "attn", "all calls of attn: 0 of 4"),
    ],
)
def test_a_call_that_is_missing_is_no_equal_one(left_out: Callable[[Count], bool], cause: str) -> None:
    request = Request((EXACT,), {"attn": ("zeros", "normal")}, 2, ("loop_bound",), ("zeros",))
    shapes = product(("shape", "other shape"), request.subjects["attn"])
    all_calls = [Count("attn", label, data, ("kernel",), {EXACT: 5}) for label, data in shapes]
    all_calls += [Count("loop_bound", twin, "zeros", ("kernel",), {EXACT: 5}) for twin in controls.TWINS]
    assert request.calls == len(all_calls)
    counters_ncu.require_complete(request, all_calls)
    with pytest.raises(tools.NotRun, match=cause):
        counters_ncu.require_complete(request, [one for one in all_calls if not left_out(one)])


def test_kernels_of_one_call_are_combined() -> None:
    step = {"name": "sdpa-cudnn", "label": "shape", "data": "zeros"}
    rows = [
        (0, "first", {EXACT: 3.0, metrics.REGISTERS: 100.0, f"{metrics.OPCODES}:FFMA": 1.0}),
        (0, "second", {EXACT: 4.0, metrics.REGISTERS: 64.0, f"{metrics.OPCODES}:FFMA": 2.0}),
    ]
    (count,) = counters_ncu.combine([step], rows)
    assert count.kernels == ("first", "second")
    assert count.values == {EXACT: 7, metrics.REGISTERS: 100, f"{metrics.OPCODES}:FFMA": 3}


# Of three launches two are of one function.
LAUNCHES = [["delta_64", "delta"], ["dk_64", "bwd"], ["dv_64", "bwd"]]


def launched(number: int, *entries: str) -> list[tuple[int, str, dict[str, float]]]:
    return [(number, entry, {EXACT: 3.0 + at}) for at, entry in enumerate(entries)]


def test_each_kernel_of_a_planned_call_is_counted_alone() -> None:
    step = {"name": "dk_64", "label": "shape", "data": "zeros", "launches": LAUNCHES}
    counts = counters_ncu.combine([step], launched(0, "delta", "bwd", "bwd"))
    assert [(count.name, count.values) for count in counts] == [
        ("delta_64", {EXACT: 3}), ("dk_64", {EXACT: 4}), ("dv_64", {EXACT: 5})
    ]  # fmt: skip
    assert {count.kernels for count in counts} == {("delta", "bwd", "bwd")}


def test_a_kernel_of_two_calls_is_counted_in_its_own() -> None:
    steps = [
        {"name": "dk_64", "label": "shape", "data": "zeros", "launches": LAUNCHES},
        {"name": "all_64", "label": "shape", "data": "zeros", "launches": [LAUNCHES[0], ["all_64", "bwd"]]},
    ]
    request = Request(
        (EXACT,),
        {"dk_64": ("zeros",), "all_64": ("zeros",)},
        1,
        parts={"dk_64": ("dk_64", "dv_64"), "all_64": ("all_64", "delta_64")},
    )
    rows = [*launched(0, "delta", "bwd", "bwd"), *launched(1, "delta", "bwd")]
    counts = counters_ncu.combine(steps, rows, request.parts)
    assert [count.name for count in counts] == ["dk_64", "dv_64", "delta_64", "all_64"]
    counters_ncu.require_complete(request, counts)
    with pytest.raises(tools.NotRun, match="all calls of delta_64: 2 of 1"):
        counters_ncu.require_complete(request, counters_ncu.combine(steps, rows))


def test_data_that_decide_what_a_planned_call_launches_are_found() -> None:
    """In every kernel of the call: nobody can tell what was left out."""
    steps = [{"name": "dk_64", "label": "shape", "data": data, "launches": LAUNCHES} for data in ("a", "a", "b")]
    rows = [*launched(0, "delta", "bwd", "bwd"), *launched(1, "delta", "bwd", "bwd"), *launched(2, "delta", "bwd")]
    counts = counters_ncu.combine(steps, rows)
    assert [count.values for count in counts if count.data == "b"] == [{}, {}, {}]
    for name in ("delta_64", "dk_64", "dv_64"):
        assert study.findings(study.study([count for count in counts if count.name == name]), {})


@pytest.mark.parametrize("entries", [("delta", "bwd"), ("bwd", "delta", "bwd"), ("delta", "bwd", "bwd", "bwd")])
def test_another_plan_than_what_ran_is_not_run(entries: tuple[str, ...]) -> None:
    step = {"name": "dk_64", "label": "shape", "data": "zeros", "launches": LAUNCHES}
    with pytest.raises(tools.NotRun, match=r"call of delta_64 \(shape\) launched .*, which is not what was planned"):
        counters_ncu.combine([step], launched(0, *entries))


def test_a_kernel_of_a_call_that_was_not_counted_is_missed() -> None:
    request = Request((EXACT,), {"dk_64": ("zeros",)}, 1, parts={"dk_64": ("dk_64", "delta_64")})
    counts = [Count(name, "shape", "zeros", ("kernel",), {EXACT: 5}) for name in ("dk_64", "delta_64")]
    counters_ncu.require_complete(request, counts)
    with pytest.raises(tools.NotRun, match="all calls of delta_64: 0 of 1"):
        counters_ncu.require_complete(request, counts[:1])


def test_a_row_of_no_call_is_not_run() -> None:
    step = {"name": "attn", "label": "shape", "data": "zeros"}
    with pytest.raises(tools.NotRun, match="range 1, where 1 calls were made"):
        counters_ncu.combine([step], [(0, "attn", {EXACT: 3.0}), (1, "attn", {EXACT: 3.0})])


def test_a_call_that_was_not_counted_is_not_run() -> None:
    with pytest.raises(tools.NotRun, match=r"no kernel of bank_conflict \(leak, zeros\)"):
        counters_ncu.combine([{"name": "bank_conflict", "label": "leak", "data": "zeros"}], [])


# ---- running ncu: one that is made of Python -------------------------------------------------------------------------


def fake_ncu(folder: Path, body: str) -> Path:
    """A program that is called like ncu; body has argv, log (a path) and request (the content of the request)."""
    path = folder / "ncu"
    path.write_text(
        f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\nargv = sys.argv\n"
        "log = Path(argv[argv.index('--log-file') + 1])\nrequest = json.loads(Path(argv[-1]).read_text())\n" + body
    )
    path.chmod(0o755)
    return path


REQUEST = Request((EXACT,), {"attn": ("zeros",)}, 1)


@pytest.mark.parametrize(
    ("application_replay", "mode", "caches"), [(False, "kernel", "all"), (True, "application", "none")]
)
def test_ncu_is_run(
    application_replay: bool, mode: str, caches: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = ncu_log([EXACT], [("dhp:0:", "kernel", ["1,234"])])
    steps = [{"name": "attn", "label": "shape", "data": "zeros"}]
    body = f"log.write_text({text!r})\nPath(request['steps']).write_text({json.dumps(steps)!r})\nprint('1 attn')\n"
    body += f"assert '{EXACT}' in argv and request['subjects'] == {{'attn': ['zeros']}}\n"
    for option, value in (("replay-mode", mode), ("cache-control", caches), ("profile-from-start", "off")):
        body += f"assert argv[argv.index('--{option}') + 1] == '{value}'\n"
    ncu = fake_ncu(tmp_path, body)
    monkeypatch.setattr(counters_ncu, "find_ncu", lambda: ncu)
    told: list[tuple[int, str]] = []
    request = replace(REQUEST, application_replay=application_replay)
    assert counters_ncu.measure(request, lambda done, what: told.append((done, what))) == [
        Count("attn", "shape", "zeros", ("kernel",), {EXACT: 1234})
    ]
    assert told == [(1, "attn")]


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ("log.write_text('==ERROR== ERR_NVGPUCTRPERM - The user does not have permission')\nsys.exit(1)", "permission"),
        ("log.write_text('==ERROR== Failed to find metric x')\nsys.exit(1)", "ncu failed: Failed to find metric x"),
        ("print('Traceback\\nRuntimeError: no', file=sys.stderr)\nsys.exit(3)", "ncu failed: RuntimeError: no"),
        ("sys.exit(3)", "ncu failed: exit code 3"),
        ("pass", "ncu failed: exit code 0"),
    ],
)
def test_ncu_fails(body: str, cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ncu = fake_ncu(tmp_path, body)
    monkeypatch.setattr(counters_ncu, "find_ncu", lambda: ncu)
    with pytest.raises(tools.NotRun, match=cause):
        counters_ncu.measure(REQUEST, lambda done, what: None)


def test_without_ncu_it_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "_candidates", lambda name: iter(()))
    monkeypatch.setattr(counters_ncu, "INSTALLED", tmp_path)
    with pytest.raises(tools.NotRun, match="Nsight Compute"):
        counters_ncu.find_ncu()
    own = tmp_path / "2025.3.1" / "ncu"
    own.parent.mkdir()
    own.touch()
    assert counters_ncu.find_ncu() == own
