"""The commands about what is kept under audits/: status, evidence, peers."""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from dhp_safe_fa import evidence
from dhp_safe_fa._files import write_whole

from .. import provenance, registry, targets
from ..peers import page
from ..tools import NotRun
from ..verdict import EXIT_CODES, FAIL, NOT_RUN, PASS, Progress, worst
from . import contracts, gathering, pieces, writer

COMMANDS = ("status", "evidence", "peers")
_OF_A_RUN = "--kernel, --family, --quick, --missing, --devices, --piece and --minutes"
_EXIT = {evidence.FRESH: 0, evidence.STALE: 1, evidence.NONE: 2}
_AUDITS = evidence.CHECKOUT.parent
# The whole output of the last run of `evidence`, figures and all; audits/ keeps what people review.
LAST_RUN = evidence.CHECKOUT.parents[1] / "build" / "evidence" / "run.json"
_PIECES = "pieces"  # the folder beside it, where it is made piece by piece


def add_commands(commands: Any) -> None:
    """Adds them to the parser's subcommands."""
    status = commands.add_parser("status", help="is audits/evidence.json about this build? 0 fresh, 1 stale, 2 none")
    status.add_argument("--write", metavar="README.md", type=Path, help="bring the states in that file up to date")
    record = commands.add_parser("evidence", help="run the gates on a Hopper GPU, and store what they say")
    some = record.add_mutually_exclusive_group()
    some.add_argument("--kernel", metavar="NAME", nargs="+", help="of these kernels (default: all)")
    some.add_argument("--family", metavar="NAME", nargs="+", help="of the kernels of these families")
    record.add_argument("--gate", dest="gates", choices=registry.NAMES, nargs="+", default=[*registry.NAMES],
                        help="these gates (default: all); sass needs no GPU")  # fmt: skip
    record.add_argument("--from", dest="runs", metavar="FILE", type=Path, nargs="+", help="of `gates all --json FILE`")
    record.add_argument("--output", metavar="FILE", type=Path, default=evidence.CHECKOUT, help="default: %(default)s")
    record.add_argument(
        "--quick", metavar="GATE", choices=writer.QUICK_IS_EVIDENCE, nargs="+", default=[], help="with fewer repeats"
    )
    record.add_argument("--missing", action="store_true", help="only what is not stored, stale, INVALID, or was quick")
    record.add_argument("--devices", metavar="N", nargs="+", default=[], help="on these GPUs at once, piece by piece")
    record.add_argument("--piece", metavar="N", type=_count, help="so many kernels in a piece at most")
    record.add_argument("--minutes", metavar="M", type=_minutes, help="stop then; --missing goes on another day")
    peers = commands.add_parser("peers", help="run the gates on the peers, and store that: audits/peers.json, peers.md")
    peers.add_argument("--peer", choices=targets.PEERS, nargs="+", help="default: all")
    peers.add_argument("--gate", dest="gates", choices=registry.NAMES, nargs="+", help="default: all")
    peers.add_argument("--from", dest="runs", metavar="FILE", type=Path, nargs="+", help="peers.json of runs elsewhere")
    peers.add_argument("--output", metavar="FOLDER", type=Path, default=_AUDITS, help="default: %(default)s")


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of kernels, 1 or more")
    return int(text)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"'{text}' is no number of minutes above 0")
    return minutes


def status_command(arguments: argparse.Namespace, out: Console) -> int:
    """Prints the state and every reason; with --write, corrects a README. Exit code 0 fresh, 1 stale, 2 none."""
    status = evidence.status()
    out.print(f"evidence: {status.state}" + (f": {escape(status.summary)}" if status.summary else ""))
    for reason in status.reasons:
        out.print(escape(f"  {reason}"))
    for part in status.not_compared:
        out.print(f"  not compared here: {part}")
    if arguments.write:
        path = evidence.find()
        text = arguments.write.read_text(encoding="utf-8")
        try:
            known = evidence.load(path) if path else None
        except ValueError as error:
            raise writer.Refused(str(error)) from error
        try:
            corrected = contracts.rewrite(text, known, evidence.held(), provenance.here())
        except ValueError as error:
            raise writer.Refused(f"--write {arguments.write}: {error}") from error
        write_whole(corrected, arguments.write)
    return _EXIT[status.state]


