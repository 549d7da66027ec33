"""Gradients over ranks with S and dP computed once, five products of all pairs: each rank computes dk, dv and a share
of dq from its keys, for all queries.

A share is integers, in a unit of each query row that follows from maxima over the keys that the row sees
(docs/kernel-backward.md, "Sums of dq"). Maxima and sums of integers are the same in any order, so they are reduced over
the ranks, and every bit is that of one process. A share is rounded once for each tile of 128 keys, counted from the
first one of all, and sums lie in blocks of 16 query rows: so chunks have to begin at multiples of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_safe_fa.integrations.context_parallel import parts
from dhp_safe_fa.integrations.context_parallel.arriving import gather, gather_small, one_ahead
from dhp_safe_fa.integrations.context_parallel.packing import Step
from dhp_safe_fa.integrations.context_parallel.parts import (
    KEYS_OF_TILE,
    ROWS_OF_BLOCK,
    ROWS_OF_PAIR,
    Part,
    Workspace,
    ceil_div,
    stand_in,
)
from dhp_safe_fa.integrations.context_parallel.placement import Chunk

# As attention.EIGHTHS; nothing is computed while the last heads' sums travel.
EIGHTHS = (1, 4, 7, 8)
# Of torch.distributed, which has called it so since 2.13.
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

if TYPE_CHECKING:
    from dhp_safe_fa.integrations.context_parallel.attention import Call


def are_possible(call: Call, q: Tensor) -> bool:
    """Whether dq and dk or dv of this call can be computed so; the same on all ranks."""
    begins = ((call.queries, ROWS_OF_BLOCK), (call.keys, KEYS_OF_TILE))
    return (
        not call.is_packed
        and call.options.window == (-1, -1)
        and call.options.softcap is None
        and parts.serve(q)
        and q.shape[0] * q.shape[1] > 0
        and all(chunks[-1].stop > 0 for chunks, _ in begins)
        and all(c.start % multiple == 0 for chunks, multiple in begins for c in chunks if c.stop > c.start)
    )


def _in_units_of(rows: int, chunks: Sequence[Chunk]) -> list[Chunk]:
    """The same chunks, counted in tiles, blocks or pairs of so many rows; only the last one may be cut off."""
    return [Chunk(c.rank, *(ceil_div(at, rows) for at in (c.start, c.stop, c.first))) for c in chunks]


def _options(call: Call, before: int) -> dict[str, Any]:
    """Of queries of which the first one is so many rows further behind the first key."""
    options = call.options.moved(call.sequences[0].causal_offset + before)
    return {"is_causal": options.is_causal, "scale": options.scale, "causal_offset": options.causal_offset}


def _places(rows: int, chunks: Sequence[Chunk], mine: list[Workspace], *names: str) -> Step:
    """These places of all ranks' workspaces, one behind the other, which count so many rows as one. Of a rank without a
    chunk `mine` is a workspace of another one, and sends nothing."""
    return _in_units_of(rows, chunks), [torch.cat([getattr(one, name) for one in mine], dim=2) for name in names]


def _bounds(call: Call, own: list[Chunk], q: Tensor, k: Tensor, v: Tensor) -> list[Workspace]:
    """Of each chunk of local keys."""
    one_row, found = stand_in(q, q.shape[1], 1), []
    for chunk in own:
        keys = k[:, :, chunk.local]
        found.append(Workspace(one_row, keys))
        found[-1].run(Part.BOUNDS, one_row, keys, _options(call, 0), v=v[:, :, chunk.local])
    return found or [Workspace(one_row, stand_in(k, k.shape[1], 1))]


def _deltas(
    call: Call, own: list[Chunk], bounds: Tensor, columns: Tensor, k: Tensor, of_queries: tuple[Tensor, ...]
) -> list[Workspace]:
    """Of each chunk of local queries: statistics and units, and what dq needs of all keys."""
    q, all_keys, found = of_queries[0], stand_in(k, k.shape[1], call.keys[-1].stop), []
    for chunk in own:
        grad_out, out, *of_rows = (t[:, :, chunk.local] for t in of_queries[1:])
        rows = stand_in(q, q.shape[1], chunk.stop - chunk.start)
        found.append(Workspace(rows, all_keys))
        found[-1].bounds.copy_(bounds)
        found[-1].columns.copy_(columns)
        given = dict(zip(("lse", "grad_lse"), of_rows, strict=False))
        found[-1].run(Part.DELTA, rows, all_keys, _options(call, chunk.start), out=out, grad_out=grad_out, **given)
    return found


class _Reducing:
    """What shares of all ranks add up to, for these heads, on its way to who has the rows.

    Args:
        of_all: sums of this rank's shares, and units and failures as they are after them.
        mine: workspaces of the local chunks of queries.
    """

    def __init__(self, call: Call, heads: slice, keys: slice, of_all: Workspace, mine: dict[Chunk, Workspace]) -> None:
        self._heads, self._keys, self._mine = heads, keys, mine
        group, ranks = call.group, dist.get_world_size(call.group)
        of_ranks = [[] for _ in range(ranks)]  # type: list[list[Tensor]]
        for chunk in _in_units_of(ROWS_OF_BLOCK, call.queries):
            of_ranks[chunk.rank].append(of_all.sums[:, :, :, chunk.start : chunk.stop])
        blocks = [sum(one.shape[3] for one in of_rank) for of_rank in of_ranks]
        shapes = [torch.Size((*of_all.sums.shape[:3], count, of_all.sums.shape[4])) for count in blocks]
        whole = of_all.sums.new_empty(sum(shape.numel() for shape in shapes))
        parts = whole.split([shape.numel() for shape in shapes])
        self._sent = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
        for one, of_rank in zip(self._sent, of_ranks, strict=True):
            torch.cat(of_rank, dim=3, out=one)
        self._sums = torch.empty_like(self._sent[dist.get_rank(group)])
        reduce = (
            partial(_reduce_scatter_single, self._sums.view(-1), whole)
            if len(set(shapes)) == 1
            else partial(dist.reduce_scatter, self._sums, self._sent)
        )
        self._units, self._failed = of_all.units.clone(), of_all.failed.clone()
        self._transfers = [
            reduce(group=group, async_op=True),
            # all bits of a unit that says NaN are set: it is the largest
            dist.all_reduce(self._units, dist.ReduceOp.MAX, group=group, async_op=True),
            dist.all_reduce(self._failed, group=group, async_op=True),  # zeros and NaN
        ]

    def wait(self) -> None:
        """Puts it into the workspaces of the local chunks."""
        for transfer in self._transfers:
            transfer.wait()
        del self._sent
        first = 0
        for chunk, here in self._mine.items():
            count = here.sums.shape[3]
            here.sums[:, self._heads] = self._sums[:, :, :, first : first + count]
            here.units[:, self._heads] = self._units[:, :, chunk.start : chunk.stop]
            here.failed[:, self._keys] = self._failed
            first += count


def _add_shares(
    call: Call, here: Workspace, own: list[Chunk], keys: slice, k: Tensor, v: Tensor, of_queries: list[Tensor],
    dk: Tensor | None, dv: Tensor | None,
) -> None:  # fmt: skip
    """Of these key heads, dk and dv of the local keys, where they are needed, and their shares of dq."""
    q, grad_out = of_queries
    for chunk in own:
        place = (slice(None), keys, chunk.local)
        found = [None if t is None else k.new_empty(k[place].shape) for t in (dk, dv)]
        options = _options(call, -chunk.start)
        here.run(Part.SHARES, q, k[place], options, v=v[place], grad_out=grad_out, dk=found[0], dv=found[1])
        for gradient, part in zip((dk, dv), found, strict=True):
            if gradient is not None and part is not None:
                gradient[place] = part


def gradients(
    call: Call, dq: Tensor, dk: Tensor | None, dv: Tensor | None, k: Tensor, v: Tensor, of_queries: tuple[Tensor, ...]
) -> None:
    """Writes those that are needed; of_queries: q, grad_out, out, lse, and where it has a gradient that of lse."""
    q, grad_out = of_queries[:2]
    rank = dist.get_rank(call.group)
    own_queries, own_keys = (
        [c for c in chunks if c.rank == rank and c.start < c.stop] for chunks in (call.queries, call.keys)
    )
    steps = list(call.heads_arriving(q, k, EIGHTHS))

    of_keys = _bounds(call, own_keys, q, k, v)
    of_steps = gather(call.group, [(call.queries, (q[:, heads], grad_out[:, heads])) for heads, _ in steps])
    gathered = one_ahead(of_steps)
    first = next(gathered)  # on its way
    small = _places(KEYS_OF_TILE, call.keys, of_keys, "bounds", "columns")
    [(bounds, columns)] = gather_small(call.group, [small])
    mine = dict(zip(own_queries, _deltas(call, own_queries, bounds, columns, k, of_queries), strict=True))
    of_rows = list(mine.values()) or [Workspace(stand_in(q, q.shape[1], 1), stand_in(k, k.shape[1], 1))]
    kinds = (("statistics", ROWS_OF_PAIR), ("units", 1))
    places = [_places(rows, call.queries, of_rows, name) for name, rows in kinds]
    (statistics,), (units,) = gather_small(call.group, places)

    largest = max((c.stop - c.start for c in own_keys), default=1)  # a workspace for it is large enough for the others
    reducing: list[_Reducing] = []
    for (heads, keys), arriving in zip(steps, chain([first], gathered), strict=True):
        whole = arriving.wait()
        here = Workspace(whole[0], stand_in(k, keys.stop - keys.start, largest))
        here.statistics.copy_(statistics[:, heads])
        here.units.copy_(units[:, heads])
        here.sums.zero_()
        here.failed.zero_()
        _add_shares(call, here, own_keys, keys, k, v, whole, dk, dv)
        reducing.append(_Reducing(call, heads, keys, here, mine))
        del whole, here  # before the step after next is started
        if len(reducing) > 1:
            reducing.pop(0).wait()
    reducing.pop().wait()

    all_keys = stand_in(k, k.shape[1], call.keys[-1].stop)
    for chunk, here in mine.items():
        rows = q.new_empty(q[:, :, chunk.local].shape)
        here.run(Part.DQ, rows, all_keys, _options(call, chunk.start), dq=rows)
        dq[:, :, chunk.local] = rows
