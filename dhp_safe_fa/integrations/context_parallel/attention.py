"""Attention of local queries over everybody's keys, and its derivative.

No sum of floats crosses a call of the operators: a query row is computed by its rank over all keys of its sequence, a
key's gradients by the key's rank over all queries. So every row has the bits that it has in one process (contracts C5,
C10). Where it can be, dq is added up over the ranks in integers (shares.py).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dhp_safe_fa._operator import fake
from dhp_safe_fa._operator.gradients import refuse_double_backward
from dhp_safe_fa._operator.schema import BACKWARD
from dhp_safe_fa._ops import attention_lse
from dhp_safe_fa.integrations.context_parallel import shares
from dhp_safe_fa.integrations.context_parallel.agreement import Fact, agree, refuse
from dhp_safe_fa.integrations.context_parallel.arriving import gather, one_ahead
from dhp_safe_fa.integrations.context_parallel.mapped import mapped
from dhp_safe_fa.integrations.context_parallel.packing import Step
from dhp_safe_fa.integrations.context_parallel.parts import ceil_div
from dhp_safe_fa.integrations.context_parallel.placement import Chunk, Together, held

_attention_backward = torch.ops.dhp.attention_backward.default
_threads = threading.local()
ALL = slice(None)
_served: set[tuple[object, ...]] = set()  # what refuse_unsupported has let pass, which costs a call some 0.2 ms
MOST_SERVED = 1000
# Of the heads, how many eighths are computed before the next ones: at 65536 rows on four GPUs, copies of two take no
# longer than the forward of one, and copies of five no longer than that of two.
EIGHTHS = (1, 3, 8)


@contextlib.contextmanager
def computing() -> Iterator[None]:
    """In this thread, inside the block, the operators are called by what knows of the other ranks."""
    _threads.computing = True
    try:
        yield
    finally:
        _threads.computing = False


def is_computing() -> bool:
    return getattr(_threads, "computing", False)


def batched(tensors: Iterable[Tensor], is_packed: bool) -> list[Tensor]:
    """As [B, H, rows, D], and lse as [B, H, rows], of what may be packed, [rows, H, D] and [H, rows]: views."""
    if not is_packed:
        return list(tensors)
    return [(t.transpose(0, 1) if t.dim() == 3 else t).unsqueeze(0) for t in tensors]


class Options(NamedTuple):
    """Of :func:`dhp_safe_fa.attention`."""

    is_causal: bool
    scale: float | None
    window: tuple[int, int]
    softcap: float | None
    causal_offset: int = 0

    def moved(self, causal_offset: int) -> Options:
        """For queries that stand so far behind the first key, where it matters."""
        if not self.is_causal and self.window == (-1, -1):
            return self
        return self._replace(causal_offset=min(max(causal_offset, -(2**63)), 2**63 - 1))  # all the same beyond

    def spelt(self) -> dict[str, Any]:
        """As in the operators' schemas."""
        given = self._asdict()
        given["window_left"], given["window_right"] = given.pop("window")
        return given


