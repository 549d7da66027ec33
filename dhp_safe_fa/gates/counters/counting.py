"""What is to be counted for the gate `counters`, and what was: whoever counts, `hardware.py` or `ncu.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..controls import TWINS
from ..tools import NotRun
from .metrics import is_sum

# Number of a step, name of a kernel that it launched, metric to value.
Row = tuple[int, str, dict[str, float]]


@dataclass(frozen=True)
class Request:
    """What is to be counted.

    Attributes:
        metrics: by the names of ``ncu --query-metrics``, with their suffix.
        subjects: name of a subject to the classes of inputs with which each shape is run; one that comes twice is A/A.
            A kernel stands for all of the operator's call that launches it.
        parts: to such a name those of all kernels under test that its call launches; itself, if it is not named here.
        shapes: how many of each subject's.
        controls: names of controls, both twins of which are run.
        control_data: names of ``inputs.planted_secrets``, with which they are run.
        labels: to such a name the shapes that are run, by their labels; all of them, if it is not named here.
    """

    metrics: tuple[str, ...]
    subjects: dict[str, tuple[str, ...]]
    shapes: int
    controls: tuple[str, ...] = ()
    control_data: tuple[str, ...] = ()
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def shapes_of(self, name: str) -> int:
        """On how many shapes a subject is run."""
        return len(self.labels.get(name, ())) or self.shapes

    @property
    def calls(self) -> int:
        """How many calls are to be counted."""
        of_controls = len(self.controls) * len(TWINS) * len(self.control_data)
        return of_controls + sum(len(data) * self.shapes_of(name) for name, data in self.subjects.items())


@dataclass(frozen=True)
class Step:
    """One call that was made: of which subject or control, on which shape or of which twin, with which class of data;
    name and entry of the kernels that it launches, each to be told apart (none: all that ran are counted together)."""

    name: str
    label: str
    data: str
    launches: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Count:
    """What was counted in one call.

    Attributes:
        name: of the subject or control.
        label: the shape, or the twin.
        data: the class of data.
        kernels: those that ran.
        values: metric to value, over these kernels, or of the one that the name is of; none if others ran than planned.
    """

    name: str
    label: str
    data: str
    kernels: tuple[str, ...]
    values: dict[str, float]


def _together(kernels: Iterable[dict[str, float]]) -> dict[str, float]:
    """Sums are added up over the kernels of a call; of anything else the largest counts."""
    together: dict[str, float] = {}
    for values in kernels:
        for metric, value in values.items():
            old = together.get(metric, 0.0)
            together[metric] = old + value if is_sum(metric) else max(old, value)
    return together


def combine(
    steps: Sequence[Step], rows: Iterable[Row], parts: Mapping[str, Sequence[str]] | None = None
) -> list[Count]:
    """One count for each step; for each kernel that it launches, if it says which: in their order, so that two launches
    of one function are told apart. parts: of these kernels alone, see Request. One that several calls launch is
    counted in that which it is a part of.

    A call that launched others has no values for any. NotRun if that is so with all data: the plan is wrong.
    """
    grouped: dict[int, list[tuple[str, dict[str, float]]]] = {}
    for number, kernel, values in rows:
        if number >= len(steps):
            raise NotRun(f"a kernel was counted in call {number}, where {len(steps)} calls were made")
        grouped.setdefault(number, []).append((kernel, values))
    counts = []
    for number, step in enumerate(steps):
        if number not in grouped:
            raise NotRun(f"no kernel of {step.name} was counted ({step.label}, {step.data})")
        entries = tuple(kernel for kernel, _ in grouped[number])
        counted = [values for _, values in grouped[number]]
        if not step.launches:
            found = {step.name: _together(counted)}
        elif entries == tuple(entry for _, entry in step.launches):
            found = dict(zip((name for name, _ in step.launches), counted, strict=True))
        else:
            found = {name: {} for name, _ in step.launches}
        under_test = (parts or {}).get(step.name, found)
        found = {name: values for name, values in found.items() if name in under_test}
        counts += [Count(name, step.label, step.data, entries, some) for name, some in found.items()]
    as_planned = {(count.name, count.label) for count in counts if count.values}
    for count in counts:
        if (count.name, count.label) not in as_planned:
            launched = ", ".join(count.kernels)
            raise NotRun(f"a call of {count.name} ({count.label}) launched {launched}, which is not what was planned")
    return counts


def require_complete(request: Request, counts: Sequence[Count]) -> None:
    """NotRun unless every call of the request was counted: what is missing would be seen as equal."""
    labels: dict[str, dict[str, list[str]]] = {}
    for count in counts:
        labels.setdefault(count.name, {}).setdefault(count.label, []).append(count.data)
    wanted = {name: (len(TWINS), request.control_data) for name in request.controls}
    for call, data in request.subjects.items():
        wanted |= {name: (request.shapes_of(call), data) for name in request.parts.get(call, (call,))}
    for name, (number, data) in wanted.items():
        found = labels.get(name, {})
        if len(found) != number or any(sorted(one) != sorted(data) for one in found.values()):
            raise NotRun(
                f"not all calls of {name} were counted: {sum(map(len, found.values()))} of {number * len(data)}"
            )
