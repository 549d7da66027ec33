"""``python -m dhp_safe_fa.burn``: one iteration of the kernel, or a look at the log.

Exit status: 0; of ``run``: 0 proceed, 1 roll back, 3 undecided; 2 if nothing was done, with the cause.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from dhp_safe_fa._exit import exit_code
from dhp_safe_fa.burn import loop
from dhp_safe_fa.burn.builds.keeping import ROOT, BuildFailed
from dhp_safe_fa.burn.families import FAMILIES
from dhp_safe_fa.burn.log import file, quoted, stored
from dhp_safe_fa.burn.log.file import LogError
from dhp_safe_fa.burn.log.milestones import MILESTONES
from dhp_safe_fa.burn.log.records import FORWARD, Record
from dhp_safe_fa.burn.measuring.profiling import NoCounters
from dhp_safe_fa.burn.showing import tables

LOG = ROOT / "audits" / "iterations.jsonl"
PICTURE = ROOT / "audits" / "iterations.png"
EXIT_CODES = {"proceed": 0, "roll back": 1, "undecided": 3}

EPILOG = """\
examples:
  %(prog)s baseline iteration-0
  %(prog)s run fewer-waits --hypothesis "half of the waits are not needed" --predict "+3%% at D=128"
  %(prog)s log
  %(prog)s log fewer-waits
  %(prog)s roofline fewer-waits

