"""The Python functions over the operators.

The operators' kernels are in csrc/torch; schemas, fake kernels, derivatives and the rules of autocast and vmap in
dhp_safe_fa/_operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dhp_safe_fa import _widths, _windows
from dhp_safe_fa._operator import autocast, fake, gradients, transforms  # noqa: F401  (importing registers them)
from dhp_safe_fa._operator.scalars import number_of, refuse_tensors, shown, wrong_flag
from dhp_safe_fa._operator.schema import DEFAULTS, VARLEN, refuse
from dhp_safe_fa._operator.wrong_types import refuse_wrong_types

# Bound once: looking them up and choosing the overload would cost every call some microseconds.
_attention = torch.ops.dhp.attention.default
_attention_lse = torch.ops.dhp.attention_lse.default
_DEFAULT_OPTIONS = tuple(DEFAULTS.values())
_NO_WINDOW = (-1, -1)
_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_exclude = torch._C._dispatch_tls_set_dispatch_key_excluded


def _somebody_looks_on() -> bool:
    """Something that sees or transforms the calls: it must see them, and find autograd, as they are."""
    return (
        forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _run(operator: torch._ops.OpOverload[..., Any], q: Tensor, k: Tensor, v: Tensor, *options: object) -> Any:
    """A call of the operator, a tenth to a half faster where it is eager and small.

    Defaults are left out, and what an overload does on top of its C function: each takes torch some 1 µs. So does the
    way through autograd, which is in Python.
    """
    if torch.compiler.is_compiling():
        return operator(q, k, v, *options)
    count = len(options)
    while count and options[count - 1] is _DEFAULT_OPTIONS[count - 1]:  # not ==, which of a symbol makes a guard
        count -= 1
    around_autograd = (
        type(q) is type(k) is type(v) is Tensor
        and not _somebody_looks_on()
        and not _is_excluded(_AUTOGRAD)
        and not (
            torch.is_grad_enabled()
            and (q.requires_grad or k.requires_grad or v.requires_grad or getattr(options[-1], "requires_grad", False))
        )  # the last option is sinks
    )
    if around_autograd:
        _exclude(_AUTOGRAD, True)
    try:
        return operator._op(q, k, v, *options[:count])  # the one line for both: torch.jit.trace compares it
    except Exception:  # torch says so of some types, and of None nothing that helps
        refuse_wrong_types("attention", (q, k, v, *options))
        raise
    finally:
        if around_autograd:
            _exclude(_AUTOGRAD, False)


def _asked(question: Callable[..., bool], *given: object) -> bool:
    """Of tensors, without a function mode seeing it, or torch.jit.trace: what they see are calls."""
    if torch.compiler.is_compiling():
        return question(*given)
    trace = torch._C._get_tracing_state()  # where there is one, sizes are tensors, and to compare them is a warning
    if trace is not None:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        if not torch._C._is_torch_function_mode_enabled():
            return question(*given)
        with torch._C.DisableTorchFunction():
            return question(*given)
    finally:
        if trace is not None:
            torch._C._set_tracing_state(trace)  # type: ignore[attr-defined]


def _is_plain(softcap: float | None, sinks: Tensor | None) -> bool:
    """Neither is there."""
    return not softcap and sinks is None


def _sides(window: tuple[int, int], operator: str = "attention") -> tuple[int, int]:
    """window, or a refusal. A side is not computed with: it may be a symbol, or of torch.jit.trace."""
    try:
        left, right = window
        if all(isinstance(side, (int, torch.SymInt)) or hasattr(side, "__index__") for side in (left, right)):
            if isinstance(left, Tensor) or isinstance(right, Tensor):
                refuse_tensors(operator, {}, {"window, left": left, "window, right": right})
            return left, right
    except (TypeError, ValueError):
        pass
    refuse(operator, f"window: {shown(window)}; expected (left, right), two numbers of keys")


def _attend(
    operator: torch._ops.OpOverload[..., Any],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    scale: float | None,
    causal_offset: int,
    window: tuple[int, int],
    softcap: float | None,
    sinks: Tensor | None,
) -> tuple[Tensor, Any]:
    """A call of the operator, or of that of packed sequences where CUDA has what is asked for only there; values of a
    head_dim of their own filled up. out, and lse if the operator returns it."""
    if wrong := wrong_flag(is_causal):
        refuse("attention", f"is_causal: {wrong}")
    sides = _sides(window)
    if isinstance(scale, Tensor) or isinstance(softcap, Tensor) or isinstance(causal_offset, Tensor):
        refuse_tensors("attention", {"scale": scale, "softcap": softcap}, {"causal_offset": causal_offset})
        scale, softcap = number_of(scale), number_of(softcap)
    values = v
    if _asked(_widths.differ, q, k, v):
        q, k, v, scale = _widths.fill(q, k, v, scale)
    is_plain = sides == _NO_WINDOW and _is_plain(softcap, sinks)
    lse: Tensor | None = None
    if not is_plain and _asked(_windows.are_packed, q, k, v, is_causal, sides, softcap, sinks, scale):
        out, lse = _windows.attend(q, k, v, is_causal, scale, causal_offset, sides, softcap, sinks)
    else:
        found = _run(operator, q, k, v, is_causal, scale, causal_offset, *sides, softcap, sinks)
        out, lse = found if operator is _attention_lse else (found, lse)
    return (out if v is values else _widths.narrow(out, values)), lse


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int = 0,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """softmax(scale · q kᵀ) v, FlashAttention's algorithm (Dao et al., 2022), constant-time in the content of q, k, v.

    Args:
        q: queries, [B, Hq, Sq, D]; float16 or bfloat16, on the CPU also float32 and float64. Any strides; a layout that
            cannot be read in place (last dimension not contiguous; on CUDA also rows that are not 16-byte aligned) is
            copied.
        k: keys, [B, Hk, Sk, D]; Hk divides Hq, query head h reads key head h // (Hq // Hk).
        v: values, [B, Hk, Sk, Dv]; Dv may be any head_dim. Where it is not D, CUDA fills up the narrower with zeros.
        is_causal: query i sees key j only if j <= i + causal_offset.
        scale: factor of the scores, 0 to 2^100; 1/sqrt(D) by default. Not differentiated.
        causal_offset: 0 is the alignment of torch's SDPA, Sk - Sq that of FlashAttention (and of cached decoding). Only
            with is_causal or a window.
        window: (left, right), in keys; query i sees key j only if i + causal_offset - left <= j <= i + causal_offset +
            right, and under is_causal none behind i + causal_offset. -1: no bound on that side. On CUDA where no
            gradient is recorded; with a left side, wider than a segment (4096 keys at head_dim 128: docs/kernel.md) and
            over more keys, the batch goes as packed sequences, copied unless stored [B, S, H, D].
        softcap: each scaled score becomes softcap · tanh(score / softcap), as in Gemma 2. None, or 0: it stays. Neither
            it nor scale / softcap may be more than 2^100, but of float64. On CUDA where no gradient is recorded, as
            packed sequences.
        sinks: [Hq], float32 (float64 for float64 inputs); exp(sinks[h]) is one more term of the sum of each row of
            query head h, with a value of 0, as in gpt-oss (Xiao et al., 2023, have learned keys for it). On CUDA as a
            soft cap.

    Returns:
        [B, Hq, Sq, Dv], q's dtype, strides as torch.empty_like(q) where Dv is D, else contiguous. A row that sees no
        key is 0. Differentiable, sinks too, once and in reverse mode; where an input requires grad, the lse is kept
        beside q, k, v and the result.

    Raises:
        RuntimeError: names the argument, what was given and what is supported. head_dim: 1 to 256 on CPU; on CUDA (a
            Hopper GPU) multiples of 8 up to ``dhp_safe_fa._inspect.build_info()["max_head_dim_cuda"]``. Also for
            forward-mode differentiation, and when a gradient is differentiated again.
    """
    return _attend(_attention, q, k, v, is_causal, scale, causal_offset, window, softcap, sinks)[0]


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int = 0,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention` and, per query row, the natural logarithm of the sum of exp(scaled scores).

    Args:
        q, k, v, is_causal, scale, causal_offset, window, softcap, sinks: as for :func:`attention`.

    Returns:
        out as :func:`attention`; lse, [B, Hq, Sq], float32 (float64 for float64 inputs); where a row sees no key its
        head's sink, or -inf without sinks. Both are differentiable.

    Raises:
        RuntimeError: as :func:`attention`.
    """
    out, lse = _attend(_attention_lse, q, k, v, is_causal, scale, causal_offset, window, softcap, sinks)
    return out, lse


