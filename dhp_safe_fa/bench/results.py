"""What a run leaves behind: measured times, the figures derived from them, and the JSON file that keeps both."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from dhp_safe_fa._files import write_whole
from dhp_safe_fa.bench.cases import Case
from dhp_safe_fa.bench.directions import DIRECTIONS

SCHEMA = "dhp_safe_fa.bench/1"

# Before the layout was recorded, inputs were contiguous [B, H, S, D].
UNRECORDED_LAYOUT = "BHSD"

# The mark of an estimate, at the end of a candidate's name.
TILDE = "~"

# Names of the best peer in geometric_mean_ratio: of those that were measured, and with estimates counted as peers.
BEST, BEST_WITH_ESTIMATES = "best", "best~"


@dataclass(frozen=True)
class Stats:
    """Of one figure over the rounds of a run: microseconds per call, megahertz or watts."""

    median: float
    q1: float
    q3: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: list[float]) -> Stats:
        """Quartiles by linear interpolation; of one value, that value. ValueError without any."""
        if not values:
            raise ValueError("no samples")
        q1, median, q3 = statistics.quantiles(values, method="inclusive") if len(values) > 1 else values * 3
        return cls(median, q1, q3, min(values), max(values), len(values))

    @property
    def spread(self) -> float:
        """The distance between the quartiles, in per cent of the median."""
        return 100 * (self.q3 - self.q1) / self.median

    def scaled(self, factor: float) -> Stats:
        times = {name: getattr(self, name) * factor for name in ("median", "q1", "q3", "low", "high")}
        return replace(self, **times)


@dataclass(frozen=True)
class Outcome:
    """One candidate on one case. Either there are times, or a reason why not.

    Attributes:
        name: with a tilde at its end it is an estimate, and not measured.
        relative_error: against float64.
        graph_us: by graph replay, calls back to back; only on CUDA.
        eager_us: Python calls back to back.
        reason: why a time is missing.
        alone_us: by graph replay with another kernel between the calls; only of small shapes.
        clock_mhz, power_w: while graph_us was taken; only of a sustained run with NVML.
        basis: what an estimate rests on.
        errors: as relative_error, of each output by name; only where there are several.
        repeats_equal: of Case.repeats calls more, how many gave the bits of the first; only where that is asked.
    """

    name: str
    relative_error: float | None = None
    graph_us: Stats | None = None
    eager_us: Stats | None = None
    reason: str | None = None
    alone_us: Stats | None = None
    clock_mhz: Stats | None = None
    power_w: Stats | None = None
    basis: str | None = None
    errors: dict[str, float] | None = None
    repeats_equal: int | None = None

    @property
    def us(self) -> Stats | None:
        """The time that stands for the candidate: by graph where there is one."""
        return self.graph_us or self.eager_us

    @property
    def estimated(self) -> bool:
        return self.name.endswith(TILDE)


@dataclass(frozen=True)
class Result:
    """One case: ours first, then the peers. ``wrong`` says what is wrong with our output; then nothing was timed."""

    case: Case
    outcomes: tuple[Outcome, ...] = ()
    max_abs_diff_sdpa: float | None = None
    wrong: str | None = None

    def outcome(self, name: str) -> Outcome | None:
        return next((o for o in self.outcomes if o.name == name), None)

    def ratio(self, name: str) -> float | None:
        """The peer's time by ours, above 1 where ours is faster; None if either was not measured.

        By graph if both have one, else eager against eager.
        """
        ours, peer = self.outcome("ours"), self.outcome(name)
        if ours is None or peer is None:
            return None
        for mine, theirs in ((ours.graph_us, peer.graph_us), (ours.eager_us, peer.eager_us)):
            if mine and theirs:
                return theirs.median / mine.median
        return None

    def ratio_alone(self, name: str) -> float | None:
        """The same, each timed alone."""
        ours, peer = self.outcome("ours"), self.outcome(name)
        if ours is None or peer is None or ours.alone_us is None or peer.alone_us is None:
            return None
        return peer.alone_us.median / ours.alone_us.median

    def best_peer(self, estimates: bool = False) -> tuple[str, float] | None:
        """(name, ratio) of the fastest peer that was measured; with estimates, of these and the estimated ones."""
        peers = [o for o in self.outcomes if o.name != "ours" and (estimates or not o.estimated)]
        ratios = [(o.name, r) for o in peers if (r := self.ratio(o.name)) is not None]
        return min(ratios, key=lambda pair: pair[1], default=None)

    def tflops(self, name: str) -> float | None:
        outcome = self.outcome(name)
        return self.case.flops / outcome.us.median / 1e6 if outcome and outcome.us else None

    def tb_per_s(self, name: str) -> float | None:
        """What has to move at least, over the time: terabytes a second, of 10^12."""
        outcome = self.outcome(name)
        return self.case.bytes / outcome.us.median / 1e6 if outcome and outcome.us else None

    def flops_per_cycle(self, name: str, multiprocessors: int) -> float | None:
        """Floating point operations per clock cycle and multiprocessor; None without a measured clock."""
        outcome = self.outcome(name)
        if outcome is None or outcome.us is None or outcome.clock_mhz is None:
            return None
        return self.case.flops / (outcome.us.median * outcome.clock_mhz.median * multiprocessors)


@dataclass
class Report:
    """A whole run. host_us: what a call costs the calling thread, by candidate."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    host_us: dict[str, Stats] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def layout(self) -> str:
        """How the inputs were stored, one of cases.LAYOUTS."""
        return str(self.settings.get("layout", UNRECORDED_LAYOUT))

    @property
    def wrong(self) -> bool:
        return any(r.wrong for r in self.results)

    def peers(self) -> list[str]:
        """Every peer's name, in the order of their first appearance."""
        names = dict.fromkeys(o.name for r in self.results for o in r.outcomes)
        return [name for name in names if name != "ours"]

    def ratios(self, name: str) -> list[tuple[Case, float]]:
        """Ratios to one peer over the cases that have it; BEST, BEST_WITH_ESTIMATES: to each case's fastest."""
        found: list[tuple[Case, float]] = []
        for result in self.results:
            if name in (BEST, BEST_WITH_ESTIMATES):
                best = result.best_peer(estimates=name == BEST_WITH_ESTIMATES)
                ratio = best[1] if best else None
            else:
                ratio = result.ratio(name)
            if ratio is not None:
                found.append((result.case, ratio))
        return found

    def geomean(self, name: str) -> float | None:
        """Geometric mean of these ratios."""
        known = [ratio for _, ratio in self.ratios(name)]
        return statistics.geometric_mean(known) if known else None


