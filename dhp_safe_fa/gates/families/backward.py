"""The backward under test: a kernel computes "dk dv", "dk", "dv" or "dq", and a call asks for no more than that.

The kernels of a call share a stream with `delta`, which comes first. What is counted and timed is told apart by the
name of the function in the cubin, so a call may launch each function once only.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from dhp_safe_fa import _inspect

from .. import gradients
from ..bitwise.key_rows import gradient_ways
from ..inputs import Inputs, Shape
from ..subjects import Subject
from ..tools import NotRun
from .forward import shapes_that

FAMILY = "backward"
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
        q, k, v, out, lse, grad_out = inputs
        needs = {f"need_{name}": name in self.outputs for name in GRADIENTS}
        found = torch.ops.dhp.attention_backward(
            grad_out, q, k, v, out, lse, is_causal, causal_offset=causal_offset, **needs
        )
        return tuple(gradient for name, gradient in zip(GRADIENTS, found, strict=True) if name in self.outputs)

    def launches(self, shape: Shape) -> list[dict[str, Any]]:
        """The kernels of ``_inspect.kernels()`` that a call of this shape launches, without delta.

        The smallest head_dim that serves the shape decides, with what a kernel computes: there is one for each part.
        NotRun if there are several, of which no plan says which is chosen.
        """
        fitting = [
            one
            for one in _inspect.kernels()
            if one["family"] == FAMILY and one["dtype"] == shape.dtype and one["head_dim"] >= shape.head_dim
        ]
        smallest = min((one["head_dim"] for one in fitting), default=0)
        chosen = [one for one in fitting if one["head_dim"] == smallest and set(parts_of(one)) & set(self.outputs)]
        parts = [one["part"] for one in chosen]
        if len(set(parts)) < len(parts):
            raise NotRun(f"{', '.join(one['name'] for one in chosen)}: which of them a call launches is not known")
        return chosen


def parts_of(kernel: dict[str, Any]) -> tuple[str, ...]:
    """The gradients that a kernel computes."""
    return tuple(str(kernel["part"]).split())


def subject_of(kernel: dict[str, Any], call: Call, is_launched: Callable[[Shape], bool]) -> Subject:
    """The kernel as a part of that call. NotRun if no shape was found on which the call launches it."""
    name = str(kernel["name"])
    return Subject(
        name,
        call.attend,
        nullcontext,
        (name,),
        shapes_that(is_launched, kernel),
        str(kernel["cubin_sha256"]),
        call.attend_offset,
        call.outputs,
        gradient_ways,
        gradients.make,
        gradients.matched,
        gradients.power,
        gradients.CLASSES,
        gradients.TESTED,
        gradients.ROW_CLASSES,
        str(kernel["entry"]),
    )


def subject(kernel: dict[str, Any]) -> Subject:
    outputs = parts_of(kernel)
    if not outputs or set(outputs) - set(GRADIENTS):
        raise NotRun(f"{kernel['name']}: computes '{kernel['part']}'; a call can ask for {', '.join(GRADIENTS)}")
    call = Call(outputs)
    return subject_of(kernel, call, lambda shape: [one["name"] for one in call.launches(shape)] == [kernel["name"]])
