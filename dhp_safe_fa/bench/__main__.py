"""``python -m dhp_safe_fa.bench``: measure, show, keep.

Exit status: 0; 1 if a result was wrong (nothing is timed for that case); 2 if an argument was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dhp_safe_fa import _inspect
from dhp_safe_fa._exit import exit_code
from dhp_safe_fa._files import can_write
from dhp_safe_fa.bench import anchors, meter
from dhp_safe_fa.bench.cases import DTYPES, LAYOUTS, Case, select
from dhp_safe_fa.bench.directions import DIRECTIONS, FORWARD, Direction
from dhp_safe_fa.bench.environment import environment, missing_hopper
from dhp_safe_fa.bench.measurement import DEFAULT_SETTINGS, QUICK_SETTINGS, WrongResult, host_overhead, measure
from dhp_safe_fa.bench.peers import Candidate, one_line
from dhp_safe_fa.bench.results import Report, Result, load, save
from dhp_safe_fa.bench.show import tables
from dhp_safe_fa.bench.sustained import SustainedSettings, measure_sustained

# Samples of the host's time a candidate: each is short.
HOST_ROUNDS = 21

# Below this time calls are also measured alone: launches overlap by about 1 µs, which is 2 % of it.
ALONE_BELOW_US = 50.0

# Who is run for seconds at a time unless --peers says otherwise: those that are as fast.
SUSTAINED_PEERS = ("cudnn", "fa3")

# What is measured in place of the forward, each by an option of its name.
DIRECTION_OPTIONS = tuple(name for name in DIRECTIONS if name != FORWARD.case.direction)

SHORT_SAMPLES = "its ratios are of short samples at one clock for everybody"

EPILOG = """\
examples:
  %(prog)s --quick
  %(prog)s --shapes sweep --dtype float16 --json sweep.json --plot sweep.png
  %(prog)s --shapes start anchors --peers flash cudnn --json anchors.json
  %(prog)s --sustained --json sustained.json
  %(prog)s --shapes 4,16,1024,64:causal:float16 2,32,8192,64
  %(prog)s --shapes odd 8,32/4,2500,64:causal 16,32/8,1/4096,128
  %(prog)s --backward --json backward.json
  %(prog)s --training --shapes 2,16,8192,128:causal
  %(prog)s --decode --json decode.json
  %(prog)s --varlen --shapes 64,32/8,16-8192,128:causal 3,8,700+1+90,64
  %(prog)s --paged --shapes 8,32/8,1/8192,128:page16 8,32/8,1/8192,128:page256
  %(prog)s --forms --shapes 4,16/4,4096,128:window1023:causal 4,16/4,4096,128:softcap50:sinks:causal
  %(prog)s --from sweep.json --plot sweep.svg --plot-all sweep_all.svg

