"""Nsight Compute: starts it over the launches of ``counted.py``, and reads what it counted."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from .. import tools
from ..controls import TWINS
from ..tools import NotRun

INSTALLED = Path("/opt/nvidia/nsight-compute")
_NVTX = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
_RANGE = re.compile(r"dhp:(\d+):")
_ERROR = re.compile(r"==ERROR== (.*)")
_PERMISSION = "ERR_NVGPUCTRPERM"
# Of a cell. One that lists what each instruction of a kernel did has 20 to 30 bytes for each; the csv module takes
# 131,072, some 5,000 instructions.
_LONGEST_CELL = 1 << 24


@dataclass(frozen=True)
class Request:
    """What is to be counted.

    Attributes:
        metrics: by the names of ``ncu --query-metrics``, with their suffix.
        subjects: name of a subject to the classes of inputs with which each shape is run; one that comes twice is A/A.
            A kernel stands for all of the operator's call that launches it.
        parts: to such a name those of all kernels under test that its call launches; itself, if it is not named here.
        shapes: how many of each subject's.
        controls: names of controls, both twins of which are run.
        control_data: names of ``inputs.planted_secrets``, with which they are run.
        application_replay: each pass over the metrics is a run of everything, and no launch is made again. Every run
            has to launch the same kernels. With many launches that takes half as long, though each run begins anew.
        labels: to such a name the shapes that are run, by their labels; all of them, if it is not named here.
    """

    metrics: tuple[str, ...]
    subjects: dict[str, tuple[str, ...]]
    shapes: int
    controls: tuple[str, ...] = ()
    control_data: tuple[str, ...] = ()
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    application_replay: bool = False
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def shapes_of(self, name: str) -> int:
        """On how many shapes a subject is run."""
        return len(self.labels.get(name, ())) or self.shapes

    @property
    def calls(self) -> int:
        """How many calls are to be counted."""
        of_controls = len(self.controls) * len(TWINS) * len(self.control_data)
        return of_controls + sum(len(data) * self.shapes_of(name) for name, data in self.subjects.items())


@dataclass(frozen=True)
class Count:
    """What was counted in one call.

    Attributes:
        name: of the subject or control.
        label: the shape, or the twin.
        data: the class of data.
        kernels: those that ran.
        values: metric to value, over these kernels, or of the one that the name is of; none if others ran than planned.
    """

    name: str
    label: str
    data: str
    kernels: tuple[str, ...]
    values: dict[str, float]


def find_ncu() -> Path:
    """ncu in PATH, the CUDA toolkit, or where its own installer puts it."""
    try:
        return tools.find("ncu")
    except NotRun:
        own = sorted(INSTALLED.glob("*/ncu"))
        if own:
            return own[-1]
        raise NotRun("ncu (Nsight Compute) was not found in PATH, CUDA_HOME, /usr/local/cuda or /opt/nvidia") from None


def read_rows(text: str, metrics: Sequence[str]) -> list[tuple[int, str, dict[str, float]]]:
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


def _is_per_opcode(metric: str) -> bool:
    return metric.partition(":")[0].endswith("_per_opcode")


def _read_cell(metric: str, cell: str) -> dict[str, float]:
    """A number, or a number followed by (KEY: number; …). Keys that are numbers count instances, not opcodes. NotRun if
    a metric for each opcode lacks opcodes, or these do not make up its total."""
    total, _, instances = cell.partition(" (")
    values = {metric: _number(metric, total)}
    for instance in filter(None, instances.rstrip(")").split("; ")):
        key, _, value = instance.rpartition(": ")
        if not key.isdigit():
            values[f"{metric}:{key}"] = _number(metric, value)
    if _is_per_opcode(metric) and (len(values) == 1 or sum(values.values()) != 2 * values[metric]):
        raise NotRun(f"ncu gives '{cell}' for {metric}: the opcodes do not make up the total")
    return values


def _is_sum(metric: str) -> bool:
    return metric.endswith(".sum") or _is_per_opcode(metric)


def _together(kernels: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sums are added up over the kernels of a call; of anything else the largest counts."""
    together: dict[str, float] = {}
    for values in kernels:
        for metric, value in values.items():
            old = together.get(metric, 0.0)
            together[metric] = old + value if _is_sum(metric) else max(old, value)
    return together


