"""What a rank was asked for: a call of any kind, as tensors, options and sequences; or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from numbers import Integral, Real
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dhp_safe_fa._operator import autocast, fake
from dhp_safe_fa._operator.scalars import in_words, is_too_large, number_of, refuse_tensors, shown, wrong_flag
from dhp_safe_fa._operator.schema import AUTOCAST
from dhp_safe_fa._ops import Alignment
from dhp_safe_fa.integrations.context_parallel.agreement import Fact, digest_fact, refuse, yes_or_no
from dhp_safe_fa.integrations.context_parallel.attention import Options, batched
from dhp_safe_fa.integrations.context_parallel.placement import Together, packed_together


class Asked(NamedTuple):
    """One call.

    Attributes:
        q, k, v: [B, H, rows, D], or [rows, H, D] if is_packed.
        sequences: of the numbers of queries and keys that all ranks have together.
        facts: what has to agree beside what every call has.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    sequences: Callable[[int, int], list[Together]]
    facts: list[Fact]
    is_packed: bool

    def batched(self) -> list[Tensor]:
        """q, k and v as [B, H, rows, D]."""
        return batched((self.q, self.k, self.v), self.is_packed)


def dense(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    causal_offset: int,
    window: tuple[int, int],
    softcap: float | None,
) -> Asked:
    q, k, v = _local(call, "[B, H, rows, D]", q=q, k=k, v=v)
    options = _options(call, is_causal, scale, window, softcap, causal_offset)

    def sequences(queries: int, keys: int) -> list[Together]:
        return [Together((0, queries), (0, keys), options.causal_offset)]

    return Asked(q, k, v, options, sequences, [], is_packed=False)


def packed(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    is_causal: bool,
    scale: float | None,
    alignment: str,
    window: tuple[int, int],
    softcap: float | None,
) -> Asked:
    q, k, v = _local(call, "[rows, H, D]", q=q, k=k, v=v)
    check_tensors(call, "[sequences + 1]", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    known = get_args(Alignment)
    if not isinstance(alignment, str) or alignment not in known:
        refuse(call, f"alignment: {alignment!r}; supported: {', '.join(map(repr, known))}")
    options = _options(call, is_causal, scale, window, softcap, 0)
    of_operator = options.spelt()
    del of_operator["causal_offset"]
    fake._varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0, **of_operator)  # refuses what the operator refuses
    begins_q, begins_k = _begins(call, "q", cu_seqlens_q), _begins(call, "k", cu_seqlens_k)
    is_bottom_right = alignment == "bottom-right"
    facts = [
        digest_fact("cu_seqlens_q:", begins_q),
        digest_fact("cu_seqlens_k:", begins_k),
        yes_or_no("alignment: bottom-right", is_bottom_right),
    ]
    sequences = partial(packed_together, begins_q, begins_k, is_bottom_right)
    return Asked(q, k, v, options, sequences, facts, is_packed=True)


# Here everything is looked at that a call of one process leaves to Python or to the operators' schemas: an error that
# only one rank has must be one that it can tell the others of.


def check_tensors(call: str, shape: str, **tensors: object) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            refuse(call, f"{name}: a DTensor; supported: the local shard, a plain tensor, as to_local() gives")
        if not isinstance(tensor, Tensor):
            refuse(call, f"{name}: {type(tensor).__name__}; expected a tensor {shape}")
        if tensor.is_nested or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else "sparse"
            refuse(call, f"{name}: a {kind} tensor; supported: strided tensors")


def _local(call: str, shape: str, **tensors: Tensor) -> list[Tensor]:
    """By autocast's rule for the operators."""
    check_tensors(call, shape, **tensors)
    found = []
    for tensor in tensors.values():
        dtype = autocast.dtype_on(tensor.device.type)
        found.append(tensor.to(dtype) if dtype is not None and tensor.dtype in AUTOCAST else tensor)
    return found


def _options(
    call: str, is_causal: object, scale: object, window: object, softcap: object, causal_offset: object
) -> Options:
    if wrong := wrong_flag(is_causal):
        refuse(call, f"is_causal: {wrong}")
    given = {"scale": scale, "softcap": softcap}
    refuse_tensors("attention", given, {"causal_offset": causal_offset})
    scale, softcap, causal_offset = map(number_of, (scale, softcap, causal_offset))  # type: ignore[arg-type]
    if not isinstance(causal_offset, Integral):
        refuse(call, f"causal_offset: {causal_offset!r}; expected an int")
    if isinstance(window, Tensor):
        refuse(call, f"window: {shown(window)}; expected (left, right), two numbers of keys")
    if not isinstance(window, (tuple, list)) or [isinstance(side, Integral) for side in window] != [True, True]:
        refuse(call, f"window: {window!r}; expected (left, right), two numbers of keys")
    factors = []
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and not isinstance(value, Real):
            refuse(call, f"{name}: {value!r}; expected a number, or None")
        if is_too_large(value):
            refuse(call, f"{name}: {in_words(value)}; supported: up to 2^100")
        factors.append(None if value is None else float(value))
    left, right = window
    return Options(bool(is_causal), factors[0], (int(left), int(right)), factors[1] or None, int(causal_offset))


def _begins(call: str, name: str, cu_seqlens: Tensor) -> list[int]:
    found: list[int] = cu_seqlens.tolist()
    if found[0] != 0 or found != sorted(found):
        refuse(call, f"cu_seqlens_{name}: {_short(found)}; supported: ascending numbers, from 0")
    return found


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"{str(numbers[:8])[:-1]}, ...]"
