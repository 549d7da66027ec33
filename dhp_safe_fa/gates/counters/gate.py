"""The gate `counters`: what Nsight Compute counts is the same for every input, to the last digit.

Each class of a subject's inputs is run several times. A metric that is the same in all runs of the same input
(A/A) is *exact*, and then has to be the same over all classes. That counts of executed instructions are exact is
demanded: a kernel that spins executes what chance decides. Of a metric that need not be, but is the median of its class
in nine runs of ten, the medians have to be equal; of others they may lie no farther apart than what A/A shows of chance
explains. Where classes differ in none but such metrics, these are counted again, in more runs, and judged by those
alone: what chance did to one run is then outvoted, and what data do comes again. So are controls whose clean twin
differs so. Bytes, cache traffic and time are reported, their spread over the classes beside their spread in A/A.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from .. import controls
from ..subjects import Subject, require_shapes
from ..verdict import ControlOutcome, GateResult, Progress, conclude
from . import ncu
from .ncu import Count, Request

GATE = "counters"
LEAK, CLEAN = controls.TWINS  # labels of a control's runs
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
# Exact or not: that is measured, and then they are judged as exact, or beside their spread in A/A. xbar2l1tex is what
# comes from L2, also by TMA; idc is the constant cache.
CANDIDATES = (
    "smsp__thread_inst_executed_pred_on.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    "l1tex__m_xbar2l1tex_read_sectors.sum",
    "idc__requests.sum",
    REGISTERS,
)
# Not exact, but nearly so, and therefore a finding if classes differ by more percent than this, and by more than
# MERGED times what runs of the same input ever did. Sectors written to L2: neighbouring stores are merged or not as
# they happen to meet, 3 in 70,000 on the shipped kernels and 1.4 % where registers are spilled; 8 of the 24 that a
# control writes (H100), where the leaks that this metric alone sees write seven times as many.
MERGED = 2
PERCENT = " %"
WITHIN = {"l1tex__m_l1tex2xbar_write_sectors.sum": 5.0}
# Where classes differ in none but these two kinds, the metrics that do are counted again, so many times in all classes:
# the median of three outvotes what chance did to one run, and every class shows how far apart chance brings its runs.
# The first counts of them are not judged then: they come from other passes, with other metrics, and a difference
# between the two would be taken for chance.
LOOKS_AGAIN = 3
# Of CANDIDATES, one that has its class's median in so many of the runs of a label is nearly exact. The other runs are
# events too rare to bring a median anywhere: they explain nothing, and hide no leak.
NEARLY = 0.9
# A run of their own, with one shape and few controls, because these take many passes. First what is exact again:
# instructions of each opcode, what patched code says of threads, requests and sectors.
DEMANDED_ONCE = (OPCODES, "smsp__sass_thread_inst_executed.sum")
CANDIDATES_ONCE = (
    "smsp__sass_thread_inst_executed_pred_on.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
)
# For each of these metrics, a control whose leak changes it: the metric is alive in the run that is judged by it. Of
# swapped_opcodes and scattered_store the other metrics, above, can see nothing.
CONTROLS_ONCE = {
    OPCODES: "swapped_opcodes",
    "smsp__sass_thread_inst_executed.sum": "nan_early_out",
    "smsp__sass_thread_inst_executed_pred_on.sum": "predicated_arithmetic",
    "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": "skip_small_p",
    "l1tex__t_requests_pipe_lsu_mem_global_op_st.sum": "predicated_store",
    "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum": "scattered_store",
}
ONCE_ALONE = ("swapped_opcodes", "scattered_store")
# Then what is not exact, and only reported, without --quick. Issued instructions contain replays; conflicts of stores
# to shared memory contain those with TMA, which come as chance has it (2 to 70 % in A/A on an H100).
REPORTED = (
    TIME,
    "smsp__inst_issued.sum",
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "lts__t_sectors.sum",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
)
# What is counted together: for all shapes, and for one.
CHEAP = (*DEMANDED, *CANDIDATES, *WITHIN)
COSTLY = (*DEMANDED_ONCE, *CANDIDATES_ONCE)


@dataclass(frozen=True)
class Extent:
    """How much is run, as lists of classes of data. One that comes twice is an A/A pair.

    Attributes:
        shapes: of each subject.
        repeats: of every class of a subject's inputs, for each shape.
        again: classes that are run once more.
        data_once: for one shape, with the metrics that take many passes; empty for every class twice.
        control_data: of ``inputs.planted_secrets``, for each control.
        control_data_once: the same, for CONTROLS_ONCE.
        reported: what is counted beside COSTLY.
    """

    shapes: int
    repeats: int
    again: tuple[str, ...]
    data_once: tuple[str, ...]
    control_data: tuple[str, ...]
    control_data_once: tuple[str, ...]
    reported: tuple[str, ...] = ()

    def data(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """For each shape of a subject with these classes."""
        return (*classes * self.repeats, *self.again)

    def once(self, classes: tuple[str, ...]) -> tuple[str, ...]:
        """For its one shape with the costly metrics."""
        return self.data_once or classes * 2


QUICK = Extent(
    shapes=2,
    repeats=1,
    again=("zeros", "normal", "NaN rows"),
    data_once=("zeros", "normal", "large", "NaN rows") * 2,
    control_data=("zeros", "ascending", "large", "NaN", "zeros"),
    control_data_once=("zeros", "ascending", "NaN", "zeros"),
)
FULL = Extent(
    shapes=4,
    repeats=2,
    again=(),
    data_once=(),
    control_data=("zeros", "normal", "large", "ascending", "descending", "denormals", "NaN", "zeros", "normal"),
    control_data_once=("zeros", "ascending", "NaN") * 2,
    reported=REPORTED,
)


@dataclass(frozen=True)
class Study:
    """What was seen of one metric on one label (a shape, or a twin).

    Attributes:
        is_exact: the same in all runs of the same data.
        is_nearly: what is usual with the same data in NEARLY of their runs, or more; of CANDIDATES, looked at again.
        is_equal: the same in all runs.
        value: the median over the classes.
        aa_percent: the largest spread within a class, (max - min) / median.
        classes_percent: the spread of the classes' medians.
        within: the largest spread within a class, in the metric's unit.
        apart: how far apart the classes' medians are, likewise.
        explained: how far apart the runs of the same data (A/A) let chance bring them; nearly exact ones nowhere.
        by_class: medians, if the classes differ.
    """

    is_exact: bool
    is_nearly: bool
    is_equal: bool
    value: float
    aa_percent: float
    classes_percent: float
    within: float
    apart: float
    explained: float
    by_class: dict[str, float]


# The probability that the medians of the classes are farther apart than is said to be explained, where only (normally
# distributed) chance is at work: a run judges some hundred metrics.
_UNEXPLAINED = 0.001
_DRAWS = 50_000


@cache
def _chance(runs: tuple[int, ...]) -> float:
    """How far apart the medians of classes, with so many runs each, may come by chance: in units of the largest
    difference between runs of one class. 2.6 for eleven classes with two runs each, 18 if only three have two."""
    rng = np.random.default_rng(0)
    classes = [rng.standard_normal((count, _DRAWS)) for count in runs]
    medians = np.array([np.median(values, axis=0) for values in classes])
    within = np.max([np.ptp(values, axis=0) for values in classes], axis=0)
    return float(np.quantile(np.ptp(medians, axis=0) / within, 1 - _UNEXPLAINED))


def _spread(values: Sequence[float]) -> float:
    """(max - min) / median in percent; of the maximum if the median is 0."""
    most, least, middle = max(values), min(values), median(values)
    return 0.0 if most == least else 100 * (most - least) / abs(middle or most or least)


def _require_repeats(runs: Sequence[Count]) -> None:
    repeats = Counter(run.data for run in runs)
    if len(repeats) < 2 or max(repeats.values()) < 2:
        raise ValueError(f"two classes of data, one of them twice, are needed, not {', '.join(repeats) or 'none'}")


def study(counts: Iterable[Count]) -> dict[str, Study]:
    """Metric to what was seen of it, over the runs of one label in which it was counted. An opcode that a run lacks is
    0 there, and so is everything where a call launched other kernels. ValueError without classes to compare, or
    without two runs of any."""
    runs = list(counts)
    _require_repeats(runs)
    counted = [{_base(metric) for metric in run.values} for run in runs]
    found = {}
    for metric in dict.fromkeys(metric for run in runs for metric in run.values):
        by_class: dict[str, list[float]] = {}
        for run, bases in zip(runs, counted, strict=True):
            if not bases or _base(metric) in bases:
                by_class.setdefault(run.data, []).append(run.values.get(metric, 0.0))
        medians = {data: median(values) for data, values in by_class.items()}
        everything = [value for values in by_class.values() for value in values]
        is_equal = len(set(everything)) == 1
        again = [(value, medians[data]) for data, values in by_class.items() if len(values) > 1 for value in values]
        is_alike = sum(value == usual for value, usual in again) >= NEARLY * len(again)
        is_nearly = is_alike and _base(metric) in CANDIDATES
        within = max(max(values) - min(values) for values in by_class.values())
        repeats = tuple(len(values) for values in by_class.values())
        found[metric] = Study(
            is_exact=within == 0,
            is_nearly=is_nearly,
            is_equal=is_equal,
            value=median(medians.values()),
            aa_percent=max(map(_spread, by_class.values())),
            classes_percent=_spread(list(medians.values())),
            within=within,
            apart=max(medians.values()) - min(medians.values()),
            explained=0.0 if is_nearly or not within else within * _chance(repeats),
            by_class={} if is_equal else medians,
        )
    return found


def _base(metric: str) -> str:
    """Without the opcode."""
    return metric.partition(":")[0]


def explained_elsewhere(studies: Iterable[dict[str, Study]]) -> dict[str, float]:
    """The metrics that were not nearly exact everywhere, and how far apart chance brings classes on the label where it
    does so least; of WITHIN, MERGED times the most that A/A differs, and as METRIC % the same in percent. On a label
    whose few A/A pairs happen to agree, that much is no finding."""
    found: dict[str, float] = {}
    for seen in studies:
        for metric, one in seen.items():
            if _base(metric) in WITHIN:
                for name, merged in ((metric, one.within), (metric + PERCENT, one.aa_percent)):
                    found[name] = max(MERGED * merged, found.get(name, 0.0))
            elif not (one.is_exact or one.is_nearly):
                found[metric] = min(one.explained, found.get(metric, one.explained))
    return found


def _differs(metric: str, seen: Study, elsewhere: Mapping[str, float]) -> bool:
    """Whether the classes differ by more than is known to be chance."""
    base = _base(metric)
    if base in REPORTED:
        return False
    if base in WITHIN:
        merged = max(MERGED * seen.within, elsewhere.get(metric, 0.0))
        merged_percent = max(MERGED * seen.aa_percent, elsewhere.get(metric + PERCENT, 0.0))
        is_more = seen.apart > merged or seen.classes_percent > merged_percent  # labels are of unlike sizes
        return seen.classes_percent > WITHIN[base] and is_more
    if base in (*DEMANDED, *DEMANDED_ONCE):
        return not seen.is_equal
    return seen.apart > (seen.explained or elsewhere.get(metric, 0.0))


def findings(seen: dict[str, Study], elsewhere: Mapping[str, float]) -> dict[str, str]:
    """What speaks against a kernel on one label, by metric. elsewhere: see explained_elsewhere."""
    found = {}
    for metric, one in seen.items():
        if _base(metric) in (*DEMANDED, *DEMANDED_ONCE) and not one.is_exact:
            found[metric] = f"{metric} varies by {one.aa_percent:.2g} % between runs of the same input"
        elif _differs(metric, one, elsewhere):
            found[metric] = _difference(metric, one)
    return found


def _may_be_chance(differing: Iterable[str]) -> bool:
    """Whether the metrics that differ are all of those, of the first run, that need not be exact."""
    return all(metric in (*CANDIDATES, *WITHIN) for metric in differing)


def in_doubt(often: Iterable[Count], name: str) -> dict[str, list[str]]:
    """Metric to what it says against a subject, if chance may have done it all: differences in metrics that need not be
    exact. In few A/A pairs a rare event, such as one sector more in a million, is not seen."""
    shapes = {label: study(some) for label, some in by_label(often, name).items()}
    elsewhere = explained_elsewhere(shapes.values())
    found = [(label, *one) for label, seen in shapes.items() for one in findings(seen, elsewhere).items()]
    if not _may_be_chance(metric for _, metric, _ in found):
        return {}
    return {metric: [f"{label}: {text}" for label, of, text in found if of == metric] for _, metric, _ in found}


def controls_in_doubt(often: Sequence[Count], expected: Mapping[str, str]) -> dict[str, list[str]]:
    """Of controls the metrics in which a twin differs of which nothing should be seen, if chance may have done it all:
    the clean one; of a control that is expected to be seen by nobody here the other, too."""
    found = {}
    for name, twins in _twins(often, expected).items():
        silent = controls.TWINS if expected[name] == controls.BLIND else (CLEAN,)
        seen = list(dict.fromkeys(metric for twin in silent for metric in twins[twin]))
        if seen and _may_be_chance(seen):
            found[name] = seen
    return found


def second_look(often: Sequence[Count], again: Sequence[Count], doubt: Mapping[str, Iterable[str]]) -> list[Count]:
    """The runs by which subjects and controls are judged that were looked at again: of the metrics in doubt (doubt: by
    name), the second look's alone; of executed instructions those of both, of others the first's. Of a leak twin
    instructions are the first's: else a leak that was not seen would have a second chance, with more runs."""
    judged = []
    for count in often:
        kept = count.values.keys() - doubt.get(count.name, ())
        judged.append(_only(count, kept))
    for count in again:
        if doubt.get(count.name):
            in_both = set() if count.label == LEAK else {INSTRUCTIONS}
            judged.append(_only(count, in_both.union(doubt[count.name])))
    return judged


