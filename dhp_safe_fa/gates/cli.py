"""Security gates: the command line.

Exit code: 0 pass, 1 fail, 2 invalid (a control went wrong) or not run (the cause is printed).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dhp_safe_fa import evidence
from dhp_safe_fa._files import can_write, write_whole

from . import controls, provenance, report, targets, tools
from .evidence import commands
from .evidence.writer import SOURCES, Refused
from .registry import EXECUTING, GATES, NAMES
from .sass import policy
from .sass.gate import Cubin, KernelReport, audit
from .tools import NotRun
from .verdict import EXIT_CODES, INVALID, NOT_RUN, GateResult, have_a_say, not_run, worst

# What stops a gate before it has looked; anything else is a fault of the gate.
_CAUSES = (NotRun, Refused, controls.ControlError, policy.PolicyError, ImportError, OSError)


@dataclass
class Screen:
    """Where a run writes: out for verdicts, errors for progress and causes."""

    out: Console
    errors: Console

    def progress(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self.errors, transient=True, disable=not self.errors.is_terminal)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m dhp_safe_fa.gates", description=(__doc__ or "").split("\n")[0])
    gates = parser.add_subparsers(dest="gate", required=True, metavar="GATE")

    def add(name: str, purpose: str) -> tuple[argparse.ArgumentParser, argparse._MutuallyExclusiveGroup]:
        gate = gates.add_parser(name, help=purpose)
        what = gate.add_mutually_exclusive_group()
        what.add_argument("--kernel", metavar="NAME", nargs="+", help="these shipped kernels (default: all)")
        what.add_argument("--peer", choices=targets.PEERS, help="another attention: its binary, or its calls")
        gate.add_argument("--json", metavar="FILE", help="write the results there; - is standard output")
        extent = gate.add_mutually_exclusive_group()
        if name == "all":
            some = "fewer repeats, of these gates (default: all that execute kernels)"
            extent.add_argument("--quick", metavar="GATE", choices=EXECUTING, nargs="*", help=some)
        else:
            extent.add_argument("--quick", action="store_true", help="fewer repeats (sass is always exhaustive)")
        extent.add_argument("--full", action="store_true", help="all repeats (default)")
        return gate, what

    takes_policy = []
    for gate in GATES:
        one, what = add(gate.name, f"{gate.purpose}; needs a Hopper GPU" if gate.executes else gate.purpose)
        if not gate.executes:
            what.add_argument("--cubin", metavar="FILE", type=Path, nargs="+", action="extend", help="anybody's cubins")
            what.add_argument("--library", metavar="FILE", type=Path, help="every cubin inside a library or executable")
        if "policy" in gate.needs:
            takes_policy.append(one)
        if gate.draws:
            one.add_argument("--plot", metavar="FILE", type=Path, help="draw the distributions there")
    every, _ = add("all", f"all {len(GATES)}, and one JSON object")
    for parser_of_one in (*takes_policy, every):
        parser_of_one.add_argument("--policy", metavar="FILE", type=Path, help="default: audits/sass_policy.json")
    commands.add_commands(gates)
    return parser


# ---- sass ------------------------------------------------------------------------------------------------------------


def _choose(arguments: argparse.Namespace) -> list[Cubin]:
    if arguments.peer:
        return targets.from_peer(arguments.peer)
    if arguments.gate == "sass" and arguments.cubin:
        return targets.from_files(arguments.cubin)
    if arguments.gate == "sass" and arguments.library:
        return targets.from_library(arguments.library)
    return targets.select(targets.shipped(), arguments.kernel)


def _load_policy(path: Path | None) -> policy.Policy:
    return policy.load(path or provenance.POLICY)


def run_sass(arguments: argparse.Namespace, screen: Screen) -> tuple[str, list[dict[str, Any]]]:
    """Controls, then the kernels. Returns the verdict and the JSON; NotRun and its like are for the caller."""
    tools.find("nvdisasm")
    rules = _load_policy(arguments.policy)
    cubins = _choose(arguments)
    unread: list[str] = []

    def one(cubin: Cubin) -> list[KernelReport]:
        try:
            return audit(cubin, rules)
        except NotRun as error:
            unread.append(f"{cubin.origin or cubin.name}: {error}")
            return []

    with screen.progress() as progress, ThreadPoolExecutor(os.cpu_count()) as pool:
        task = progress.add_task("controls", total=len(cubins) + 1)
        outcomes = controls.run_controls(controls.load_controls(lambda text: progress.update(task, description=text)))
        progress.update(task, advance=1, description="kernels")
        reports = []
        for some in pool.map(one, cubins):
            reports += some
            progress.advance(task)

    is_valid = have_a_say(outcomes)
    report.print_controls(screen.out, outcomes)
    report.print_reports(screen.out, reports, is_valid)
    report.print_policy(screen.out, rules)
    for text in unread:
        screen.out.print(escape(f"NOT RUN: {text}"))
    found = report.as_json(reports, is_valid)
    if not is_valid:
        return INVALID, found
    return worst([*(r.verdict for r in reports), *(NOT_RUN for _ in unread)]), found


# ---- the gates that execute kernels ----------------------------------------------------------------------------------


def _subjects(arguments: argparse.Namespace) -> list[Any]:
    subjects = importlib.import_module("dhp_safe_fa.gates.subjects")  # needs torch, which sass does not
    chosen: list[Any] = subjects.choose(arguments.kernel, arguments.peer)
    return chosen


def run_executing(gate: str, arguments: argparse.Namespace, screen: Screen) -> tuple[str, list[dict[str, Any]]]:
    """One of the gates that execute kernels; whatever stops it is a result, too."""
    results: list[GateResult]
    try:
        subjects = _subjects(arguments)
        module = importlib.import_module(f"dhp_safe_fa.gates.{gate}.gate")
        with screen.progress() as progress:
            task = progress.add_task(gate, total=None)

            def tell(text: str, done: int, total: int) -> None:
                progress.update(task, description=f"{gate}: {text}", completed=done, total=total)

            able = [subject for subject in subjects if not subject.why_not]
            results = module.run(able, arguments.quick, tell) if able else []
            results += [not_run(gate, subject.name, subject.why_not) for subject in subjects if subject.why_not]
        if getattr(arguments, "plot", None):
            module.plot(results, arguments.plot)
    except _CAUSES as error:
        results = [not_run(gate, _asked_for(arguments), error)]
    report.print_results(screen.out, gate, results)
    return worst(result.verdict for result in results), [result.as_json() for result in results]


def _asked_for(arguments: argparse.Namespace) -> str:
    """In words, for a run or a gate as a whole."""
    return str(arguments.peer or ", ".join(arguments.kernel or ()) or "shipped kernels")


def _names(asked_for: Sequence[str] | None) -> list[str]:
    """Of the shipped kernels that are asked for; none where there are none, which the gates then say."""
    try:
        return [cubin.name for cubin in targets.select(targets.shipped(), asked_for)]
    except NotRun:
        return []


def _digests(arguments: argparse.Namespace) -> dict[str, str | None]:
    return {**provenance.here(), "policy": provenance.of_policy(arguments.policy or provenance.POLICY)}


def _how(arguments: argparse.Namespace, gates: Sequence[str], quick: list[str]) -> dict[str, Any]:
    """How a run is made, for whoever makes evidence of it: what was asked for, and digests of all that takes part."""
    digests = _digests(arguments)
    return {
        "subjects": _asked_for(arguments),
        "kernels": [] if arguments.peer else _names(arguments.kernel),
        "gates": list(gates),
        "quick": quick,
        "sources": {**provenance.built_and_here(), "dirty": report.sources_dirty(SOURCES)},
        "digests": digests,
    }


def run_all(
    arguments: argparse.Namespace,
    screen: Screen,
    gates: Sequence[str] = NAMES,
    keep: Callable[[dict[str, Any]], None] = lambda found: None,
) -> tuple[str, dict[str, Any]]:
    """All gates, or these; one that cannot run does not stop the others. `quick`: the gates that are, none of them for
    all, or None. keep: is given what was found until then after each gate."""
    quick_gates = [] if arguments.quick is None else [g for g in EXECUTING if g in (arguments.quick or EXECUTING)]
    found = dict[str, Any](environment=report.environment(), how=_how(arguments, gates, quick_gates))
    verdicts: dict[str, str] = {}
    for gate in gates:
        if gate in EXECUTING:
            here = argparse.Namespace(**vars(arguments) | {"quick": gate in quick_gates})
            verdicts[gate], found[gate] = run_executing(gate, here, screen)
        else:
            verdicts[gate], found[gate] = _sass_of_all(arguments, screen)
        if _digests(arguments) != found["how"]["digests"]:  # it may have run what is not what these are of
            result = not_run(gate, _asked_for(arguments), "sources changed while it ran")
            report.print_results(screen.out, gate, [result])
            verdicts[gate], found[gate] = NOT_RUN, [result.as_json()]
        keep(found)
    report.print_summary(screen.out, verdicts)
    return worst(verdicts.values()), found


def _sass_of_all(arguments: argparse.Namespace, screen: Screen) -> tuple[str, list[dict[str, Any]]]:
    """The gate sass; what stops it is a result, too."""
    try:
        return run_sass(arguments, screen)
    except _CAUSES as error:
        result = not_run("sass", _asked_for(arguments), error)
        report.print_results(screen.out, "sass", [result])
        return NOT_RUN, [result.as_json()]


# ---- what is kept under audits/ --------------------------------------------------------------------------------------


def run_audits(arguments: argparse.Namespace, screen: Screen) -> int:
    """status, evidence or peers: the exit code."""
    if arguments.gate == "status":
        return commands.status_command(arguments, screen.out)
    if arguments.gate == "evidence":
        asked = {"gate": "all", "peer": None, "policy": None, "quick": arguments.quick or None}
        gates = [gate for gate in NAMES if gate in arguments.gates]

        def run(kernels: list[str], keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
            return run_all(argparse.Namespace(**asked, kernel=kernels), screen, gates, keep)[1]

        return commands.evidence_command(arguments, screen.out, run)
    with screen.progress() as progress:
        task = progress.add_task("peers", total=None)
        return commands.peers_command(
            arguments,
            screen.out,
            lambda text, done, total: progress.update(task, description=text, completed=done, total=total),
        )


# ---- what people call ------------------------------------------------------------------------------------------------


def _console(stream: TextIO) -> Console:
    """Into a file or pipe: wide enough for the table."""
    return Console(file=stream, width=None if stream.isatty() else 160)


def _write(text: str, file: str, errors: Console) -> None:
    """What stops it is printed: the verdict stands."""
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        write_whole(text, Path(file))
    except OSError as error:
        errors.print(escape(f"--json {file}: not written: {error}"))


def main(argv: list[str] | None = None) -> int:
    """Run one gate, or all; returns the exit code."""
    arguments = _parser().parse_args(argv)
    errors = _console(sys.stderr)
    json_file = getattr(arguments, "json", None)
    screen = Screen(errors if json_file == "-" else _console(sys.stdout), errors)
    found: Any
    try:
        if arguments.gate in commands.COMMANDS:
            return run_audits(arguments, screen)
        for option in ("json", "plot"):
            path = getattr(arguments, option, None)
            if path and str(path) != "-" and not can_write(Path(path)):
                raise NotRun(f"--{option} {path}: cannot write there")
        if arguments.gate == "all":
            verdict, found = run_all(arguments, screen)
        elif arguments.gate == "sass":
            verdict, found = run_sass(arguments, screen)
        else:
            verdict, found = run_executing(arguments.gate, arguments, screen)
    except _CAUSES as error:
        errors.print(escape(f"NOT RUN: {error}"))
        return EXIT_CODES[NOT_RUN]
    if json_file:
        _write(json.dumps(found, indent=2) + "\n", json_file, errors)
    note = {INVALID: ": a control went wrong or none was judged, so the verdicts mean nothing"}.get(verdict, "")
    screen.out.print(f"{report.coloured(verdict)}{note}")
    if not arguments.peer:
        screen.out.print(escape(evidence.status().line()))
    return EXIT_CODES[verdict]
