"""Counts of each opcode, by code that Nsight Compute patches: starts it over the launches of ``counted.py``."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from .. import tools
from ..tools import NotRun
from .counting import Count, Request, Row, Step, combine, require_complete
from .metrics import is_per_opcode

INSTALLED = Path("/opt/nvidia/nsight-compute")
_NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
_RANGE = re.compile(r"dhp:(\d+):")
_ERROR = re.compile(r"==ERROR== (.*)")
_PERMISSION = "ERR_NVGPUCTRPERM"
# Of a cell. One that lists what each instruction of a kernel did has 20 to 30 bytes for each; the csv module takes
# 131,072, some 5,000 instructions.
_LONGEST_CELL = 1 << 24


def find_ncu() -> Path:
    """ncu in PATH, the CUDA toolkit, or where its own installer puts it."""
    try:
        return tools.find("ncu")
    except NotRun:
        own = sorted(INSTALLED.glob("*/ncu"))
        if own:
            return own[-1]
        raise NotRun("ncu (Nsight Compute) was not found in PATH, CUDA_HOME, /usr/local/cuda or /opt/nvidia") from None


def read_rows(text: str, metrics: Sequence[str]) -> list[Row]:
    """ncu's raw page as CSV, among whatever else it says: (range number, kernel name, metric to value) for each row.

    A metric that has a value for each opcode comes as its total and as METRIC:OPCODE.
    """
    csv.field_size_limit(_LONGEST_CELL)
    rows = csv.reader(line for line in text.splitlines() if line.startswith('"'))
    names = next(rows, [])
    next(rows, [])  # units
    missing = [metric for metric in metrics if metric not in names]
    if names and missing:
        raise NotRun(f"ncu does not know {', '.join(missing)}")
    found = []
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        match = _RANGE.search(cells[_NVTX])
        if match is None:
            raise NotRun("ncu counted a kernel outside of every NVTX range")
        values: dict[str, float] = {}
        for metric in metrics:
            values.update(_read_cell(metric, cells[metric]))
        found.append((int(match[1]), cells["Kernel Name"], values))
    return found


def _number(metric: str, text: str) -> float:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):  # ncu may print "nan", which would compare as no difference
        raise NotRun(f"ncu gives '{text}' for {metric}, where a number is expected")
    return value


def _read_cell(metric: str, cell: str) -> dict[str, float]:
    """A number, or a number followed by (KEY: number; …). Keys that are numbers count instances, not opcodes. NotRun if
    a metric for each opcode lacks opcodes, or these do not make up its total."""
    total, _, instances = cell.partition(" (")
    values = {metric: _number(metric, total)}
    for instance in filter(None, instances.rstrip(")").split("; ")):
        key, _, value = instance.rpartition(": ")
        if not key.isdigit():
            values[f"{metric}:{key}"] = _number(metric, value)
    if is_per_opcode(metric) and (len(values) == 1 or sum(values.values()) != 2 * values[metric]):
        raise NotRun(f"ncu gives '{cell}' for {metric}: the opcodes do not make up the total")
    return values


def cause(log: str, errors: str, code: int) -> str:
    """Why a run of ncu failed, in a line."""
    if _PERMISSION in log + errors:
        return f"no permission to read the GPU's performance counters ({_PERMISSION})"
    said = _ERROR.findall(log) or [line for line in errors.strip().splitlines()[-1:] if line]
    return f"ncu failed: {said[0] if said else f'exit code {code}'}"


def _command(ncu: Path, metrics: Sequence[str], folder: Path) -> list[str]:
    """Instances are printed, because opcodes are. ncu leaves the caches alone: counted.py empties the L2."""
    # fmt: off
    return [
        str(ncu), "--clock-control", "none", "--profile-from-start", "off", "--nvtx", "--csv", "--page", "raw",
        "--print-units", "base", "--print-metric-instances", "details", "--metrics", ",".join(metrics),
        "--replay-mode", "kernel", "--cache-control", "none", "--log-file", str(folder / "log"),
        sys.executable, "-m", "dhp_safe_fa.gates.counters.counted", str(folder / "request"),
    ]
    # fmt: on


def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
    """Count all calls of a request in one run of ncu. tell: calls done, and of what. NotRun says why it could not."""
    ncu = find_ncu()
    package = str(Path(__file__).resolve().parents[3])
    variables = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = folder / "steps"
        (folder / "request").write_text(json.dumps({**asdict(request), "steps": str(steps)}))
        with (folder / "errors").open("w") as errors:
            command = _command(ncu, request.metrics, folder)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables) as process:
                for line in process.stdout or ():
                    done, _, what = line.strip().partition(" ")
                    if done.isdigit():
                        tell(int(done), what)
        log = (folder / "log").read_text() if (folder / "log").exists() else ""
        if process.returncode or not steps.exists():
            raise NotRun(cause(log, (folder / "errors").read_text(), process.returncode))
        made = [Step(**one) for one in json.loads(steps.read_text())]
        counts = combine(made, read_rows(log, request.metrics), request.parts)
    require_complete(request, counts)
    return counts