def _only(count: Count, metrics: Collection[str]) -> Count:
    return replace(count, values={metric: value for metric, value in count.values.items() if metric in metrics})


def _difference(metric: str, seen: Study) -> str:
    low, *_, high = sorted(seen.by_class, key=lambda data: seen.by_class[data])
    chance = f", of which chance explains {seen.explained:.0f}" if seen.explained else ""
    return f"{metric}: {seen.by_class[low]:.0f} ({low}) to {seen.by_class[high]:.0f} ({high}){chance}"


def by_label(counts: Iterable[Count], name: str) -> dict[str, list[Count]]:
    """The runs of one subject or control, by label."""
    labels: dict[str, list[Count]] = {}
    for count in counts:
        if count.name == name:
            labels.setdefault(count.label, []).append(count)
    return labels


def _twins(counts: Sequence[Count], names: Iterable[str]) -> dict[str, dict[str, dict[str, str]]]:
    """Control to twin to findings. What is noise in any clean twin may be noise in all."""
    seen = {}
    for name in names:
        labels = by_label(counts, name)
        seen[name] = {twin: study(labels[twin]) for twin in controls.TWINS}
    elsewhere = explained_elsewhere(twins["clean"] for twins in seen.values())
    return {name: {twin: findings(one, elsewhere) for twin, one in twins.items()} for name, twins in seen.items()}


