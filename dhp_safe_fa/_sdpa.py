"""torch's scaled_dot_product_attention with our kernel behind it, and the question whether the kernel can serve a call.

Both take the arguments of torch.nn.functional.scaled_dot_product_attention, and look at shapes, dtypes and flags only.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dhp_safe_fa import _inspect
from dhp_safe_fa._operator import autocast
from dhp_safe_fa._operator.scalars import in_words, is_number, loses_gradient, shown
from dhp_safe_fa._operator.schema import (
    AUTOCAST,
    CPU_MAX_HEAD_DIM,
    CUDA_MAX_HEAD_DIM,
    DTYPES,
    HALVES,
    LARGEST,
    NUMBERS,
)
from dhp_safe_fa._ops import attention
from dhp_safe_fa._widths import is_fillable

Attend = Callable[..., Tensor]

# NVIDIA's number for Hopper; the kernels are its machine code.
HOPPER = (9, 0)

# What this build has, asked once: torch.compile cannot look into the module that knows.
HAS_GPU_KERNELS = bool(_inspect.kernels())


def sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """:func:`dhp_safe_fa.attention` with the arguments of ``torch.nn.functional.scaled_dot_product_attention``.

    Args:
        query: [..., Hq, Sq, D]; dtypes and head_dims as :func:`dhp_safe_fa.attention`. Rank 2 is one head, rank 3 has
            no batch, from rank 5 on all leading dimensions are batch.
        key: [..., Hk, Sk, D], leading dimensions as query's.
        value: [..., Hk, Sk, Dv].
        attn_mask: must be None. is_causal, or the causal_offset of :func:`dhp_safe_fa.attention`, needs no mask.
        dropout_p: must be 0.
        is_causal: query i sees key j only if j <= i, counted from the first query and the first key.
        scale: factor of the scores, 0 to 2^100; 1/sqrt(D) by default. Not differentiated.
        enable_gqa: must be True where Hq differs from Hk; Hk then divides Hq.

    Returns:
        [..., Hq, Sq, Dv], query's dtype; differentiable as :func:`dhp_safe_fa.attention`.

    Raises:
        RuntimeError: names the argument, what was given, what is supported and what to use instead.
    """
    reason = _wrong_type(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    reason = reason or why_not(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if reason is not None:
        raise RuntimeError(f"dhp_safe_fa.sdpa: {reason}")
    return serve(query, key, value, is_causal, scale)


def serve(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None, attend: Attend = attention
) -> Tensor:
    """The call itself, for arguments that :func:`why_not` has no objection to, by a function like attention."""
    rank = query.dim()
    if rank == 4:
        return attend(query, key, value, is_causal=is_causal, scale=scale)
    if rank < 4:
        q, k, v = (t[(None,) * (4 - rank)] for t in (query, key, value))
    else:
        q, k, v = (t.flatten(0, rank - 4) for t in (query, key, value))
    return attend(q, k, v, is_causal=is_causal, scale=scale).reshape(*query.shape[:-1], value.shape[-1])


def _wrong_type(
    query: object,
    key: object,
    value: object,
    attn_mask: object,
    dropout_p: object,
    is_causal: object,
    scale: object,
    enable_gqa: object,
) -> str | None:
    """What torch's own function asks of its arguments before anything else."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            return f"{name}: {type(tensor).__name__}; expected a tensor [..., H, S, D]"
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        return f"attn_mask: {type(attn_mask).__name__}; supported: None"
    if not isinstance(dropout_p, NUMBERS):
        return f"dropout_p: {shown(dropout_p)}; supported: 0"
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            return f"{name}: {shown(flag)}; supported: True or False"
    if loses_gradient(scale):
        return "scale: a tensor that requires a gradient; supported: None, or a number, which has none"
    if scale is not None and not is_number(scale):
        return f"scale: {shown(scale)}; supported: None, or a number"
    return None


