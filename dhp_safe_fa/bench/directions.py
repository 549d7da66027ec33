"""What the operator can be asked for, one entry a direction: all that the command and stored results know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from dhp_safe_fa.bench.cases import SETS, Case, CaseSet, parse_case
from dhp_safe_fa.bench.forms.cases import FORM_SETS, FormCase
from dhp_safe_fa.bench.forms.peers import form_candidates
from dhp_safe_fa.bench.gradients.cases import SETS as SETS_OF_GRADIENTS
from dhp_safe_fa.bench.gradients.cases import BackwardCase, TrainingCase
from dhp_safe_fa.bench.gradients.peers import backward_candidates, training_candidates
from dhp_safe_fa.bench.peers import Candidate, candidates
from dhp_safe_fa.bench.serving.cases import (
    DECODE_SETS,
    PAGED_SETS,
    VARLEN_SETS,
    DecodeCase,
    PagedCase,
    VarlenCase,
)
from dhp_safe_fa.bench.serving.peers import decode_candidates, paged_candidates, varlen_candidates


@dataclass(frozen=True)
class Direction:
    """
    Attributes:
        case: the class of its cases, whose ``direction`` is the name; it makes inputs and calls, counts and judges.
        sets: sets of cases by the names that the command line takes.
        default_sets: what is measured if nothing is said, by device.
        candidates: device -> (ours first, then every peer there is; notes on those that there are not).
        host_case: by device, a case whose own work is so short that a call costs the host more.
        dtypes: by device, what cases are in if nothing is said; without, each set has its own.
        estimates: who is estimated where it is not installed, and its column in the anchors.
    """

    case: type[Case]
    sets: Mapping[str, CaseSet]
    default_sets: Mapping[str, list[str]]
    candidates: Callable[[str], tuple[list[Candidate], list[str]]]
    host_case: Mapping[str, Case]
    dtypes: Mapping[str, list[str]] = field(default_factory=dict)
    estimates: Mapping[str, str] = field(default_factory=dict)


FORWARD = Direction(
    case=Case,
    sets=SETS,
    default_sets={"cuda": ["start", "sweep"], "cpu": ["start"]},
    candidates=candidates,
    # on CUDA the call returns before the work is done; on the CPU one query and one key are next to no work
    host_case={"cuda": Case(1, 8, 512, 64, False, "float16"), "cpu": Case(1, 1, 1, 64, False, "float32")},
    estimates={"fa3": "fa3_tflops"},
)


def _short(kind: type[Case]) -> dict[str, Case]:
    """The forward's host cases in another direction."""
    return {device: kind.like(case) for device, case in FORWARD.host_case.items()}


_ONE_DTYPE = {"cuda": ["bfloat16"], "cpu": ["float32"]}

BACKWARD = Direction(
    case=BackwardCase,
    sets=SETS_OF_GRADIENTS,
    default_sets={"cuda": ["anchors"], "cpu": ["start"]},
    candidates=backward_candidates,
    host_case=_short(BackwardCase),
    dtypes=_ONE_DTYPE,
    estimates={"fa3": "fa3_tflops", "fa3-det": "fa3_deterministic_tflops"},
)

TRAINING = Direction(
    case=TrainingCase,
    sets=SETS_OF_GRADIENTS,
    default_sets={"cuda": ["anchors"], "cpu": ["start"]},
    candidates=training_candidates,
    host_case=_short(TrainingCase),
    dtypes=_ONE_DTYPE,
)

DECODE = Direction(
    case=DecodeCase,
    sets=DECODE_SETS,
    default_sets={"cuda": ["decode"], "cpu": ["decode"]},
    candidates=decode_candidates,
    host_case=_short(DecodeCase),
    dtypes=_ONE_DTYPE,
    estimates={"fa3": "fa3_us"},
)

VARLEN = Direction(
    case=VarlenCase,
    sets=VARLEN_SETS,
    default_sets={"cuda": ["varlen"], "cpu": ["varlen"]},
    candidates=varlen_candidates,
    host_case=_short(VarlenCase),
    dtypes=_ONE_DTYPE,
)

PAGED = Direction(
    case=PagedCase,
    sets=PAGED_SETS,
    default_sets={"cuda": ["paged"], "cpu": ["paged"]},
    candidates=paged_candidates,
    host_case=_short(PagedCase),
    dtypes=_ONE_DTYPE,
)

FORMS = Direction(
    case=FormCase,
    sets=FORM_SETS,
    default_sets={"cuda": ["forms"], "cpu": ["forms"]},
    candidates=form_candidates,
    host_case=_short(FormCase),
    dtypes=_ONE_DTYPE,
)

_ALL = (FORWARD, BACKWARD, TRAINING, DECODE, VARLEN, PAGED, FORMS)
DIRECTIONS = {direction.case.direction: direction for direction in _ALL}


def parse(label: str) -> Case:
    """The inverse of a case's label, which ends in its direction where that is not the forward. ValueError if it is
    none."""
    sizes, _, last = label.rpartition(":")
    if last in DIRECTIONS:
        return DIRECTIONS[last].case.parse(sizes, "")
    return parse_case(label, "")