def judge_controls(counts: Sequence[Count], expected: dict[str, str]) -> list[ControlOutcome]:
    """What the metrics of all shapes saw of each control."""
    outcomes = []
    for name, said in _twins(counts, expected).items():
        leak, clean = ("; ".join(list(said[twin].values())[:2]) for twin in controls.TWINS)
        expects = controls.MAY if name in ONCE_ALONE else expected[name]
        outcomes.append(controls.judge_executed(name, expects, leak, clean))
    return outcomes


def judge_controls_once(counts: Sequence[Count]) -> list[ControlOutcome]:
    """What the costly metrics saw of CONTROLS_ONCE: each has to see its own control's leak, and none a clean twin."""
    said = _twins(counts, CONTROLS_ONCE.values())
    outcomes = []
    for metric, name in CONTROLS_ONCE.items():
        leak = "; ".join(text for found, text in said[name]["leak"].items() if _base(found) == metric)
        clean = "; ".join(list(said[name]["clean"].values())[:2])
        outcomes.append(controls.judge_executed(f"{name}: {metric}", controls.CAUGHT, leak, clean))
    return outcomes


def _other_kernels(runs: Sequence[Count]) -> list[str]:
    """Runs that launch other kernels than the first one: data, or chance, decide over it."""
    first, *others = runs
    differing = dict.fromkeys(run.data for run in others if run.kernels != first.kernels)
    return [f"{data} launches other kernels than {first.data}" for data in differing]


