"""The gate `counters`: what Nsight Compute counts is the same for every input, to the last digit.

Each class of inputs (``inputs.CLASSES``) is run several times. A metric that is the same in all runs of the same input
(A/A) is *exact*, and then has to be the same over all classes. That counts of executed instructions are exact is
demanded: a kernel that spins executes what chance decides. Bytes, cache traffic and time are never exact; their spread
over the classes is reported beside their spread in A/A.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from .. import controls, inputs
from ..subjects import Subject
from ..verdict import ControlOutcome, GateResult, Progress, conclude
from . import ncu
from .ncu import Count, Request

GATE = "counters"
INSTRUCTIONS = "smsp__inst_executed.sum"
OPCODES = "sass__inst_executed_per_opcode"
TIME = "gpu__time_duration.sum"
REGISTERS = "launch__registers_per_thread"

# Executed instructions, counted by the hardware (smsp__) or by patched code (sass): all must be exact in A/A.
DEMANDED = (
    INSTRUCTIONS,
    "smsp__thread_inst_executed.sum",
    "smsp__sass_branch_targets.sum",
    "smsp__sass_branch_targets_threads_divergent.sum",
)
# Exact or not: that is measured. xbar2l1tex is what comes from L2, also by TMA; idc is the constant cache.
CANDIDATES = (
    "smsp__thread_inst_executed_pred_on.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__m_xbar2l1tex_read_sectors.sum",
    "idc__requests.sum",
    REGISTERS,
)
# Not exact, but nearly so, and therefore a finding if classes differ by more percent than this. Sectors written to L2:
# neighbouring stores are merged or not as they happen to meet, 3 in 70,000 on the shipped kernels and 1.4 % where
# registers are spilled (H100).
WITHIN = {"l1tex__m_l1tex2xbar_write_sectors.sum": 5.0}
# A run of their own, with one shape and no controls, because these take many passes. First what is exact again:
# instructions of each opcode, what patched code says of threads, requests and sectors.
DEMANDED_ONCE = (OPCODES, "smsp__sass_thread_inst_executed.sum")
CANDIDATES_ONCE = (
    "smsp__sass_thread_inst_executed_pred_on.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
)
# Then what is not exact, and is only reported. Issued instructions contain replays; conflicts of stores to shared
# memory contain those with TMA, which come as chance has it (2 to 70 % in A/A on an H100).
REPORTED = (
    TIME,
    "smsp__inst_issued.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors.sum",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
)


@dataclass(frozen=True)
class Extent:
    """How much is run, as lists of classes of data. One that comes twice is an A/A pair.

    Attributes:
        shapes: of each subject.
        data: for each shape.
        data_once: for one shape, with the metrics that take many passes.
        control_data: of ``inputs.planted_secrets``, for each control.
    """

    shapes: int
    data: tuple[str, ...]
    data_once: tuple[str, ...]
    control_data: tuple[str, ...]


_ALL = tuple(inputs.CLASSES)
QUICK = Extent(
    shapes=2,
    data=(*_ALL, "zeros", "normal", "NaN rows"),
    data_once=("zeros", "normal", "large", "NaN rows") * 2,
    control_data=("zeros", "ascending", "large", "NaN", "zeros"),
)
FULL = Extent(
    shapes=4,
    data=_ALL * 2,
    data_once=_ALL * 2,
    control_data=("zeros", "normal", "large", "ascending", "descending", "denormals", "NaN", "zeros", "normal"),
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


def _base(metric: str) -> str:
    """Without the opcode."""
    return metric.partition(":")[0]


def inexact(studies: Iterable[dict[str, Study]]) -> set[str]:
    """The metrics that were not exact everywhere."""
    return {metric for some in studies for metric, seen in some.items() if not seen.is_exact}


def findings(seen: dict[str, Study], noisy: set[str]) -> list[str]:
    """What speaks against a kernel on one label. noisy: metrics that A/A runs have shown not to be exact."""
    found = []
    for metric, one in seen.items():
        if _base(metric) in (*DEMANDED, *DEMANDED_ONCE) and not one.is_exact:
            found.append(f"{metric} varies by {one.aa_percent:.2g} % between runs of the same input")
        elif metric in WITHIN:
            if one.classes_percent > WITHIN[metric]:
                found.append(_difference(metric, one))
        elif _base(metric) not in REPORTED and metric not in noisy and not one.is_equal:
            found.append(_difference(metric, one))
    return found


def _difference(metric: str, seen: Study) -> str:
    low, *_, high = sorted(seen.by_class, key=lambda data: seen.by_class[data])
    return f"{metric}: {seen.by_class[low]:.0f} ({low}) to {seen.by_class[high]:.0f} ({high})"


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
    name: str, often: Sequence[Count], once: Sequence[Count], outcomes: list[ControlOutcome]
) -> GateResult:
    """The verdict on one subject, from its runs on all shapes (often) and those with the costly metrics (once)."""
    shapes = {label: study(runs) for label, runs in by_label(often, name).items()}
    costly = {label: study(runs) for label, runs in by_label(once, name).items()}
    studies = [*shapes.items(), *costly.items()]
    noisy = inexact(seen for _, seen in studies)
    problems = [f"{label}: {text}" for label, seen in studies for text in findings(seen, noisy)]
    gated = {metric for _, seen in studies for metric in seen if _base(metric) not in (*REPORTED, *WITHIN)}
    first, detail = next(iter(shapes.values())), next(iter(costly.values()))
    figures: dict[str, Any] = {
        "shapes": len(shapes),
        "calls": sum(count.name == name for count in (*often, *once)),
        "instructions": int(first[INSTRUCTIONS].value),
        "registers": int(first[REGISTERS].value),
        "exact": f"{len(gated - noisy)} of {len(gated)}",
        "differ": len({metric for _, seen in studies for metric, s in seen.items() if not s.is_equal} & gated - noisy),
        "time: classes (A/A)": f"{detail[TIME].classes_percent:.1f} ({detail[TIME].aa_percent:.1f}) %",
        "not exact": sorted(noisy & gated),
        "kernels": sorted({kernel for count in often if count.name == name for kernel in count.kernels}),
        "counted": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in shapes.items()},
        "counted once": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in costly.items()},
    }
    return conclude(GATE, name, figures, problems, outcomes)


def _as_json(seen: Study) -> dict[str, Any]:
    return {"value": seen.value} if seen.is_equal else asdict(seen)


def run(subjects: list[Subject], quick: bool, progress: Progress) -> list[GateResult]:
    """Count controls and subjects. NotRun if there is no Nsight Compute, or it may not count."""
    expected = controls.load_controls(lambda text: progress(text, 0, 1)).expected_of(GATE)
    extent = QUICK if quick else FULL
    names = tuple(subject.name for subject in subjects)
    shapes = min(extent.shapes, *(len(subject.shapes) for subject in subjects))
    first = Request((*DEMANDED, *CANDIDATES, *WITHIN), names, shapes, extent.data, extent.control_data)
    second = Request((*DEMANDED_ONCE, *CANDIDATES_ONCE, *REPORTED), names, 1, extent.data_once)
    in_first = len(expected) * len(controls.TWINS) * len(extent.control_data) + len(names) * shapes * len(extent.data)
    total = in_first + len(names) * len(extent.data_once)
    often = ncu.measure(first, lambda done, what: progress(what, done, total))
    once = ncu.measure(second, lambda done, what: progress(what, in_first + done, total))
    outcomes = judge_controls(often, expected)
    return [judge_subject(name, often, once, outcomes) for name in names]
