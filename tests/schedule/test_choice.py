"""The choice of a forward kernel against measured times of all kernels: benchmarks/results/kernel_choice/. And whether
key segments are split, against what the plan itself expects: no call was measured in that way.
"""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from compiling import C_COMPILER, CSRC, compile_with, families, needs_c, run
from harness import needs_kernels
from test_dealing import SEGMENTS, Call

import build_cubins  # of csrc/kernels, where compiling.py finds the families
from dhp_safe_fa import _inspect

MEASURED = sorted((Path(__file__).parents[2] / "benchmarks" / "results" / "kernel_choice").glob("*.json"))


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
    return rows


def _call(row: dict[str, Any]) -> Call:
    q = row["batch"], row["heads"], row["key_heads"], row["seqlen"], row["key_seqlen"], row["head_dim"]
    return Call(*q, int(row["causal"]), row["key_seqlen"] - row["seqlen"] if row["causal"] else 0)


def _plan(call: Call) -> dict[str, Any]:
    q = call.batch, call.heads, call.seqlen_q, call.head_dim
    k = call.batch, call.key_heads, call.seqlen_k, call.head_dim
    plan = _inspect.plan(q, k, "bfloat16", bool(call.is_causal), call.causal_offset)
    assert plan is not None
    return plan


@needs_kernels
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.stem)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_choice_costs_little(path: Path, head_dim: int) -> None:
    """Chosen over the fastest: at most 1.15 on any shape, and on average half a percent; 1.2 over several segments,
    where a last one may be short. Where a kernel of another family is chosen, another file has the times. A file whose
    rows do not say segments has times of kernels that went through all keys of a row: they say nothing of the same
    kernel where segments are split. Few of its rows are of that kind; of these see below. A kernel for rows of one
    segment has the times of the other of its shape."""
    rows = [row for row in _rows(path) if row["head_dim"] == head_dim]
    plans = [_plan(_call(row)) for row in rows]
    for is_long, most in ((False, 1.15), (True, 1.2)):
        pairs = [(row, plan) for row, plan in zip(rows, plans, strict=True) if ("segments" in row) == is_long]
        known = [(row["us"], p["kernel"].removesuffix("_short")) for row, p in pairs if is_long or p["splits"] == 1]
        assert len(known) >= 0.95 * len(pairs)
        loss = {f"{us} {kernel}": us[kernel] / min(us.values()) for us, kernel in known if kernel in us}
        if is_long and not pairs:
            continue
        assert len(loss) > 30
        assert max(loss.values()) <= most, max(loss, key=lambda row: loss[row])
        assert statistics.geometric_mean(loss.values()) <= 1.005


def _expected(folder: Path, calls: Sequence[Call]) -> list[tuple[bool, int, float, float]]:
    """What forward/choice.c says of each: whether a decode kernel serves it, splits, cycles without splits and with."""
    own = [family for family in families.families() if family.name in ("decode", "fold", "forward", "tiles")]
    cubin, table = folder / "empty.cubin", folder / "kernel_table.c"
    cubin.touch()
    cubins = [build_cubins.Cubin(family, kernel, cubin, "", 0, 0) for family in own for kernel in family.kernels]
    table.write_text(build_cubins.table_source(cubins, own))
    host = ["check.c", "error.c", "kernel_info.c", "cuda/none.c", "families/decode/plan.c", "families/fold/launch.c"]
    sources = [Path(__file__).parent / "forward" / "choice.c", table, *(CSRC / name for name in host)]
    objects = [
        compile_with(C_COMPILER, one, folder / f"{n}.o", "-std=gnu11", "-O2", f"-I{CSRC}")
        for n, one in enumerate(sources)
    ]
    program = folder / "choice"
    linked = run(*C_COMPILER, *objects, "-lm", "-o", program)
    assert linked.returncode == 0, linked.stderr
    lines = "".join(" ".join(map(str, call)) + "\n" for call in calls)
    said = subprocess.run([program], input=lines, capture_output=True, text=True, check=True).stdout.splitlines()
    assert len(said) == len(calls)
    words = [line.split() for line in said]
    return [(one == "1", int(splits), float(whole), float(split)) for one, splits, whole, split in words]


@needs_c
def test_segments_are_split_where_that_takes_fewer_cycles(tmp_path: Path) -> None:
    """By the plan's own estimate, whose step of a kernel is measured, and whose fold is not."""
    measured = [_call(row) for path in MEASURED for row in _rows(path)]
    expected = dict(zip([*measured, *SEGMENTS], _expected(tmp_path, [*measured, *SEGMENTS]), strict=True))
    forwards = {call: rest for call, (is_decode, *rest) in expected.items() if not is_decode}
    for call, (splits, whole, split) in forwards.items():
        assert (splits > 1) == (split < whole), (call, whole, split)
    for calls in (measured, SEGMENTS):
        assert any(forwards[call][0] > 1 for call in calls if call in forwards)


def test_there_are_measurements() -> None:
    assert MEASURED