def judge_subject(
    name: str,
    often: Sequence[Count],
    once: Sequence[Count],
    outcomes: list[ControlOutcome],
    first_look: Sequence[str] = (),
) -> GateResult:
    """The verdict on one subject, from its runs on all shapes (often) and those with the costly metrics (once).
    first_look: what was in doubt when some of the runs on all shapes had been made."""
    runs = [*by_label(often, name).items(), *by_label(once, name).items()]
    shapes = {label: study(some) for label, some in by_label(often, name).items()}
    costly = {label: study(some) for label, some in by_label(once, name).items()}
    studies = [*shapes.items(), *costly.items()]
    elsewhere = explained_elsewhere(seen for _, seen in studies)
    problems = [f"{label}: {text}" for label, seen in studies for text in findings(seen, elsewhere).values()]
    problems += [f"{label}: {text}" for label, some in runs for text in _other_kernels(some)]
    idle = [label for label, seen in shapes.items() if not seen[INSTRUCTIONS].value]
    problems += [f"{label}: no instruction was counted" for label in idle]
    gated = {metric for _, seen in studies for metric in seen if _base(metric) not in (*REPORTED, *WITHIN)}
    noisy = {metric for _, seen in studies for metric in gated & set(seen) if not seen[metric].is_exact}
    first, detail = next(iter(shapes.values())), next(iter(costly.values()))
    figures: dict[str, Any] = {
        "shapes": len(shapes),
        "calls": sum(count.name == name for count in (*often, *once)),
        "instructions": int(first[INSTRUCTIONS].value),
        "registers": int(first[REGISTERS].value),
        "exact": f"{len(gated - noisy)} of {len(gated)}",
        "differ": len({metric for _, seen in studies for metric in gated & set(findings(seen, elsewhere))}),
        "time: classes (A/A)": _spreads(detail[TIME]) if TIME in detail else "not counted",
        "not exact": sorted(noisy),
        "looks": 1 + bool(first_look),
        "in doubt at first": list(first_look),
        "kernels": sorted({kernel for count in often if count.name == name for kernel in count.kernels}),
        "counted": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in shapes.items()},
        "counted once": {label: {m: _as_json(s) for m, s in seen.items()} for label, seen in costly.items()},
    }
    return conclude(GATE, name, figures, problems, outcomes)


