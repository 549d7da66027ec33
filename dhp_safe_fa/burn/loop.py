"""The steps of an iteration and of the baseline, in order. A record is written at the very end, or not at all."""

from __future__ import annotations

import datetime
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dhp_safe_fa._files import can_write
from dhp_safe_fa.bench import Candidate, Case, Settings, WrongResult, anchors
from dhp_safe_fa.bench.cases import select
from dhp_safe_fa.bench.environment import missing_hopper
from dhp_safe_fa.bench.measurement import DEFAULT_SETTINGS
from dhp_safe_fa.burn.builds import keeping
from dhp_safe_fa.burn.builds.library import Library, ShippedKernel
from dhp_safe_fa.burn.families import FAMILIES
from dhp_safe_fa.burn.log import file, milestones
from dhp_safe_fa.burn.log.records import AGAIN, FORWARD, OURS, PREVIOUS, Chip, Gate, Kernel, Record, Shape
from dhp_safe_fa.burn.measuring import blocks, chip, gating, profiling
from dhp_safe_fa.gates import registry, tools

# Never the best peer on Hopper, and slow: timed by the baseline and by --full.
SLOW_PEERS = ("efficient", "math")
# A baseline has no verdict: blocks only for its spread.
BASELINE_BLOCKS = 3

Tell = Callable[[str], None]


class Refused(Exception):
    """What was asked for cannot be done here or makes no sense; one sentence."""


@dataclass(frozen=True)
class Change:
    """What the user changed and why, and how it is judged.

    Attributes:
        against: the iteration to compare with; None: the previous best.
        evidence: the gates that need a GPU are not run again, audits/evidence.json speaks for them.
    """

    hypothesis: str
    prediction: str
    milestones: Sequence[str] = ()
    against: str | None = None
    evidence: bool = False


@dataclass(frozen=True)
class Plan:
    """What is to be timed.

    Attributes:
        full: every shape and peer, gates in full, a report for ncu-ui; else quick.
        family: of kernels, one of families.FAMILIES.
    """

    log: Path
    name: str
    full: bool
    shapes: Sequence[str] | None
    family: str = FORWARD

    def cases(self) -> list[Case]:
        """ValueError about a word that cannot be read."""
        family = FAMILIES[self.family]
        direction = family.direction
        dtypes = direction.dtypes.get("cuda")
        shapes = self.shapes or family.default_shapes
        return select(shapes, dtypes, "cuda", not self.full, direction.sets, direction.case)

    def settings(self) -> Settings:
        """Samples as long as the benchmark's, so that ratios to peers are of one kind."""
        return Settings(rounds=6 if self.full else 4, sample_ms=DEFAULT_SETTINGS.sample_ms, eager=False)

    def recorded_settings(self, count: int) -> dict[str, Any]:
        shapes = list(self.shapes) if self.shapes else None
        return {"full": self.full, "shapes": shapes, "blocks": count, **vars(self.settings())}


