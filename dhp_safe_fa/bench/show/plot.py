"""A report as a picture: TFLOP/s of everybody over the sequence length or, without a sweep, over the cases."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from dhp_safe_fa.bench.results import Report, Result

# Of the picture of everything, inches.
PANEL_WIDTH, PANEL_HEIGHT = 4.5, 3.4

# The picture of at most four panels has to be read at the width of a telephone, some 400 pixels: at 8 inches a letter
# of 17 points is 12 pixels high there.
SMALL_SIZE = (8.0, 8.6)
SMALL_FONT = 17

# Its panels: full and causal of these, which most models have, in the dtype with the most cases.
SMALL_HEAD_DIMS = (64, 128)

# Its lines, each with its label and colour: what a reader compares with; slower peers are in the picture of everything.
SMALL_SERIES = {
    "ours": ("ours", "tab:blue"),
    "fa3": ("FA3", "tab:red"),
    "fa3~": ("FA3\nestimated", "tab:red"),
    "cudnn": ("cuDNN", "tab:green"),
    "flash": ("FA2", "tab:orange"),
}

# The least distance between the labels at the ends of two lines, as a share of the axis: a line of letters.
LABEL_GAP = 0.085

# The axis ends this much above the highest point.
TOP = 1.1


def check_name(path: Path) -> None:
    """ValueError if matplotlib cannot write such a file."""
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:] not in known:
        raise ValueError(f"plot '{path}': unknown ending; known: {', '.join(sorted(known))}")


def save(report: Report, path: Path) -> None:
    """At most four panels, to be read at a glance. ValueError if no case has times."""
    few = _few(_timed(report))
    sweep = [r for r in few if r.case.in_sweep]
    figure = _small(report, sweep) if sweep else _grid(report, few)
    figure.savefig(path, dpi=150)


def save_all(report: Report, path: Path) -> None:
    """A panel per head_dim (across) and dtype and mask (down). ValueError if no case has times."""
    _grid(report, _timed(report)).savefig(path, dpi=150)


def _timed(report: Report) -> list[Result]:
    timed = [r for r in report.results if r.outcomes]
    if not timed:
        raise ValueError("nothing to plot: no case has times")
    return timed


def _few(timed: list[Result]) -> list[Result]:
    """Of the dtype with the most cases, and of SMALL_HEAD_DIMS or, if there are none, of two others: four panels."""
    dtypes = [r.case.dtype for r in timed]
    dtype = max(dict.fromkeys(dtypes), key=dtypes.count)
    there = sorted({r.case.head_dim for r in timed if r.case.dtype == dtype})
    head_dims = [d for d in there if d in SMALL_HEAD_DIMS] or there[: len(SMALL_HEAD_DIMS)]
    return [r for r in timed if r.case.dtype == dtype and r.case.head_dim in head_dims]


def _grid(report: Report, timed: list[Result]) -> Figure:
    """All of the sweep as lines, or without a sweep all cases as bars; everybody is shown."""
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
    return figure


def _small(report: Report, shown: list[Result]) -> Figure:
    """Of a sweep in one dtype; lines are named in their colours at the right."""
    across = sorted({r.case.head_dim for r in shown})
    down = list(dict.fromkeys(r.case.mask for r in shown))
    names = [name for name in SMALL_SERIES if name == "ours" or name in report.peers()]
    figure = Figure(figsize=SMALL_SIZE, layout="constrained")
    grid = figure.subplots(len(down), len(across), squeeze=False, sharex=True, sharey=True)
    panels = [(grid[y][x], mask, head_dim) for y, mask in enumerate(down) for x, head_dim in enumerate(across)]
    ends = []
    for axes, mask, head_dim in panels:
        panel = [r for r in shown if (r.case.head_dim, r.case.mask) == (head_dim, mask)]
        ends.append(_small_lines(axes, panel, names))
        axes.set_title(f"head_dim {head_dim}, {mask}", fontsize=SMALL_FONT)
        axes.tick_params(labelsize=SMALL_FONT - 2)
    grid[0][0].set_ylim(0, TOP * max(t for r in shown for name in names if (t := r.tflops(name)) is not None))
    for y, row in enumerate(grid):
        row[0].set_ylabel("TFLOP/s", fontsize=SMALL_FONT)
        _label(row[-1], ends[(y + 1) * len(across) - 1])
    figure.supxlabel("sequence length", fontsize=SMALL_FONT)
    figure.suptitle(f"{report.environment['device']}, {shown[0].case.dtype}", fontsize=SMALL_FONT)
    return figure


def _small_lines(axes: Axes, results: list[Result], names: list[str]) -> dict[str, float]:
    """A line per name, ours thick, an estimate dashed; where each ends."""
    ends = {}
    for name in names:
        points = [(r.case.seqlen, t) for r in results if (t := r.tflops(name)) is not None]
        if not points:
            continue
        axes.plot(
            [s for s, _ in points],
            [t for _, t in points],
            color=SMALL_SERIES[name][1],
            linewidth=5 if name == "ours" else 2.5,
            linestyle="--" if name.endswith("~") else "-",
        )
        ends[name] = points[-1][1]
    seqlens = sorted({r.case.seqlen for r in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(seqlens[1::2], [_thousands(s) for s in seqlens[1::2]])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    return ends


def _label(axes: Axes, ends: dict[str, float]) -> None:
    """Names at the right of the lines' ends, from above, each as far below the one before as its height demands."""
    top = axes.get_ylim()[1]
    ceiling = 1.0
    for name, end in sorted(ends.items(), key=lambda item: -item[1]):
        label, colour = SMALL_SERIES[name]
        height = LABEL_GAP * (1 + label.count("\n"))
        middle = min(end / top, ceiling - height / 2)
        ceiling = middle - height / 2
        axes.annotate(
            label,
            (1.04, middle),
            xycoords="axes fraction",
            fontsize=SMALL_FONT,
            fontweight="bold" if name == "ours" else "normal",
            color=colour,
            va="center",
            annotation_clip=False,
        )


def _thousands(seqlen: int) -> str:
    return f"{seqlen // 1024}k" if seqlen % 1024 == 0 else str(seqlen)


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
