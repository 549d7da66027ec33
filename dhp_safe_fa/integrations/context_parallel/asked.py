"""What a rank was asked for: a call of any kind as one of tensors [B, H, rows, D] and of sequences, or a refusal."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dhp_safe_fa._operator import fake
from dhp_safe_fa._operator.schema import AUTOCAST, VARLEN
from dhp_safe_fa._ops import Alignment, _sides
from dhp_safe_fa.integrations.context_parallel.agreement import Fact, digest_fact, refuse, yes_or_no
from dhp_safe_fa.integrations.context_parallel.attention import Options
from dhp_safe_fa.integrations.context_parallel.placement import Together, packed_together


class Asked(NamedTuple):
    """One call.

    Attributes:
        sequences: of the numbers of queries and keys that all ranks have together.
        facts: what has to agree beside what every call has.
        is_packed: the caller writes [rows, H, D].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options
    sequences: Callable[[int, int], list[Together]]
    facts: list[Fact]
    is_packed: bool


def dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    causal_offset: int,
    window: tuple[int, int],
    softcap: float | None,
) -> Asked:
    q, k, v = _local("attention", q, k, v)
    options = Options(is_causal, scale, _sides(window), softcap, causal_offset)
    fake.check(q, k, v, **options.spelt())
    _check_widths("attention", q, v)

    def sequences(queries: int, keys: int) -> list[Together]:
        return [Together((0, queries), (0, keys), causal_offset)]

    return Asked(q, k, v, options, sequences, [], is_packed=False)


def packed(
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
    q, k, v = _local(VARLEN, q, k, v)
    if alignment not in get_args(Alignment):
        refuse(VARLEN, f"alignment: {alignment!r}; supported: {', '.join(map(repr, get_args(Alignment)))}")
    options = Options(is_causal, scale, _sides(window, VARLEN), softcap)
    of_operator = options.spelt()
    del of_operator["causal_offset"]
    fake._varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, 0, 0, **of_operator)  # refuses what the operator refuses
    _check_widths(VARLEN, q, v)
    begins = {"q": _begins("q", cu_seqlens_q), "k": _begins("k", cu_seqlens_k)}
    facts = [digest_fact(f"cu_seqlens_{name}:", numbers) for name, numbers in begins.items()]
    facts.append(yes_or_no("alignment: bottom-right", alignment == "bottom-right"))
    sequences = partial(packed_together, begins["q"], begins["k"], alignment == "bottom-right")
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    return Asked(q, k, v, options, sequences, facts, is_packed=True)


def _local(call: str, *tensors: Tensor) -> list[Tensor]:
    """q, k and v, by autocast's rule for the operators."""
    found = []
    for name, tensor in zip("qkv", tensors, strict=True):
        if isinstance(tensor, DTensor):
            refuse(call, f"{name}: a DTensor; supported: the local shard, a plain tensor, as to_local() gives")
        on = tensor.device.type
        cast = torch.is_autocast_enabled(on) and tensor.dtype in AUTOCAST
        found.append(tensor.to(torch.get_autocast_dtype(on)) if cast else tensor)
    return found


def _check_widths(call: str, q: Tensor, v: Tensor) -> None:
    own, other = q.shape[-1], v.shape[-1]
    if own != other:
        refuse(call, f"v: head_dim {other} differs from q's {own}; supported over ranks: equal ones")


def _begins(name: str, cu_seqlens: Tensor) -> list[int]:
    found: list[int] = cu_seqlens.tolist()
    if found[0] != 0 or found != sorted(found):
        refuse(VARLEN, f"cu_seqlens_{name}: {_short(found)}; supported: ascending numbers, from 0")
    return found


def _short(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"{str(numbers[:8])[:-1]}, ...]"
