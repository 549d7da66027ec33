"""The log, audits/iterations.jsonl: one JSON object a line, read back only if it is whole and agrees with itself.

A line holds what was measured and what follows from it. The second is computed again whenever the log is read, and a
line that claims something else (another TFLOP/s, ratio or decision) is refused, as is one whose parent was changed
afterwards.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dhp_safe_fa._files import write_whole
from dhp_safe_fa.bench.cases import Case, parse_case
from dhp_safe_fa.burn import decode, milestones, verdict
from dhp_safe_fa.burn.verdict import Decision

# The number goes up when the rules of the verdict change: a line is judged by the rules it was written under.
SCHEMA = "dhp_safe_fa.burn/1"
# Every gate that has to pass before a change may proceed, in the order in which they are run.
GATES: tuple[Literal["sass", "counters", "bitwise", "timing"], ...] = ("sass", "counters", "bitwise", "timing")
OURS, PREVIOUS, AGAIN = "ours", "previous", "again"


class LogError(ValueError):
    """The log, or a name looked up in it, is not as it should be; one sentence."""


@dataclass(frozen=True)
class Chip:
    """The machine. clock_mhz: highest SM clock. dram_gbs: peak of the memory in GB/s. None: not recorded."""

    gpu: str
    multiprocessors: int
    clock_mhz: int
    dram_gbs: float | None
    power_limit: str | None
    driver: str
    cuda: str
    cudnn: int
    torch: str


@dataclass(frozen=True)
class Kernel:
    """A cubin. registers: per thread. shared_bytes: per CTA. wgmma, tma: instructions in its SASS."""

    name: str
    cubin_sha256: str
    registers: int | None
    spill_bytes: int | None
    shared_bytes: int | None
    wgmma: int | None
    tma: int | None


@dataclass(frozen=True)
class Profile:
    """Counters of one launch (Nsight Compute, caches flushed before it). Percentages are of the peak over the launch's
    duration; instructions are warp instructions."""

    case: str
    us: float
    sm_percent: float
    tensor_percent: float
    dram_bytes: int
    issued_instructions: int
    executed_instructions: int


@dataclass(frozen=True)
class Shape:
    """Times of one case by graph replay: µs per call, for each candidate one number a block; None: not in that block.
    Ours is in every block.

    launch: what ours and previous launched. absent: why a candidate has no times.
    """

    case: str
    us: dict[str, list[float | None]]
    launch: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def parsed(self) -> Case:
        return parse_case(self.case, "")

    def median_us(self, name: str) -> float | None:
        values = [value for value in self.us.get(name, []) if value is not None]
        return statistics.median(values) if values else None

    def tflops(self, name: str) -> float | None:
        us = self.median_us(name)
        return None if us is None else self.parsed.flops / us / 1e6

    def ratio(self, name: str) -> float | None:
        """The other's time by ours, block by block: the median. Above 1 ours is faster."""
        pairs = zip(self.us.get(name, []), self.us.get(OURS, []), strict=False)
        ratios = [other / ours for other, ours in pairs if other is not None and ours is not None]
        return statistics.median(ratios) if ratios else None

    def peers(self) -> list[str]:
        return [name for name in self.us if name not in (OURS, PREVIOUS, AGAIN)]

    def best_peer(self) -> tuple[str, float] | None:
        """(name, ratio) of the fastest peer; a name that ends in ~ is an estimate."""
        ratios = [(name, ratio) for name in self.peers() if (ratio := self.ratio(name)) is not None]
        return min(ratios, key=lambda pair: pair[1], default=None)

    def timed(self) -> verdict.Timed:
        """For the verdict: the blocks of the builds, of a shape that was timed against the previous best."""
        rows = zip(*(self.us[name] for name in (OURS, PREVIOUS, AGAIN)), strict=True)
        blocks = [[us for us in row if us is not None] for row in rows if None not in row]
        ours, previous, again = zip(*blocks, strict=True)
        return verdict.Timed(self.case, ours, previous, again, self.launch[OURS] == self.launch[PREVIOUS])

    def derived(self) -> dict[str, Any]:
        names = [name for name in self.us if name != OURS]
        return {"tflops": {n: self.tflops(n) for n in self.us}, "ratio": {n: self.ratio(n) for n in names}}


@dataclass(frozen=True)
class Gate:
    """What a gate said; detail: its lines about anything but a pass, or where a pass was stored."""

    name: Literal["sass", "counters", "bitwise", "timing"]
    verdict: Literal["PASS", "FAIL", "INVALID", "NOT RUN"]
    detail: str = ""


