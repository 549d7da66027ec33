"""Results with known numbers, for the tests of the benchmark."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from dhp_safe_fa.bench import Case
from dhp_safe_fa.bench.results import Outcome, Report, Result, Stats
from dhp_safe_fa.bench.show import tables

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ANCHORS = BENCHMARKS / "anchors_h100_forward.csv"
TINY = "1,2,40,16"


def times(*values: float) -> Stats:
    return Stats.of(list(values))


def some_result(case: Case | None = None) -> Result:
    """Ours 10 µs by graph; flash 20, cudnn 8; efficient without a graph; math not there."""
    return Result(
        case or Case(1, 8, 512, 64, False, "float16"),
        (
            Outcome("ours", 2.5e-4, times(9, 10, 11), times(30, 40, 50)),
            Outcome("flash", 2.5e-4, times(20, 20, 20), times(25, 25, 25)),
            Outcome("cudnn", 2.6e-4, times(8, 8, 8), times(30, 30, 30)),
            Outcome("efficient", 2.6e-4, None, times(60, 60, 60), "no CUDA graph, eager times compared: oops"),
            Outcome("math", reason="not run above 5e+08 stored scores"),
        ),
        max_abs_diff_sdpa=5e-4,
    )


def some_report(*results: Result) -> Report:
    environment = {"device": "GPU", "torch": "2", "dhp_safe_fa": "1", "commit": "0123456789abcdef", "dirty": True}
    timing = {"rounds": 3, "sample_ms": 20, "cold": False, "layout": "BSHD", "alone_below_us": 50.0}
    settings = {"device": "cuda", "seed": 3, **timing}
    return Report(environment, settings, list(results), {"ours": times(5), "flash": times(6)}, ["a note"])


def rendered(report: Report) -> str:
    text = io.StringIO()
    tables.show(report, Console(file=text, width=tables.MIN_WIDTH))
    return text.getvalue()
