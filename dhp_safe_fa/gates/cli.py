"""Security gates: the command line.

Exit code: 0 pass, 1 fail, 2 invalid (a control went wrong) or not run (the cause is printed).
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import controls, policy, report, targets, tools
from .sass import PASS, Cubin, KernelReport, audit
from .tools import NotRun

EXIT_PASS, EXIT_FAIL, EXIT_NOT_RUN = 0, 1, 2
POLICY = Path(__file__).resolve().parents[2] / "audits" / "sass_policy.json"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dhp_safe_fa.gates", description=(__doc__ or "").split("\n")[0])
    gates = parser.add_subparsers(dest="gate", required=True, metavar="GATE")
    sass = gates.add_parser("sass", help="machine code: no predicated branch, no secret that steers; needs no GPU")
    what = sass.add_mutually_exclusive_group()
    what.add_argument("--kernel", metavar="NAME", help="one shipped kernel (default: all)")
    what.add_argument("--cubin", metavar="FILE", type=Path, nargs="+", action="extend", help="anybody's cubins")
    what.add_argument("--library", metavar="FILE", type=Path, help="every cubin inside a library or executable")
    what.add_argument("--peer", choices=targets.PEERS, help="the attention kernels of an installed package")
    sass.add_argument("--policy", metavar="FILE", type=Path, help="exceptions (default: audits/sass_policy.json)")
    sass.add_argument("--json", metavar="FILE", help="write the reports there; - is standard output")
    extent = sass.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="same as --full: this gate is always exhaustive")
    extent.add_argument("--full", action="store_true", help="analyse everything (always so)")
    return parser


def _choose(arguments: argparse.Namespace) -> list[Cubin]:
    if arguments.cubin:
        return targets.from_files(arguments.cubin)
    if arguments.library:
        return targets.from_library(arguments.library)
    if arguments.peer:
        return targets.from_peer(arguments.peer)
    return targets.select(targets.shipped(), arguments.kernel)


def _load_policy(path: Path | None) -> policy.Policy:
    if path is None and not POLICY.exists():  # an installed package: no exceptions
        return policy.Policy()
    return policy.load(path or POLICY)


def run_sass(arguments: argparse.Namespace, out: Console, errors: Console) -> int:
    """Controls, then the kernels. Returns the exit code; NotRun and its like are for the caller."""
    tools.find("nvdisasm")
    rules = _load_policy(arguments.policy)
    cubins = _choose(arguments)
    not_run: list[str] = []

    def one(cubin: Cubin) -> list[KernelReport]:
        try:
            return audit(cubin, rules)
        except NotRun as error:
            not_run.append(f"{cubin.origin or cubin.name}: {error}")
            return []

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    with progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        task = progress.add_task("controls", total=len(cubins) + 1)
        outcomes = controls.run_controls(controls.load_controls(lambda text: progress.update(task, description=text)))
        progress.update(task, advance=1, description="kernels")
        reports = []
        for some in pool.map(one, cubins):
            reports += some
            progress.advance(task)

    is_valid = not any(outcome.problem for outcome in outcomes)
    report.print_controls(out, outcomes)
    report.print_reports(out, reports, is_valid)
    report.print_policy(out, rules)
    for text in not_run:
        out.print(escape(f"NOT RUN: {text}"))
    if arguments.json:
        text = report.as_json(reports, is_valid)
        if arguments.json == "-":
            sys.stdout.write(text)
        else:
            Path(arguments.json).write_text(text)
    if not is_valid:
        out.print("[red]INVALID[/]: a control went wrong, so the verdicts mean nothing")
        return EXIT_NOT_RUN
    if any(r.verdict != PASS for r in reports):
        out.print("[red]FAIL[/]")
        return EXIT_FAIL
    if not_run or not reports:
        return EXIT_NOT_RUN
    out.print("[green]PASS[/]")
    return EXIT_PASS


def _console(stream: TextIO) -> Console:
    """Into a file or pipe: wide enough for the table."""
    return Console(file=stream, width=None if stream.isatty() else 130)


def main(argv: list[str] | None = None) -> int:
    """Run one gate; returns the exit code."""
    arguments = _parser().parse_args(argv)
    errors = _console(sys.stderr)
    out = errors if arguments.json == "-" else _console(sys.stdout)
    try:
        return run_sass(arguments, out, errors)
    except (NotRun, controls.ControlError, policy.PolicyError, OSError) as error:
        errors.print(escape(f"NOT RUN: {error}"))
        return EXIT_NOT_RUN