benchmarks/README.md says how times are taken and what the JSON file holds.
"""


class UsageError(Exception):
    """An argument that makes no sense; the text is one sentence."""


def _seed(text: str) -> int:
    """As torch.Generator.manual_seed takes it."""
    try:
        seed = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number") from None
    if not -(2**63) <= seed < 2**64:
        raise argparse.ArgumentTypeError(f"{text}; supported: -2^63 to 2^64 - 1")
    return seed


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m dhp_safe_fa.bench",
        description="Time dhp_safe_fa.attention beside the attention implementations at hand, interleaved in one run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    direction = p.add_mutually_exclusive_group()
    direction.add_argument("--backward", action="store_true", help="time the gradients instead of the forward pass")
    direction.add_argument("--training", action="store_true", help="time forward and backward through autograd")
    direction.add_argument("--decode", action="store_true", help="time few queries over long caches, with TB/s")
    direction.add_argument("--varlen", action="store_true", help="time packed sequences of any lengths")
    direction.add_argument("--paged", action="store_true", help="time decoding from the pages of a cache")
    direction.add_argument("--forms", action="store_true", help="time sliding windows, soft caps and sinks")
    p.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda if there is a Hopper GPU, else cpu")
    p.add_argument(
        "--shapes",
        nargs="+",
        metavar="WORD",
        help="start, sweep, odd, anchors, sustained (or start,odd), or B,H[/Hk],S[/Sk],D[:full|:causal][:dtype]; "
        "default: start and sweep on cuda (anchors for gradients), start on cpu. --decode, --varlen, --paged and "
        "--forms have a set of their name; --varlen takes B,H[/Hk],LENGTHS,D with LENGTHS S, LOW-HIGH or S1+S2+..., "
        "--paged :pageSIZE, --forms :windowKEYS, :softcapCAP and :sinks behind the sizes",
    )
    p.add_argument(
        "--dtype",
        nargs="+",
        choices=DTYPES,
        help="default: float16 (cuda) or float32 (cpu), bfloat16 at a few shapes; gradients and serving: bfloat16 "
        "or float32",
    )
    p.add_argument("--layout", choices=LAYOUTS, help="how inputs are stored; default: BSHD, as models have them")
    p.add_argument("--peers", nargs="+", metavar="NAME", help="only these peers; --list names them")
    quick, usual = (f"{s.rounds} rounds of {s.sample_ms:g} ms" for s in (QUICK_SETTINGS, DEFAULT_SETTINGS))
    fewer = f"{quick} instead of {usual}, fewer lengths, on a CPU no bfloat16"
    p.add_argument("--quick", action="store_true", help=fewer)
    p.add_argument("--cold", action="store_true", help="rotate through inputs so that L2 never holds them (cuda)")
    p.add_argument(
        "--sustained",
        action="store_true",
        help="each candidate by itself for a second at a time, with clock and power (cuda; needs nvidia-ml-py)",
    )
    p.add_argument(
        "--anchors",
        type=Path,
        metavar="CSV",
        help="estimate FlashAttention-3, where it is not installed, from its ratio to cuDNN in this file; "
        "default: benchmarks/anchors_h100_forward.csv (_backward, _decode) of a checkout",
    )
    p.add_argument("--seed", type=_seed, metavar="N", help="repeat the inputs of a run (its JSON file says the seed)")
    p.add_argument("--json", type=Path, metavar="FILE", help="write the results, measured and derived")
    p.add_argument("--plot", type=Path, metavar="FILE", help="write TFLOP/s as a picture of at most four panels")
    p.add_argument("--plot-all", type=Path, metavar="FILE", help="the same of everything (both need matplotlib)")
    p.add_argument("--from", dest="stored", type=Path, metavar="JSON", help="show stored results, measure nothing")
    p.add_argument("--list", action="store_true", help="list cases and candidates, measure nothing")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        _check_outputs(args)
        report = _stored(args) if args.stored else _run(args, _direction(args))
        if report is None:
            return 0
        tables.show(report, tables.make_console())
        if args.json:
            save(report, args.json)
        if args.plot or args.plot_all:
            from dhp_safe_fa.bench.show import plot

            if args.plot:
                plot.save(report, args.plot)
            if args.plot_all:
                plot.save_all(report, args.plot_all)
    except (UsageError, ValueError, OSError) as error:
        print(f"dhp_safe_fa.bench: {error}", file=sys.stderr)
        return 2
    return 1 if report.wrong else 0


def _check_outputs(args: argparse.Namespace) -> None:
    """Finds out before a long run that its results could not be written."""
    pictures = [(o, path) for o, path in (("--plot", args.plot), ("--plot-all", args.plot_all)) if path]
    for option, path in [*pictures, *([("--json", args.json)] if args.json else [])]:
        if not can_write(path):
            raise UsageError(f"{option} {path}: cannot write there")
    for option, path in pictures:
        try:
            from dhp_safe_fa.bench.show import plot
        except ImportError as error:
            raise UsageError(f"{option} needs matplotlib (pip install 'dhp_safe_fa[plot]'): {error}") from error
        plot.check_name(path)


def _stored(args: argparse.Namespace) -> Report:
    """A stored run; with --anchors with estimates of FlashAttention-3 from that file in place of what it has."""
    options = (
        *DIRECTION_OPTIONS,
        "device",
        "shapes",
        "dtype",
        "layout",
        "peers",
        "quick",
        "cold",
        "sustained",
        "seed",
        "list",
    )
    useless = [f"--{name}" for name in options if getattr(args, name) not in (None, False)]
    if useless:
        raise UsageError(f"--from measures nothing: {', '.join(useless)} cannot be given with it")
    try:
        report = load(args.stored)
    except (OSError, ValueError) as error:
        raise UsageError(f"--from: {error}") from error
    if args.anchors:
        if "sustained_s" in report.settings:
            raise UsageError(f"--anchors {args.anchors}: {SHORT_SAMPLES}, and {args.stored} is a sustained run")
        for direction in {result.case.direction: None for result in report.results}:
            _estimate(report, _factors(args.anchors, DIRECTIONS[direction], []))
    return report


def _direction(args: argparse.Namespace) -> Direction:
    return next((DIRECTIONS[name] for name in DIRECTION_OPTIONS if getattr(args, name)), FORWARD)


def _run(args: argparse.Namespace, direction: Direction) -> Report | None:
    """Measures what the arguments ask for; None if they ask for a list."""
    if args.sustained and args.anchors:
        raise UsageError(f"--anchors {args.anchors}: {SHORT_SAMPLES}, and --sustained takes longer ones")
    if args.sustained and args.cold:
        raise UsageError("--cold: --sustained measures with inputs in place")
    if args.sustained and "sustained" not in direction.sets:
        raise UsageError(f"--sustained: given with --{direction.case.direction}; it is for the forward and gradients")
    device, missing = _device(args)
    default_shapes = ["sustained"] if args.sustained else direction.default_sets[device]
    dtypes = args.dtype or direction.dtypes.get(device)
    chosen = select(args.shapes or default_shapes, dtypes, device, args.quick, direction.sets, direction.case)
    cases, notes = served(chosen, device)
    everybody, absent = direction.candidates(device)
    contestants = _chosen(everybody, args.peers or (SUSTAINED_PEERS if args.sustained else None), args.peers)
    notes += absent
    if missing:
        notes.append(f"not run: everything on CUDA ({missing})")
    if args.list:
        if args.json:
            raise UsageError(f"--list: given with --json {args.json}; it measures nothing that could be stored")
        print("\n".join([*(c.label for c in cases), f"candidates: {', '.join(c.name for c in everybody)}", *notes]))
        return None
    generator = torch.Generator(device)
    seed = generator.seed() if args.seed is None else generator.manual_seed(args.seed).initial_seed()
    layout = args.layout or LAYOUTS[0]
    if args.sustained:
        turns = SustainedSettings(rounds=1 if args.quick else 3, layout=layout)
        return _sustained(cases, contestants, turns, seed, generator, notes)
    factors: dict[str, dict[Case, float]] = {}
    if device == "cuda" and not any(c.name == "fa3" for c in everybody):
        if any(c.name == "cudnn" for c in contestants):
            factors = _factors(args.anchors, direction, notes)
        else:
            notes.append("fa3 is not estimated: that needs cudnn among the peers")
    chosen_turns = QUICK_SETTINGS if args.quick else DEFAULT_SETTINGS
    settings = replace(chosen_turns, cold=args.cold, layout=layout, alone_below_us=ALONE_BELOW_US)
    report = Report(environment(device), {"device": device, "seed": seed, **vars(settings)}, notes=notes)
    report.results = _measure_all(cases, lambda case: measure(case, contestants, settings, device, generator))
    _estimate(report, factors)
    if not report.wrong:
        short = direction.host_case[device]
        report.host_us = host_overhead(short, contestants, device, generator, layout, HOST_ROUNDS)
    return report


def _device(args: argparse.Namespace) -> tuple[str, str | None]:
    """(cuda or cpu, why not cuda). UsageError if an option needs a device that is not there."""
    missing = missing_hopper()
    if missing is None and not _inspect.kernels():
        missing = "this build has no GPU kernels: nvcc was not found"
    if args.device == "cuda" and missing:
        raise UsageError(f"--device cuda: {missing}")
    device = args.device or ("cpu" if missing else "cuda")
    if device == "cuda":
        return device, None
    for option in ("cold", "sustained", "anchors"):
        if getattr(args, option):
            raise UsageError(f"--{option} needs --device cuda" + (f", and {missing}" if missing else ""))
    return device, missing or "a Hopper GPU is there, but --device cpu was given"


def _chosen(everybody: list[Candidate], names: Sequence[str] | None, asked: Sequence[str] | None) -> list[Candidate]:
    """Ours and the peers of these names, all without names. UsageError if one that was asked for is not there."""
    ours, *peers = everybody
    known = [peer.name for peer in peers]
    for name in asked or ():
        if name not in known:
            raise UsageError(f"--peers {name}: there is no such peer here; there are {', '.join(known)}")
    return [ours, *(peer for peer in peers if names is None or peer.name in names)]


def _factors(given: Path | None, direction: Direction, notes: list[str]) -> dict[str, dict[Case, float]]:
    """By name of who is estimated: its time by cuDNN's, from the file that was given or the checkout's. Adds notes."""
    path = given or anchors.of_checkout(direction.case.direction)
    if not direction.estimates:
        notes.append(f"fa3 is not estimated: there are no anchors for {direction.case.direction}")
        return {}
    if path is None:
        notes.append("fa3 is not estimated: the anchors are in a checkout's benchmarks/ (--anchors names a file)")
        return {}
    notes.append(f"what ends in ~ is estimated from {path.name}, which was measured on an H100")
    return {name: anchors.load(path, direction.case, column) for name, column in direction.estimates.items()}


def _estimate(report: Report, factors: dict[str, dict[Case, float]]) -> None:
    """Adds estimates to the results: of those of the names that were not measured."""
    for name, of_cases in factors.items():
        report.results = [anchors.with_estimate(result, of_cases, name) for result in report.results]


def _sustained(
    cases: list[Case],
    contestants: list[Candidate],
    settings: SustainedSettings,
    seed: int,
    generator: torch.Generator,
    notes: list[str],
) -> Report:
    """FlashAttention-3 is not estimated: the anchors are of short samples."""
    report = Report(environment("cuda"), {"device": "cuda", "seed": seed, **vars(settings)}, notes=notes)
    with ExitStack() as stack:
        found = meter.open_meter()
        if isinstance(found, str):
            notes.append(found)
            print(f"dhp_safe_fa.bench: {found}", file=sys.stderr)
        watching = None if isinstance(found, str) else stack.enter_context(found)
        report.results = _measure_all(
            cases, lambda case: measure_sustained(case, contestants, settings, generator, watching)
        )
    return report


def served(cases: list[Case], device: str) -> tuple[list[Case], list[str]]:
    """The cases that the installed kernels serve, and a note on every head_dim and dtype that they do not."""
    if device == "cpu":
        return cases, []
    kept, notes = [], []
    for case in cases:
        try:
            case.check_served()
            kept.append(case)
        except ValueError as error:
            notes.append(f"not run: head_dim {case.head_dim}, {case.dtype} ({error})")
    if not kept:
        raise UsageError(f"no case is served by the installed kernels; {notes[0]}")
    return kept, list(dict.fromkeys(notes))


def _measure_all(cases: list[Case], one: Callable[[Case], Result]) -> list[Result]:
    """All cases in order; one that is wrong or fails is reported at once and does not stop the others."""
    results = []
    errors = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=len(cases))
        for case in cases:
            bar.update(task, description=case.label)
            try:
                result = one(case)
            except (WrongResult, RuntimeError) as error:  # RuntimeError: torch lacks memory, or the GPU failed
                result = Result(case, wrong=one_line(error))
                errors.print(f"FAIL {case.label}: {result.wrong}", soft_wrap=True, markup=False)
            results.append(result)
            bar.advance(task)
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # the next case's graphs get the memory of this one's
    return results


if __name__ == "__main__":
    sys.exit(exit_code(main))
