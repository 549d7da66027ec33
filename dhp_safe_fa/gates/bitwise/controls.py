"""Planted leaks for the gate `bitwise`: all of tests/controls/, and attention whose rows depend on company."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor

from .. import controls, inputs
from ..inputs import Shape
from ..planted import THREADS, Planted
from ..subjects import Subject
from ..verdict import ControlOutcome
from .compare import Outputs, repeat
from .rows import rows_of_shape

_SEED = 31
# What a control needs beside one CTA and memory that holds anything: a sum by atomics starts from zero, or poison alone
# would catch it.
_ATOMIC, _ROWS = "atomic_reduction", "row_variance"
_GRIDS = {_ATOMIC: inputs.SECRETS // THREADS}
_COMPARED = 64  # floats of out: every clean twin writes as many
_CLASSES = ("normal", "large")  # what the planted attention is fed with, and what is beside its rows

# row_variance has a CTA for each row, whose threads sum 32 values each: a thread is an element of the row, and a value
# is what one key adds to it.
_KEYS = 32
# The planted attention runs on both. More than 16 keys are seen by the last rows: only these have a second half.
PLANTED_SHAPES = (
    Shape(2, 2, 1, 20, 20, THREADS, "float16", False),
    Shape(2, 2, 1, 20, 20, THREADS, "float16", True),
)
# What a row's company can be, each with the question whether a call has the company that the leak answers to. own: the
# shape on which the rows were computed first; q, k: what is computed now.
COMPANY: dict[str, Callable[[Tensor, Tensor, Shape], bool]] = {
    "batches": lambda q, k, own: q.size(0) != own.batch,
    "heads": lambda q, k, own: q.size(1) != own.heads_q,
    "rows": lambda q, k, own: q.size(2) < own.seqlen_q,
    "keys": lambda q, k, own: k.size(2) > own.seqlen_k,
    "other rows": lambda q, k, own: q.shape == own.q and not torch.equal(q, _first_inputs(own, q.device)[0]),
    "another form": lambda q, k, own: False,  # in no call, but in what stands for a form
}
_FORM = "another form"


def _first_inputs(own: Shape, device: torch.device) -> inputs.Inputs:
    return inputs.make(_CLASSES[0], own, _SEED, device.type)


def _terms(q: Tensor, k: Tensor, first: int | None) -> Tensor:
    """What each key adds to each element of each row, float32 [B, H, Sq, D, _KEYS]; nothing where it is not seen.

    first: the last key that the first row sees; None without a mask.
    """
    keys = k.float().repeat_interleave(q.size(1) // k.size(1), dim=1)[:, :, :_KEYS]
    terms = q.float()[:, :, :, None] * keys[:, :, None]
    if first is not None:
        rows, columns = (torch.arange(size, device=q.device) for size in (q.size(2), keys.size(2)))
        terms = terms * (columns[None] <= rows[:, None] + first)[..., None]
    missing = _KEYS - keys.size(2)
    return torch.nn.functional.pad(terms, (0, 0, 0, missing)).transpose(-1, -2).contiguous()


class PlantedAttention:
    """Computes rows by row_variance: all in one launch, but each in a launch of its own in the company asked for.

    The leak sums otherwise where a row is computed alone. The clean twin does not: its rows do not depend on company.
    """

    def __init__(self, planted: Planted, twin: str, company: str, own: Shape) -> None:
        self._planted, self._twin, self._company, self._own = planted, twin, company, own
        self.subject = Subject(
            f"{_ROWS} {twin}",
            self._attend,
            nullcontext,
            (),
            (own,),
            attend_offset=self._attend_offset,
            outputs=("out",),
            forms={_FORM: self._as_form},
        )

    def _launch(self, terms: Tensor) -> Tensor:
        """terms: [rows, THREADS, _KEYS]; returns [rows, THREADS]."""
        rows = len(terms)
        secret = terms.new_zeros(max(inputs.SECRETS, terms.numel()))
        secret[: terms.numel()] = terms.flatten()
        out = terms.new_zeros(max(inputs.SECRETS, rows * THREADS))
        self._planted.launch(_ROWS, self._twin, secret, out, rows)
        return out[: rows * THREADS].view(rows, THREADS)

    def _rows(self, q: Tensor, k: Tensor, first: int | None, is_form: bool = False) -> Outputs:
        terms = _terms(q, k, first).flatten(0, 2)
        is_split = self._company == _FORM if is_form else COMPANY[self._company](q, k, self._own)
        rows = torch.cat([self._launch(row) for row in terms.split(1)]) if is_split else self._launch(terms)
        return (rows.view(q.shape),)

    def _attend(self, given: inputs.Inputs, is_causal: bool) -> Outputs:
        return self._rows(given[0], given[1], 0 if is_causal else None)

    def _as_form(self, given: inputs.Inputs, stranger: inputs.Inputs, is_causal: bool) -> Outputs:
        return self._rows(given[0], given[1], 0 if is_causal else None, is_form=True)

    def _attend_offset(self, given: inputs.Inputs, causal_offset: int) -> Outputs:
        return self._rows(given[0], given[1], causal_offset)


def company_outcome(planted: Planted, company: str, device: str = "cuda") -> ControlOutcome:
    """Whether rows that depend on one kind of company are found, on each of PLANTED_SHAPES in which there is such, by
    the code that judges a shipped kernel, and whether rows that depend on none are left alone."""
    said: dict[str, list[str]] = {twin: [] for twin in controls.TWINS}
    missed = []
    for shape in PLANTED_SHAPES:
        for twin in controls.TWINS:
            attention = PlantedAttention(planted, twin, company, shape)
            rows = rows_of_shape(attention.subject, shape, *_CLASSES, seed=_SEED, device=device)
            said[twin] += [f"{shape} {line}" for line in rows.differing + rows.refused]
            # without a mask there is no key that a row does not see
            if twin == "leak" and not rows.differing and (shape.is_causal or company != "keys"):
                missed.append(str(shape))
    leak = "" if missed else said["leak"][0]
    return controls.judge_executed(f"{_ROWS}: {company}", controls.CAUGHT, leak, "; ".join(said["clean"][:1]))


def _planted_call(planted: Planted, name: str, twin: str, secret: Tensor, grid: int) -> Callable[[], Outputs]:
    allocate = torch.zeros if name == _ATOMIC else torch.empty

    def call() -> Outputs:
        out = allocate(inputs.SECRETS, device="cuda")
        planted.launch(name, twin, secret, out, grid)
        return (out[:_COMPARED],)

    return call


def control_outcomes(runs: int, tell: Callable[[str], None]) -> list[ControlOutcome]:
    """All controls, leak and clean twin, repeated so often; row_variance as attention, in every kind of company."""
    loaded = controls.load_controls(tell)
    expected = loaded.expected_of("bitwise")
    planted = Planted(loaded)
    secret = inputs.planted_secrets(_SEED)["normal"]
    outcomes = []
    for name, expects in expected.items():
        tell(name)
        if name == _ROWS:
            outcomes += [company_outcome(planted, company) for company in COMPANY]
            continue
        said = {}
        for twin in controls.TWINS:
            call = _planted_call(planted, name, twin, secret, _GRIDS.get(name, 1))
            said[twin] = repeat(call, ["out"], runs)
        outcomes.append(controls.judge_executed(name, expects, said["leak"], said["clean"]))
    return outcomes
