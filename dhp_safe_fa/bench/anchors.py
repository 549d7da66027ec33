"""FlashAttention-3 where it is not installed: estimated from its ratio to cuDNN in a table measured elsewhere."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from dhp_safe_fa.bench.cases import MASKS, Case
from dhp_safe_fa.bench.results import TILDE, Outcome, Result

# What the anchors were measured in. float16 runs on the same units: the ratio is used there, too, and said to be this.
DTYPE = "bfloat16"
ESTIMATED_DTYPES = ("bfloat16", "float16")

CHECKOUT = Path(__file__).resolve().parents[2]
FILE = "benchmarks/anchors_h100_{direction}.csv"  # in a checkout


def of_checkout(direction: str) -> Path | None:
    """The project's own anchors of a direction; None outside a checkout, or if there are none."""
    path = CHECKOUT / FILE.format(direction=direction)
    return path if path.exists() else None


def load(path: Path, kind: type[Case] = Case, column: str = "fa3_tflops") -> dict[Case, float]:
    """FlashAttention-3's time by cuDNN's, for every case of the table; see ``parse``.

    Raises:
        OSError: the file cannot be read.
        ValueError: names the file and the line that is not so.
    """
    return parse(path.read_text(encoding="utf-8"), str(path), kind, column)


def parse(text: str, origin: str, kind: type[Case] = Case, column: str = "fa3_tflops") -> dict[Case, float]:
    """The same of a table's text.

    A row per case: batch, heads, key_heads, seqlen_q, seqlen_k, head_dim, mask (full, causal), sdpa_cudnn_tflops or
    sdpa_cudnn_us, and the column; others are ignored. The dtype is bfloat16. The project's history has an older form,
    with dtype, and seqlen for all lengths.

    Args:
        origin: what errors call the text.
        kind: of the cases.
        column: of what is compared with cuDNN, in the unit that its name ends in, tflops or us; empty where it does not
            serve the case.
    """
    unit = column.rpartition("_")[2]
    factors: dict[Case, float] = {}
    rows = csv.DictReader(text.splitlines())
    try:
        for row in rows:
            older = "dtype" in row
            batch, heads, head_dim = (int(row[name]) for name in ("batch", "heads", "head_dim"))
            seqlen = int(row["seqlen" if older else "seqlen_q"])
            keys = (None, None) if older else (int(row["key_heads"]), int(row["seqlen_k"]))
            case = kind(batch, heads, seqlen, head_dim, MASKS[row["mask"]], row.get("dtype", DTYPE), *keys)
            if row[column]:
                cudnn, other = float(row[f"sdpa_cudnn_{unit}"]), float(row[column])
                factors[case] = other / cudnn if unit == "us" else cudnn / other
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"{origin}, line {rows.line_num}: not a row of anchors ({error!r})") from error
    if not factors:
        raise ValueError(f"{origin}: no rows of anchors")
    return factors


def with_estimate(result: Result, factors: dict[Case, float], name: str = "fa3") -> Result:
    """The result with an outcome "NAME~", cuDNN's times of this run, scaled, in place of an earlier estimate.

    Unchanged without factors, or if the one of that name itself ran. There is no estimate if cuDNN did not run by
    graph, if the table lacks the case, or for float32.
    """
    itself, cudnn = result.outcome(name), result.outcome("cudnn")
    if not factors or (itself and itself.us):
        return result
    measured = tuple(o for o in result.outcomes if o.name != name + TILDE)
    of_dtype = result.case if result.case in factors else replace(result.case, dtype=DTYPE)
    factor = factors.get(of_dtype)
    if result.case.dtype not in ESTIMATED_DTYPES or cudnn is None or cudnn.graph_us is None or factor is None:
        return replace(result, outcomes=measured)
    basis = f"cuDNN's time here × {factor:.3f}, which is their ratio in {of_dtype.dtype} in the anchors"
    estimate = Outcome(name + TILDE, graph_us=cudnn.graph_us.scaled(factor), basis=basis)
    return replace(result, outcomes=(*measured, estimate))
