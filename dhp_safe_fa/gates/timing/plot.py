"""The gate `timing` as a picture: cumulative distributions of every class, a panel for each study."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_ACROSS = 2  # panels in a row
_PANEL_INCHES = (6.5, 3.2)
_SHOWN = (1, 99)  # percentiles: a launch beside an interrupt would set the scale


def draw(studies: Sequence[dict[str, Any]], path: Path) -> None:
    """Write studies (Judged.as_json) to a file; its ending says the format. ValueError if matplotlib cannot."""
    down = math.ceil(len(studies) / _ACROSS)
    figure = Figure(figsize=(_ACROSS * _PANEL_INCHES[0], down * _PANEL_INCHES[1]), layout="constrained")
    panels = figure.subplots(down, _ACROSS, squeeze=False).ravel()
    for axes, study in zip(panels, studies, strict=False):
        _panel(axes, study)
    for axes in panels[len(studies) :]:
        axes.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, study: dict[str, Any]) -> None:
    reference = study["reference_cycles"]
    for name, cycles in study["percentiles_cycles"].items():
        first, last = _SHOWN
        percent = [100 * (count / reference - 1) for count in cycles[first : last + 1]]
        is_same = name.startswith("same")
        axes.step(percent, range(first, last + 1), label=name, linewidth=1, color="0.6" if is_same else None)
    found = study["detectable_percent"]
    axes.axvspan(-found, found, alpha=0.15, color="0.5", label="not detectable")
    axes.set_title(f"{study['study']}: {reference:,.0f} cycles", fontsize=9)
    axes.set_xlabel("% of the reference's median")
    axes.set_ylabel("launches, %")
