"""Attention over a sequence that lies spread over ranks ("context parallel"), by torch.distributed.

    from dhp_safe_fa.integrations.context_parallel import ContextParallel

    parallel = ContextParallel(mesh, balanced=True)
    mine, positions = parallel.shard(tokens, dim=1), parallel.positions(tokens.shape[1])
    with parallel.policy():                          # every SDPA call of an unmodified model, or an error
        model(mine, positions)

Every row of the result and of the gradients has the bits that it has in one process, however many ranks there are and
wherever the sequence is cut. docs/distributed.md says what travels, and how much memory that takes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dhp_safe_fa._operator.scalars import shown, wrong_flag
from dhp_safe_fa._ops import Alignment
from dhp_safe_fa._policy import Policy
from dhp_safe_fa.integrations.context_parallel.agreement import (
    DTYPES,
    Fact,
    agree,
    dtype_fact,
    number_fact,
    refuse,
    serves,
    yes_or_no,
)
from dhp_safe_fa.integrations.context_parallel.arriving import Broadcast
from dhp_safe_fa.integrations.context_parallel.asked import Asked, check_tensors, dense, packed
from dhp_safe_fa.integrations.context_parallel.attention import (
    Call,
    DhpAttentionOverRanks,
    computing,
    refuse_unsupported,
)
from dhp_safe_fa.integrations.context_parallel.placement import Chunk, chunks, chunks_held
from dhp_safe_fa.integrations.context_parallel.unmodified import OverRanks

__all__ = ["ContextParallel"]

Method = TypeVar("Method", bound=Callable[..., Any])
_MOST_ROWS = 2**31 - 1  # that chunks may begin at multiples of; no sequence is longer
# How many calls each group has made, whatever objects it was made by: a backward says of which it is.
_calls: Counter[str] = Counter()


def _uncompiled(method: Method) -> Method:
    """Compiled functions are cut in two around what depends on the numbers of other ranks."""
    reason = "ContextParallel waits for other ranks; supported: without fullgraph=True"
    uncompiled: Method = torch.compiler.disable(method, reason=reason)
    return uncompiled


def _dimension(call: str, name: str, tensor: Tensor, dim: object) -> int:
    """Counted from the first one."""
    check_tensors(call, "of rank 1 or more", **{name: tensor})
    rank = tensor.dim()
    if not isinstance(dim, Integral) or not -rank <= int(dim) < rank:
        refuse(call, f"dim: {shown(dim)}; supported for {name}, of rank {rank}: {-rank} to {rank - 1}")
    return range(rank)[int(dim)]


class ContextParallel:
    """Attention over sequences of which each rank holds a part.

    Args:
        ranks: a ProcessGroup, a DeviceMesh of one dimension, or None for all processes. One rank is enough.
        balanced: each rank holds two chunks of a sequence, r and 2n - 1 - r of 2n, and all compute alike under a causal
            mask; else one chunk each, in order, of any lengths. Torch's context_parallel places rows likewise (balanced
            unless told otherwise).
        multiple: chunks begin at multiples of so many rows, where a length is cut here. On CUDA gradients up to
            head_dim 128 take five products of all pairs instead of nine if keys are cut at multiples of 128, and
            queries of 16.
        heads_at_once: how many key heads a rank gathers at a time, each with its query heads; None for all. Changes no
            bit. The next heads travel while the present ones are computed.

    Memory of a rank beside its shards, for S positions in all, in elements: 2 B S D of each key head gathered; in the
    backward up to 3 B S D of each of its query heads, and on CUDA up to head_dim 128 two float32 copies of their dq.
    Two such steps are there at a time where there is more than one.

    Raises:
        RuntimeError: torch.distributed is not initialised, the mesh has several dimensions, this process is not in it,
            multiple is not 1 to 2^31 - 1, heads_at_once is not positive, or balanced is no flag.
    """

    def __init__(
        self,
        ranks: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        balanced: bool = False,
        multiple: int = 1,
        heads_at_once: int | None = None,
    ) -> None:
        if isinstance(ranks, DeviceMesh):
            if ranks.ndim != 1:
                raise RuntimeError(
                    f"ContextParallel: ranks: a mesh of {ranks.ndim} dimensions; supported: one, as mesh['name'] gives"
                )
            ranks = ranks.get_group()
        if not (ranks is None or isinstance(ranks, dist.ProcessGroup) or ranks is dist.GroupMember.NON_GROUP_MEMBER):
            raise RuntimeError(
                f"ContextParallel: ranks: {type(ranks).__name__}; supported: a ProcessGroup that this process is in, a "
                "DeviceMesh of one dimension, or None"
            )
        group = dist.group.WORLD if ranks is None else ranks
        if group is None:
            raise RuntimeError("ContextParallel: ranks: None, and torch.distributed is not initialised")
        if dist.get_rank(group) < 0:
            raise RuntimeError("ContextParallel: ranks: a group that this process is no member of")
        if heads_at_once is not None and not (isinstance(heads_at_once, int) and heads_at_once >= 1):
            raise RuntimeError(f"ContextParallel: heads_at_once: {heads_at_once}; supported: 1 or more, or None")
        if not (isinstance(multiple, int) and 1 <= multiple <= _MOST_ROWS):
            raise RuntimeError(f"ContextParallel: multiple: {multiple}; supported: 1 to {_MOST_ROWS}")
        if wrong := wrong_flag(balanced):
            raise RuntimeError(f"ContextParallel: balanced: {wrong}")
        self._group = group
        self._balanced = bool(balanced)
        self._multiple = multiple
        self._heads_at_once = heads_at_once

    # ---- placement --------------------------------------------------------------------------------------------------

    def _own(self, length: int) -> list[Chunk]:
        rank, ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
        return [c for c in chunks(length, ranks, self._balanced, self._multiple) if c.rank == rank]

    def shard(self, whole: Tensor, dim: int) -> Tensor:
        """What this rank holds of a tensor that every rank has whole. Nothing travels; differentiable.

        Lengths need not be divisible: the first chunks are a row, or `multiple` rows, longer than the others.

        Raises:
            RuntimeError: whole is no plain tensor, or has no such dimension.
        """
        if isinstance(whole, DTensor):
            refuse("shard", "whole: a DTensor; supported: the whole, a plain tensor, as full_tensor() gives")
        dim = _dimension("shard", "whole", whole, dim)
        return torch.cat([whole.narrow(dim, c.start, c.stop - c.start) for c in self._own(whole.shape[dim])], dim)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Positions of the rows that this rank holds of a sequence of this length, int64.

        Raises:
            RuntimeError: length is no whole number from 0.
        """
        if not isinstance(length, Integral) or length < 0:
            refuse("positions", f"length: {shown(length)}; supported: whole numbers from 0")
        return self.shard(torch.arange(length, device=device), 0)

    @_uncompiled
    def unshard(self, local: Tensor, dim: int) -> Tensor:
        """The whole of what every rank holds a part of, on every rank, detached: for results, not for a loss.

        Raises:
            RuntimeError: on every rank, where one has no such dimension or no plain tensor of a supported dtype, where
                shapes (but for dim) or dtypes differ, or where the lengths are not balanced.
        """
        with self._told("unshard", local):
            dim = _dimension("unshard", "local", local, dim)
            self._check_backend("unshard", "local", local)
            if local.dtype not in DTYPES or local.dim() > 8:
                given = f"local: {local.dtype}, rank {local.dim()}"
                refuse("unshard", f"{given}; supported: real dtypes, up to 8 dimensions")
        local = local.detach()
        facts = [
            dtype_fact("local: dtype", local.dtype),
            yes_or_no("balanced:", self._balanced),
            Fact("multiple:", self._multiple),
            Fact("local: rank", local.dim()),
            Fact("dim:", dim),
            *(Fact(f"local: size of dimension {i}", size) for i, size in enumerate(local.shape) if i != dim),
        ]
        lengths = agree(self._group, [local], "unshard", facts, [local.shape[dim]])
        return Broadcast(self._group, self._chunks("unshard", "local", [of[0] for of in lengths]), local, dim).wait()

    def _chunks(self, call: str, name: str, lengths: Sequence[int]) -> Sequence[Chunk]:
        try:
            return chunks_held(tuple(lengths), self._balanced, self._multiple)
        except ValueError as error:
            refuse(call, f"{name}: {error}")

    # ---- attention --------------------------------------------------------------------------------------------------

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        causal_offset: int = 0,
        window: tuple[int, int] = (-1, -1),
        softcap: float | None = None,
    ) -> Tensor:
        """:func:`dhp_safe_fa.attention` of the whole sequences, for the local queries.

        All ranks call it, in the same order, and run its backward, too. What has to agree is compared before either:
        the host waits for the other ranks', and, if the group has no backend for CPUs, for the device.

        Args:
            q: local queries, [B, Hq, rows, D]; every rank may have another number of rows, also none.
            k, v: local keys and values, [B, Hk, rows, D], of q's head_dim; not necessarily as many as queries.
            is_causal, scale, causal_offset, window, softcap: as for :func:`dhp_safe_fa.attention`, positions counted
                over all ranks.

        Returns:
            [B, Hq, rows, D], q's dtype. Differentiable, once and in reverse mode; the loss is the sum over all ranks.

        Raises:
            RuntimeError: on every rank, for arguments that attention refuses or that differ between ranks, before
                anything is computed. Errors of torch.distributed, where a rank is gone or later than its time-out.
        """
        return self._run("attention", dense, q, k, v, is_causal, scale, causal_offset, window, softcap)[0]

    def attention_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        causal_offset: int = 0,
        window: tuple[int, int] = (-1, -1),
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`attention`, and lse of the local queries, [B, Hq, rows], as of :func:`dhp_safe_fa.attention_lse`."""
        return self._run("attention_lse", dense, q, k, v, is_causal, scale, causal_offset, window, softcap)

    def attention_varlen(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        alignment: Alignment = "bottom-right",
        window: tuple[int, int] = (-1, -1),
        softcap: float | None = None,
    ) -> Tensor:
        """:func:`dhp_safe_fa.attention_varlen` of packed sequences, for the local queries.

        Sequences begin and end anywhere, within a rank or across several: what is placed are all tokens. A row has the
        bits that it has in a call of :func:`dhp_safe_fa.attention` for its sequence alone, and so have its gradients.
        A rank makes such a call for each sequence of which it has rows.

        Args:
            q: local queries, [rows, Hq, D]; every rank may have another number of rows, also none.
            k, v: local keys and values, [rows, Hk, D], of q's head_dim; not necessarily as many as queries.
            cu_seqlens_q, cu_seqlens_k: int32 [sequences + 1], the same on all ranks: where sequences begin among the
                rows of all ranks, ascending from 0. They are read, for which the host waits. Rows behind the last
                sequence belong to none and become 0, their lse -inf.
            is_causal, scale, alignment, window, softcap: as for :func:`dhp_safe_fa.attention_varlen`.

        Returns:
            [rows, Hq, D], contiguous, else as :meth:`attention`. Gradients of rows of no sequence are 0.

        Raises:
            RuntimeError: as :meth:`attention`, and for lengths that do not ascend from 0 or are longer than all rows.
        """
        given = q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale, alignment, window, softcap
        return self._run("attention_varlen", packed, *given)[0]

    def attention_varlen_lse(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        *,
        is_causal: bool = False,
        scale: float | None = None,
        alignment: Alignment = "bottom-right",
        window: tuple[int, int] = (-1, -1),
        softcap: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """:meth:`attention_varlen`, and lse of the local queries, [Hq, rows]."""
        given = q, k, v, cu_seqlens_q, cu_seqlens_k, is_causal, scale, alignment, window, softcap
        return self._run("attention_varlen_lse", packed, *given)

    def policy(self) -> Policy:
        """Every call of ``scaled_dot_product_attention`` inside the block, in this thread, runs over the ranks.

        As ``dhp_safe_fa.policy("secure")``, which may be at work, too, inside or outside of it: a call is served or
        refused, and what that one refuses is refused here. is_causal counts from the first row of the first rank.
        Compiled functions run uncompiled meanwhile, in every thread.
        """
        return OverRanks(self.attention, lambda query: self._tell_refused("attention", query))

    def _tell_refused(self, name: str, *given: object) -> None:
        """Instead of a call: the other ranks, which make it, get an error at once."""
        agree(self._group, given, name, [], [], refused=True)

    @contextmanager
    def _told(self, name: str, *given: object) -> Iterator[None]:
        """An error in the block, of whatever kind, is told to the other ranks, which wait for this one."""
        try:
            yield
        except Exception:
            self._tell_refused(name, *given)
            raise

    def _check_backend(self, call: str, name: str, tensor: object) -> None:
        if isinstance(tensor, Tensor) and not serves(self._group, tensor.device):
            backend = dist.get_backend(self._group)
            refuse(call, f"{name}: on {tensor.device}, where the group has no backend; it has {backend}")

    @_uncompiled
    def _run(self, name: str, read: Callable[..., Asked], q: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        """The call of this name, whose arguments `read` knows how to read."""
        with self._told(name, q, *given):
            self._check_backend(name, "q", q)
            asked = read(name, q, *given)
            recorded = [torch.is_grad_enabled() and t.requires_grad for t in (asked.q, asked.k, asked.v)]
            with computing():
                refuse_unsupported(name, asked.batched(), asked.options, recorded)
            facts = self._facts(asked, recorded)
        q, k, _ = asked.batched()
        lengths = agree(self._group, [q], name, facts, [q.shape[2], k.shape[2]])
        of_queries, of_keys = zip(*lengths, strict=True)
        queries, keys = self._chunks(name, "q", of_queries), self._chunks(name, "k", of_keys)
        try:
            sequences = asked.sequences(queries[-1].stop, keys[-1].stop)
        except ValueError as error:
            refuse(name, str(error))
        call = Call(
            self._group,
            queries,
            keys,
            sequences,
            self._heads_of(k),
            asked.options,
            asked.is_packed,
            with_lse=name.endswith("_lse"),
            number=_calls[self._group.group_name],
        )
        _calls[self._group.group_name] += 1
        with computing():
            out, lse = DhpAttentionOverRanks.apply(call, asked.q, asked.k, asked.v)  # type: ignore[no-untyped-call]
        return out, lse

    def _heads_of(self, k: Tensor) -> int:
        """Key heads at a time, of k [B, H, rows, D]."""
        return min(self._heads_at_once or k.shape[1], k.shape[1])

    def _facts(self, asked: Asked, recorded: list[bool]) -> list[Fact]:
        """What has to agree; recorded: whether q, k and v have gradients."""
        q, k, _ = asked.batched()
        options = asked.options
        return [
            Fact("q: batch", q.shape[0]),
            Fact("q: heads", q.shape[1]),
            Fact("q: head_dim", q.shape[3]),
            dtype_fact("q: dtype", q.dtype),
            Fact("k: heads", k.shape[1]),
            yes_or_no("is_causal:", options.is_causal),
            number_fact("scale:", options.scale),
            Fact("causal_offset:", options.causal_offset),
            Fact("window: left", options.window[0]),
            Fact("window: right", options.window[1]),
            number_fact("softcap:", options.softcap),
            yes_or_no("balanced:", self._balanced),
            Fact("multiple:", self._multiple),
            Fact("heads_at_once:", self._heads_of(k)),
            *(yes_or_no(f"{n}: requires_grad", need) for n, need in zip("qkv", recorded, strict=True)),
            *asked.facts,
        ]
