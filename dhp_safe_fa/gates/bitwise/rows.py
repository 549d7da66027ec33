"""Row invariance: the bits of an output row depend on its query and on the keys and values it sees, on nothing else.

A row is computed again in other company: other batches and heads beside it, fewer query rows, or alone, fewer and
more keys that it must not see. The ways that need no causal_offset are open to peers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..inputs import Inputs, Shape
from .compare import Outputs, compare_outputs

if TYPE_CHECKING:  # a subject knows its ways
    from ..subjects import Attend, AttendOffset, Subject

# Query rows computed at a time: one alone, a part of a warp's rows, whole tiles of 64 and 128.
_ROWS = (1, 17, 64, 128)
_PADDING = (1, 130)  # more keys: inside the last tile, and a tile more


@dataclass(frozen=True)
class Way:
    """A way to compute outputs again, and the part of the first call's outputs that they have to equal."""

    name: str
    compute: Callable[[], Outputs]
    expected: Outputs


@dataclass(frozen=True)
class Rows:
    """What was found: a line for each way in which bits differ, and for each that was refused; ways: how many."""

    differing: list[str]
    refused: list[str]
    ways: int

    def and_more(self, other: Rows) -> Rows:
        return Rows(self.differing + other.differing, self.refused + other.refused, self.ways + other.ways)


def _join(first: Inputs, second: Inputs, dim: int) -> Inputs:
    return tuple(torch.cat(pair, dim) for pair in zip(first, second, strict=True))


def _cut(outputs: Outputs, *index: slice) -> Outputs:
    return tuple(output[index] for output in outputs)


def _kept(outputs: Outputs) -> Outputs:
    """A copy: who writes all outputs to the same memory would be compared with itself."""
    return tuple(output.clone() for output in outputs)


_ALL = slice(None)


def _company(attend: Attend, inputs: Inputs, stranger: Inputs, is_causal: bool, whole: Outputs) -> Iterator[Way]:
    """Other batches and heads."""
    q, k, v = inputs
    batch, heads, group = q.size(0), q.size(1), q.size(1) // k.size(1)
    batches = _join(_join(stranger, inputs, 0), stranger, 0)
    middle = slice(batch, 2 * batch)
    yield Way("other batches beside", lambda: _cut(attend(batches, is_causal), middle), whole)
    yield Way("its batch alone", lambda: attend((q[-1:], k[-1:], v[-1:]), is_causal), _cut(whole, slice(-1, None)))
    more_heads = _join(stranger, inputs, 1)
    own = slice(heads, None)
    yield Way("other heads beside", lambda: _cut(attend(more_heads, is_causal), _ALL, own), whole)
    last = slice(heads - group, heads)
    alone = (q[:, last], k[:, -1:], v[:, -1:])
    yield Way("its key head alone", lambda: attend(alone, is_causal), _cut(whole, _ALL, last))


def _rows(attend: Attend, inputs: Inputs, stranger: Inputs, is_causal: bool, whole: Outputs) -> Iterator[Way]:
    """Other numbers of query rows, and of keys that are not seen."""
    q, k, v = inputs
    seqlen = q.size(2)

    def part(rows: slice, keys: int, masked: bool) -> Callable[[], Outputs]:
        seen = slice(min(keys, k.size(2)) if is_causal else None)
        return lambda: attend((q[:, :, rows], k[:, :, seen], v[:, :, seen]), masked)

    for rows in (rows for rows in _ROWS if rows <= seqlen):
        first = slice(rows)
        yield Way(f"the first {rows} rows", part(first, rows, is_causal), _cut(whole, _ALL, _ALL, first))
    for row in sorted({seqlen // 2, seqlen - 1}):
        one = slice(row, row + 1)
        yield Way(f"row {row} alone", part(one, row + 1, False), _cut(whole, _ALL, _ALL, one))
    third = slice(None, None, 3)
    changed = stranger[0].clone()
    changed[:, :, third] = q[:, :, third]
    yield Way(
        "other rows beside",
        lambda: _cut(attend((changed, k, v), is_causal), _ALL, _ALL, third),
        _cut(whole, _ALL, _ALL, third),
    )

    def padded(more: int) -> Callable[[], Outputs]:
        extra = (stranger[0][:, :, :more], stranger[1][:, :, :more], stranger[2][:, :, :more])
        return lambda: _cut(attend(_join(inputs, extra, 2), True), _ALL, _ALL, slice(seqlen))

    if is_causal and seqlen == k.size(2):
        for more in _PADDING:
            yield Way(f"{more} more rows and keys", padded(more), whole)


def _offsets(attend: AttendOffset, inputs: Inputs, stranger: Inputs) -> Iterator[Way]:
    """Causal with the last query at the last key: the last rows in chunks, fewer keys, and more keys behind."""
    q, k, v = inputs
    seqlen, keys = q.size(2), k.size(2)
    offset = keys - seqlen
    whole = _kept(attend(inputs, offset))

    def last(rows: int) -> Callable[[], Outputs]:
        return lambda: attend((q[:, :, -rows:], k, v), keys - rows)

    def padded(more: int) -> Callable[[], Outputs]:
        longer = [torch.cat((t, s[:, :, :more]), dim=2) for t, s in zip((k, v), stranger[1:], strict=True)]
        return lambda: attend((q, *longer), offset)

    for rows in (rows for rows in _ROWS if rows <= seqlen):
        yield Way(f"the last {rows} rows", last(rows), _cut(whole, _ALL, _ALL, slice(-rows, None)))
    half = slice(seqlen // 2)
    seen = slice(max(0, offset + seqlen // 2))
    yield Way(
        "only the keys that are seen",
        lambda: attend((q[:, :, half], k[:, :, seen], v[:, :, seen]), offset),
        _cut(whole, _ALL, _ALL, half),
    )
    for more in _PADDING:
        yield Way(f"{more} more keys", padded(more), whole)


def attention_ways(subject: Subject, inputs: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
    """The ways of attention's forward pass: all that the subject can compute, with a causal_offset if it takes one.

    Args:
        inputs: q, k, v.
        stranger: other values, same shapes: the company.
    """
    whole = _kept(subject.attend(inputs, is_causal))
    ways = [
        *_company(subject.attend, inputs, stranger, is_causal, whole),
        *_rows(subject.attend, inputs, stranger, is_causal, whole),
    ]
    if is_causal and subject.attend_offset is not None:
        ways += _offsets(subject.attend_offset, inputs, stranger)
    return ways


def recompute(names: tuple[str, ...], ways: Sequence[Way]) -> Rows:
    """Compute rows again in every way, and compare the bits of all outputs, which have these names."""
    found = Rows([], [], len(ways))
    for way in ways:
        try:
            got = way.compute()
        except RuntimeError as error:  # a shape that a peer does not serve
            found.refused.append(f"{way.name}: refused: {str(error).splitlines()[0]}")
            continue
        if said := compare_outputs(names, way.expected, got):
            found.differing.append(f"{way.name}: {said}")
    return found


def rows_of_shape(subject: Subject, shape: Shape, own: str, company: str, seed: int, device: str = "cuda") -> Rows:
    """Row invariance of a subject on one shape, in all its ways.

    own, company: classes of inputs, of the rows that are compared and of what is beside them.
    """
    inputs, stranger = subject.make(own, shape, seed, device), subject.make(company, shape, seed + 1, device)
    with subject.context():
        return recompute(subject.outputs, subject.ways(subject, inputs, stranger, shape.is_causal))
