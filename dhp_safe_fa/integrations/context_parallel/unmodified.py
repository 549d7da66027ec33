"""A policy under which the SDPA calls of an unmodified model run over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dhp_safe_fa._active_policies import entered, uncompiled
from dhp_safe_fa._policy import Policy, Secure
from dhp_safe_fa._recognized import OURS
from dhp_safe_fa._sdpa import Attend, serve
from dhp_safe_fa.integrations.context_parallel.attention import is_computing

DTENSOR_REASON = (
    "query: a DTensor, as inside of torch's context_parallel, which does not say in which order it placed the rows; "
    "supported: local shards as plain tensors, also those that torch's function has left behind (no_restore_buffers), "
    "if this block begins after its block"
)


class OverRanks(Secure):
    """policy("secure") whose attention spans ranks: what it cannot serve would attend to the local shard alone.

    A policy inside of it leaves the calls that it would serve to this one. One outside does not see them any more, but
    for calls without rows, by which this one asks whether they are supported.
    """

    name, over_ranks = "context_parallel", True

    def __init__(self, attend: Attend, tell_refused: Callable[[object], None]) -> None:
        super().__init__()
        self._attend_over_ranks, self._tell_refused = attend, tell_refused

    def refuse(self, reason: str) -> None:
        raise RuntimeError(f"ContextParallel.policy: {reason}")

    def __enter__(self) -> Policy:
        if any(policy.over_ranks and policy is not self for policy in entered()):
            self.refuse("inside of another one; supported: one at a time")
        return super().__enter__()

    def _begin(self) -> None:
        super()._begin()
        uncompiled.begin()

    def _end(self) -> None:
        uncompiled.end()
        super()._end()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OURS and not is_computing():
            self._tell_refused(args[0] if args else None)
            self.refuse(f"{func} called directly, over the local shard alone; supported: scaled_dot_product_attention")
        return super().__torch_function__(func, types, args, kwargs)

    def _attend(self, torch_sdpa: Callable[..., Tensor], query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(query, DTensor):
            self._tell_refused(query)
            self.refuse(DTENSOR_REASON)
        return super()._attend(torch_sdpa, query, *args, **kwargs)

    def _refuse_or_note(self, query: Tensor, key: Tensor, reason: str | None, *others: Any) -> None:
        if reason is not None:
            self._tell_refused(query)
        super()._refuse_or_note(query, key, reason, *others)

    def _serve(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        return serve(query, key, value, is_causal, scale, self._attend_over_ranks)