docs/burn.md teaches the method on an entry of the log.
"""


def _sentence(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return text


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m dhp_safe_fa.burn",
        description="Change one thing, gate it, profile it, time it against the previous best, decide, record.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--log", type=Path, default=LOG, metavar="FILE", help="default: audits/iterations.jsonl")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="one iteration of the committed sources (needs a Hopper GPU and ncu)")
    run.add_argument("name")
    why = "what the change does, and why it should help"
    run.add_argument("--hypothesis", required=True, type=_sentence, metavar="TEXT", help=why)
    run.add_argument("--predict", required=True, type=_sentence, metavar="TEXT", help='such as "+8%% at D=128 causal"')
    run.add_argument("--against", metavar="NAME", help="compare with this iteration instead of the previous best")
    run.add_argument(
        "--milestone", action="append", default=[], choices=MILESTONES, help="a milestone that this iteration works on"
    )
    run.add_argument(
        "--evidence", action="store_true", help="take the GPU gates from audits/evidence.json if it is about this build"
    )
    baseline = commands.add_parser("baseline", help="iteration 0: torch's attention and an unfused chain, without ours")
    baseline.add_argument("name")
    for command in (run, baseline):
        extent = command.add_mutually_exclusive_group()
        extent.add_argument("--quick", action="store_true", help="the default: fewer lengths and peers, quick gates")
        extent.add_argument("--full", action="store_true", help="every shape and peer, full gates, a report for ncu-ui")
        command.add_argument("--shapes", nargs="+", metavar="WORD", help="as bench takes them; default: start, sweep")

    imports = commands.add_parser("import", help="record the stored benchmark result of a commit, without a decision")
    imports.add_argument("name")
    imports.add_argument("commit", help="a commit whose benchmarks/results/GPU_FAMILY.json is taken")
    imports.add_argument("--gpu", metavar="NAME", default="h100", help="as that file is called; default: %(default)s")

    build = commands.add_parser(
        "build", help="put the build of an iteration into build/burn/, to carry it to a machine without git history"
    )
    build.add_argument("name")

    log = commands.add_parser("log", help="the table, or everything about one iteration")
    log.add_argument("name", nargs="?")
    log.add_argument("--milestones", action="store_true", help="which iteration answers which milestone")
    plot = commands.add_parser("plot", help="the journey as a picture")
    plot.add_argument("--out", type=Path, default=PICTURE, metavar="FILE", help="default: audits/iterations.png")
    for command in (run, baseline, imports, plot):
        command.add_argument("--family", choices=FAMILIES, default=FORWARD, help="of kernels; default: %(default)s")
    compare = commands.add_parser("compare", help="two iterations, shape by shape")
    compare.add_argument("a")
    compare.add_argument("b")
    roofline = commands.add_parser("roofline", help="measured time against three floors, shape by shape")
    roofline.add_argument("name", nargs="?", help="default: the latest iteration with times")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command in ("run", "baseline"):
            return _iterate(args)
        if args.command == "import":
            loop.check_log(args.log)
            record = stored.imported(args.name, args.commit, args.family, args.gpu)
            file.append(args.log, record)
            tables.show_record(record, tables.make_console())
            return 0
        if not args.log.exists():
            raise LogError(f"--log {args.log}: there is no such log; `run`, `baseline` and `import` begin one")
        _look(args, file.load(args.log))
    except KeyboardInterrupt:
        print("dhp_safe_fa.burn: interrupted; nothing was recorded", file=sys.stderr)
        return 2
    except (loop.Refused, BuildFailed, NoCounters, ValueError, OSError, RuntimeError) as error:
        print(f"dhp_safe_fa.burn: {error}", file=sys.stderr)
        return 2
    except Exception:  # Python itself would exit with 1, which is a verdict
        traceback.print_exc()
        return 2
    return 0


def _iterate(args: argparse.Namespace) -> int:
    """Runs, shows the record, returns the exit status of its decision."""
    progress = Console(stderr=True, highlight=False)

    def tell(line: str) -> None:
        progress.print(line, markup=False, soft_wrap=True)

    plan = loop.Plan(log=args.log, name=args.name, full=args.full, shapes=args.shapes, family=args.family)
    if args.command == "run":
        change = loop.Change(args.hypothesis, args.predict, args.milestone, args.against, args.evidence)
        record = loop.run(plan, change, tell)
    else:
        record = loop.baseline(plan, tell)
    tables.show_record(record, tables.make_console())
    return EXIT_CODES[record.decision] if record.decision else 0


def _look(args: argparse.Namespace, log: file.Log) -> None:
    """The commands that read the log. LogError or ValueError with one sentence."""
    console = tables.make_console()
    if args.command == "log" and args.milestones and args.name:
        raise ValueError(f"--milestones: given with an iteration ({args.name}), of which `log {args.name}` says all")
    if args.command == "log" and args.milestones:
        tables.show_milestones(log.records, console)
    elif args.command == "log" and args.name:
        tables.show_record(log.find(args.name), console)
    elif args.command == "log":
        tables.show_log(log.records, quoted.load(), console)
    elif args.command == "build":
        library = loop.build_of(log.find(args.name))
        console.print(f"{library.path.parent} holds the build of {args.name}", markup=False, soft_wrap=True)
    elif args.command == "compare":
        tables.show_comparison(log.find(args.a), log.find(args.b), console)
    elif args.command == "roofline":
        tables.show_roofline(_with_bandwidth(log.find(args.name) if args.name else _latest_timed(log), log), console)
    else:
        try:
            from dhp_safe_fa.burn.showing import plot
        except ImportError as error:
            raise ValueError(f"plot needs matplotlib (pip install 'dhp_safe_fa[plot]'): {error}") from error
        plot.save([record for record in log.records if record.family == args.family], quoted.load(), args.out)
        console.print(f"wrote {args.out}", markup=False, soft_wrap=True)


def _with_bandwidth(record: Record, log: file.Log) -> Record:
    """The record; if its memory's bandwidth was not recorded, with another record's: a log is of one GPU model."""
    known = [other.chip.dram_gbs for other in log.records if other.chip and other.chip.dram_gbs]
    if record.chip is None or record.chip.dram_gbs or not known:
        return record
    return replace(record, chip=replace(record.chip, dram_gbs=known[0]))


def _latest_timed(log: file.Log) -> Record:
    for record in reversed(log.records):
        if record.shapes and record.kind != "baseline":
            return record
    raise LogError(f"{log.path}: no iteration has times yet")


if __name__ == "__main__":
    sys.exit(exit_code(main))
