"""Nsight Compute for the gate counters, without a GPU: what is read, what is missing, and why it did not run."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from dhp_safe_fa.gates import tools
from dhp_safe_fa.gates.counters import counted, metrics
from dhp_safe_fa.gates.counters import ncu as counters_ncu
from dhp_safe_fa.gates.counters.calls import Calls
from dhp_safe_fa.gates.counters.counting import Count, Request, Step

EXACT = "idc__requests.sum"


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


REQUEST = Request(metrics.PATCHED, {"attn": ("zeros",)}, 1)


def test_ncu_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cells = ["1,234 (FFMA: 1,234)", "39,000 (FFMA: 39,000)"]
    text = ncu_log(list(metrics.PATCHED), [("dhp:0:", "kernel", cells)])
    steps = [{"name": "attn", "label": "shape", "data": "zeros", "launches": []}]
    body = f"log.write_text({text!r})\nPath(request['steps']).write_text({json.dumps(steps)!r})\nprint('1 attn')\n"
    body += f"assert '{','.join(metrics.PATCHED)}' in argv and request['subjects'] == {{'attn': ['zeros']}}\n"
    options = {"replay-mode": "kernel", "cache-control": "none", "profile-from-start": "off"}
    for option, value in {**options, "print-metric-instances": "details"}.items():
        body += f"assert argv[argv.index('--{option}') + 1] == '{value}'\n"
    ncu = fake_ncu(tmp_path, body)
    monkeypatch.setattr(counters_ncu, "find_ncu", lambda: ncu)
    told: list[tuple[int, str]] = []
    assert counters_ncu.measure(REQUEST, lambda done, what: told.append((done, what))) == [
        Count(
            "attn",
            "shape",
            "zeros",
            ("kernel",),
            {
                metrics.OPCODES: 1234,
                f"{metrics.OPCODES}:FFMA": 1234,
                metrics.GUARDS: 39_000,
                f"{metrics.GUARDS}:FFMA": 39_000,
            },
        )
    ]
    assert told == [(1, "attn")]


def test_only_calls_are_in_ranges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler is on while the calls of a shape are made, but not while their inputs are."""
    said: list[str] = []

    def calls_of(request: Request) -> Iterator[Calls]:
        for label in ("s0", "s1"):
            said.append("inputs")
            data = request.subjects["attn"]
            yield Calls("attn", label, data, said.append, lambda: said.append("call"), [("attn", "kernel")])

    class Cold:
        def make(self) -> None:
            said.append("cold")

    monkeypatch.setattr(counted, "calls_of", calls_of)
    monkeypatch.setattr(counted, "Cold", Cold)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: said.append("on"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: said.append("off"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("end"))
    monkeypatch.setattr(torch, "set_grad_enabled", lambda _: None)
    path, steps = tmp_path / "request", tmp_path / "steps"
    path.write_text(json.dumps({**asdict(REQUEST), "steps": str(steps)}))
    counted.main(path)
    for number, begins in enumerate((0, 8)):
        assert said[begins : begins + 8] == [
            "inputs", "on", "zeros", "cold", f"dhp:{number}:", "call", "end", "off"
        ]  # fmt: skip
    assert [Step(**one) for one in json.loads(steps.read_text())] == [
        Step("attn", label, "zeros", [["attn", "kernel"]]) for label in ("s0", "s1")
    ]


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
