"""What a gate that executes kernels says of a subject, and what that means for the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

PASS, NOT_RUN, INVALID, FAIL = "PASS", "NOT RUN", "INVALID", "FAIL"
EXIT_PASS, EXIT_FAIL, EXIT_NOT_RUN = 0, 1, 2
EXIT_CODES = {PASS: EXIT_PASS, NOT_RUN: EXIT_NOT_RUN, INVALID: EXIT_NOT_RUN, FAIL: EXIT_FAIL}
# What a gate has to see of a planted leak (controls.py). A control of these two kinds proves nothing about what it can
# find.
BLIND, MAY = "blind", "may"
# From the best to the worst: what one gate found is not hidden by another that could not look.
_ORDER = (PASS, NOT_RUN, INVALID, FAIL)

# Called with what is going on, how much is done, and how much there is.
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ControlOutcome:
    """What a gate saw of one planted leak and its clean twin; problem is empty if that was right.

    Attributes:
        name: the control's file name without its ending.
        expects: caught, blind or may, as its header declares for this gate.
        seen: one line on what the gate saw.
    """

    name: str
    expects: str
    seen: str
    problem: str = ""


class SaidOfControl(Protocol):
    """What a gate said of one control."""

    @property
    def expects(self) -> str: ...

    @property
    def problem(self) -> str: ...


def have_a_say(controls: Sequence[SaidOfControl]) -> bool:
    """Whether a run may speak: no control went wrong, and at least one leak had to be found. A run without controls,
    or with such alone in which there is nothing to find, has not shown that it can fail."""
    must_be_found = any(control.expects not in (BLIND, MAY) for control in controls)
    return must_be_found and not any(control.problem for control in controls)


@dataclass(frozen=True)
class GateResult:
    """One gate's word on one subject.

    Attributes:
        gate: counters, bitwise or timing.
        subject: a shipped kernel's name, or a peer's.
        verdict: PASS, FAIL, INVALID or NOT RUN.
        figures: what was measured. Numbers and strings at the top are the columns of the printed table, in this order;
            lists and dicts are for the JSON only.
        problems: one sentence for each thing that speaks against the subject; if it was not run, the cause.
        controls: what the same run saw of the planted leaks.
    """

    gate: str
    subject: str
    verdict: str
    figures: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    controls: list[ControlOutcome] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def conclude(
    gate: str,
    subject: str,
    figures: dict[str, Any],
    problems: list[str],
    controls: list[ControlOutcome],
    checks: Sequence[ControlOutcome] = (),
) -> GateResult:
    """The verdict on a subject that was measured: a gate with a wrong control, or without any that it had to catch, has
    no say. checks: what the run says of itself (identical inputs, a load beside it); one that went wrong leaves the
    gate without a say, too, but none of them stands in for a planted leak."""
    is_valid = have_a_say(controls) and not any(check.problem for check in checks)
    verdict = INVALID if not is_valid else FAIL if problems else PASS
    return GateResult(gate, subject, verdict, figures, problems, [*checks, *controls])


def not_run(gate: str, subject: str, cause: object) -> GateResult:
    return GateResult(gate, subject, NOT_RUN, problems=[str(cause)])


def worst(verdicts: Iterable[str]) -> str:
    """The worst of some verdicts; nothing at all was not run."""
    return max(verdicts, key=_ORDER.index, default=NOT_RUN)
