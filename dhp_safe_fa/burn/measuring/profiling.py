"""Counters of single calls, by Nsight Compute."""

from __future__ import annotations

import csv
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dhp_safe_fa.bench import Case
from dhp_safe_fa.burn.builds.keeping import ROOT
from dhp_safe_fa.burn.builds.library import Library
from dhp_safe_fa.burn.families import FAMILIES
from dhp_safe_fa.burn.log.records import Profile

METRICS = {
    "us": "gpu__time_duration.sum",
    "sm_percent": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram_read": "dram__bytes_read.sum",
    "dram_write": "dram__bytes_write.sum",
    "issued_instructions": "smsp__inst_issued.sum",
    "executed_instructions": "smsp__inst_executed.sum",
}


class NoCounters(Exception):
    """Nsight Compute is missing or did not deliver; one sentence."""


def find_ncu() -> str:
    """NoCounters if there is none in PATH or /usr/local/cuda."""
    found = shutil.which("ncu", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))
    if found is None:
        raise NoCounters("a record needs counters, and ncu is neither in PATH nor in /usr/local/cuda/bin")
    return found


def profile(library: Library, family: str, cases: Sequence[Case]) -> list[Profile]:
    """The counters of one call of each case. NoCounters if any is missing."""
    options = ["--metrics", ",".join(METRICS.values()), "--csv", "--page", "raw", "--print-units", "base"]
    return parse(_ncu(options, library, family, cases), cases, FAMILIES[family].entries)


def store_report(library: Library, family: str, cases: Sequence[Case], path: Path) -> None:
    """A full report for ncu-ui. NoCounters if it could not be made."""
    _ncu(["--set", "full", "--force-overwrite", "--export", str(path)], library, family, cases)
    if not path.exists():
        raise NoCounters(f"ncu ended well but wrote no {path}")


def parse(text: str, cases: Sequence[Case], entries: Sequence[str]) -> list[Profile]:
    """ncu's CSV: a row of names, a row of units, and a row for each launch, in the order of the cases.

    entries: of the functions that are launched for a case, in the order of a case's launches; the first one comes once
    at most. So a launch that is before the last one in this order, or the first one again, begins the next case. Others
    are left out. What a case's launches take is added up; how busy the chip was is the mean by their time.
    """
    rows = list(csv.reader(io.StringIO("\n".join(line for line in text.splitlines() if line.startswith('"')))))
    launches = [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]
    calls: list[list[dict[str, str]]] = []
    before = 0
    for launch in launches:
        if launch.get("Kernel Name") not in entries:
            continue
        nth = entries.index(launch["Kernel Name"])
        if not calls or nth < before or nth == 0:
            calls.append([])
        calls[-1].append(launch)
        before = nth
    if len(calls) != len(cases):
        raise NoCounters(f"ncu reported {len(calls)} launches; {len(cases)} were made, one for each shape")
    return [_profile(case, call) for case, call in zip(cases, calls, strict=True)]


def _profile(case: Case, launches: Sequence[Mapping[str, str]]) -> Profile:
    try:
        numbers = [
            {name: float(launch[metric].replace(",", "")) for name, metric in METRICS.items()} for launch in launches
        ]
    except (KeyError, ValueError) as error:
        raise NoCounters(f"ncu gave no usable value for {case.label}: {error!r}") from error
    total = {name: sum(launch[name] for launch in numbers) for name in METRICS}
    busy = {
        name: sum(launch[name] * launch["us"] for launch in numbers) / total["us"]
        for name in ("sm_percent", "tensor_percent")
    }
    return Profile(
        case=case.label,
        us=total["us"] / 1e3,  # ncu's base unit is the nanosecond
        **busy,
        dram_bytes=int(total["dram_read"] + total["dram_write"]),
        issued_instructions=int(total["issued_instructions"]),
        executed_instructions=int(total["executed_instructions"]),
    )


def _ncu(options: list[str], library: Library, family: str, cases: Sequence[Case]) -> str:
    """Its standard output. Clocks are left as they are: those that the times were taken with."""
    command = [find_ncu(), "--clock-control", "none", "--kernel-name", "regex:dhp", *options]
    target = [sys.executable, "-m", "dhp_safe_fa.burn.builds.launch", str(library.path.parent), family]
    target += [case.label for case in cases]
    result = subprocess.run([*command, *target], cwd=ROOT, capture_output=True, text=True)
    if result.returncode != 0:
        said = [line for line in (result.stdout + result.stderr).splitlines() if "==ERROR==" in line or "Error" in line]
        raise NoCounters(f"ncu failed: {said[0] if said else f'exit code {result.returncode}'}")
    return result.stdout
