"""The original project's milestones, and what in the log answers them: a number that was measured, or nothing.

The original project: earlier hand-written kernels for this task, in iterations numbered up to I13. Its kernels are not
here. What it reported of them is quoted (quoted.py); its milestones, all of them about the forward, are answered by
lines of this log.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dhp_safe_fa.bench.cases import parse_case
from dhp_safe_fa.burn.log.records import FORWARD, Record

# For whoever meets the names.
ORIGINAL = "the original project, earlier hand-written kernels for this task, in iterations numbered up to I13"
# What I5 asks of the tensor pipe, in per cent of its peak.
TENSOR_PERCENT = 35

MILESTONES = {
    "I4": "fused: q kᵀ never goes to memory",
    "I5": f"one kernel with TMA and WGMMA, tensor pipe above {TENSOR_PERCENT} %",
    "I6": "warp specialisation",
    "I7": "ping-pong of two warpgroups",
    "shared-memory": "I8–I13: how much shared memory a CTA takes, and what for",
    "registers": "I8–I13: registers a thread, nothing spilled",
    "layout": "I8–I13: where tiles lie in shared memory and registers",
    "scheduling": "I8–I13: which CTA computes which tiles, and in which order",
}
# Those that the counters of a record answer by themselves; the others are claimed with `run --milestone`.
COUNTED = ("I4", "I5")


@dataclass(frozen=True)
class Answer:
    """record: its name; None: no record answers. text: the number."""

    milestone: str
    record: str | None
    text: str


def counted(record: Record) -> list[str]:
    """The milestones that the counters of a record reach."""
    return [name for name in COUNTED if _counters(name, record) is not None]


def check(record: Record) -> None:
    """ValueError if a record lists a milestone that there is not, or that its own counters deny."""
    for name in record.milestones:
        if name not in MILESTONES:
            raise ValueError(f"{record.name}: milestone '{name}': there are {', '.join(MILESTONES)}")
        if name in COUNTED and _counters(name, record) is None:
            raise ValueError(f"{record.name}: its counters do not reach the milestone {name} ({MILESTONES[name]})")


def answers(records: Sequence[Record]) -> list[Answer]:
    """For each milestone the record that answers it: the latest that proceeded, else the latest that tried."""
    found = []
    for name in MILESTONES:
        listed = [record for record in records if name in record.milestones]
        proceeded = [record for record in listed if record.decision == "proceed"]
        if not listed:
            found.append(Answer(name, None, "no record yet"))
            continue
        record = (proceeded or listed)[-1]
        found.append(Answer(name, record.name, _number(name, record)))
    return found


def _number(name: str, record: Record) -> str:
    decision = f"{record.decision}; " if record.decision else ""
    if name in COUNTED:
        return f"{decision}{_counters(name, record)}"
    ratio = record.verdict.ratio if record.verdict else None
    parts = [f"ratio to the previous best {ratio}"] if ratio else record.verdict.reasons[:1] if record.verdict else []
    if name == "shared-memory":
        parts.append(f"{max(kernel.shared_bytes or 0 for kernel in record.kernels)} bytes a CTA")
    if name == "registers":
        most = max(kernel.registers or 0 for kernel in record.kernels)
        parts.append(f"{most} registers, {max(kernel.spill_bytes or 0 for kernel in record.kernels)} bytes spilled")
    return decision + "; ".join(parts)


def _counters(name: str, record: Record) -> str | None:
    """The number for I4 or I5 if the record reaches it."""
    if not record.profiles or record.family != FORWARD:
        return None
    if name == "I4":
        # an unfused chain writes q kᵀ and reads it again; the case with the most scores shows that best
        most = max(record.profiles, key=lambda profile: parse_case(profile.case, "").scores)
        case = parse_case(most.case, "")
        scores = case.scores * case.torch_dtype.itemsize
        text = f"{most.dram_bytes / 1e6:.0f} MB of DRAM traffic at {most.case}, where q kᵀ has {scores / 1e6:.0f} MB"
        return text if most.dram_bytes < scores else None
    if not record.kernels or not all(kernel.wgmma and kernel.tma for kernel in record.kernels):
        return None
    best = max(record.profiles, key=lambda profile: profile.tensor_percent)
    lowest = min(profile.tensor_percent for profile in record.profiles)
    text = f"tensor pipe {best.tensor_percent:.1f} % at {best.case} ({lowest:.1f} % at the lowest profiled shape)"
    return text if best.tensor_percent > TENSOR_PERCENT else None