def why_not(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Why dhp does not serve this call of scaled_dot_product_attention, in one sentence; None if it does."""
    if attn_mask is not None:
        return _wrong_mask(attn_mask)
    if dropout_p != 0:
        return f"dropout_p: {dropout_p:g}; supported: 0 (in evaluation, pass dropout_p=0.0)"
    return _wrong_place(query, key, value) or _wrong_shape(query, key, value, enable_gqa) or _wrong_scale(scale)


def _wrong_mask(mask: Tensor) -> str:
    """By its shape alone: what it says is data."""
    given = f"attn_mask: given, shape {list(mask.shape)}"
    if mask.dim() < 2 or mask.shape[-2] == 1:
        return (
            f"{given}, the same keys for every query, as for padding; supported: None (one call for each length, "
            "without padding; under is_causal=True padding behind a sequence needs no mask; for transformers, "
            "dhp_safe_fa.integrations.transformers does so)"
        )
    return (
        f"{given}; supported: None, with is_causal=True for the causal mask, "
        "or dhp_safe_fa.attention with causal_offset where queries follow a cache"
    )


def unsupported_gpu(device: torch.device | int) -> str | None:
    """Why kernels of this build do not run on a CUDA device; None if they do."""
    if not HAS_GPU_KERNELS:
        return "this build has no GPU kernels, because nvcc was not found when it was built"
    gpu = torch.cuda.get_device_properties(device)
    if (gpu.major, gpu.minor) != HOPPER:
        return f"{gpu.name} has compute capability {gpu.major}.{gpu.minor}; supported: Hopper (9.0)"
    return None


def _wrong_place(query: Tensor, key: Tensor, value: Tensor) -> str | None:
    """Device, layout, dtype, and the limits on head_dim that come with them."""
    on = query.device.type
    if key.device != query.device or value.device != query.device:
        return f"device: query is on {query.device}, key on {key.device}, value on {value.device}; they must agree"
    if on not in ("cpu", "cuda", "meta"):
        return f"device: {on}; supported: cpu, and cuda on a Hopper GPU"
    if query.is_nested or key.is_nested or value.is_nested:
        return "query, key, value: a nested tensor; supported: strided tensors, one call for each length"
    if query.layout != torch.strided or key.layout != torch.strided or value.layout != torch.strided:
        return "query, key, value: a sparse tensor; supported: strided tensors"
    dtypes = [query.dtype, key.dtype, value.dtype]
    if (cast_to := autocast.dtype_on(on)) is not None:
        dtypes = [cast_to if dtype in AUTOCAST else dtype for dtype in dtypes]
    if dtypes[1] != dtypes[0] or dtypes[2] != dtypes[0]:
        return f"dtype: query {query.dtype}, key {key.dtype}, value {value.dtype}; they must agree"
    if dtypes[0] not in DTYPES or (on == "cuda" and dtypes[0] not in HALVES):
        return f"dtype: {dtypes[0]} on {on}; supported: float16, bfloat16, and on CPU float32 and float64"
    if not query.dim():
        return None  # as its shape will say
    head_dim = query.shape[-1]
    if on == "cuda":
        gpu = unsupported_gpu(query.device)
        if gpu is not None:
            return f"device: {gpu}"
        if not is_fillable(head_dim):
            return f"query: head_dim {head_dim}; supported on CUDA: multiples of 8 up to {CUDA_MAX_HEAD_DIM}"
    elif not 1 <= head_dim <= CPU_MAX_HEAD_DIM:
        return f"query: head_dim {head_dim}; supported on CPU: 1 to {CPU_MAX_HEAD_DIM}"
    return None


def _wrong_shape(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> str | None:
    q, k, v = query.shape, key.shape, value.shape
    if len(q) < 2 or len(k) != len(q):
        return f"query, key: rank {len(q)} and {len(k)}; supported: equal, at least 2, [..., H, S, D]"
    if k[-1] != q[-1]:
        return f"key: head_dim {k[-1]} differs from query's {q[-1]}; they must be equal"
    if v[:-1] != k[:-1]:
        return "value: its shape differs from key's; they must be equal but for head_dim"
    if v[-1] != k[-1]:
        on_cuda = query.device.type == "cuda"
        if on_cuda and not is_fillable(v[-1]):
            return f"value: head_dim {v[-1]}; supported on CUDA: multiples of 8 up to {CUDA_MAX_HEAD_DIM}"
        if not on_cuda and not 1 <= v[-1] <= CPU_MAX_HEAD_DIM:
            return f"value: head_dim {v[-1]}; supported on CPU: 1 to {CPU_MAX_HEAD_DIM}"
    if k[:-3] != q[:-3]:
        return "key: its batch dimensions differ from query's; expand the smaller tensor"
    if len(q) == 2:
        return None
    if not enable_gqa and k[-3] != q[-3]:
        return f"key: {k[-3]} heads for {q[-3]} query heads; pass enable_gqa=True for grouped heads"
    if k[-3] < 1 or (enable_gqa and q[-3] % k[-3] != 0):
        return f"key: {k[-3]} heads for {q[-3]} query heads; supported: a divisor of the number of query heads"
    return None


def _wrong_scale(scale: float | None) -> str | None:
    if scale is not None and not 0 <= scale <= LARGEST:
        return f"scale: {in_words(scale)}; supported: 0 to 2^100"
    return None