@dataclass(frozen=True)
class Parent:
    """The previous best that a run was compared with. sha256: of its line in the log."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Record:
    """One line. None: not known (an imported result), or not come to (a gate failed before). wrong: what is wrong with
    the output; then nothing was timed. chip is None only where a gate that needs no GPU failed without one.

    kind: a `run` of the loop; the `baseline`, torch's own attention without ours; or a stored benchmark result,
    `imported` from the commit `source`, which had no gates, no profile and no decision.
    """

    name: str
    kind: Literal["run", "baseline", "imported"]
    date: str
    commit: str | None
    chip: Chip | None
    settings: dict[str, Any]
    hypothesis: str | None = None
    prediction: str | None = None
    source: str | None = None
    nvcc: str | None = None
    library_sha256: str | None = None
    kernels: list[Kernel] = field(default_factory=list)
    parent: Parent | None = None
    gates: list[Gate] = field(default_factory=list)
    profiles: list[Profile] | None = None
    report: str | None = None
    wrong: str | None = None
    shapes: list[Shape] = field(default_factory=list)
    milestones: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> verdict.Verdict | None:
        """Computed from the gates and the times; None for what is not a run."""
        if self.kind != "run":
            return None
        timed = [shape.timed() for shape in self.shapes if PREVIOUS in shape.us]
        return verdict.judge({gate.name: gate.verdict for gate in self.gates}, GATES, timed or None, self.wrong)

    @property
    def decision(self) -> Decision | None:
        return self.verdict.decision if self.verdict else None

    def geomean_tflops(self, name: str, cases: Sequence[str] | None = None) -> float | None:
        return _geomean([s.tflops(name) for s in self.shapes if cases is None or s.case in cases])

    def geomean_ratio(self, name: str, cases: Sequence[str] | None = None) -> float | None:
        """To one peer, over the shapes that have it; "best": to each shape's fastest peer."""
        shapes = [s for s in self.shapes if cases is None or s.case in cases]
        best = [s.best_peer() for s in shapes]
        return _geomean([b[1] for b in best if b] if name == "best" else [s.ratio(name) for s in shapes])


def _geomean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


# ---- lines -----------------------------------------------------------------------------------------------------------


def to_line(record: Record) -> str:
    """One line of JSON, without its end."""
    data: dict[str, Any] = {"schema": SCHEMA, **asdict(record)}
    for row, shape in zip(data["shapes"], record.shapes, strict=True):
        row["derived"] = shape.derived()
    data["verdict"] = asdict(record.verdict) if record.verdict else None
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def from_line(line: str) -> Record:
    """The inverse of to_line. ValueError with one sentence if the line is something else, or contradicts itself."""
    data = json.loads(line)
    if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
        raise ValueError(f"its schema is not '{SCHEMA}'")
    claimed_verdict = data.pop("verdict", None)
    claimed_shapes = [row.pop("derived", None) for row in data.get("shapes", []) if isinstance(row, dict)]
    record = decode.decode(Record, data)
    _check(record)
    for shape, claimed in zip(record.shapes, claimed_shapes, strict=True):
        if claimed != shape.derived():
            raise ValueError(f"{record.name}: {shape.case}: its TFLOP/s and ratios do not follow from its times")
    if claimed_verdict != (asdict(record.verdict) if record.verdict else None):
        raise ValueError(f"{record.name}: its verdict does not follow from its gates and times")
    return record


