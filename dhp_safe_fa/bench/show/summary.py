"""A run in a few sentences, which keep apart what was measured and what was estimated."""

from __future__ import annotations

from dhp_safe_fa.bench.results import BEST, BEST_WITH_ESTIMATES, Report

# Names for readers; other candidates are called what they are in the tables.
FULL_NAMES = {
    "fa3": "FlashAttention-3",
    "fa3~": "FlashAttention-3, estimated",
    "fa3-det": "FlashAttention-3, deterministic",
    "fa3-det~": "FlashAttention-3, deterministic, estimated",
}


def summary(report: Report) -> list[str]:
    """A sentence on the best of the peers that were measured, then on each estimate, then on both together."""
    peers = report.peers()
    measured = [name for name in peers if not name.endswith("~")]
    estimated = [name for name in peers if name.endswith("~")]
    names = ", ".join(FULL_NAMES.get(name, name) for name in measured)
    lines = [_line(report, BEST, f"Against the best of what was measured here ({names})")] if measured else []
    lines += [_line(report, name, f"Against {FULL_NAMES.get(name, name)} and not measured") for name in estimated]
    if measured and estimated:
        lacking = sum(not any(o.estimated for o in r.outcomes) for r in report.results if not r.wrong)
        note = f" ({lacking} cases have none)" if lacking else ""
        lines.append(_line(report, BEST_WITH_ESTIMATES, f"Against the best of both, so in part an estimate{note}"))
    return [line for line in lines if line]


def _line(report: Report, name: str, title: str) -> str:
    """Empty if no case has the ratio."""
    ratios = report.ratios(name)
    mean = report.geomean(name)
    if mean is None:
        return ""
    case, lowest = min(ratios, key=lambda pair: pair[1])
    slower = sum(ratio < 1 for _, ratio in ratios)
    return (
        f"{title}: geometric mean {mean:.2f} × over {len(ratios)} cases, lowest {lowest:.2f} × ({case.label}), "
        f"slower in {slower}"
    )