def evidence_command(
    arguments: argparse.Namespace,
    out: Console,
    run_all: Callable[[list[str], Callable[[dict[str, Any]], None]], dict[str, Any]],
) -> int:
    """Runs gates, or reads runs, and stores what they said beside what is stored of other kernels and gates. Refused or
    NotRun before anything is written. What was found is stored after each gate, or piece, and kept as the last run: one
    that ends early loses no finding, and is gone on with by --missing. Results of pieces are kept below _PIECES."""
    from dhp_safe_fa import _inspect
    from dhp_safe_fa.bench.environment import git_commit

    in_pieces = bool(arguments.missing or arguments.devices or arguments.minutes or arguments.piece)
    if arguments.runs and (in_pieces or arguments.kernel or arguments.family or arguments.quick):
        raise writer.Refused(f"{_OF_A_RUN} are of a new run: not with --from")
    _require_folder(arguments.output.parent)
    if arguments.output.is_dir():
        raise writer.Refused(f"--output {arguments.output}: is a folder; a file is needed")
    kernels, now = _inspect.kernels(), provenance.here()
    built = _inspect.build_info()["sources"]["all"]
    writer.require_clean_build(evidence.held(), git_commit(*writer.SOURCES)["dirty"], built)
    _stored(arguments.output)  # refused now, and not after a long run
    listings: dict[str, str] = {}
    standing: dict[tuple[str, str], None] = {}  # what was found before, and not now

    def store(runs: Sequence[dict[str, Any]]) -> None:
        for run in runs:
            writer.require_made_as_evidence(run, kernels, now)
            for name in run["how"]["kernels"] if "sass" in run else ():
                if name not in listings and any(report.get("kernel") == name for report in run["sass"]):
                    listings[name] = writer.listing_digest(_inspect.cubin(name))
        with _alone():
            before = _stored(arguments.output)
            standing.update(dict.fromkeys(writer.not_taken_back(runs, kernels, now, before)))
            writer.write(writer.assemble(runs, kernels, listings, now, before), arguments.output)

    def keep(run: dict[str, Any]) -> None:
        _keep(run)
        store([run])

    runs: list[dict[str, Any]] = []
    without: list[pieces.Piece] = []
    if arguments.runs:
        runs = [_read(path) for path in arguments.runs]
        store(runs)
    elif in_pieces:
        wanted, found = _wanted(arguments, kernels, now)
        standing.update(dict.fromkeys(found if arguments.missing else ()))
        runs, without = _in_pieces(arguments, wanted, store, out)
    else:
        names = _chosen(arguments, kernels)
        if set(arguments.gates) & set(registry.EXECUTING):
            from ..subjects import require_gpu

            require_gpu()
        runs = [run_all(names, keep)]
        store(runs)
    looked_at = {name for run in runs for name in run["how"]["kernels"]}
    for name, gate in standing:
        failed_before = f"{name}: {gate} has failed on these bytes, with all taking part that takes part now"
        out.print(escape(f"{failed_before}: that stands, a second look takes no finding back"))
    is_done = in_pieces and not runs and not without
    verdicts = [PASS if is_done else writer.verdict(runs), *(FAIL for _ in standing), *(NOT_RUN for _ in without)]
    verdict = worst(verdicts)
    where = f"stored in {arguments.output}" if runs else f"nothing {'is missing' if is_done else 'was stored'}"
    out.print(escape(f"{verdict}: {len(looked_at)} of {len(kernels)} kernels, {where}"))
    return EXIT_CODES[verdict]


