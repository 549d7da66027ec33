"""What a run says: a table and findings for a person, JSON for a program."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .controls import Outcome
from .sass.gate import KernelReport
from .sass.policy import Policy
from .verdict import FAIL, INVALID, NOT_RUN, PASS, ControlOutcome, GateResult

_SHOWN = 8  # findings printed per kernel; --json has all


_COLOURS = {PASS: "green", NOT_RUN: "yellow", INVALID: "red", FAIL: "red"}


def coloured(verdict: str) -> str:
    """For the screen."""
    return f"[{_COLOURS[verdict]}]{verdict}[/]"


def _short(name: str) -> str:
    """A kernel's name for the screen: mangled ones run to a thousand characters."""
    return name if len(name) <= 60 else f"{name[:36]}…{name[-23:]}"


def as_json(reports: list[KernelReport], is_valid: bool) -> list[dict[str, Any]]:
    """One object for each kernel."""
    return [{**asdict(report), "verdict": report.verdict if is_valid else INVALID} for report in reports]


def print_controls(console: Console, outcomes: Sequence[Outcome | ControlOutcome]) -> None:
    """One line if all controls are right, else one for each that is not."""
    wrong = [outcome for outcome in outcomes if outcome.problem]
    for outcome in wrong:
        console.print(f"[red]control {outcome.name} (expects {outcome.expects}): {escape(outcome.problem)}[/]")
    right = len(outcomes) - len(wrong)
    console.print(f"controls: {right} of {len(outcomes)} right (planted leaks seen as declared, clean twins passed)")


def print_reports(console: Console, reports: list[KernelReport], is_valid: bool) -> None:
    """The table, then the findings of each kernel."""
    table = Table(title="sass: literal and taint analysis of machine code", box=box.SIMPLE)
    table.add_column("kernel", overflow="fold")
    headings = ("instructions", "registers", "spill bytes", "predicated", "indirect", "findings", "unknown", "verdict")
    for heading in headings:
        table.add_column(heading, justify="right")
    for r in reports:
        verdict = r.verdict if is_valid else INVALID
        figures = (r.instructions, r.registers, r.spill_bytes, r.predicated_branches, r.indirect_branches)
        table.add_row(
            escape(_short(r.kernel)),
            *(str(figure) for figure in figures),
            str(len(r.secret_findings)),
            str(len(r.unknown_opcodes)),
            coloured(verdict),
        )
    console.print(table)
    for r in reports:
        if r.unknown_opcodes:
            console.print(escape(f"{_short(r.kernel)}: unknown opcodes: {', '.join(r.unknown_opcodes)}"))
        for finding in r.secret_findings[:_SHOWN]:
            _print_finding(console, r.kernel, finding)
        if len(r.secret_findings) > _SHOWN:
            console.print(escape(f"{_short(r.kernel)}: {len(r.secret_findings) - _SHOWN} more findings, see --json"))


def _print_finding(console: Console, kernel: str, finding: dict[str, Any]) -> None:
    where = f"  {finding['source']}" if finding["source"] else ""
    console.print(escape(f"{_short(kernel)}: {finding['kind']} at {finding['address']}{where}"), style="bold")
    chain = finding["chain"]
    steps = chain if len(chain) <= 8 else [*chain[:3], None, *chain[-4:]]
    for number, step in enumerate(steps):
        if step is None:
            console.print(f"    … {len(chain) - 7} steps")
            continue
        note = f"  <- {finding['secret']}" if number == 0 and finding["secret"] else ""
        console.print(escape(f"    {step['address']} {step['instruction']}{note}"))


def print_policy(console: Console, policy: Policy) -> None:
    """Which exceptions were made, and which were not needed."""
    for entry in policy.entries:
        state = "used" if entry in policy.used else "[yellow]unused[/]"
        what = f"{entry.effect} {entry.kernel}: {entry.instruction}: {entry.reason}"
        console.print(f"policy: {state}: {escape(what)}")
    for memory in policy.public_memory:
        state = "used" if memory in policy.used else "[yellow]unused[/]"
        what = f"public memory {memory.kernel}: {memory.name}, parameter at {memory.parameter}: {memory.reason}"
        console.print(f"policy: {state}: {escape(what)}")


# ---- the gates that execute kernels ----------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """On what a run is made: version, commit, gpu, driver, cuda, torch, nvcc and kernels, as far as it can be known."""
    try:
        known = importlib.import_module("dhp_safe_fa.bench.environment")
        has_gpu = importlib.import_module("torch").cuda.is_available()
        found: dict[str, Any] = known.environment("cuda" if has_gpu else "cpu")
    except ImportError as error:  # no torch: the gate sass runs all the same
        return {"gpu": None, "note": str(error)}
    driver = found.get("nvidia_smi", {}).get("driver_version")
    gpu = {"gpu": found["device"] if has_gpu else None, "driver": driver, "cuda": found.get("cuda")}
    return {"version": found["dhp_safe_fa"], **found, **gpu}


def sources_dirty(paths: Sequence[str]) -> bool | None:
    """Whether tracked files at these paths differ from the commit; None where nobody can say."""
    try:
        known = importlib.import_module("dhp_safe_fa.bench.environment")
    except ImportError:  # no torch, as above
        return None
    dirty: bool | None = known.git_commit(*paths)["dirty"]
    return dirty


def print_results(console: Console, gate: str, results: list[GateResult]) -> None:
    """The controls, the table, then what speaks against each subject."""
    measured = [result for result in results if result.verdict != NOT_RUN]
    if measured:
        print_controls(console, measured[0].controls)
    headings = list(dict.fromkeys(key for r in measured for key, value in r.figures.items() if _is_column(value)))
    table = Table(title=gate, box=box.SIMPLE)
    table.add_column("subject", overflow="fold")
    for heading in (*headings, "verdict"):
        table.add_column(heading, justify="right")
    for r in results:
        table.add_row(escape(r.subject), *(_cell(r.figures.get(key)) for key in headings), coloured(r.verdict))
    console.print(table)
    for r in results:
        for problem in r.problems[:_SHOWN]:
            console.print(escape(f"{r.verdict}: {r.subject}: {problem}"))
        if len(r.problems) > _SHOWN:
            console.print(escape(f"{r.subject}: {len(r.problems) - _SHOWN} more, see --json"))


def _is_column(value: Any) -> bool:
    return isinstance(value, (int, float, str))


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return "" if value is None else escape(str(value))


def print_summary(console: Console, verdicts: dict[str, str]) -> None:
    """One line: gate and verdict."""
    console.print("  ".join(f"{gate} {coloured(verdict)}" for gate, verdict in verdicts.items()))
