"""FlashAttention-3 where it is not installed: estimated from its ratio to cuDNN in a table measured elsewhere."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from dhp_safe_fa.bench.cases import MASKS, Case
from dhp_safe_fa.bench.results import Outcome, Result

# The tilde marks an estimate wherever the name appears.
ESTIMATE = "fa3~"


def load(path: Path) -> dict[Case, float]:
    """FlashAttention-3's time by cuDNN's, for every case of the table.

    The CSV file has a row per case: dtype, batch, heads, seqlen, head_dim, mask (full, causal), sdpa_cudnn_tflops,
    fa3_tflops; other columns are ignored.

    Raises:
        OSError: the file cannot be read.
        ValueError: names the file and the line that is not so.
    """
    factors: dict[Case, float] = {}
    with path.open(newline="", encoding="utf-8") as file:
        rows = csv.DictReader(file)
        try:
            for row in rows:
                batch, heads, seqlen, head_dim = (int(row[name]) for name in ("batch", "heads", "seqlen", "head_dim"))
                case = Case(batch, heads, seqlen, head_dim, MASKS[row["mask"]], row["dtype"])
                factors[case] = float(row["sdpa_cudnn_tflops"]) / float(row["fa3_tflops"])
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ValueError(f"{path}, line {rows.line_num}: not a row of anchors ({error!r})") from error
    if not factors:
        raise ValueError(f"{path}: no rows of anchors")
    return factors


def with_estimate(result: Result, factors: dict[Case, float]) -> Result:
    """The result with an outcome "fa3~": cuDNN's times of this run, scaled. Unchanged if FlashAttention-3 itself ran or
    was estimated before, if cuDNN did not run by graph, or if the table lacks the case."""
    fa3, cudnn, factor = result.outcome("fa3"), result.outcome("cudnn"), factors.get(result.case)
    if (fa3 and fa3.us) or result.outcome(ESTIMATE) or cudnn is None or cudnn.graph_us is None or factor is None:
        return result
    return replace(result, outcomes=(*result.outcomes, Outcome(ESTIMATE, graph_us=cudnn.graph_us.scaled(factor))))
