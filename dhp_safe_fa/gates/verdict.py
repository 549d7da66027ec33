"""What a gate that executes kernels says of a subject, and what that means for the exit code."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, NOT_RUN, INVALID, FAIL = "PASS", "NOT RUN", "INVALID", "FAIL"
EXIT_PASS, EXIT_FAIL, EXIT_NOT_RUN = 0, 1, 2
EXIT_CODES = {PASS: EXIT_PASS, NOT_RUN: EXIT_NOT_RUN, INVALID: EXIT_NOT_RUN, FAIL: EXIT_FAIL}
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
    gate: str, subject: str, figures: dict[str, Any], problems: list[str], controls: list[ControlOutcome]
) -> GateResult:
    """The verdict on a subject that was measured: a gate with a wrong control, or with none, has no say."""
    is_valid = bool(controls) and not any(control.problem for control in controls)
    verdict = INVALID if not is_valid else FAIL if problems else PASS
    return GateResult(gate, subject, verdict, figures, problems, controls)


def not_run(gate: str, subject: str, cause: object) -> GateResult:
    return GateResult(gate, subject, NOT_RUN, problems=[str(cause)])


def worst(verdicts: Iterable[str]) -> str:
    """The worst of some verdicts; nothing at all was not run."""
    return max(verdicts, key=_ORDER.index, default=NOT_RUN)