def _spreads(seen: Study) -> str:
    return f"{seen.classes_percent:.1f} ({seen.aa_percent:.1f}) %"


def _as_json(seen: Study) -> dict[str, Any]:
    return {"value": seen.value} if seen.is_equal else asdict(seen)


def run(subjects: list[Subject], quick: bool, progress: Progress) -> list[GateResult]:
    """Count controls and subjects; the kernels of a call in one. NotRun if there is no Nsight Compute, or it may not
    count."""
    require_shapes(subjects)
    calls: dict[str, Subject] = {}
    parts: dict[str, tuple[str, ...]] = {}
    for subject in subjects:
        call = subject.call()
        first = next((name for name, other in calls.items() if other.name == call.name), subject.name)
        calls.setdefault(first, call)
        parts[first] = (*parts.get(first, ()), subject.name)
    require_shapes(calls.values())
    expected = controls.load_controls(lambda text: progress(text, 0, 1)).expected_of(GATE)
    extent = QUICK if quick else FULL
    shapes = min(extent.shapes, *(len(call.shapes) for call in calls.values()))
    planted, planted_once = tuple(expected), tuple(CONTROLS_ONCE.values())
    data = {name: extent.data(call.classes) for name, call in calls.items()}
    data_once = {name: extent.once(call.classes) for name, call in calls.items()}
    is_shipped = all(subject.cubin_sha256 for subject in subjects)  # a peer may launch others in another run
    for_all = Request(CHEAP, data, shapes, planted, extent.control_data, parts, application_replay=is_shipped)
    for_one = Request((*COSTLY, *extent.reported), data_once, 1, planted_once, extent.control_data_once, parts)
    in_first = for_all.calls
    total = in_first + for_one.calls
    often = ncu.measure(for_all, lambda done, what: progress(what, done, total))
    once = ncu.measure(for_one, lambda done, what: progress(what, in_first + done, total))
    doubts = {subject.name: in_doubt(often, subject.name) for subject in subjects}
    planted_doubts = controls_in_doubt(often, expected)
    in_question = {first: data[first] * LOOKS_AGAIN for first in calls if any(doubts[name] for name in parts[first])}
    if in_question or planted_doubts:
        doubtful = {INSTRUCTIONS}.union(*doubts.values(), *planted_doubts.values())
        metrics = tuple(metric for metric in CHEAP if metric in doubtful)
        parts_in_question = {first: parts[first] for first in in_question}
        data_again = extent.control_data * LOOKS_AGAIN if planted_doubts else ()
        again = Request(metrics, in_question, shapes, tuple(planted_doubts), data_again, parts_in_question)
        counted = ncu.measure(again, lambda done, what: progress(f"again: {what}", done, again.calls))
        often = second_look(often, counted, {**doubts, **planted_doubts})
    outcomes = [*judge_controls(often, expected), *judge_controls_once(once)]
    first_looks = {name: [text for texts in doubt.values() for text in texts] for name, doubt in doubts.items()}
    results = [judge_subject(one.name, often, once, outcomes, first_looks[one.name]) for one in subjects]
    for result in results:
        result.figures["controls in doubt at first"] = planted_doubts
    return results
