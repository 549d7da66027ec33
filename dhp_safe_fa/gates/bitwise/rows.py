"""Row invariance: the bits of an output row depend on its query and on the keys and values it sees, on nothing else.

A row is computed again in other company: other batches and heads beside it, fewer query rows, or alone, fewer and
more keys that it must not see; and in the other forms that the operator has (forms.py). The ways that need no
causal_offset are open to peers, too. Rows of keys, which gradients have, are in key_rows.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeAlias

import torch

from ..inputs import Inputs, Shape
from .compare import Outputs, compare_outputs, kept

if TYPE_CHECKING:  # a subject knows its ways
    from ..subjects import Attend, AttendOffset, Subject

# Query rows computed at a time: one alone, a part of a warp's rows, whole tiles of 64 and 128.
ROWS = (1, 17, 64, 128)
PADDING = (1, 130)  # more keys: inside the last tile, and a tile more

# Where k and v are among the inputs of every subject. They have a row for each key, all others one for each query; rows
# are dimension 2, heads dimension 1. Of the outputs, gradients of k and v have a row for each key.
KEYED = (1, 2)
KEYED_OUTPUTS = ("dk", "dv")

ALL = slice(None)

# (inputs, stranger, is_causal, and what a call may ask for) -> all outputs, computed in another form, with the
# stranger's values beside
Form: TypeAlias = Callable[..., Outputs]


@dataclass(frozen=True)
class Way:
    """A way to compute outputs again, and the part of the first call's outputs that they have to equal. names: of these
    outputs; without, they are all that the subject has."""

    name: str
    compute: Callable[[], Outputs]
    expected: Outputs
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rows:
    """What was found: a line for each way in which bits differ, and for each that was refused; ways: how many."""

    differing: list[str]
    refused: list[str]
    ways: int

    def and_more(self, other: Rows) -> Rows:
        return Rows(self.differing + other.differing, self.refused + other.refused, self.ways + other.ways)


@dataclass(frozen=True)
class Side:
    """The outputs of a subject that have a row for each query, or (keyed) those that have one for each key."""

    names: tuple[str, ...]
    attend: Attend
    attend_offset: AttendOffset | None
    keyed: bool

    def cut(self, outputs: Outputs, dim: int, queries: slice, keys: slice = ALL) -> Outputs:
        """A part of these outputs along heads or rows."""
        index = (ALL,) * dim + (keys if self.keyed else queries,)
        return tuple(output[index] for output in outputs)


def side(subject: Subject, keyed: bool) -> Side:
    """Of a subject; without names if it has no such outputs."""
    places = [at for at, name in enumerate(subject.outputs) if (name in KEYED_OUTPUTS) == keyed]

    def pick(outputs: Outputs) -> Outputs:
        return tuple(outputs[at] for at in places)

    offset = subject.attend_offset
    return Side(
        tuple(subject.outputs[at] for at in places),
        lambda inputs, is_causal: pick(subject.attend(inputs, is_causal)),
        None if offset is None else lambda inputs, causal_offset: pick(offset(inputs, causal_offset)),
        keyed,
    )


def part(inputs: Inputs, queries: slice = ALL, keys: slice = ALL, dim: int = 2) -> Inputs:
    """Some rows (or heads) of the queries, and of the keys."""
    cuts = [(ALL,) * dim + (keys if at in KEYED else queries,) for at in range(len(inputs))]
    return tuple(tensor[cut] for tensor, cut in zip(inputs, cuts, strict=True))


def join(first: Inputs, second: Inputs, dim: int) -> Inputs:
    return tuple(torch.cat(pair, dim) for pair in zip(first, second, strict=True))


def mixed(inputs: Inputs, stranger: Inputs, rows: slice, keyed: bool) -> Inputs:
    """The stranger's queries (or keys) with these rows of the inputs among them, and the inputs' keys (or queries)."""
    result = []
    for at, (own, other) in enumerate(zip(inputs, stranger, strict=True)):
        if (at in KEYED) != keyed:
            result.append(own)
            continue
        changed = other.clone()
        changed[:, :, rows] = own[:, :, rows]
        result.append(changed)
    return tuple(result)


def more_keys(inputs: Inputs, stranger: Inputs, more: int) -> Inputs:
    """The stranger's first keys behind the inputs' last one."""
    pairs = enumerate(zip(inputs, stranger, strict=True))
    return tuple(torch.cat((own, other[:, :, :more]), dim=2) if at in KEYED else own for at, (own, other) in pairs)


def company(of: Side, inputs: Inputs, stranger: Inputs, is_causal: bool, whole: Outputs) -> Iterator[Way]:
    """Other batches and heads. whole: what the side computes of the inputs."""
    q, k = inputs[:2]
    batch, heads, key_heads = q.size(0), q.size(1), k.size(1)
    attend = of.attend
    batches = join(join(stranger, inputs, 0), stranger, 0)
    middle, last = slice(batch, 2 * batch), slice(-1, None)

    def way(name: str, compute: Callable[[], Outputs], expected: Outputs) -> Way:
        return Way(name, compute, expected, of.names)

    yield way("other batches beside", lambda: of.cut(attend(batches, is_causal), 0, middle, middle), whole)
    yield way("its batch alone", lambda: attend(part(inputs, last, last, 0), is_causal), of.cut(whole, 0, last, last))
    more_heads = join(stranger, inputs, 1)
    own, own_keys = slice(heads, None), slice(key_heads, None)
    yield way("other heads beside", lambda: of.cut(attend(more_heads, is_causal), 1, own, own_keys), whole)
    group = slice(heads - heads // key_heads, heads)
    yield way(
        "its key head alone",
        lambda: attend(part(inputs, group, last, 1), is_causal),
        of.cut(whole, 1, group, last),
    )


def _rows(of: Side, inputs: Inputs, stranger: Inputs, is_causal: bool, whole: Outputs) -> Iterator[Way]:
    """Other numbers of query rows, and of keys that are not seen."""
    seqlen, keys = inputs[0].size(2), inputs[1].size(2)
    attend = of.attend

    def some(rows: slice, seen: int, masked: bool) -> Callable[[], Outputs]:
        return lambda: attend(part(inputs, rows, slice(min(seen, keys) if is_causal else None)), masked)

    for rows in (rows for rows in ROWS if rows <= seqlen):
        first = slice(rows)
        yield Way(f"the first {rows} rows", some(first, rows, is_causal), of.cut(whole, 2, first), of.names)
    for row in sorted({seqlen // 2, seqlen - 1}):
        one = slice(row, row + 1)
        yield Way(f"row {row} alone", some(one, row + 1, False), of.cut(whole, 2, one), of.names)
    third = slice(None, None, 3)
    changed = mixed(inputs, stranger, third, keyed=False)
    yield Way(
        "other rows beside",
        lambda: of.cut(attend(changed, is_causal), 2, third),
        of.cut(whole, 2, third),
        of.names,
    )

    def padded(more: int) -> Callable[[], Outputs]:
        extra = part(stranger, slice(more), slice(more))
        return lambda: of.cut(attend(join(inputs, extra, 2), True), 2, slice(seqlen))

    if is_causal and seqlen == keys:
        for more in PADDING:
            yield Way(f"{more} more rows and keys", padded(more), whole, of.names)


def _offsets(of: Side, attend: AttendOffset, inputs: Inputs, stranger: Inputs) -> Iterator[Way]:
    """Causal with the last query at the last key: the last rows in chunks, fewer keys, and more keys behind."""
    seqlen, keys = inputs[0].size(2), inputs[1].size(2)
    offset = keys - seqlen
    whole = kept(attend(inputs, offset))

    def last(rows: int) -> Callable[[], Outputs]:
        return lambda: attend(part(inputs, slice(-rows, None)), keys - rows)

    def padded(more: int) -> Callable[[], Outputs]:
        longer = more_keys(inputs, stranger, more)
        return lambda: attend(longer, offset)

    for rows in (rows for rows in ROWS if rows <= seqlen):
        yield Way(f"the last {rows} rows", last(rows), of.cut(whole, 2, slice(-rows, None)), of.names)
    half = slice(seqlen // 2)
    seen = slice(max(0, offset + seqlen // 2))
    yield Way(
        "only the keys that are seen",
        lambda: attend(part(inputs, half, seen), offset),
        of.cut(whole, 2, half),
        of.names,
    )
    for more in PADDING:
        yield Way(f"{more} more keys", padded(more), whole, of.names)


def _forms(
    of: Side, forms: Mapping[str, Form], inputs: Inputs, stranger: Inputs, is_causal: bool, whole: Outputs
) -> Iterator[Way]:
    """All rows in other forms, of a side that has all outputs."""
    for name, form in forms.items():
        yield Way(f"as {name}", partial(form, inputs, stranger, is_causal), whole, of.names)


def query_ways(
    of: Side, inputs: Inputs, stranger: Inputs, is_causal: bool, forms: Mapping[str, Form] = MappingProxyType({})
) -> list[Way]:
    """The ways to compute rows of queries: all that the subject can compute, with a causal_offset if it takes one."""
    whole = kept(of.attend(inputs, is_causal))
    ways = [*company(of, inputs, stranger, is_causal, whole), *_rows(of, inputs, stranger, is_causal, whole)]
    ways += _forms(of, forms, inputs, stranger, is_causal, whole)
    if is_causal and of.attend_offset is not None:
        ways += _offsets(of, of.attend_offset, inputs, stranger)
    return ways


def attention_ways(subject: Subject, inputs: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
    """The ways of attention's forward pass, all of whose outputs have a row for each query.

    Args:
        inputs: q, k, v.
        stranger: other values, same shapes: the company.
    """
    return query_ways(side(subject, keyed=False), inputs, stranger, is_causal, subject.forms)


def recompute(names: tuple[str, ...], ways: Sequence[Way]) -> Rows:
    """Compute rows again in every way, and compare the bits. names: of the outputs of a way that names none."""
    found = Rows([], [], len(ways))
    for way in ways:
        try:
            got = way.compute()
        except RuntimeError as error:  # a shape that a peer does not serve
            found.refused.append(f"{way.name}: refused: {str(error).splitlines()[0]}")
            continue
        if said := compare_outputs(way.names or names, way.expected, got):
            found.differing.append(f"{way.name}: {said}")
    return found


def rows_of_shape(subject: Subject, shape: Shape, own: str, company: str, seed: int, device: str = "cuda") -> Rows:
    """Row invariance of a subject on one shape, in all its ways.

    own, company: classes of inputs, of the rows that are compared and of what is beside them.
    """
    inputs, stranger = subject.make(own, shape, seed, device), subject.make(company, shape, seed + 1, device)
    with subject.context():
        return recompute(subject.outputs, subject.ways(subject, inputs, stranger, shape.is_causal))
