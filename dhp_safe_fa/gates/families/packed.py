"""The forward of packed sequences under test: a batch as sequences one behind the other, all as long as the others, so
that rows can be held to those of any other call. Where heads are grouped, the keys are a cache in pages.

The operator wants [tokens, H, D]. Inputs are stored so that this is a view of them: a copy would be a launch that is
not ours among those that are counted and timed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

from .. import inputs as inputs_of
from .. import sinks
from ..bitwise.forms import FORMS
from ..bitwise.rows import Way, attention_ways
from ..bitwise.window_rows import window_ways
from ..inputs import Inputs, Shape
from ..shapes import shapes_that
from ..subjects import Subject
from ..timing import inputs as timing_inputs
from .forward import keys_of_two_segments


@lru_cache(maxsize=64)
def _lengths(batch: int, seqlen: int, device: torch.device) -> Tensor:
    return torch.arange(0, (batch + 1) * seqlen, max(seqlen, 1), dtype=torch.int32, device=device)[: batch + 1]


# Of the pages in which keys lie where heads are grouped: the smallest, of which a tile of keys has the most.
PAGE = 16


@lru_cache(maxsize=64)
def _pages(batch: int, seqlen: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """page_table and seqused_k: every sequence has its own pages, one behind the other."""
    table = torch.arange(batch * seqlen // PAGE, dtype=torch.int32, device=device).view(batch, -1)
    return table, torch.full((batch,), seqlen, dtype=torch.int32, device=device)


def _packed(t: Tensor) -> Tensor:
    """[B, H, S, D] as [B S, H, D]."""
    b, h, s, d = t.shape
    return t.transpose(1, 2).reshape(b * s, h, d)


def _are_paged(q: Tensor, k: Tensor) -> bool:
    return k.size(1) < q.size(1) and k.size(2) > 0 and k.size(2) % PAGE == 0


class Asked(NamedTuple):
    """What a kernel is for beside plain attention. One with a soft cap serves calls with sinks and without; they are
    secrets, so it has them here."""

    softcap: float | None
    has_sinks: bool


# By the part of a call that a kernel computes. The scores of normal inputs are in the cap's bend.
ASKED = {
    "packed out": Asked(None, False),
    "packed out sinks": Asked(None, True),
    "packed out softcap": Asked(2.0, True),
}


def attend(
    inputs: Inputs, is_causal: bool, *, softcap: float | None = None, window: tuple[int, int] = (-1, -1)
) -> tuple[Tensor, ...]:
    """inputs: q, k, v, and sinks if there are any."""
    b, h, sq, d = inputs[0].shape
    sk, device = inputs[1].size(2), inputs[0].device
    q, k, v = map(_packed, inputs[:3])
    begins_k: Tensor | None = _lengths(b, sk, device)
    table = used = None
    if _are_paged(*inputs[:2]):
        begins_k, (table, used) = None, _pages(b, sk, device)
        k, v = (t.view(-1, PAGE, *t.shape[1:]) for t in (k, v))
    out, lse = dhp_safe_fa.attention_varlen_lse(
        *(q, k, v, _lengths(b, sq, device), begins_k, sq, sk),
        is_causal=is_causal,
        alignment="top-left",
        page_table=table,
        seqused_k=used,
        softcap=softcap,
        window=window,
        sinks=sinks.of(inputs),
    )
    return out.reshape(b, sq, h, d).transpose(1, 2), lse.reshape(h, b, sq).transpose(0, 1)


def _stored_by_tokens(inputs: Inputs) -> Inputs:
    return tuple(t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs)


def make(name: str, shape: Shape, seed: int, device: str) -> Inputs:
    """As inputs.make, stored [B, S, H, D]."""
    return _stored_by_tokens(inputs_of.make(name, shape, seed, device))


def matched(shape: Shape, seed: int, device: str) -> dict[str, Inputs]:
    """As timing_inputs.matched, stored [B, S, H, D]."""
    return {name: _stored_by_tokens(one) for name, one in timing_inputs.matched(shape, seed, device).items()}


def power(shape: Shape, seed: int, device: str) -> dict[str, Inputs]:
    """As timing_inputs.power, stored [B, S, H, D]."""
    return {name: _stored_by_tokens(one) for name, one in timing_inputs.power(shape, seed, device).items()}


def _planned(shape: Shape, form: Asked) -> str:
    """The kernel that goes through the list."""
    q, k = ((size[0] * size[2], size[1], size[3]) for size in (shape.q, shape.k))
    lengths = shape.batch, shape.seqlen_q, shape.seqlen_k
    plan = _inspect.plan_packed(q, k, shape.dtype, *lengths, form.softcap or 0.0, form.has_sinks)
    return str(plan["kernel"]) if plan else ""


def ways(softcap: float | None, subject: Subject, inputs: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
    """Those of attention, and those of windows, which only these kernels have."""
    within = window_ways(subject, partial(attend, softcap=softcap), inputs, stranger, is_causal)
    return attention_ways(subject, inputs, stranger, is_causal) + within


def subject_of(kernel: dict[str, Any], reader: dict[str, Any]) -> Subject:
    """A kernel of the calls that launch `reader`, which goes through their list."""
    entries = {str(one["name"]): str(one["entry"]) for one in _inspect.kernels()}
    first = next(str(one["name"]) for one in _inspect.kernels() if one["family"] == "tiles")
    launched = (first, str(reader["name"]))
    form = ASKED[str(reader["part"])]

    def is_planned(shape: Shape) -> bool:
        return _planned(shape, form) == str(reader["name"])

    def long(shape: Shape) -> Shape:
        """Keys of two segments, if it still launches the kernel; under a causal mask nobody would see them."""
        longer = replace(shape, seqlen_k=max(shape.seqlen_k, keys_of_two_segments(reader)))
        return longer if not shape.is_causal and is_planned(longer) else shape

    shapes = tuple(map(long, shapes_that(is_planned, reader)))

    name, sha256 = str(kernel["name"]), str(kernel["cubin_sha256"])
    subject = Subject(
        name,
        partial(attend, softcap=form.softcap),
        nullcontext,
        (name,),
        shapes,
        sha256,
        make=make,
        matched=matched,
        power=power,
        ways=partial(ways, form.softcap),
        forms={way: partial(compute, softcap=form.softcap) for way, compute in FORMS.items()},
        entry=str(kernel["entry"]),
    )
    if form.has_sinks:
        subject = sinks.with_sinks(subject)

    def whole() -> Subject:
        return replace(
            subject,
            name=" ".join(launched),
            kernels=launched,
            cubin_sha256="",
            entry="",
            launches=lambda shape: [(one, entries[one]) for one in (first, _planned(shape, form))],
        )

    return replace(subject, whole=whole)
