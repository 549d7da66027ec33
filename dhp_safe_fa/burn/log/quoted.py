"""Numbers that were not measured here: the original project's own (see milestones.py), and peers'."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from dhp_safe_fa.burn.builds.keeping import ROOT

QUOTED = ROOT / "audits" / "iterations_quoted.csv"
# FlashAttention-3 is estimated from these where it is not installed; they were measured on an H100.
ANCHORS = ROOT / "benchmarks" / "anchors_h100_forward.csv"

# What they were measured at, on an H100.
BATCH_HEADS, SEQLEN, HEAD_DIM = 16, 1024, 64
CASE = f"1,{BATCH_HEADS},{SEQLEN},{HEAD_DIM}:full:float16"


@dataclass(frozen=True)
class Quoted:
    """wrong: its output was. what: how it was made."""

    name: str
    us_per_head: float
    wrong: bool
    what: str

    @property
    def tflops(self) -> float:
        """4·S²·D operations a head."""
        return 4 * SEQLEN**2 * HEAD_DIM / self.us_per_head / 1e6


def load(path: Path = QUOTED) -> list[Quoted]:
    """The rows of the file: name, us_per_head, wrong (0 or 1), what. ValueError names the line that is not so, or says
    that this is no checkout."""
    if not path.exists():
        raise ValueError(f"the log of iterations is kept in a checkout, and there is no {path}: clone the project")
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        try:
            return [Quoted(r["name"], float(r["us_per_head"]), bool(int(r["wrong"])), r["what"]) for r in rows]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {rows.line_num}: not a quoted row ({error!r})") from error
