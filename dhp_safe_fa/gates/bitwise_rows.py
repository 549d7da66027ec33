"""Row invariance: the bits of an output row depend on its query and on the keys and values it sees, on nothing else.

A row is computed again in other company: other batches and heads beside it, fewer query rows, or alone, fewer and
more keys that it must not see. The ways that need no causal_offset are open to peers, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .bitwise_compare import Outputs, compare_outputs
from .inputs import Inputs

# (q, k, v, is_causal) -> outputs, each [B, H, Sq, …]
Attend = Callable[[Tensor, Tensor, Tensor, bool], Outputs]
# (q, k, v, causal_offset) -> outputs of causal attention
AttendOffset = Callable[[Tensor, Tensor, Tensor, int], Outputs]

# Query rows computed at a time: one alone, a part of a warp's rows, whole tiles of 64 and 128.
_ROWS = (1, 17, 64, 128)
_PADDING = (1, 130)  # more keys: inside the last tile, and a tile more


@dataclass(frozen=True)
class Way:
    """Outputs computed in another way, and the part of the first call's outputs that they have to equal."""

    name: str
    outputs: Outputs
    expected: Outputs


def _join(first: Inputs, second: Inputs, dim: int) -> Inputs:
    q, k, v = (torch.cat(pair, dim) for pair in zip(first, second, strict=True))
    return q, k, v


def _cut(outputs: Outputs, *index: slice) -> Outputs:
    return tuple(output[index] for output in outputs)


_ALL = slice(None)


def _company(attend: Attend, inputs: Inputs, stranger: Inputs, is_causal: bool, whole: Outputs) -> Iterator[Way]:
    """Other batches and heads."""
    q, k, v = inputs
    with_batches = _join(_join(stranger, inputs, 0), stranger, 0)
    batch, heads, group = q.size(0), q.size(1), q.size(1) // k.size(1)
    yield Way("other batches beside", _cut(attend(*with_batches, is_causal), slice(batch, 2 * batch)), whole)
    yield Way("its batch alone", attend(q[-1:], k[-1:], v[-1:], is_causal), _cut(whole, slice(-1, None)))
    with_heads = _join(stranger, inputs, 1)
    yield Way("other heads beside", _cut(attend(*with_heads, is_causal), _ALL, slice(heads, None)), whole)
    last = slice(heads - group, heads)
    alone = attend(q[:, last], k[:, -1:], v[:, -1:], is_causal)
    yield Way("its key head alone", alone, _cut(whole, _ALL, last))


def _rows(attend: Attend, inputs: Inputs, stranger: Inputs, is_causal: bool, whole: Outputs) -> Iterator[Way]:
    """Other numbers of query rows, and of keys that are not seen."""
    q, k, v = inputs
    seqlen = q.size(2)
    for rows in (rows for rows in _ROWS if rows <= seqlen):
        keys = slice(min(rows, k.size(2)) if is_causal else None)
        part = attend(q[:, :, :rows], k[:, :, keys], v[:, :, keys], is_causal)
        yield Way(f"the first {rows} rows", part, _cut(whole, _ALL, _ALL, slice(rows)))
    for row in {seqlen // 2, seqlen - 1}:
        keys = slice(min(row + 1, k.size(2)) if is_causal else None)
        one = slice(row, row + 1)
        alone = attend(q[:, :, one], k[:, :, keys], v[:, :, keys], False)
        yield Way(f"row {row} alone", alone, _cut(whole, _ALL, _ALL, one))
    changed = stranger[0].clone()
    changed[:, :, ::3] = q[:, :, ::3]
    third = slice(None, None, 3)
    yield Way(
        "other rows beside", _cut(attend(changed, k, v, is_causal), _ALL, _ALL, third), _cut(whole, _ALL, _ALL, third)
    )
    if is_causal and seqlen == k.size(2):
        for more in _PADDING:
            extra = (stranger[0][:, :, :more], stranger[1][:, :, :more], stranger[2][:, :, :more])
            part = _cut(attend(*_join(inputs, extra, 2), True), _ALL, _ALL, slice(seqlen))
            yield Way(f"{more} more rows and keys", part, whole)


def _offsets(attend: AttendOffset, inputs: Inputs, stranger: Inputs) -> Iterator[Way]:
    """Causal with the last query at the last key: the last rows in chunks, and more keys behind."""
    q, k, v = inputs
    seqlen, keys = q.size(2), k.size(2)
    whole = attend(q, k, v, keys - seqlen)
    for rows in (rows for rows in _ROWS if rows <= seqlen):
        part = attend(q[:, :, -rows:], k, v, keys - rows)
        yield Way(f"the last {rows} rows", part, _cut(whole, _ALL, _ALL, slice(-rows, None)))
    middle = seqlen // 2
    seen = slice(max(0, keys - seqlen + middle))
    part = attend(q[:, :, :middle], k[:, :, seen], v[:, :, seen], keys - seqlen)
    yield Way("only the keys that are seen", part, _cut(whole, _ALL, _ALL, slice(middle)))
    for more in _PADDING:
        longer_k, longer_v = (
            torch.cat((t, s[:, :, :more]), dim=2) for t, s in zip((k, v), stranger[1:], strict=True)
        )
        yield Way(f"{more} more keys", attend(q, longer_k, longer_v, keys - seqlen), whole)


def row_differences(
    attend: Attend,
    names: tuple[str, ...],
    inputs: Inputs,
    stranger: Inputs,
    is_causal: bool,
    attend_offset: AttendOffset | None = None,
) -> tuple[list[str], int]:
    """Compute rows again in every way.

    Args:
        attend, names: what is under test, and the names of its outputs.
        inputs: q, k, v.
        stranger: other values, same shapes: the company.
        attend_offset: the same with a causal_offset, if there is such a thing; used if is_causal.

    Returns:
        A line for each way in which bits differ, and the number of ways.
    """
    whole = attend(*inputs, is_causal)
    problems, count = [], 0
    ways = [_company(attend, inputs, stranger, is_causal, whole), _rows(attend, inputs, stranger, is_causal, whole)]
    if is_causal and attend_offset is not None:
        ways.append(_offsets(attend_offset, inputs, stranger))
    for some in ways:
        for way in some:
            count += 1
            said = compare_outputs(names, way.expected, way.outputs)
            if said:
                problems.append(f"{way.name}: {said}")
    return problems, count
