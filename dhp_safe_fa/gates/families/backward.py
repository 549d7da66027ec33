"""The backward under test: a kernel computes "dk dv", "dk", "dv" or "dq", and a call asks for no more than that.

The kernels of a call share a stream with `delta`, which comes first. What is timed is told apart by the name of the
function in the cubin, so a call may launch each function once only; what is counted, by its place among the launches.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from dhp_safe_fa import _inspect

from .. import gradients
from ..bitwise.key_rows import gradient_ways
from ..inputs import Inputs, Shape
from ..shapes import shapes_that
from ..subjects import Subject
from ..tools import NotRun

GRADIENTS = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Call:
    """A call of the operator that computes some of GRADIENTS. The inputs are those of gradients.py."""

    outputs: tuple[str, ...]

    def attend(self, inputs: Inputs, is_causal: bool) -> Inputs:
        return self._gradients(inputs, is_causal, 0)

    def attend_offset(self, inputs: Inputs, causal_offset: int) -> Inputs:
        return self._gradients(inputs, True, causal_offset)

    def _gradients(self, inputs: Inputs, is_causal: bool, causal_offset: int) -> Inputs:
        q, k, v, out, lse, grad_out, grad_lse = inputs
        needs = {f"need_{name}": name in self.outputs for name in GRADIENTS}
        found = torch.ops.dhp.attention_backward(
            grad_out, q, k, v, out, lse, is_causal, causal_offset=causal_offset, grad_lse=grad_lse, **needs
        )
        return tuple(gradient for name, gradient in zip(GRADIENTS, found, strict=True) if name in self.outputs)

    def launches(self, shape: Shape) -> list[str]:
        """Names of the kernels that a call of this shape launches, in order."""
        needs = {f"need_{name}": name in self.outputs for name in GRADIENTS}
        plan = _inspect.plan_backward(shape.q, shape.k, shape.dtype, shape.is_causal, 0, **needs)
        return [str(launch["kernel"]) for launch in plan]


def parts_of(kernel: dict[str, Any]) -> tuple[str, ...]:
    """The gradients that a kernel computes."""
    return tuple(str(kernel["part"]).split())


def subject_of(kernel: dict[str, Any], call: Call) -> Subject:
    """The kernel as a part of that call. NotRun if no shape was found on which the call launches it, and its function
    only once."""
    name, entry = str(kernel["name"]), str(kernel["entry"])
    entries = {str(one["name"]): str(one["entry"]) for one in _inspect.kernels()}

    def is_launched(shape: Shape) -> bool:
        return [one for one in call.launches(shape) if entries[one] == entry] == [name]

    def whole_of(every: Call) -> Subject:
        shapes = shapes_that(lambda shape: name in every.launches(shape), kernel)
        launched = tuple(dict.fromkeys(one for shape in shapes for one in every.launches(shape)))
        subject = _subject(" ".join(launched), every, launched, shapes)
        return replace(subject, launches=lambda shape: [(one, entries[one]) for one in every.launches(shape)])

    def whole() -> Subject:
        """Of all gradients; of those that were asked for, if only such a call launches the kernel."""
        try:
            return whole_of(Call(GRADIENTS))
        except NotRun:
            return whole_of(call)

    found = _subject(name, call, (name,), shapes_that(is_launched, kernel))
    return replace(found, cubin_sha256=str(kernel["cubin_sha256"]), entry=entry, whole=whole)


def _subject(name: str, call: Call, kernels: tuple[str, ...], shapes: tuple[Shape, ...]) -> Subject:
    return Subject(
        name,
        call.attend,
        nullcontext,
        kernels,
        shapes,
        attend_offset=call.attend_offset,
        outputs=call.outputs,
        ways=gradient_ways,
        make=gradients.make,
        matched=gradients.matched,
        power=gradients.power,
        classes=gradients.CLASSES,
        tested=gradients.TESTED,
        row_classes=gradients.ROW_CLASSES,
    )


def subject(kernel: dict[str, Any]) -> Subject:
    outputs = parts_of(kernel)
    if not outputs or set(outputs) - set(GRADIENTS):
        raise NotRun(f"{kernel['name']}: computes '{kernel['part']}'; a call can ask for {', '.join(GRADIENTS)}")
    return subject_of(kernel, Call(outputs))


def subject_of_dq(kernel: dict[str, Any]) -> Subject:
    """Of a kernel that has no output of its own but in dq, each of whose rows depends on its own inputs alone."""
    return subject_of(kernel, Call(("dq",)))