def _chosen(arguments: argparse.Namespace, kernels: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the kernels that are asked for. NotRun for a name that there is not."""
    families = {str(kernel["family"]) for kernel in kernels}
    unknown = [family for family in arguments.family or () if family not in families]
    if unknown:
        raise NotRun(f"--family {unknown[0]}: there is no such family; there are {', '.join(sorted(families))}")
    names = [
        str(kernel["name"]) for kernel in kernels if not arguments.family or kernel["family"] in arguments.family
    ]
    targets.require_shipped(arguments.kernel, names)
    return [name for name in names if not arguments.kernel or name in arguments.kernel]


def _stored(path: Path) -> evidence.Evidence | None:
    """What is in the file that is to be written; None if it is of an older version, of which nothing is kept. Refused
    if it cannot be read: a finding in it would be lost."""
    if not path.is_file():
        return None
    try:
        return evidence.load(path)
    except ValueError as error:
        if evidence.is_older(path):
            return None
        raise writer.Refused(f"{error}: mend it, or take it away") from error


def _keep(run: dict[str, Any]) -> None:
    LAST_RUN.parent.mkdir(parents=True, exist_ok=True)
    write_whole(json.dumps(run, indent=1) + "\n", LAST_RUN)


def _wanted(
    arguments: argparse.Namespace, kernels: Sequence[Mapping[str, Any]], now: Mapping[str, str | None]
) -> tuple[dict[str, list[str]], list[tuple[str, str]]]:
    """Gate to the kernels on which it is asked for; and of what was asked for kernel and gate of each finding."""
    before = _stored(arguments.output)
    failed = writer.findings(before)
    chosen = set(_chosen(arguments, kernels))
    of = [kernel for kernel in kernels if kernel["name"] in chosen]
    gates = [gate for gate in registry.NAMES if gate in arguments.gates]

    def is_wanted(kernel: Mapping[str, Any], gate: str) -> bool:
        return not arguments.missing or pieces.is_missing(before, failed, kernel, gate, gate in arguments.quick, now)

    wanted = {gate: [str(kernel["name"]) for kernel in of if is_wanted(kernel, gate)] for gate in gates}
    found = [(kernel["name"], gate) for kernel in of for gate in gates if writer.has_failed(failed, kernel, gate, now)]
    return wanted, found


@contextmanager
def _alone() -> Iterator[None]:
    """Whoever stores evidence reads the file first: no other command of this checkout may write it meanwhile."""
    LAST_RUN.parent.mkdir(parents=True, exist_ok=True)
    with (LAST_RUN.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _in_pieces(
    arguments: argparse.Namespace,
    wanted: Mapping[str, Sequence[str]],
    store: Callable[[Sequence[dict[str, Any]]], None],
    out: Console,
) -> tuple[list[dict[str, Any]], list[pieces.Piece]]:
    """Runs piece by piece: what came of them, as far as a verdict needs it, and the pieces of which nothing came."""
    runs: list[dict[str, Any]] = []

    def store_piece(run: dict[str, Any]) -> str:
        store([run])
        runs.append({"how": {"kernels": run["how"]["kernels"]}, **_verdicts(run)})
        return writer.said(run)

    devices = gathering.visible(arguments.devices, os.environ)
    if not any(wanted.values()):
        return [], []
    (LAST_RUN.parent / _PIECES).mkdir(parents=True, exist_ok=True)
    without = gathering.gather(
        pieces.deal(wanted, arguments.quick, arguments.piece),
        devices,
        60 * arguments.minutes if arguments.minutes else float("inf"),
        Path(tempfile.mkdtemp(prefix=f"{datetime.now():%Y-%m-%d-%H%M}-", dir=LAST_RUN.parent / _PIECES)),
        store_piece,
        lambda text: out.print(escape(text)),
    )
    for piece in without:
        out.print(escape(f"not run: {piece}; the same with --missing goes on with it, --piece N makes it smaller"))
    return runs, without


def _verdicts(run: Mapping[str, Any]) -> dict[str, Any]:
    """Of a run what its verdict is made of: figures of many pieces are large."""
    return {gate: [{"verdict": one["verdict"]} for one in run[gate]] for gate in registry.NAMES if gate in run}


def _require_folder(folder: Path) -> None:
    """Finds out before a long run that its results could not be written."""
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        raise writer.Refused(f"--output: cannot write into {folder}")


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object. Refused for anything else; stored files are there, so that one which is not was asked for."""
    if not path.is_file():
        raise writer.Refused(f"--from {path}: there is no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise writer.Refused(f"{path}: is no JSON file ({error})") from error
    if not isinstance(content, dict):
        raise writer.Refused(f"{path}: is no JSON object")
    return content


def _read_peers(path: Path) -> dict[str, Any]:
    """What is known of peers. Refused for anything else, of which no page could be made either."""
    from ..peers import run

    content = _read_json(path)
    if content.get("schema") != run.SCHEMA:
        raise writer.Refused(f"{path}: is {content.get('schema') or 'no run on the peers'}; expected is {run.SCHEMA}")
    try:
        page.page(run.merge([content]))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise writer.Refused(f"{path}: is damaged ({what}): mend it, or take it away") from error
    return content


def _read(path: Path) -> dict[str, Any]:
    """A JSON object with an environment, as runs of all gates have. Refused for anything else."""
    content = _read_json(path)
    if not isinstance(content.get("environment"), dict):
        raise writer.Refused(f"{path}: is no stored run: it does not say on which machine it was made")
    return content


def peers_command(arguments: argparse.Namespace, out: Console, tell: Progress) -> int:
    """Audits the peers, and stores JSON and page, beside what is stored of other peers and gates; what the gates find
    there fails nothing here."""
    from ..peers import run

    if arguments.runs and (arguments.peer or arguments.gates):
        raise writer.Refused("--peer and --gate are of a new run: not with --from")
    _require_folder(arguments.output)
    file = arguments.output / "peers.json"

    def stored_with(*found: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Read anew: another run may have stored something meanwhile."""
        content = run.merge([*([_read_peers(file)] if file.is_file() else []), *found])
        return content, page.page(content)

    stored_with()  # refused now, and not after a long run
    gates = [gate for gate in registry.NAMES if gate in (arguments.gates or registry.NAMES)]
    found = [_read_peers(path) for path in arguments.runs or ()]
    content, text = stored_with(*(found or [run.run(arguments.peer or [*targets.PEERS], tell, gates)]))
    write_whole(writer.as_text(content), file)
    write_whole(text, arguments.output / "peers.md")
    out.print(f"written: {escape(str(arguments.output / 'peers.md'))}")
    return EXIT_CODES[PASS]
