"""The security gates, each run as its own command: nothing of the gates' process can reach into this one."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dhp_safe_fa import evidence
from dhp_safe_fa.burn.builds.keeping import ROOT
from dhp_safe_fa.burn.log.records import Chip, Gate
from dhp_safe_fa.gates import provenance, registry

# Of what speaks against the kernels, a record keeps this much; the gate's own report has all.
KEPT_CAUSES = 3


def run_all(names: Sequence[str], cubins: Mapping[str, str], quick: bool, tell: Callable[[str], None]) -> list[Gate]:
    """Gates in order, up to the first that fails.

    Args:
        cubins: kernel name → SHA-256 of the build that is to be timed: a gate that judged anything else is INVALID.
        tell: gets a line before and after each gate.
    """
    results: list[Gate] = []
    for name in names:
        tell(f"gate {name} …")
        results.append(run_one(name, cubins, quick))
        tell(f"gate {name}: {results[-1].verdict} {results[-1].detail}".strip())
        if results[-1].verdict == "FAIL":
            break
    return results


def from_evidence(names: Sequence[str], cubins: Mapping[str, str], here: Chip) -> list[Gate]:
    """What audits/evidence.json says, instead of another run of these gates.

    Raises:
        ValueError: it is not about exactly these cubins, or they did not pass, or it was measured on another model of
            GPU or with another driver; one sentence.
    """
    if not evidence.CHECKOUT.is_file():
        raise ValueError("--evidence: there is no audits/evidence.json")
    stored = evidence.load(evidence.CHECKOUT)
    status = evidence.compare(stored, cubins, provenance.here())
    if status.state != evidence.FRESH:
        raise ValueError(f"--evidence: it does not speak for this build: {status.reasons[0]}")
    runs = [run["environment"] for name in names if registry.gate(name).executes for run in stored.runs_of(name)]
    measured_on = {(run.get("gpu"), run.get("driver")) for run in runs}
    for gpu, driver in measured_on - {(here.gpu, here.driver)}:
        raise ValueError(f"--evidence: it is of {gpu}, driver {driver}; here is {here.gpu}, driver {here.driver}")
    return [Gate(name, "PASS", f"stored evidence: {stored.where()}") for name in names]


def run_one(name: str, cubins: Mapping[str, str], quick: bool) -> Gate:
    """One gate by its exit code (0 pass, 1 fail, 2 invalid or not run) and by the kernels that its report names."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "dhp_safe_fa.gates", name, "--json", str(report)]
        result = subprocess.run([*command, *(["--quick"] if quick else [])], cwd=ROOT, capture_output=True, text=True)
        rows = json.loads(report.read_text(encoding="utf-8")) if report.exists() else []
    if result.returncode == 0:
        cause = _other_kernels(rows, cubins)
        return Gate(name, "INVALID" if cause else "PASS", cause)
    causes = [cause for row in rows if row["verdict"] != "PASS" for cause in _causes(row)]
    said = [" ".join(line.split()) for line in (result.stdout + result.stderr).splitlines() if line.strip()]
    detail = "; ".join((causes or said[-1:])[:KEPT_CAUSES])
    if result.returncode == 1:
        return Gate(name, "FAIL", detail)
    is_invalid = any(row["verdict"] == "INVALID" for row in rows) or any("INVALID" in line for line in said)
    return Gate(name, "INVALID" if is_invalid else "NOT RUN", detail)


def _causes(row: dict[str, Any]) -> list[str]:
    """Why a kernel did not pass: `problems` of the gates that execute kernels, findings of the gate on machine code."""
    kernel = row.get("subject") or row.get("kernel")
    problems = [str(problem) for problem in row.get("problems", [])]
    problems += [f"{finding['kind']} at {finding['address']}" for finding in row.get("secret_findings", [])]
    problems += [f"unknown opcode {opcode}" for opcode in row.get("unknown_opcodes", [])]
    if row.get("predicated_branches"):
        problems.append(f"{row['predicated_branches']} predicated branches")
    return [f"{kernel}: {problem}" for problem in problems]


def _other_kernels(rows: list[dict[str, Any]], cubins: Mapping[str, str]) -> str:
    """What is wrong if a report is not about exactly these cubins: by their hashes where it has them, else by name."""
    hashes = {row["cubin_sha256"] for row in rows if row.get("cubin_sha256")}
    judged, expected = (hashes, set(cubins.values())) if hashes else ({row["subject"] for row in rows}, set(cubins))
    return "" if judged == expected else f"it judged {len(judged)} kernels, not the {len(expected)} of this build"
