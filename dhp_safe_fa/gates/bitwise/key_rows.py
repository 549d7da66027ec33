"""Row invariance of the gradients of k and v: the bits of a row of dk and dv depend on its key and value and on the
queries that see it, with what belongs to these queries: out, lse, grad_out, grad_lse. On nothing else.

What belongs to a query is given, not computed again, so other keys are no matter whether they are seen or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch

from ..inputs import Inputs
from .compare import Outputs, kept
from .rows import KEYED, PADDING, ROWS, Side, Way, company, mixed, more_keys, part, query_ways, side

if TYPE_CHECKING:  # a subject knows its ways
    from ..subjects import AttendOffset, Subject


def _padded_queries(inputs: Inputs, more: int) -> Inputs:
    """Queries behind the last one that are all zero, and whose gradients are: they add nothing."""

    def longer(tensor: torch.Tensor) -> torch.Tensor:
        size = (*tensor.shape[:2], more, *tensor.shape[3:])
        return torch.cat((tensor, tensor.new_zeros(size)), dim=2)

    return tuple(tensor if at in KEYED else longer(tensor) for at, tensor in enumerate(inputs))


def _rows(of: Side, inputs: Inputs, stranger: Inputs, is_causal: bool, whole: Outputs) -> Iterator[Way]:
    """Fewer and more keys, other keys, more queries that add nothing, other queries that do not see the key."""
    seqlen, keys = inputs[0].size(2), inputs[1].size(2)

    def way(name: str, given: Inputs, rows: slice) -> Way:
        """Computes `given`, whose rows of keys begin with the inputs', and compares some of these."""

        def compute() -> Outputs:
            return of.cut(of.attend(given, is_causal), 2, rows, rows)

        return Way(name, compute, of.cut(whole, 2, rows, rows), of.names)

    for rows in (rows for rows in ROWS if rows <= keys):
        yield way(f"the first {rows} keys", part(inputs, keys=slice(rows)), slice(rows))
    third = slice(None, None, 3)
    yield way("other keys beside", mixed(inputs, stranger, third, keyed=True), third)
    for more in PADDING:
        yield way(f"{more} more keys", more_keys(inputs, stranger, more), slice(keys))
        yield way(f"{more} more queries that add nothing", _padded_queries(inputs, more), slice(keys))
    if is_causal:
        blind = min(seqlen, keys) // 2  # so many queries do not see the key of this number, nor any after it
        given = mixed(inputs, stranger, slice(blind, None), keyed=False)
        yield way("other queries that do not see it", given, slice(blind, None))


def _offsets(of: Side, attend: AttendOffset, inputs: Inputs) -> Iterator[Way]:
    """Causal with the last query at the last key: one key alone, seen from where it stood, and the last keys."""
    seqlen, keys = inputs[0].size(2), inputs[1].size(2)
    offset = keys - seqlen
    whole = kept(attend(inputs, offset))

    def from_key(first: int, last: int) -> Callable[[], Outputs]:
        return lambda: attend(part(inputs, keys=slice(first, last)), offset - first)

    for key in sorted({keys // 2, keys - 1}):
        alone = slice(key, key + 1)
        yield Way(f"key {key} alone", from_key(key, key + 1), of.cut(whole, 2, alone, alone), of.names)
    half = slice(keys // 2, None)
    yield Way("the last half of the keys", from_key(keys // 2, keys), of.cut(whole, 2, half, half), of.names)


def key_ways(of: Side, inputs: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
    """The ways to compute rows of keys: all that the subject can compute, with a causal_offset if it takes one."""
    whole = kept(of.attend(inputs, is_causal))
    ways = [*company(of, inputs, stranger, is_causal, whole), *_rows(of, inputs, stranger, is_causal, whole)]
    if is_causal and of.attend_offset is not None:
        ways += _offsets(of, of.attend_offset, inputs)
    return ways


def gradient_ways(subject: Subject, inputs: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
    """The ways of attention's gradients, whichever of them the subject computes.

    Args:
        inputs: q, k, v, and whatever else has a row for each query: out, lse, grad_out, grad_lse.
        stranger: other values, same shapes: the company.
    """
    of_queries, of_keys = side(subject, keyed=False), side(subject, keyed=True)
    ways = query_ways(of_queries, inputs, stranger, is_causal) if of_queries.names else []
    return ways + (key_ways(of_keys, inputs, stranger, is_causal) if of_keys.names else [])
