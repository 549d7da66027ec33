"""A report as a picture: TFLOP/s of everybody over the sequence length or, without a sweep, over the cases."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from dhp_safe_fa.bench.results import Report, Result

# Inches.
PANEL_WIDTH, PANEL_HEIGHT = 4.5, 3.4


def check_name(path: Path) -> None:
    """ValueError if matplotlib cannot write such a file."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise ValueError(f"plot '{path}': unknown ending; known: {', '.join(sorted(known))}")


def save(report: Report, path: Path) -> None:
    """A panel per head_dim (across) and dtype and mask (down). ValueError if no case has times."""
    timed = [r for r in report.results if r.outcomes]
    if not timed:
        raise ValueError("nothing to plot: no case has times")
    sweep = [r for r in timed if r.case.in_sweep]
    shown, draw = (sweep, _lines) if sweep else (timed, _bars)
    across = sorted({r.case.head_dim for r in shown})
    down = list(dict.fromkeys((r.case.dtype, r.case.mask) for r in shown))
    names = ["ours", *report.peers()]

    figure = Figure(figsize=(len(across) * PANEL_WIDTH, len(down) * PANEL_HEIGHT), layout="constrained")
    grid = figure.subplots(len(down), len(across), squeeze=False)
    for y, (dtype, mask) in enumerate(down):
        for x, head_dim in enumerate(across):
            key = (head_dim, dtype, mask)
            draw(grid[y][x], [r for r in shown if (r.case.head_dim, r.case.dtype, r.case.mask) == key], names)
            grid[y][x].set_title(f"head_dim {head_dim}, {mask}, {dtype}", fontsize=10)
        grid[y][0].set_ylabel("TFLOP/s")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names))
    figure.savefig(path, dpi=150)


def _lines(axes: Axes, results: list[Result], names: list[str]) -> None:
    """Sequence length across; ours thick, an estimate dashed."""
    for name in names:
        points = [(r.case.seqlen, t) for r in results if (t := r.tflops(name)) is not None]
        axes.plot(
            [s for s, _ in points],
            [t for _, t in points],
            marker="o",
            markersize=3,
            linewidth=2.5 if name == "ours" else 1.2,
            linestyle="--" if name.endswith("~") else "-",
            label=name,
        )
    seqlens = sorted({r.case.seqlen for r in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(seqlens, [str(s) for s in seqlens])
    axes.set_xlabel("sequence length")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _bars(axes: Axes, results: list[Result], names: list[str]) -> None:
    """A group of bars per shape."""
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        places = [x + i * width for x in range(len(results))]
        axes.bar(places, [r.tflops(name) or 0 for r in results], width, label=name)
    middles = [x + 0.4 - width / 2 for x in range(len(results))]
    axes.set_xticks(middles, [r.case.sizes for r in results], rotation=25, ha="right", fontsize=7)
    axes.grid(axis="y", alpha=0.3)