def _check(record: Record) -> None:
    """What the types do not say. ValueError with one sentence."""

    def refuse(what: str) -> None:
        raise ValueError(f"{record.name}: {what}")

    for shape in record.shapes:
        case, blocks = shape.parsed, {len(values) for values in shape.us.values()}
        if case.label != shape.case or len(blocks) != 1:
            refuse(f"shape '{shape.case}' is not a case with equally many blocks for every candidate")
        if any(value is not None and not value > 0 for values in shape.us.values() for value in values):
            refuse(f"{shape.case}: a time is not above 0")
        if record.kind != "baseline" and None in shape.us.get(OURS, [None]):
            refuse(f"{shape.case}: a block lacks a time of ours")
        holes = [[us is None for us in shape.us.get(name, [])] for name in (PREVIOUS, AGAIN)]
        if holes[0] != holes[1] or (holes[0] and all(holes[0])):
            refuse(f"{shape.case}: {PREVIOUS} and {AGAIN} were not timed in the same blocks")
        if PREVIOUS in shape.us and not {OURS, PREVIOUS} <= shape.launch.keys():
            refuse(f"{shape.case}: what was launched is not recorded")
    if record.shapes and record.kind == "run" and bool(record.parent) != any(PREVIOUS in s.us for s in record.shapes):
        refuse("it has a previous best exactly if some shape was timed against it")
    milestones.check(record)
    if record.kind != "run":
        if record.chip is None or not record.shapes:
            refuse("it has no chip or no shape")
        return
    failed = any(gate.verdict == "FAIL" for gate in record.gates)
    if (failed or record.wrong) and record.shapes:
        refuse("a gate failed or the output was wrong, so nothing may have been timed")
    if not failed and (not record.profiles or not (record.wrong or record.shapes)):
        refuse("no gate failed, so counters, and times or what was wrong, must be there")
    if not failed and record.chip is None:
        refuse("it does not say which GPU it was measured on")
    if [gate.name for gate in record.gates] != list(GATES[: len(record.gates)]) or not record.gates:
        refuse(f"its gates are not the first of {', '.join(GATES)}")
    if not record.kernels or record.commit is None or record.library_sha256 is None or not record.hypothesis:
        refuse("a run names its commit, library, kernels and hypothesis")


# ---- the file --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Log:
    """The records of a file in order; lines: the text of each."""

    path: Path
    records: list[Record]
    lines: list[str]

    def find(self, name: str) -> Record:
        for record in self.records:
            if record.name == name:
                return record
        known = ", ".join(record.name for record in self.records) or "the log is empty"
        raise LogError(f"no iteration '{name}' in {self.path}; there are: {known}")

    def best(self) -> Record | None:
        """The latest iteration that was to proceed."""
        return next((record for record in reversed(self.records) if record.decision == "proceed"), None)

    def parent(self, record: Record) -> Parent:
        return Parent(record.name, _sha256(self.lines[self.records.index(record)]))

    def gpu(self) -> str | None:
        """The one GPU model that the log is about; None as long as nothing was measured."""
        return next((record.chip.gpu for record in self.records if record.chip), None)

    def check_new(self, name: str, gpu: str | None) -> None:
        """LogError if a record of this name or GPU may not be appended."""
        if not name or name != name.strip() or len(name) > 60 or not name.isprintable():
            raise LogError(f"name '{name}': give one of 1 to 60 printable characters without spaces around them")
        if any(record.name == name for record in self.records):
            raise LogError(f"name '{name}': {self.path} has an iteration of this name already")
        if gpu and self.gpu() not in (None, gpu):
            raise LogError(f"{self.path} is a log of {self.gpu()}, and this is {gpu}: keep one log for each with --log")


def load(path: Path) -> Log:
    """An absent file is an empty log. LogError names the line that is not whole or contradicts itself."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    records: list[Record] = []
    known: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = from_line(line)
            if record.name in known:
                raise ValueError(f"{record.name}: a second iteration of this name")
            if record.chip and records and (gpus := {r.chip.gpu for r in records if r.chip} - {record.chip.gpu}):
                raise ValueError(f"{record.name}: measured on {record.chip.gpu}, the lines before on {', '.join(gpus)}")
            if record.parent and known.get(record.parent.name) != record.parent.sha256:
                raise ValueError(f"{record.name}: its parent '{record.parent.name}' is not an earlier, unchanged line")
        except ValueError as error:
            raise LogError(f"{path}, line {number}: {error}") from error
        records.append(record)
        known[record.name] = _sha256(line)
    return Log(path, records, lines)


def append(path: Path, record: Record) -> None:
    """Adds a line, whole or not at all: the file is written anew beside the old one and takes its name.

    LogError if the record would not be read back, or if its name has been taken meanwhile.
    """
    log = load(path)
    log.check_new(record.name, record.chip.gpu if record.chip else None)
    line = to_line(record)
    try:
        from_line(line)
    except ValueError as error:
        raise LogError(f"not written: {error}") from error
    write_whole("".join(f"{text}\n" for text in [*log.lines, line]), path)


def cases_in_common(records: Sequence[Record]) -> Iterator[str]:
    """Labels of the cases that all of them have, in the order of the first."""
    first, *others = ({shape.case: shape for shape in record.shapes} for record in records)
    return (case for case in first if all(case in other for other in others))


def _sha256(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()
