"""What a run says: a table and findings for a person, JSON for a program."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .controls import Outcome
from .policy import Policy
from .sass import PASS, KernelReport

INVALID = "INVALID"
_SHOWN = 8  # findings printed per kernel; --json has all


def _short(name: str) -> str:
    """A kernel's name for the screen: mangled ones run to a thousand characters."""
    return name if len(name) <= 60 else f"{name[:36]}…{name[-23:]}"


def as_json(reports: list[KernelReport], is_valid: bool) -> str:
    """A list with one object for each kernel."""
    objects: list[dict[str, Any]] = [
        {**asdict(report), "verdict": report.verdict if is_valid else INVALID} for report in reports
    ]
    return json.dumps(objects, indent=2) + "\n"


def print_controls(console: Console, outcomes: list[Outcome]) -> None:
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
            f"[{'green' if verdict == PASS else 'red'}]{verdict}[/]",
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
