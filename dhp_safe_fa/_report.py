"""The calls of attention that a policy has counted: what is noted of one, and the table to print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dhp_safe_fa._operator import autocast

WIDTH = 160  # columns; reasons wrap


class Call(NamedTuple):
    """One kind of attention call, as the ``calls`` of a policy count them."""

    query: tuple[Any, ...]  #: shape [..., Hq, Sq, D]; a size that was symbolic when it was compiled is a string
    key: tuple[Any, ...]  #: shape [..., Hk, Sk, D]
    dtype: str  #: of the query, for example "float16"
    device: str  #: of the query, for example "cuda:0"
    backend: str  #: "dhp", or torch's choice, for example "CUDNN_ATTENTION"
    reason: str | None  #: why dhp does not serve it; None if it does


def describe(query: Tensor, key: Tensor, backend: str, reason: str | None) -> Call:
    dtype = str(query.dtype).removeprefix("torch.")
    return Call(_sizes(query), _sizes(key), dtype, str(query.device), backend, reason)


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    if tensor.is_nested and tensor.layout == torch.strided:  # it has no shape, which a jagged one has
        return (tensor.size(0), *["?"] * (tensor.dim() - 1))
    return tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)


def choice_of_torch(query: Tensor, key: Tensor, others: tuple[Any, ...]) -> str:
    """The backend that SDPA would choose; others are its remaining arguments, where they are known."""
    from torch.nn.attention import SDPBackend

    if not others:
        return "torch"
    if not key.is_nested and key.dim() > 2 and key.shape[-3] == 0:
        return "none"  # torch divides by the number of key heads, and the process ends
    value, attn_mask, dropout_p, is_causal, scale, enable_gqa = others
    if (dtype := autocast.dtype_on(query.device.type)) is not None:
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
    try:
        choice = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except (RuntimeError, IndexError):
        return "none"  # what SDPA will say itself
    return str(SDPBackend(choice).name)


def table(policy: str, calls: Mapping[Call, int]) -> str:
    """One line for each kind of call, the most frequent first, and how many dhp serves."""
    from rich.console import Console
    from rich.table import Table

    served = sum(count for call, count in calls.items() if call.reason is None)
    verb = "would serve" if policy == "audit" else "serves"
    rows = Table(title=f"{policy}: dhp {verb} {served} of {sum(calls.values())} calls", title_justify="left", box=None)
    for column in ("calls", "query", "key", "dtype", "device", "backend", "served", "why not"):
        rows.add_column(column, justify="right" if column == "calls" else "left")
    for call, count in sorted(calls.items(), key=lambda item: -item[1]):
        shapes = ["x".join(map(str, shape)) for shape in (call.query, call.key)]
        answer = "yes" if call.reason is None else "no"
        rows.add_row(str(count), *shapes, call.dtype, call.device, call.backend, answer, call.reason or "")
    console = Console(width=WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(rows)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