Alignment = Literal["bottom-right", "top-left"]


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    alignment: Alignment = "bottom-right",
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> Tensor:
    """:func:`attention` within each of many sequences of any lengths, packed one behind the other.

    A row has the bits that it has in a call of :func:`attention` for its sequence alone, wherever its keys lie; and so
    have its gradients.

    Args:
        q: [query tokens, Hq, D]; dtypes and strides as :func:`attention`.
        k, v: [key tokens, Hk, D]; Hk divides Hq. With page_table a cache in pages, [pages, page_size, Hk, D], of 16,
            32, 64, 128 or 256 keys. v may have a head_dim of its own, Dv; on CUDA not with page_table.
        cu_seqlens_q: int32 [sequences + 1]; sequence b has the rows from cu_seqlens_q[b] up to cu_seqlens_q[b + 1].
            Ascending from 0; rows behind the last belong to no sequence and become 0, their lse -inf.
        cu_seqlens_k: the same of keys and values. None with page_table.
        max_seqlen_q, max_seqlen_k: no sequence has more query rows, or keys that count.
        is_causal: a query sees no key behind its place among the keys, which `alignment` says.
        scale: as :func:`attention`.
        alignment: where query i of a sequence stands among its keys, for is_causal and window: "bottom-right", as in
            FlashAttention and cached decoding, the last query at the last key that counts; "top-left", as in torch's
            SDPA, at key i.
        window: (left, right), as :func:`attention`, around that place.
        softcap, sinks: as :func:`attention`.
        seqused_k: int32 [sequences]; of the keys of sequence b only the first seqused_k[b] count. All by default;
            needed with page_table.
        page_table: int32 [sequences, pages of a sequence]; key j of sequence b is row j % page_size of page
            page_table[b, j // page_size] of k and v. Pages may come in any order, and sequences may share them. Entries
            behind a sequence's last key may be anything.
        leftpad_k: int32 [sequences]; of the keys of sequence b the first leftpad_k[b] do not count, as if the sequence
            began behind them: what seqused_k says counts them still. None with page_table.

    Returns:
        [query tokens, Hq, Dv], contiguous, q's dtype. A row that sees no key is 0. Differentiable, sinks too, once and
        in reverse mode, but on the CPU alone and not with page_table; rows of no sequence, and keys that do not count,
        have gradient 0.

    Raises:
        RuntimeError: names the argument, what was given and what is supported. On the CPU lengths and pages are looked
            at before anything is computed. On CUDA they stay on the device, so that graphs can be replayed with others:
            what is wrong with cu_seqlens_q makes all rows NaN, what is wrong with the keys or pages of a sequence its
            rows. Also for a page_table where an input requires grad and gradients are recorded; for forward-mode
            differentiation, and when a gradient is differentiated again.
    """
    return attention_varlen_lse(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        is_causal=is_causal,
        scale=scale,
        alignment=alignment,
        window=window,
        softcap=softcap,
        sinks=sinks,
        seqused_k=seqused_k,
        page_table=page_table,
        leftpad_k=leftpad_k,
    )[0]


