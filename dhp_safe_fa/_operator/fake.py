"""Fake kernels: what the operators return and refuse, as far as it is known without data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dhp_safe_fa._operator import softcaps
from dhp_safe_fa._operator.schema import (
    BACKWARD,
    CPU_MAX_HEAD_DIM,
    DEFAULTS,
    DTYPES,
    LARGEST,
    LIBRARY,
    PAGE_SIZES,
    SINKS_BACKWARD,
    VARLEN,
    VARLEN_BACKWARD,
    refuse,
)

# What packed sequences bring beside q, k and v.
METADATA = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table", "leftpad_k")


class _Checks:
    """What csrc/torch and the C core check of one call, in their words; of several mistakes they may name another one
    first."""

    def __init__(
        self,
        operator: str,
        shape_of: Callable[[Tensor], list[int]] = lambda t: list(t.shape),
        is_paged: bool = False,
    ) -> None:
        """shape_of: how the caller wrote the shape of a tensor [B, H, S, D]. is_paged: k and v belong to no batch."""
        self._operator = operator
        self._shape_of = shape_of
        self._is_paged = is_paged

    def refuse(self, sentence: str) -> None:
        refuse(self._operator, sentence)

    def given(self, shape: str, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is None:  # the schema's Tensor lets it through
                self.refuse(f"{name}: None; expected a tensor {shape}")

    def on_device_of(self, q: Tensor, model_name: str = "q", **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None and tensor.device != q.device:
                devices = f"on {tensor.device}, {model_name} on {q.device}"
                self.refuse(f"{name}: {devices}; all tensors must be on the same device")

    def described(self, rank: int = 4, shape: str = "[B, H, S, D]", *, why: str = "", **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            if tensor.dim() != rank:
                self.refuse(f"{name}: rank {tensor.dim()}; expected {rank} dimensions {shape}{why}")
            if tensor.dtype not in DTYPES:
                supported = "float16, bfloat16, and on the CPU float32 and float64"
                self.refuse(f"{name}: dtype {_dtype(tensor)}; supported: {supported}")

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool,
        scale: float | None,
        causal_offset: int,
        window_left: int,
        window_right: int,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> None:
        for name, tensor in {"k": k, "v": v}.items():
            if tensor.dtype != q.dtype:
                self.refuse(f"{name}: dtype {_dtype(tensor)} differs from q's {_dtype(q)}; they must agree")
        shapes = f"(k {self._shape_of(k)}, q {self._shape_of(q)})"
        for dim in range(3):
            if k.size(dim) != v.size(dim):
                differ = f"shape {self._shape_of(v)} differs from k's {self._shape_of(k)}"
                self.refuse(f"v: {differ}; they must be equal but for head_dim")
        if not self._is_paged and k.size(0) != q.size(0):
            self.refuse(f"k: batch {k.size(0)} differs from q's batch {q.size(0)} {shapes}")
        if k.size(3) != q.size(3):
            self.refuse(f"k: head_dim {k.size(3)} differs from q's head_dim {q.size(3)} {shapes}")
        for name, tensor in {"q": q, "v": v}.items():
            if tensor.size(3) < 1:
                self.refuse(f"{name}: head_dim 0 in shape {self._shape_of(tensor)}; supported: 1 to {CPU_MAX_HEAD_DIM}")
        if k.size(1) < 1 or q.size(1) % k.size(1) != 0:
            self.refuse(
                f"k: {k.size(1)} key heads for {q.size(1)} query heads; "
                f"the number of query heads must be a multiple of it {shapes}"
            )
        if scale is not None and not 0 <= scale <= LARGEST:
            self.refuse(f"scale: {scale:g}; supported: 0 to 2^100")
        if window_left < -1 or window_right < -1:
            supported = "on each side -1 (no bound) or a number of keys, not negative"
            self.refuse(f"window: ({window_left}, {window_right}); supported: {supported}")
        if not is_causal and window_left == window_right == -1 and causal_offset != 0:
            self.refuse(
                f"causal_offset: {causal_offset} without is_causal or a window; "
                "supported: 0, or is_causal=True or a window with it"
            )
        refusal = softcaps.refusal(softcap, scale, q)
        if refusal:
            self.refuse(refusal)
        for name, tensor in {"q": q, "v": v}.items():
            if q.device.type == "cpu" and tensor.size(3) > CPU_MAX_HEAD_DIM:
                self.refuse(f"{name}: head_dim {tensor.size(3)}; supported on CPU: 1 to {CPU_MAX_HEAD_DIM}")
        self.sinks(q, sinks)

    def sinks(self, q: Tensor, sinks: Tensor | None) -> None:
        if sinks is None:
            return
        self.on_device_of(q, sinks=sinks)
        if sinks.dim() != 1 or sinks.size(0) != q.size(1):
            self.refuse(f"sinks: shape {list(sinks.shape)}; expected [{q.size(1)}], one number for each query head")
        if sinks.dtype != row_dtype(q):
            self.refuse(f"sinks: dtype {_dtype(sinks)}; expected {str(row_dtype(q)).removeprefix('torch.')}")

    def numbers(self, sizes: Sequence[int], shape: str, **tensors: Tensor | None) -> None:
        """int32 of these sizes; -1: any."""
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            pairs = zip(sizes, tensor.shape, strict=False)
            if tensor.dim() != len(sizes) or any(want not in (-1, size) for want, size in pairs):
                self.refuse(f"{name}: shape {list(tensor.shape)}; expected {shape}")
            if tensor.dtype != torch.int32:
                self.refuse(f"{name}: dtype {_dtype(tensor)}; expected int32")

    def like(self, model: Tensor, model_name: str, of_dtype: str = "q", **tensors: Tensor) -> None:
        """of_dtype: what is said to have the model's dtype."""
        for name, tensor in tensors.items():
            if tensor.dtype != model.dtype:
                differ = f"dtype {_dtype(tensor)} differs from {of_dtype}'s {_dtype(model)}"
                self.refuse(f"{name}: {differ}; they must agree")
            for dim in range(model.dim()):
                if tensor.size(dim) != model.size(dim):
                    shapes = f"shape {list(tensor.shape)} differs from {model_name}'s {list(model.shape)}"
                    self.refuse(f"{name}: {shapes}; they must be equal")

    def results(self, q: Tensor, v: Tensor, out: Tensor) -> None:
        if out.dtype != q.dtype:
            self.refuse(f"out: dtype {_dtype(out)} differs from q's {_dtype(q)}; they must agree")
        last = q.dim() - 1
        for dim in range(q.dim()):
            if out.size(dim) != (v if dim == last else q).size(dim):
                shapes = f"shape {list(out.shape)} differs from q's {list(q.shape)} with v's head_dim {v.size(last)}"
                self.refuse(f"out: {shapes}; they must be equal")

    def rows_of(self, q: Tensor, sizes: Sequence[int], **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.dim() != len(sizes) or any(size != want for size, want in zip(tensor.shape, sizes, strict=True)):
                expected = f"{list(sizes)}, one number for each query row"
                self.refuse(f"{name}: shape {list(tensor.shape)}; expected {expected}")
            if tensor.dtype != row_dtype(q):
                expected = str(row_dtype(q)).removeprefix("torch.")
                self.refuse(f"{name}: dtype {_dtype(tensor)}; expected {expected}")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def row_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _bound(operator: str, given: Sequence[Any], named: Mapping[str, Any]) -> SimpleNamespace:
    """The arguments of a call by their names in the schema, with the defaults of those that it leaves out."""
    arguments = getattr(torch.ops.dhp, operator).default._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments}
    return SimpleNamespace(**(defaults | dict(zip(defaults, given, strict=False)) | dict(named)))