def run(plan: Plan, change: Change, tell: Tell) -> Record:
    """One iteration: build, gates, counters, times, verdict, record.

    Raises:
        Refused, LogError, ValueError, BuildFailed, NoCounters, RuntimeError: nothing was recorded; one sentence.
    """
    keeping.check_checkout()
    log, here, cases = _open(plan)
    best = log.find(change.against) if change.against else log.best(plan.family)
    if best and best.family != plan.family:
        raise Refused(f"'{best.name}' is about {best.family}: {plan.family} cannot be compared with it")
    commit = keeping.commit()
    tell("building …")
    keeping.build_current()
    ours = keeping.current()
    previous = build_of(best) if best else None
    cases, left_out = _served(ours, plan.family, cases)
    for sentence in left_out:
        tell(sentence)

    anywhere = [gate.name for gate in registry.GATES if not gate.executes]
    gates = gating.run_all(anywhere, ours.cubins(), not plan.full, tell)
    profiles, report, shapes, wrong = None, None, [], None
    if not _failed(gates):
        if here is None:
            raise Refused(f"after {', '.join(anywhere)} a Hopper GPU is needed: {missing_hopper()}")
        if change.evidence:
            gates += gating.from_evidence(registry.EXECUTING, ours.cubins(), here)
        else:
            gates += gating.run_all(registry.EXECUTING, ours.cubins(), not plan.full, tell)
    if not _failed(gates):
        profiled = _longest(cases)
        tell(f"counters of {len(profiled)} shapes …")
        profiles = profiling.profile(ours, plan.family, profiled)
        if plan.full:
            report = _store_report(plan, ours, profiled, tell)
        tell(f"times of {len(cases)} shapes …")
        try:
            shapes = _measure(plan, cases, ours, previous)
        except WrongResult as error:
            wrong = str(error)
    record = Record(
        name=plan.name,
        kind="run",
        date=_now(),
        commit=commit,
        chip=here,
        settings=plan.recorded_settings(blocks.BLOCKS),
        hypothesis=change.hypothesis,
        prediction=change.prediction,
        nvcc=_nvcc_version(),
        library_sha256=ours.sha256,
        kernels=[_kernel(kernel) for kernel in ours.kernels],
        parent=log.parent(best) if best else None,
        gates=gates,
        profiles=profiles,
        report=report,
        wrong=wrong,
        shapes=shapes,
        milestones=list(change.milestones),
        family=plan.family,
    )
    record.milestones.extend(name for name in milestones.counted(record) if name not in record.milestones)
    file.append(plan.log, record)
    return record


def baseline(plan: Plan, tell: Tell) -> Record:
    """Iteration 0: torch's backends and the unfused chain at the start shapes and the sweep, without ours."""
    _, here, cases = _open(plan)
    if here is None:
        raise Refused(f"the baseline needs a Hopper GPU: {missing_hopper()}")
    peers = FAMILIES[plan.family].direction.candidates("cuda")[0][1:]
    tell(f"times of {', '.join(peer.name for peer in peers)} at {len(cases)} shapes …")
    try:
        shapes = _timed(plan, cases, lambda case, block: peers, BASELINE_BLOCKS)
    except WrongResult as error:
        raise Refused(str(error)) from error
    settings = plan.recorded_settings(BASELINE_BLOCKS)
    record = Record(plan.name, "baseline", _now(), None, here, settings, shapes=shapes, family=plan.family)
    file.append(plan.log, record)
    return record


# ---- steps -----------------------------------------------------------------------------------------------------------


def check_log(path: Path) -> None:
    """Refused if nothing could be written there, which else is found out when all has been measured."""
    if not can_write(path):
        raise Refused(f"--log {path}: cannot write there")


def _open(plan: Plan) -> tuple[file.Log, Chip | None, list[Case]]:
    """The log, the GPU if there is one, and the cases: what can be refused before anything is built."""
    cases = plan.cases()
    here = None if missing_hopper() else chip.here()
    check_log(plan.log)
    log = file.load(plan.log)
    log.check_new(plan.name, here.gpu if here else None)
    if here:
        profiling.find_ncu()
    return log, here, cases


def build_of(record: Record) -> Library:
    """The build of an iteration. Refused if the record names none; BuildFailed if it cannot be had."""
    if record.kind != "run" or record.library_sha256 is None or record.commit is None:
        raise Refused(f"'{record.name}' is no run of the loop: there is no build of it")
    cubins = {kernel.name: kernel.cubin_sha256 for kernel in record.kernels}
    return keeping.kept(record.name, record.library_sha256, record.commit, cubins)


def _failed(gates: Sequence[Gate]) -> bool:
    return any(gate.verdict == "FAIL" for gate in gates)