def attention_varlen_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    alignment: Alignment = "bottom-right",
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
    seqused_k: Tensor | None = None,
    page_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """:func:`attention_varlen` and, per query row, the natural logarithm of the sum of exp(scaled scores).

    Args:
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k: as for :func:`attention_varlen`.
        is_causal, scale, alignment, window, softcap, sinks, seqused_k, page_table, leftpad_k: as for
            :func:`attention_varlen`.

    Returns:
        out as :func:`attention_varlen`; lse, [Hq, query tokens], float32 (float64 for float64 inputs); where a row sees
        no key its head's sink, or -inf without sinks; -inf in rows of no sequence. Both are differentiable.

    Raises:
        RuntimeError: as :func:`attention_varlen`.
    """
    if wrong := wrong_flag(is_causal):
        refuse(VARLEN, f"is_causal: {wrong}")
    if not isinstance(alignment, str) or alignment not in ("bottom-right", "top-left"):
        refuse(VARLEN, f"alignment: {shown(alignment)}; supported: 'bottom-right', 'top-left'")
    sequences = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    places = alignment == "bottom-right", *_sides(window, VARLEN)
    if any(isinstance(number, Tensor) for number in (scale, softcap, max_seqlen_q, max_seqlen_k)):
        lengths = {"max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}
        refuse_tensors(VARLEN, {"scale": scale, "softcap": softcap}, lengths)
        scale, softcap = number_of(scale), number_of(softcap)
    rest = softcap, seqused_k, page_table, leftpad_k, sinks
    values = v
    if page_table is None and _asked(_widths.differ, q, k, v):
        q, k, v, scale = _widths.fill(q, k, v, scale)
    given = q, k, v, *sequences, is_causal, scale, *places, *rest
    try:
        out, lse = torch.ops.dhp.attention_varlen(*given)
    except Exception:
        refuse_wrong_types(VARLEN, given)
        raise
    return (out if v is values else _widths.narrow(out, values)), lse
