"""A record as a line of JSON, and back, if the line is whole and agrees with itself.

A line holds what was measured and what follows from it. The second is computed again whenever a line is read, and a
line that claims something else (another TFLOP/s, ratio or decision) is refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from dhp_safe_fa.burn import verdict
from dhp_safe_fa.burn.log import decode, milestones
from dhp_safe_fa.burn.log.records import AGAIN, FORWARD, OURS, PREVIOUS, Record

# What every line of the first schema was about, without saying so.
_FIRST = {"family": FORWARD, "required": ["sass", "counters", "bitwise", "timing"]}
_IMPLIED: dict[str, dict[str, Any]] = {"dhp_safe_fa.burn/1": _FIRST}


def to_line(record: Record) -> str:
    """One line of JSON, without its end."""
    data: dict[str, Any] = {"schema": record.schema, **asdict(record)}
    for name in _IMPLIED.get(record.schema, {}):
        del data[name]
    for row, shape in zip(data["shapes"], record.shapes, strict=True):
        row["derived"] = shape.derived()
    data["verdict"] = asdict(record.verdict) if record.verdict else None
    return json.dumps(data, ensure_ascii=False, allow_nan=False)


def from_line(line: str) -> Record:
    """The inverse of to_line. ValueError with one sentence if the line is something else, or contradicts itself."""
    data = json.loads(line)
    if not isinstance(data, dict) or data.get("schema") not in verdict.RULES:
        raise ValueError(f"its schema is none of {', '.join(verdict.RULES)}")
    data |= _IMPLIED.get(data["schema"], {})
    claimed_verdict = data.pop("verdict", None)
    claimed_shapes = [row.pop("derived", None) for row in data.get("shapes", []) if isinstance(row, dict)]
    record = decode.decode(Record, data)
    _check(record)
    for shape, claimed in zip(record.shapes, claimed_shapes, strict=True):
        if claimed != shape.derived():
            raise ValueError(f"{record.name}: {shape.case}: its TFLOP/s and ratios do not follow from its times")
    if claimed_verdict != (asdict(record.verdict) if record.verdict else None):
        raise ValueError(f"{record.name}: its verdict does not follow from its gates and times")
    return record


def _check(record: Record) -> None:
    """What the types do not say. ValueError with one sentence."""

    def refuse(what: str) -> None:
        raise ValueError(f"{record.name}: {what}")

    for shape in record.shapes:
        case, blocks = shape.parsed, {len(values) for values in shape.us.values()}
        if case.label != shape.case or len(blocks) != 1:
            refuse(f"shape '{shape.case}' is not a case with equally many blocks for every candidate")
        if any(value is not None and not value > 0 for values in shape.us.values() for value in values):
            refuse(f"{shape.case}: a time is not above 0")
        if record.kind != "baseline" and None in shape.us.get(OURS, [None]):
            refuse(f"{shape.case}: a block lacks a time of ours")
        holes = [[us is None for us in shape.us.get(name, [])] for name in (PREVIOUS, AGAIN)]
        if holes[0] != holes[1] or (holes[0] and all(holes[0])):
            refuse(f"{shape.case}: {PREVIOUS} and {AGAIN} were not timed in the same blocks")
        if PREVIOUS in shape.us and not {OURS, PREVIOUS} <= shape.launch.keys():
            refuse(f"{shape.case}: what was launched is not recorded")
    if record.shapes and record.kind == "run" and bool(record.parent) != any(PREVIOUS in s.us for s in record.shapes):
        refuse("it has a previous best exactly if some shape was timed against it")
    milestones.check(record)
    if record.kind != "run":
        if record.chip is None or not record.shapes:
            refuse("it has no chip or no shape")
        return
    failed = any(gate.verdict == "FAIL" for gate in record.gates)
    if (failed or record.wrong) and record.shapes:
        refuse("a gate failed or the output was wrong, so nothing may have been timed")
    if not failed and (not record.profiles or not (record.wrong or record.shapes)):
        refuse("no gate failed, so counters, and times or what was wrong, must be there")
    if not failed and record.chip is None:
        refuse("it does not say which GPU it was measured on")
    if missing := [name for name in _FIRST["required"] if name not in record.required]:
        refuse(f"{', '.join(missing)}: not among the gates that it had to pass")
    if [gate.name for gate in record.gates] != record.required[: len(record.gates)] or not record.gates:
        refuse(f"its gates are not the first of {', '.join(record.required)}")
    if not record.kernels or record.commit is None or record.library_sha256 is None or not record.hypothesis:
        refuse("a run names its commit, library, kernels and hypothesis")
