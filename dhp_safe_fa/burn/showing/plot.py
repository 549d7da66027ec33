"""The journey as a picture: TFLOP/s and the ratio to the best peer by iteration, gates and decisions as colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dhp_safe_fa.bench.directions import parse
from dhp_safe_fa.burn.log import quoted
from dhp_safe_fa.burn.log.milestones import ORIGINAL
from dhp_safe_fa.burn.log.quoted import Quoted
from dhp_safe_fa.burn.log.records import OURS, Record, cases_in_common

# Inches: of the picture's height, and for every iteration.
HEIGHT, WIDTH, WIDTH_EACH = 8.5, 5.0, 0.45

_COLOURS = {"every gate passed": "tab:green", "a gate failed": "tab:red", "not every gate gave a verdict": "tab:orange"}
_NO_GATES = "tab:gray"
_MARKERS = {"proceed": "^", "roll back": "v", "undecided": "o", None: "s"}


def save(records: Sequence[Record], rows: Sequence[Quoted], path: Path) -> None:
    """ValueError if no iteration has times of ours, or matplotlib cannot write such a file."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise ValueError(f"plot '{path}': unknown ending; known: {', '.join(sorted(known))}")
    # runs at shapes of the user's choice have too little in common with the others
    regular = [r for r in records if r.kind != "baseline" and not r.settings.get("shapes")]
    timed = [record for record in regular if record.shapes]
    if not timed:
        raise ValueError("nothing to plot: no iteration in the log has times of ours at the usual shapes")
    cases = list(cases_in_common(timed))
    figure = Figure(figsize=(WIDTH + WIDTH_EACH * (len(rows) + len(records)), HEIGHT), layout="constrained")
    top, middle, bottom = figure.subplots(3, 1)
    _start(top, records, rows)
    _speed(middle, timed, cases)
    _ratio(bottom, regular, cases)
    dots = [("s", colour, text) for text, colour in [*_COLOURS.items(), ("no gates (imported)", _NO_GATES)]]
    dots += [(marker, "black", str(decision)) for decision, marker in _MARKERS.items() if decision]
    handles = [Line2D([], [], marker=m, color=c, linestyle="", label=text) for m, c, text in dots]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=130)


def _start(axes: Axes, records: Sequence[Record], rows: Sequence[Quoted]) -> None:
    """The one shape that the original project reported, from its first kernel on."""
    names = [row.name for row in rows]
    for x, row in enumerate(rows):
        axes.plot(x, row.tflops, marker="x" if row.wrong else "D", color="tab:blue", markerfacecolor="none")
    for record in records:
        shape = next((shape for shape in record.shapes if shape.case == quoted.CASE), None)
        if shape is None:
            continue
        if record.kind == "baseline":
            for name in ("flash", "cudnn", "unfused"):
                if (value := shape.tflops(name)) is not None:
                    names.append(f"{record.name}: {name}")
                    axes.plot(len(names) - 1, value, marker="s", color="black", markerfacecolor="none")
        elif (value := shape.tflops(OURS)) is not None:
            names.append(record.name)
            _mark(axes, len(names) - 1, value, record)
    axes.set_yscale("log")
    title = f"{quoted.CASE}; open diamonds: reported by {ORIGINAL};\ncrosses: its output was wrong"
    axes.set_title(title, fontsize=9)
    _finish(axes, names, "TFLOP/s")


def _speed(axes: Axes, records: Sequence[Record], cases: Sequence[str]) -> None:
    """A line for each head_dim and mask, over the cases that all records have."""
    groups: dict[str, list[str]] = {}
    for label in cases:
        case = parse(label)
        groups.setdefault(f"head_dim {case.head_dim}, {case.mask}", []).append(label)
    for number, (name, members) in enumerate(groups.items()):
        values = [record.geomean_tflops(OURS, members) or math.nan for record in records]
        _segments(axes, records, values, marker=".", color=f"C{number}")
        axes.plot([], [], marker=".", color=f"C{number}", label=name)
    title = f"geometric means over the {len(cases)} shapes that all iterations have"
    axes.set_title(f"{title}; a line ends where times began to be taken differently", fontsize=9)
    axes.set_ylim(bottom=0)
    if groups:
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _finish(axes, [record.name for record in records], "TFLOP/s")


def _ratio(axes: Axes, records: Sequence[Record], cases: Sequence[str]) -> None:
    values = [record.geomean_ratio("best", cases) or math.nan for record in records]
    _segments(axes, records, values, color="lightgray", zorder=0)
    for x, (record, value) in enumerate(zip(records, values, strict=True)):
        if math.isnan(value):  # stopped before anything was timed
            axes.axvline(x, color=_colour(record), linestyle=":")
        else:
            _mark(axes, x, value, record)
    axes.axhline(1, color="black", linewidth=0.8)
    title = "best peer's time by ours, same run, same shapes (an estimated FlashAttention-3 counts)"
    axes.set_title(f"{title}; dotted: stopped by a gate or a wrong output", fontsize=9)
    _finish(axes, [record.name for record in records], "× best peer")


def _segments(axes: Axes, records: Sequence[Record], values: Sequence[float], **style: Any) -> None:
    """A line that joins only what was measured alike: the same kind of record, with samples of the same length."""
    ways = [(record.kind, record.settings.get("sample_ms")) for record in records if record.shapes]
    places = [(x, value) for x, (record, value) in enumerate(zip(records, values, strict=True)) if record.shapes]
    for way in dict.fromkeys(ways):
        points = [point for point, its in zip(places, ways, strict=True) if its == way]
        axes.plot([x for x, _ in points], [value for _, value in points], **style)


def _mark(axes: Axes, x: int, y: float, record: Record) -> None:
    axes.plot(x, y, marker=_MARKERS[record.decision], color=_colour(record), markersize=8, linestyle="")


def _colour(record: Record) -> str:
    verdicts = [gate.verdict for gate in record.gates]
    if not verdicts:
        return _NO_GATES
    if "FAIL" in verdicts:
        return _COLOURS["a gate failed"]
    all_passed = verdicts == ["PASS"] * len(record.required)
    return _COLOURS["every gate passed" if all_passed else "not every gate gave a verdict"]


def _finish(axes: Axes, names: Sequence[str], ylabel: str) -> None:
    axes.set_xticks(range(len(names)), names, rotation=25, ha="right", fontsize=8)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", alpha=0.3)
