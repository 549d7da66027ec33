"""What a run leaves behind: measured times, the figures derived from them, and the JSON file that keeps both."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dhp_safe_fa._files import write_whole
from dhp_safe_fa.bench.cases import Case

SCHEMA = "dhp_safe_fa.bench/1"


@dataclass(frozen=True)
class Stats:
    """Microseconds per call over the rounds of a run."""

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
    """One candidate on one case. Either there are times, or a reason why not; graph_us only on CUDA."""

    name: str
    relative_error: float | None = None
    graph_us: Stats | None = None
    eager_us: Stats | None = None
    reason: str | None = None

    @property
    def us(self) -> Stats | None:
        """The time that stands for the candidate: by graph where there is one."""
        return self.graph_us or self.eager_us


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

    def best_peer(self) -> tuple[str, float] | None:
        """(name, ratio) of the fastest peer, estimates included."""
        ratios = [(o.name, r) for o in self.outcomes if o.name != "ours" and (r := self.ratio(o.name)) is not None]
        return min(ratios, key=lambda pair: pair[1], default=None)

    def tflops(self, name: str) -> float | None:
        outcome = self.outcome(name)
        return self.case.flops / outcome.us.median / 1e6 if outcome and outcome.us else None


@dataclass
class Report:
    """A whole run. host_us: what a call costs the calling thread, by candidate."""

    environment: dict[str, Any]
    settings: dict[str, Any]
    results: list[Result] = field(default_factory=list)
    host_us: dict[str, Stats] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> bool:
        return any(r.wrong for r in self.results)

    def peers(self) -> list[str]:
        """Every peer's name, in the order of their first appearance."""
        names = dict.fromkeys(o.name for r in self.results for o in r.outcomes)
        return [name for name in names if name != "ours"]

    def geomean(self, name: str) -> float | None:
        """Geometric mean of the ratio to one peer over the cases that have it; "best": to each case's best peer."""
        if name == "best":
            return _geomean(best[1] for r in self.results if (best := r.best_peer()))
        return _geomean(r.ratio(name) for r in self.results)


def _geomean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.geometric_mean(known) if known else None


# ---- JSON ---------------------------------------------------------------------------------------------------------


def to_json(report: Report) -> dict[str, Any]:
    """The report as benchmarks/README.md describes it. Derived figures are written too, and ignored by from_json."""
    rows = []
    for result in report.results:
        row = asdict(result)
        for outcome in row["outcomes"]:
            outcome["tflops"] = result.tflops(outcome["name"])
            outcome["ratio"] = result.ratio(outcome["name"])
        rows.append(row)
    geomeans = {name: report.geomean(name) for name in [*report.peers(), "best"]}
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
                    case=Case(**row["case"]),
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


def _outcome(data: dict[str, Any]) -> Outcome:
    times = {name: Stats(**data[name]) if data[name] else None for name in ("graph_us", "eager_us")}
    return Outcome(name=data["name"], relative_error=data["relative_error"], reason=data["reason"], **times)


def save(report: Report, path: Path) -> None:
    """Writes the file whole or not at all."""
    write_whole(json.dumps(to_json(report), indent=1, allow_nan=False) + "\n", path)


def load(path: Path) -> Report:
    """Raises OSError or ValueError with one sentence."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
