"""``python -m dhp_safe_fa.bench``: measure, show, keep.

Exit status: 0; 1 if a result was wrong (nothing is timed for that case); 2 if an argument was.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dhp_safe_fa import _inspect
from dhp_safe_fa.bench import anchors, tables
from dhp_safe_fa.bench.cases import DTYPES, Case, select
from dhp_safe_fa.bench.environment import environment, missing_hopper
from dhp_safe_fa.bench.measurement import Settings, WrongResult, host_overhead, measure
from dhp_safe_fa.bench.peers import Candidate, candidates, one_line
from dhp_safe_fa.bench.results import Report, Result, load, save

# Samples of the host's time a candidate: each is short.
HOST_ROUNDS = 21

EPILOG = """\
examples:
  %(prog)s --quick
  %(prog)s --shapes sweep --dtype float16 --json sweep.json --plot sweep.png
  %(prog)s --shapes 4,16,1024,64:causal:float16 2,32,8192,64
  %(prog)s --shapes odd 8,32/4,2500,64:causal 16,32/8,1/4096,128
  %(prog)s --from sweep.json --plot sweep.svg

benchmarks/README.md says how times are taken and what the JSON file holds.
"""


class UsageError(Exception):
    """An argument that makes no sense; the text is one sentence."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m dhp_safe_fa.bench",
        description="Time dhp_safe_fa.attention beside the attention implementations at hand, interleaved in one run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a Hopper GPU, else cpu")
    p.add_argument(
        "--shapes",
        nargs="+",
        metavar="WORD",
        help="start, sweep, odd (or start,odd), or B,H[/Hk],S[/Sk],D[:full|:causal][:dtype]; "
        "default: start and sweep on cuda, start on cpu",
    )
    p.add_argument(
        "--dtype", nargs="+", choices=DTYPES, help="default: float16 (cuda) or float32 (cpu), bfloat16 at a few shapes"
    )
    p.add_argument("--quick", action="store_true", help="3 rounds of 5 ms instead of 7 of 20 ms, fewer lengths")
    p.add_argument("--cold", action="store_true", help="rotate through inputs so that L2 never holds them (cuda)")
    p.add_argument(
        "--anchors", type=Path, metavar="CSV", help="estimate FlashAttention-3 from its ratio to cuDNN in this file"
    )
    p.add_argument("--seed", type=int, help="repeat the inputs of a run (its JSON file says the seed)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results, measured and derived")
    p.add_argument("--plot", type=Path, metavar="FILE", help="write TFLOP/s as a picture (needs matplotlib)")
    p.add_argument("--from", dest="stored", type=Path, metavar="JSON", help="show stored results, measure nothing")
    p.add_argument("--list", action="store_true", help="list cases and candidates, measure nothing")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        _check_outputs(args)
        report = _stored(args) if args.stored else _run(args)
        if report is None:
            return 0
        tables.show(report, tables.make_console())
        if args.json:
            save(report, args.json)
        if args.plot:
            from dhp_safe_fa.bench import plot

            plot.save(report, args.plot)
    except (UsageError, ValueError, OSError) as error:
        print(f"dhp_safe_fa.bench: {error}", file=sys.stderr)
        return 2
    return 1 if report.wrong else 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Finds out before a long run that its results could not be written."""
    for option, path in (("--json", args.json), ("--plot", args.plot)):
        if path and not (path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()):
            raise UsageError(f"{option} {path}: cannot write there")
    if args.plot:
        try:
            from dhp_safe_fa.bench import plot
        except ImportError as error:
            raise UsageError(f"--plot needs matplotlib (pip install 'dhp_safe_fa[plot]'): {error}") from error
        plot.check_name(args.plot)


def _stored(args: argparse.Namespace) -> Report:
    """A stored run; with --anchors also its estimates of FlashAttention-3."""
    options = ("device", "shapes", "dtype", "quick", "cold", "seed", "list")
    useless = [f"--{name}" for name in options if getattr(args, name) not in (None, False)]
    if useless:
        raise UsageError(f"--from measures nothing: {', '.join(useless)} cannot be given with it")
    report = load(args.stored)
    if args.anchors:
        factors = anchors.load(args.anchors)
        report.results = [anchors.with_estimate(result, factors) for result in report.results]
    return report


def _run(args: argparse.Namespace) -> Report | None:
    """Measures what the arguments ask for; None if they ask for a list."""
    missing = missing_hopper()
    if missing is None and not _inspect.kernels():
        missing = "this build has no GPU kernels: nvcc was not found"
    if args.device == "cuda" and missing:
        raise UsageError(f"--device cuda: {missing}")
    device = args.device or ("cpu" if missing else "cuda")
    if device == "cpu" and (args.cold or args.anchors):
        raise UsageError(f"{'--cold' if args.cold else '--anchors'} needs --device cuda")
    factors = anchors.load(args.anchors) if args.anchors else {}
    shapes = args.shapes or (["start"] if device == "cpu" else ["start", "sweep"])
    cases, notes = served(select(shapes, args.dtype, device, args.quick), device)
    contestants, absent = candidates(device)
    notes += absent
    if device == "cpu":
        notes.append(f"not run: everything on CUDA ({missing or 'a Hopper GPU is there, but --device cpu was given'})")
    if args.list:
        print("\n".join([*(c.label for c in cases), f"candidates: {', '.join(c.name for c in contestants)}", *notes]))
        return None
    settings = Settings(rounds=3 if args.quick else 7, sample_ms=5 if args.quick else 20, cold=args.cold)
    generator = torch.Generator(device)
    seed = generator.seed() if args.seed is None else generator.manual_seed(args.seed).initial_seed()
    report = Report(environment(device), {"device": device, "seed": seed, **vars(settings)}, notes=notes)
    measured = _measure_all(cases, contestants, settings, device, generator)
    report.results = [anchors.with_estimate(result, factors) for result in measured]
    if not report.wrong:
        report.host_us = host_overhead(contestants, device, generator, HOST_ROUNDS)
    return report


def served(cases: list[Case], device: str) -> tuple[list[Case], list[str]]:
    """The cases that the installed kernels serve, and a note on every head_dim and dtype that they do not."""
    if device == "cpu":
        return cases, []
    kept, notes = [], []
    for case in cases:
        try:
            _inspect.plan(case.shape, case.key_shape, case.dtype, case.causal)
            kept.append(case)
        except ValueError as error:
            notes.append(f"not run: head_dim {case.head_dim}, {case.dtype} ({error})")
    if not kept:
        raise UsageError(f"no case is served by the installed kernels; {notes[0]}")
    return kept, list(dict.fromkeys(notes))


def _measure_all(
    cases: list[Case], contestants: list[Candidate], settings: Settings, device: str, generator: torch.Generator
) -> list[Result]:
    """All cases in order; one that is wrong or fails is reported at once and does not stop the others."""
    results = []
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=len(cases))
        for case in cases:
            bar.update(task, description=case.label)
            try:
                result = measure(case, contestants, settings, device, generator)
            except (WrongResult, RuntimeError) as error:  # RuntimeError: torch lacks memory, or the GPU failed
                result = Result(case, wrong=one_line(error))
                errors.print(f"FAIL {case.label}: {result.wrong}", soft_wrap=True, markup=False)
            results.append(result)
            bar.advance(task)
            if device == "cuda":
                torch.cuda.empty_cache()  # the next case's graphs get the memory of this one's
    return results


if __name__ == "__main__":
    sys.exit(main())