# ---- JSON ---------------------------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """The report as benchmarks/README.md describes it. Derived figures are written too, and ignored by from_json."""
    rows = []
    multiprocessors = report.environment.get("multiprocessors", 0)
    for result in report.results:
        row = asdict(result)
        row["case"]["direction"] = result.case.direction
        for outcome in row["outcomes"]:
            name = outcome["name"]
            outcome["tflops"] = result.tflops(name)
            outcome["tb_per_s"] = result.tb_per_s(name)
            outcome["ratio"] = result.ratio(name)
            outcome["ratio_alone"] = result.ratio_alone(name)
            outcome["flops_per_cycle"] = result.flops_per_cycle(name, multiprocessors)
        rows.append(row)
    geomeans = {name: report.geomean(name) for name in [*report.peers(), BEST, BEST_WITH_ESTIMATES]}
    return {"schema": SCHEMA, **asdict(report), "results": rows, "geometric_mean_ratio": geomeans}


def from_json(data: Any) -> Report:
    """The inverse of to_json. ValueError if data is something else."""
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise ValueError(f"not a benchmark result: its schema is not '{SCHEMA}'")
    try:
        return Report(
            environment=data["environment"],
            settings=data["settings"],
            results=[
                Result(
                    case=_case(row["case"]),
                    outcomes=tuple(_outcome(o) for o in row["outcomes"]),
                    max_abs_diff_sdpa=row["max_abs_diff_sdpa"],
                    wrong=row["wrong"],
                )
                for row in data["results"]
            ],
            host_us={name: Stats(**stats) for name, stats in data["host_us"].items()},
            notes=data["notes"],
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a benchmark result: {type(error).__name__} {error}") from error


def _case(data: dict[str, Any]) -> Case:
    sizes = dict(data)
    direction = sizes.pop("direction", Case.direction)
    if direction not in DIRECTIONS:
        raise ValueError(f"not a benchmark result: direction '{direction}'; known: {', '.join(DIRECTIONS)}")
    return DIRECTIONS[direction].case(**sizes)


def _outcome(data: dict[str, Any]) -> Outcome:
    """Fields that an older file lacks are None; derived ones are left out."""
    known: dict[str, Any] = {f.name: data.get(f.name) for f in fields(Outcome)}
    for name, value in known.items():
        if isinstance(value, dict) and name != "errors":
            known[name] = Stats(**value)
    return Outcome(**known)


def save(report: Report, path: Path) -> None:
    """Writes the file whole or not at all."""
    write_whole(json.dumps(to_json(report), indent=1, allow_nan=False) + "\n", path)


def load(path: Path) -> Report:
    """Raises OSError or ValueError with one sentence."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: no JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