def _served(library: Library, family: str, cases: Sequence[Case]) -> tuple[list[Case], list[str]]:
    """The cases that the build serves, and its own sentence about each kind that it does not. Refused without any."""
    served, sentences = [], []
    for case in cases:
        try:
            FAMILIES[family].launch(library, case)
            served.append(case)
        except ValueError as error:
            sentences.append(f"left out: {error}")
    if not served:
        raise Refused(f"{library.path} serves none of the shapes; {sentences[0]}")
    return served, list(dict.fromkeys(sentences))


def _longest(cases: Sequence[Case]) -> list[Case]:
    """The largest case of each head_dim, mask and dtype: counters of small ones say more about launches."""
    largest: dict[tuple[int, bool, str], Case] = {}
    for case in sorted(cases, key=lambda case: case.flops):
        largest[case.head_dim, case.causal, case.dtype] = case
    return list(largest.values())


def _measure(plan: Plan, cases: Sequence[Case], ours: Library, previous: Library | None) -> list[Shape]:
    everybody = FAMILIES[plan.family].direction.candidates("cuda")[0][1:]
    peers = [peer for peer in everybody if plan.full or peer.name not in SLOW_PEERS]
    call = FAMILIES[plan.family].call
    both = [Candidate(OURS, call(ours))]
    if previous:
        both += [Candidate(PREVIOUS, call(previous)), Candidate(AGAIN, call(blocks.copy_of(ours)))]
    # a shape that the previous best does not serve is compared with the peers alone
    new = set(cases) - set(_served(previous, plan.family, cases)[0]) if previous else set()

    def lineup(case: Case, block: int) -> list[Candidate]:
        return blocks.interleaved(both[:1] if case in new else both, peers, block)

    shapes = _timed(plan, cases, lineup, blocks.BLOCKS)
    for shape, case in zip(shapes, cases, strict=True):
        for name, library in ((OURS, ours), (PREVIOUS, previous)):
            if name in shape.absent:
                raise Refused(f"{name} cannot be timed at {shape.case}: {shape.absent[name]}")
            if library and name in shape.us:
                shape.launch[name] = FAMILIES[plan.family].launch(library, case)
    return shapes


def _timed(plan: Plan, cases: Sequence[Case], lineup: blocks.Lineup, count: int) -> list[Shape]:
    here = chip.here()
    direction = FAMILIES[plan.family].direction
    path = anchors.of_checkout(direction.case.direction) if "H100" in here.gpu else None
    estimates = direction.estimates if path else {}
    factors = {name: anchors.load(path, direction.case, column) for name, column in estimates.items() if path}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("times", total=count * len(cases))
        return blocks.measure_all(
            cases, lineup, plan.settings(), count, "cuda", factors, lambda: bar.advance(task)
        )


def _kernel(kernel: ShippedKernel) -> Kernel:
    """With its matrix and TMA load instructions counted, if there is a disassembler."""
    try:
        opcodes = re.findall(r"\b(HGMMA|UTMALDG)\b", tools.disassemble(kernel.cubin))
    except tools.NotRun:
        opcodes = None
    counts = [None if opcodes is None else opcodes.count(name) for name in ("HGMMA", "UTMALDG")]
    return Kernel(kernel.name, kernel.sha256, kernel.registers, kernel.spill_bytes, kernel.shared_bytes, *counts)


def _store_report(plan: Plan, library: Library, cases: Sequence[Case], tell: Tell) -> str:
    """Too large for git: it stays under build/, and its path goes into the record."""
    path = keeping.KEPT / f"{re.sub(r'[^A-Za-z0-9._-]', '_', plan.name)}.ncu-rep"
    tell(f"full report: {path} …")
    profiling.store_report(library, plan.family, cases, path)
    return str(path.relative_to(keeping.ROOT))


def _nvcc_version() -> str | None:
    sys.path.insert(0, str(keeping.ROOT / "csrc" / "kernels"))
    import build_cubins  # no part of the package

    nvcc = build_cubins.find_nvcc()
    return build_cubins.nvcc_version(nvcc) if nvcc else None


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
