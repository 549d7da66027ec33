"""What a line of the log holds: measurements as they were taken, and what follows from them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dhp_safe_fa.bench.cases import Case
from dhp_safe_fa.bench.directions import parse
from dhp_safe_fa.burn import verdict
from dhp_safe_fa.burn.verdict import Decision
from dhp_safe_fa.gates import registry

# Of the lines that are written now: what a line holds, and by which rules it is judged (verdict.RULES).
SCHEMA = "dhp_safe_fa.burn/2"
OURS, PREVIOUS, AGAIN = "ours", "previous", "again"
FORWARD, BACKWARD = "forward", "backward"


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
        return parse(self.case)

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

    name: str
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

    schema: under which the line was written. family: of the kernels that were timed. required: the gates that had to
    pass before this change could proceed, in the order in which they are run.
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
    family: str = FORWARD
    required: list[str] = field(default_factory=lambda: list(registry.NAMES))
    schema: str = SCHEMA

    @property
    def verdict(self) -> verdict.Verdict | None:
        """Computed from the gates and the times; None for what is not a run."""
        if self.kind != "run":
            return None
        timed = [shape.timed() for shape in self.shapes if PREVIOUS in shape.us]
        judge = verdict.RULES[self.schema]
        return judge({gate.name: gate.verdict for gate in self.gates}, self.required, timed or None, self.wrong)

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


def cases_in_common(records: Sequence[Record]) -> Iterator[str]:
    """Labels of the cases that all of them have, in the order of the first."""
    first, *others = ({shape.case: shape for shape in record.shapes} for record in records)
    return (case for case in first if all(case in other for other in others))