@dataclass(frozen=True)
class Call:
    """What a call is beside its tensors, the same on all ranks.

    Attributes:
        queries, keys: chunks of all rows.
        sequences: which of them attend to which; every row is in one.
        heads_at_once: key heads whose keys and values a rank holds at a time.
        options: of every call, but for where its queries stand.
        is_packed: tensors are [rows, H, D], and lse [H, rows], where the caller sees them.
        with_lse: lse is a result, and has a gradient.
        number: how many calls of its group came before it.
    """

    group: dist.ProcessGroup
    queries: Sequence[Chunk]
    keys: Sequence[Chunk]
    sequences: list[Together]
    heads_at_once: int
    options: Options
    is_packed: bool
    with_lse: bool
    number: int

    def _own(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        rank = dist.get_rank(self.group)
        return [chunk for chunk in chunks if chunk.rank == rank]

    def own_queries(self) -> Iterator[tuple[slice, slice, Options]]:
        """Local queries, of one sequence after the other, where that is among all keys, and the options of a call."""
        own = self._own(self.queries)
        for sequence in self.sequences:
            for local, before in held(own, sequence.queries):
                yield local, slice(*sequence.keys), self.options.moved(sequence.causal_offset + before)

    def own_keys(self) -> Iterator[tuple[slice, slice, Options]]:
        """Local keys, of one sequence after the other, where that is among all queries, and the options of a call."""
        own = self._own(self.keys)
        for sequence in self.sequences:
            for local, before in held(own, sequence.keys):
                yield local, slice(*sequence.queries), self.options.moved(sequence.causal_offset - before)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """For a result: packed ones are contiguous, as those of one process are."""
        return tensor.new_empty(tensor.shape) if self.is_packed else torch.empty_like(tensor)

    def heads(self, q: Tensor, k: Tensor) -> Iterator[tuple[slice, slice]]:
        """Query heads and key heads of one step after the other."""
        group = q.shape[1] // k.shape[1]
        for first in range(0, k.shape[1], self.heads_at_once):
            last = min(first + self.heads_at_once, k.shape[1])
            yield slice(first * group, last * group), slice(first, last)

    def heads_arriving(self, q: Tensor, k: Tensor, eighths: Sequence[int]) -> Iterator[tuple[slice, slice]]:
        """The same; of all heads at once so many eighths, and so on, if rows arrive while others are computed."""
        group, heads = q.shape[1] // k.shape[1], k.shape[1]
        if self.heads_at_once < heads or heads < 2 or mapped(self.group, q.device) is None:
            yield from self.heads(q, k)
            return
        first = 0
        for last in (ceil_div(heads * n, 8) for n in eighths):
            if first < last:
                yield slice(first * group, last * group), slice(first, last)
            first = last


def refuse_unsupported(call: str, tensors: Sequence[Tensor], options: Options, recorded: Sequence[bool]) -> None:
    """What the operators refuse of q, k and v whatever the lengths, by calls without rows; recorded: whether they need
    gradients. Later a rank that has rows would refuse, and one that has none would wait for it."""
    asked = *((t.device, t.dtype, t.shape, t.stride()) for t in tensors), options, *recorded
    if asked in _served:
        return
    fake.check(*tensors, **options.spelt())
    own, other = tensors[0].shape[-1], tensors[2].shape[-1]
    if own != other:
        refuse(call, f"v: head_dim {other} differs from q's {own}; supported over ranks: equal ones")
    q, k, v = (t.detach()[:, :, :0] for t in tensors)
    out, lse = attention_lse(q, k, v, **options._asdict())
    if any(recorded):
        needed = dict(zip(("need_dq", "need_dk", "need_dv"), recorded, strict=True))
        _attention_backward(out, q, k, v, out, lse, **options.spelt(), **needed)
    if len(_served) == MOST_SERVED:
        _served.clear()
    _served.add(asked)


class DhpAttentionOverRanks(torch.autograd.Function):
    """(out, lse) of the local queries."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, of_rows = call.empty_like(q), q.shape[1::-1] if call.is_packed else q.shape[:3]
        lse = q.new_empty(of_rows, dtype=fake.row_dtype(q))
        ctx.save_for_backward(q, k, v, out, lse)
        results = out, lse
        q, k, v, out, lse = batched((q, k, v, out, lse), call.is_packed)
        steps = list(call.heads_arriving(q, k, EIGHTHS))
        starts = gather(call.group, [(call.keys, (k[:, keys], v[:, keys])) for _, keys in steps])
        for (heads, _), arriving in zip(steps, one_ahead(starts), strict=True):
            all_k, all_v = arriving.wait()
            for rows, seen, options in call.own_queries():
                here, there = (ALL, heads, rows), (ALL, ALL, seen)
                out[here], lse[here] = attention_lse(q[here], all_k[there], all_v[there], **options._asdict())
            del all_k, all_v  # before the step after next is started
        ctx.call = call
        ctx.set_materialize_grads(False)
        return results

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        """Of a loss that is the sum of what the ranks make of their rows: on every rank, or the others wait for it."""
        call: Call = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        agree(call.group, [q], "backward", [Fact("of call number", call.number)], [])
        # What is not used here may be used on another rank, which cannot know.
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out
        of_queries = [q, grad_out, out, lse]
        if call.with_lse:
            of_queries.append(torch.zeros_like(lse) if grad_lse is None else grad_lse)
        gradients = DhpAttentionOverRanksGradients.apply(call, ctx.needs_input_grad[1:], k, v, *of_queries)  # type: ignore[no-untyped-call]
        return None, *gradients


class DhpAttentionOverRanksGradients(torch.autograd.Function):
    """(dq, dk, dv) of the local queries and keys, None where not needed; they cannot be differentiated once more."""

    @staticmethod
    def forward(
        _ctx: Any, call: Call, needed: tuple[bool, ...], k: Tensor, v: Tensor, *of_queries: Tensor
    ) -> tuple[Tensor | None, ...]:
        given = of_queries[0], k, v
        results = tuple(call.empty_like(t) if need else None for t, need in zip(given, needed, strict=True))
        dq, dk, dv = (None if t is None else batched([t], call.is_packed)[0] for t in results)
        k, v, *rest = batched((k, v, *of_queries), call.is_packed)
        of_queries = tuple(rest)
        q = of_queries[0]
        if dq is not None and (dk is not None or dv is not None) and shares.are_possible(call, q):
            shares.gradients(call, dq, dk, dv, k, v, of_queries)
            return results
        wanted: list[Step] = []
        steps = []
        for heads, keys in call.heads(q, k):
            if dq is not None:
                wanted.append((call.keys, (k[:, keys], v[:, keys])))
                steps.append(partial(_query_gradients, call, dq, heads, of_queries))
            if dk is not None or dv is not None:
                wanted.append((call.queries, [t[:, heads] for t in of_queries]))
                steps.append(partial(_key_gradients, call, dk, dv, keys, (k, v)))
        for step, arriving in zip(steps, one_ahead(gather(call.group, wanted)), strict=True):
            step(arriving.wait())
        return results

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> NoReturn:
        refuse_double_backward(BACKWARD)


def _query_gradients(
    call: Call, dq: Tensor, heads: slice, of_queries: tuple[Tensor, ...], keys_and_values: list[Tensor]
) -> None:
    """dq of the local queries in these heads, over all keys and values."""
    for rows, seen, options in call.own_queries():
        here = (ALL, heads, rows)
        q, grad_out, out, lse, *grad_lse = (t[here] for t in of_queries)
        k, v = (t[ALL, ALL, seen] for t in keys_and_values)
        only_dq = {"grad_lse": grad_lse[0] if grad_lse else None, "need_dk": False, "need_dv": False}
        dq[here], _, _ = _attention_backward(grad_out, q, k, v, out, lse, **options.spelt(), **only_dq)


def _key_gradients(
    call: Call,
    dk: Tensor | None,
    dv: Tensor | None,
    heads: slice,
    keys_and_values: tuple[Tensor, Tensor],
    of_queries: list[Tensor],
) -> None:
    """dk and dv, where they are needed, of the local keys in these heads, over all queries."""
    needed = {"need_dq": False, "need_dk": dk is not None, "need_dv": dv is not None}
    for rows, seeing, options in call.own_keys():
        here = (ALL, heads, rows)
        k, v = (t[here] for t in keys_and_values)
        q, grad_out, out, lse, *grad_lse = (t[ALL, ALL, seeing] for t in of_queries)
        given = {**options.spelt(), **needed, "grad_lse": grad_lse[0] if grad_lse else None}
        _, of_k, of_v = _attention_backward(grad_out, q, k, v, out, lse, **given)
        if dk is not None:
            dk[here] = of_k
        if dv is not None:
            dv[here] = of_v