def combine(
    steps: list[dict[str, Any]],
    rows: Iterable[tuple[int, str, dict[str, float]]],
    parts: Mapping[str, Sequence[str]] | None = None,
) -> list[Count]:
    """One count for each step; for each kernel that it launches, if it says which: in their order, so that two launches
    of one function are told apart. parts: of these kernels alone, see Request. One that several calls launch is
    counted in that which it is a part of.

    A call that launched others has no values for any. NotRun if that is so with all data: the plan is wrong.
    """
    grouped: dict[int, list[tuple[str, dict[str, float]]]] = {}
    for number, kernel, values in rows:
        if number >= len(steps):
            raise NotRun(f"ncu counted a kernel in range {number}, where {len(steps)} calls were made")
        grouped.setdefault(number, []).append((kernel, values))
    counts = []
    for number, step in enumerate(steps):
        if number not in grouped:
            raise NotRun(f"ncu counted no kernel of {step['name']} ({step['label']}, {step['data']})")
        entries = tuple(kernel for kernel, _ in grouped[number])
        counted = [values for _, values in grouped[number]]
        planned = step.get("launches") or ()
        if not planned:
            found = {str(step["name"]): _together(counted)}
        elif entries == tuple(entry for _, entry in planned):
            found = dict(zip((str(name) for name, _ in planned), counted, strict=True))
        else:
            found = {str(name): {} for name, _ in planned}
        under_test = (parts or {}).get(str(step["name"]), found)
        found = {name: values for name, values in found.items() if name in under_test}
        counts += [Count(name, step["label"], step["data"], entries, some) for name, some in found.items()]
    as_planned = {(count.name, count.label) for count in counts if count.values}
    for count in counts:
        if (count.name, count.label) not in as_planned:
            launched = ", ".join(count.kernels)
            raise NotRun(f"a call of {count.name} ({count.label}) launched {launched}, which is not what was planned")
    return counts


def require_complete(request: Request, counts: Sequence[Count]) -> None:
    """NotRun unless every call of the request was counted: what is missing would be seen as equal."""
    labels: dict[str, dict[str, list[str]]] = {}
    for count in counts:
        labels.setdefault(count.name, {}).setdefault(count.label, []).append(count.data)
    wanted = {name: (len(TWINS), request.control_data) for name in request.controls}
    for call, data in request.subjects.items():
        wanted |= {name: (request.shapes_of(call), data) for name in request.parts.get(call, (call,))}
    for name, (number, data) in wanted.items():
        found = labels.get(name, {})
        if len(found) != number or any(sorted(one) != sorted(data) for one in found.values()):
            raise NotRun(
                f"ncu did not count all calls of {name}: {sum(map(len, found.values()))} of {number * len(data)}"
            )


def cause(log: str, errors: str, code: int) -> str:
    """Why a run of ncu failed, in a line."""
    if _PERMISSION in log + errors:
        return f"no permission to read the GPU's performance counters ({_PERMISSION})"
    said = _ERROR.findall(log) or [line for line in errors.strip().splitlines()[-1:] if line]
    return f"ncu failed: {said[0] if said else f'exit code {code}'}"


def _command(ncu: Path, request: Request, folder: Path) -> list[str]:
    """Instances are printed where they are opcodes: those of instructions make most of a log, and nobody reads them.
    Passes over the same launch begin with caches that ncu has flushed. Where a pass is a run of everything, counted.py
    evicts the L2 before each call, in a tenth of a millisecond; ncu takes ten for a flush."""
    instances = "details" if any(map(_is_per_opcode, request.metrics)) else "none"
    replay, caches = ("application", "none") if request.application_replay else ("kernel", "all")
    # fmt: off
    return [
        str(ncu), "--clock-control", "none", "--profile-from-start", "off", "--nvtx", "--csv", "--page", "raw",
        "--print-units", "base", "--print-metric-instances", instances, "--metrics", ",".join(request.metrics),
        "--replay-mode", replay, "--cache-control", caches, "--log-file", str(folder / "log"),
        sys.executable, "-m", "dhp_safe_fa.gates.counters.counted", str(folder / "request"),
    ]
    # fmt: on


def measure(request: Request, tell: Callable[[int, str], None]) -> list[Count]:
    """Count all calls of a request in one run of ncu. tell: calls done, and of what; in application replay anew in each
    run. NotRun says why it could not."""
    ncu = find_ncu()
    package = str(Path(__file__).resolve().parents[3])
    variables = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        steps = folder / "steps"
        (folder / "request").write_text(json.dumps({**asdict(request), "steps": str(steps)}))
        with (folder / "errors").open("w") as errors:
            command = _command(ncu, request, folder)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=variables) as process:
                for line in process.stdout or ():
                    done, _, what = line.strip().partition(" ")
                    if done.isdigit():
                        tell(int(done), what)
        log = (folder / "log").read_text() if (folder / "log").exists() else ""
        if process.returncode or not steps.exists():
            raise NotRun(cause(log, (folder / "errors").read_text(), process.returncode))
        counts = combine(json.loads(steps.read_text()), read_rows(log, request.metrics), request.parts)
    require_complete(request, counts)
    return counts