def _options(call: SimpleNamespace) -> dict[str, Any]:
    """Those of :func:`dhp_safe_fa.attention` that another operator's call has, too."""
    return {name: value for name, value in vars(call).items() if name in DEFAULTS}


def check(q: Tensor, k: Tensor, v: Tensor, *given: Any, **named: Any) -> None:
    checks = _Checks("attention")
    checks.given("[B, H, S, D]", q=q, k=k, v=v)
    checks.on_device_of(q, k=k, v=v)
    checks.described(q=q, k=k, v=v)
    checks.call(**vars(_bound("attention", (q, k, v, *given), named)))


def _empty_out(q: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(q) if q.size(3) == v.size(3) else q.new_empty([*q.shape[:3], v.size(3)])


@torch.library.register_fake("dhp::attention", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _attention(q: Tensor, k: Tensor, v: Tensor, *options: object, **named: object) -> Tensor:
    check(q, k, v, *options, **named)
    return _empty_out(q, v)


@torch.library.register_fake("dhp::attention_lse", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _attention_lse(q: Tensor, k: Tensor, v: Tensor, *options: object, **named: object) -> tuple[Tensor, Tensor]:
    check(q, k, v, *options, **named)
    return _empty_out(q, v), q.new_empty(q.shape[:3], dtype=row_dtype(q))


def _gradients(checks: _Checks, call: SimpleNamespace, rank: int, shape: str, row_sizes: Sequence[int]) -> None:
    """What a backward is given beside its forward's inputs; shape, of this rank: of grad_out and out, in words."""
    tensors = {"grad_out": call.grad_out, "out": call.out, "lse": call.lse, "grad_lse": call.grad_lse}
    checks.on_device_of(call.q, **tensors)
    checks.described(rank, shape, grad_out=call.grad_out, out=call.out)
    checks.rows_of(call.q, row_sizes, lse=call.lse, grad_lse=call.grad_lse)


def _needed(call: SimpleNamespace) -> list[tuple[bool, Tensor]]:
    return [(call.need_dq, call.q), (call.need_dk, call.k), (call.need_dv, call.v)]


@torch.library.register_fake(f"dhp::{BACKWARD}", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _backward(*given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _bound(BACKWARD, given, named)
    q, k, v = call.q, call.k, call.v
    checks = _Checks(BACKWARD)
    checks.given("[B, H, S, D]", grad_out=call.grad_out, out=call.out)
    checks.given("[B, H, S]", lse=call.lse)
    checks.given("[B, H, S, D]", q=q, k=k, v=v)
    checks.on_device_of(q, k=k, v=v)
    checks.described(q=q, k=k, v=v)
    _gradients(checks, call, 4, "[B, H, S, D]", q.shape[:3])
    checks.call(q, k, v, **_options(call))
    checks.results(q, v, call.out)
    checks.like(call.out, "out", grad_out=call.grad_out)
    dq, dk, dv = (torch.empty_like(like) if need else q.new_empty([0]) for need, like in _needed(call))
    return dq, dk, dv


@torch.library.register_fake(f"dhp::{SINKS_BACKWARD}", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _sinks_backward(
    grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, grad_lse: Tensor | None = None
) -> Tensor:
    checks = _Checks(SINKS_BACKWARD)
    checks.given("[B, H, S, D]", grad_out=grad_out, out=out)
    checks.given("[B, H, S]", lse=lse)
    checks.given("[H]", sinks=sinks)
    checks.on_device_of(out, "out", grad_out=grad_out, lse=lse, sinks=sinks, grad_lse=grad_lse)
    checks.described(out=out, grad_out=grad_out)
    checks.rows_of(out, out.shape[:3], lse=lse, grad_lse=grad_lse)
    checks.sinks(out, sinks)
    checks.like(out, "out", "out", grad_out=grad_out)
    return out.new_empty([out.size(1)], dtype=row_dtype(out))


# ---- packed sequences ------------------------------------------------------------------------------------------------


def _check_packed(checks: _Checks, call: SimpleNamespace) -> None:
    """What tensors of packed sequences say of themselves."""
    q, k, v, cu_seqlens_q = call.q, call.k, call.v, call.cu_seqlens_q
    checks.given("[tokens, H, D]", q=q)
    checks.given("[tokens, H, D] or [pages, page_size, H, D]", k=k, v=v)
    checks.given("[sequences + 1]", cu_seqlens_q=cu_seqlens_q)
    checks.on_device_of(q, k=k, v=v)
    checks.described(3, "[tokens, H, D]", q=q)
    if call.page_table is None:
        checks.described(3, "[tokens, H, D]", k=k, v=v)
    else:
        checks.described(4, "[pages, page_size, H, D]", why=", because of page_table", k=k, v=v)
    if cu_seqlens_q.dim() != 1 or cu_seqlens_q.size(0) < 1:
        checks.refuse(f"cu_seqlens_q: shape {list(cu_seqlens_q.shape)}; expected [sequences + 1]")
    metadata = {name: getattr(call, name) for name in METADATA}
    checks.on_device_of(q, **metadata)
    if call.cu_seqlens_k is not None and call.page_table is not None:
        checks.refuse("cu_seqlens_k: given beside page_table; supported: one of them")
    if call.cu_seqlens_k is None and call.page_table is None:
        checks.refuse("cu_seqlens_k: None; expected a tensor [sequences + 1], or page_table in its place")
    if call.page_table is not None and call.seqused_k is None:
        checks.refuse("seqused_k: None beside page_table; expected a tensor [sequences]")
    n = cu_seqlens_q.size(0) - 1
    checks.numbers([n + 1], f"[{n + 1}]", cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=call.cu_seqlens_k)
    checks.numbers([n], f"[{n}]", seqused_k=call.seqused_k, leftpad_k=call.leftpad_k)
    checks.numbers([n, -1], f"[{n}, pages of a sequence]", page_table=call.page_table)


def _check_packed_call(operator: str, call: SimpleNamespace) -> None:
    """How they fit to one another, and to what else is asked for."""
    is_paged = call.page_table is not None
    rows = call.q.transpose(0, 1).unsqueeze(0)
    keys, values = (t.transpose(1, 2) if is_paged else t.transpose(0, 1).unsqueeze(0) for t in (call.k, call.v))
    shapes = {id(rows): call.q.shape, id(keys): call.k.shape, id(values): call.v.shape}
    checks = _Checks(operator, lambda t: list(shapes[id(t)]), is_paged=is_paged)
    checks.call(rows, keys, values, causal_offset=0, **_options(call))
    if is_paged and call.k.size(1) not in PAGE_SIZES:
        checks.refuse(f"k: pages of {call.k.size(1)} keys; supported: {', '.join(map(str, PAGE_SIZES))}")
    for name, most in (("max_seqlen_q", call.max_seqlen_q), ("max_seqlen_k", call.max_seqlen_k)):
        if isinstance(most, int) and most < 0:  # a symbol is looked at once it is a number
            checks.refuse(f"{name}: {most}; supported: not negative")
    if is_paged and call.leftpad_k is not None:
        because = "because a sequence may begin with any page"
        checks.refuse(f"leftpad_k: given beside page_table; supported: None, {because}")


@torch.library.register_fake(f"dhp::{VARLEN}", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _varlen(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
    call = _bound(VARLEN, given, named)
    q, v = call.q, call.v
    _check_packed(_Checks(VARLEN), call)
    _check_packed_call(VARLEN, call)
    return q.new_empty([*q.shape[:2], v.size(-1)]), q.new_empty([q.size(1), q.size(0)], dtype=row_dtype(q))


@torch.library.register_fake(f"dhp::{VARLEN_BACKWARD}", lib=LIBRARY)  # type: ignore[untyped-decorator]
def _varlen_backward(*given: Any, **named: Any) -> tuple[Tensor, Tensor, Tensor]:
    call = _bound(VARLEN_BACKWARD, given, named)
    checks = _Checks(VARLEN_BACKWARD)
    checks.given("[tokens, H, D]", grad_out=call.grad_out, out=call.out)
    checks.given("[H, tokens]", lse=call.lse)
    _check_packed(checks, call)
    _gradients(checks, call, 3, "[tokens, H, D]", [call.q.size(1), call.q.size(0)])
    if call.page_table is not None:
        checks.refuse("page_table: given, but a cache in pages has no gradients; supported: cu_seqlens_k in its place")
    _check_packed_call(VARLEN_BACKWARD, call)
    checks.results(call.q, call.v, call.out)
    checks.like(call.out, "out", grad_out=call.grad_out)
    dq, dk, dv = (like.new_empty(like.shape if need else [0]) for need, like in _needed(call))
    return dq, dk, dv
