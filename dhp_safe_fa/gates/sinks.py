"""Sinks among the secrets of a subject: its fourth input, beside q, k and v.

Gates cut, join and refill inputs by batch, head and row, so sinks are float32 [B, H, S] here: the same in all batches
and rows, and stored [B, S, H], so that those of the first row are the [H] that a call takes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import wraps

import torch
from torch import Tensor

from .bitwise.rows import Way
from .inputs import Inputs, Shape
from .subjects import MakeWays, Subject
from .timing import inputs as timing_inputs

ORDER = "sinks in other order"


def of(inputs: Inputs) -> Tensor | None:
    """[H], of a call with these inputs; None if they have no sinks."""
    return inputs[3][0, :, 0].contiguous() if len(inputs) > 3 else None


def beside(inputs: Inputs, sinks: Tensor) -> Inputs:
    """q, k and v, and sinks [H] as their fourth."""
    q, k, v = inputs
    everywhere = sinks.expand(q.shape[0], q.shape[2], -1).contiguous()
    return q, k, v, everywhere.transpose(1, 2)


def _drawn(inputs: Inputs) -> Tensor:
    """As unlike in the classes of inputs as the queries are: the first element of each head."""
    return inputs[0][0, :, 0, 0].float()


def with_sinks(subject: Subject) -> Subject:
    """The subject of q, k and v with sinks, which its attend takes as the fourth input."""

    def make(name: str, shape: Shape, seed: int, device: str) -> Inputs:
        found = subject.make(name, shape, seed, device)
        return beside(found, _drawn(found))

    def matched(shape: Shape, seed: int, device: str) -> dict[str, Inputs]:
        """The same bits in other places: signs dealt out anew where those of q are, and a class in which the heads'
        sinks alone have another order."""
        found = subject.matched(shape, seed, device)
        sinks = _drawn(found[timing_inputs.REFERENCE])
        generator = torch.Generator(device).manual_seed(seed)
        signs, order = (
            timing_inputs.permute_signs(sinks, generator),
            torch.randperm(len(sinks), generator=generator, device=device),
        )
        classes = {name: beside(one, signs if name == timing_inputs.PERMUTED else sinks) for name, one in found.items()}
        return {**classes, ORDER: beside(found[timing_inputs.REFERENCE], sinks[order])}

    def power(shape: Shape, seed: int, device: str) -> dict[str, Inputs]:
        return {name: beside(one, _drawn(one)) for name, one in subject.power(shape, seed, device).items()}

    return replace(
        subject,
        make=make,
        matched=matched,
        power=power,
        tested=(*subject.tested, ORDER),
        ways=_same_in_company(subject.ways),
    )


def _same_in_company(ways: MakeWays) -> MakeWays:
    """A call has one sink for each head, in whatever company."""

    @wraps(ways)
    def same(subject: Subject, inputs: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
        return ways(subject, inputs, (*stranger[:3], inputs[3]), is_causal)

    return same
