"""What the operator can be asked for, one entry a direction: all that the command and stored results know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dhp_safe_fa.bench.cases import SETS, Case, CaseSet
from dhp_safe_fa.bench.peers import Candidate, candidates


@dataclass(frozen=True)
class Direction:
    """
    Attributes:
        case: the class of its cases, whose ``direction`` is the name; it makes inputs and calls, counts and judges.
        sets: sets of cases by the names that the command line takes.
        default_sets: what is measured if nothing is said, by device.
        candidates: device -> (ours first, then every peer there is; notes on those that there are not).
        host_case: by device, a case whose own work is so short that a call costs the host more.
    """

    case: type[Case]
    sets: Mapping[str, CaseSet]
    default_sets: Mapping[str, list[str]]
    candidates: Callable[[str], tuple[list[Candidate], list[str]]]
    host_case: Mapping[str, Case]


FORWARD = Direction(
    case=Case,
    sets=SETS,
    default_sets={"cuda": ["start", "sweep"], "cpu": ["start"]},
    candidates=candidates,
    # on CUDA the call returns before the work is done; on the CPU one query and one key are next to no work
    host_case={"cuda": Case(1, 8, 512, 64, False, "float16"), "cpu": Case(1, 1, 1, 64, False, "float32")},
)

DIRECTIONS = {direction.case.direction: direction for direction in (FORWARD,)}
