"""The gate `counters`: what Nsight Compute counts is the same for every input, to the last digit.

Each class of inputs (``inputs.CLASSES``) is run several times. A metric that is the same in all runs of the same input
(A/A) is *exact*, and then has to be the same over all classes. That instruction counts are exact is demanded: a kernel
that spins executes what chance decides. Bytes, cache traffic and time are never exact; their spread over the classes
is reported beside their spread in A/A.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from . import controls, counters_ncu, inputs
from .controls import Controls
from .counters_ncu import Count, Request
from .subjects import Subject
from .verdict import ControlOutcome, GateResult, Progress, conclude

GATE = "counters"
OPCODES = "sass__inst_executed_per_opcode"
TIME = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"

# Instructions: counted by the hardware (smsp__inst) and by patched code (sass); all must be exact in A/A.
DEMANDED = (
    "smsp__inst_executed.sum",
    OPCODES,
    "smsp__sass_thread_inst_executed.sum",
    "smsp__sass_branch_targets.sum",
    "smsp__sass_branch_targets_threads_divergent.sum",
)
# Exact or not: that is measured. Issued instructions contain replays; the last ones are the traffic of TMA and of
# loads and stores between L1 and L2, and of the constant cache.
CANDIDATES = (
    "smsp__inst_issued.sum",
    "smsp__sass_thread_inst_executed_pred_on.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "lts__t_sectors_srcunit_tex_op_read.sum",
    "lts__t_sectors_srcunit_tex_op_write.sum",
    "idc__requests.sum",
    REGISTERS,
)
# In a run of their own, on one shape: they take many passes.
REPORTED = (
    TIME,
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
)


@dataclass(frozen=True)
class Extent:
    """How much is run. control_data: the first two are an A/A pair."""

    shapes: int
    repeats: int
    control_data: tuple[str, ...]


QUICK = Extent(2, 2, ("zeros", "zeros", "normal", "large", "NaN"))
FULL = Extent(
    4, 3, ("zeros", "zeros", "zeros", "normal", "normal", "large", "ascending", "descending", "denormals", "NaN")
)


@dataclass(frozen=True)
class Study:
    """What was seen of one metric on one label (a shape, or a twin).

    Attributes:
        is_exact: the same in all runs of the same data.
        is_equal: the same in all runs.
        value: the median over the classes.
        aa_percent: the largest spread within a class, (max - min) / median.
        classes_percent: the spread of the classes' medians.
        by_class: medians, if the classes differ.
    """

    is_exact: bool
    is_equal: bool
    value: float
    aa_percent: float
    classes_percent: float
    by_class: dict[str, float]


def _spread(values: Sequence[float]) -> float:
    """(max - min) / median in percent; of the maximum if the median is 0."""
    most, least, middle = max(values), min(values), median(values)
    return 0.0 if most == least else 100 * (most - least) / abs(middle or most or least)


def study(counts: Iterable[Count]) -> dict[str, Study]:
    """Metric to what was seen of it, over the runs of one label. A metric that a run lacks (an opcode) is 0 there."""
    runs = list(counts)
    found = {}
    for metric in dict.fromkeys(metric for run in runs for metric in run.values):
        by_class: dict[str, list[float]] = {}
        for run in runs:
            by_class.setdefault(run.data, []).append(run.values.get(metric, 0.0))
        medians = {data: median(values) for data, values in by_class.items()}
        everything = [value for values in by_class.values() for value in values]
        is_equal = len(set(everything)) == 1
        found[metric] = Study(
            is_exact=all(len(set(values)) == 1 for values in by_class.values()),
            is_equal=is_equal,
            value=median(medians.values()),
            aa_percent=max(map(_spread, by_class.values())),
            classes_percent=_spread(list(medians.values())),
            by_class={} if is_equal else medians,
        )
    return found


def _demanded(metric: str) -> bool:
    return metric.partition(":")[0] in DEMANDED


def inexact(studies: Iterable[dict[str, Study]]) -> set[str]:
    """The metrics that were not exact everywhere."""
    return {metric for some in studies for metric, seen in some.items() if not seen.is_exact}


def findings(seen: dict[str, Study], noisy: set[str]) -> list[str]:
    """What speaks against a kernel on one label. noisy: metrics that A/A runs have shown not to be exact."""
    found = []
    for metric, one in seen.items():
        if _demanded(metric) and not one.is_exact:
            found.append(f"{metric} varies by {one.aa_percent:.2g} % between runs of the same input")
        elif metric not in noisy and not one.is_equal:
            low = min(one.by_class, key=lambda data: one.by_class[data])
            high = max(one.by_class, key=lambda data: one.by_class[data])
            found.append(f"{metric}: {one.by_class[low]:.0f} ({low}) to {one.by_class[high]:.0f} ({high})")
    return found


def by_label(counts: Iterable[Count], name: str) -> dict[str, list[Count]]:
    """The runs of one subject or control, by label."""
    labels: dict[str, list[Count]] = {}
    for count in counts:
        if count.name == name:
            labels.setdefault(count.label, []).append(count)
    return labels


def judge_controls(counts: Sequence[Count], expected: dict[str, str]) -> list[ControlOutcome]:
    """What was seen of each control. What is noisy in any clean twin is noise in all of them."""
    seen = {name: {twin: study(runs) for twin, runs in by_label(counts, name).items()} for name in expected}
    noisy = inexact(twins["clean"] for twins in seen.values())
    outcomes = []
    for name, twins in seen.items():
        said = {twin: "; ".join(findings(twins[twin], noisy)[:2]) for twin in controls.TWINS}
        outcomes.append(controls.judge_executed(name, expected[name], said["leak"], said["clean"]))
    return outcomes


def judge_subject(
    name: str, exact: Sequence[Count], reported: Sequence[Count], outcomes: list[ControlOutcome]
) -> GateResult:
    """The verdict on one subject, from its runs with the exact and with the reported metrics."""
    studies = {label: study(runs) for label, runs in by_label(exact, name).items()}
    more = {label: study(runs) for label, runs in by_label(reported, name).items()}
    noisy = inexact(studies.values())
    problems = [f"{label}: {text}" for label, seen in studies.items() for text in findings(seen, noisy)]
    metrics = {metric for seen in studies.values() for metric in seen}
    first, report = next(iter(studies.values())), next(iter(more.values()))
    figures: dict[str, Any] = {
        "shapes": len(studies),
        "calls": sum(count.name == name for count in (*exact, *reported)),
        "instructions": int(first[DEMANDED[0]].value),
        "registers": int(first[REGISTERS].value),
        "exact metrics": f"{len(metrics - noisy)} of {len(metrics)}",
        "unequal": len({metric for seen in studies.values() for metric, s in seen.items() if not s.is_equal} - noisy),
        "time, classes (A/A)": f"{report[TIME].classes_percent:.1f} ({report[TIME].aa_percent:.1f}) %",
        "not exact": sorted(noisy),
        "kernels": sorted({kernel for count in exact if count.name == name for kernel in count.kernels}),
        "counted": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in studies.items()},
        "reported": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in more.items()},
    }
    return conclude(GATE, name, figures, problems, outcomes)


def _as_json(seen: Study) -> dict[str, Any]:
    return {"value": seen.value} if seen.is_equal else asdict(seen)


def run(subjects: list[Subject], quick: bool, progress: Progress) -> list[GateResult]:
    """Count controls and subjects. NotRun if there is no Nsight Compute, or it may not count."""
    loaded: Controls = controls.load_controls(lambda text: progress(text, 0, 1))
    expected = loaded.expected_of(GATE)
    extent = QUICK if quick else FULL
    names = tuple(subject.name for subject in subjects)
    per_class = len(names) * len(inputs.CLASSES) * extent.repeats
    shapes = min(extent.shapes, min(len(subject.shapes) for subject in subjects))
    first = len(expected) * len(controls.TWINS) * len(extent.control_data) + per_class * shapes
    total = first + per_class

    exact = counters_ncu.measure(
        Request((*DEMANDED, *CANDIDATES), names, shapes, extent.repeats, extent.control_data),
        lambda done, what: progress(what, done, total),
    )
    reported = counters_ncu.measure(
        Request(REPORTED, names, 1, extent.repeats), lambda done, what: progress(what, first + done, total)
    )
    outcomes = judge_controls(exact, expected)
    return [judge_subject(name, exact, reported, outcomes) for name in names]
