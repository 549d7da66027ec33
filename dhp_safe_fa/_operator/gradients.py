"""The derivative of attention: which calls are recorded, what is kept of them, and what is not there.

Where an input requires grad, either operator runs as attention_lse and keeps q, k, v, out and lse; a backward pass then
calls attention_backward, once, for the gradients that are needed. Nothing else computes or keeps more than the operator
that was called. Gradients of gradients and forward mode are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dhp_safe_fa._operator.schema import BACKWARD, DEFAULTS, LIBRARY, OPERATORS, refuse

_attention_lse = torch.ops.dhp.attention_lse.default
_attention_backward = torch.ops.dhp.attention_backward.default

# Policies know by the names of these nodes whose attention a backward pass differentiates (_recognized.py).
NODES = "DhpAttention"


_AFTER_AUTOGRAD = torch._C._after_autograd_keyset


def _below_autograd(operator: Any, keys: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator._handle.redispatch_boxed(keys & _AFTER_AUTOGRAD, *arguments)


def _refuse_forward_mode(operator: str) -> NoReturn:
    refuse(operator, "forward-mode differentiation (jvp, dual numbers) does not exist; supported: reverse mode")


class DhpAttention(torch.autograd.Function):
    """(out, lse) of attention, recorded."""

    @staticmethod
    def forward(ctx: Any, keys: Any, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = _below_autograd(_attention_lse, keys, q, k, v, *options)
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        q, k, v, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        options = (*ctx.options, *list(DEFAULTS.values())[len(ctx.options) :])
        needed = ctx.needs_input_grad[2:]
        found = _attention_backward(grad_out, q, k, v, out, lse, *options, grad_lse, *needed)
        return None, None, *(gradient if need else None for need, gradient in zip(needed, found, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode("attention")


class DhpAttentionGradients(torch.autograd.Function):
    """(dq, dk, dv), which cannot be differentiated once more."""

    @staticmethod
    def forward(ctx: Any, keys: Any, *arguments: Any) -> Any:
        return _below_autograd(_attention_backward, keys, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        refuse(BACKWARD, "gradients of gradients (double backward) do not exist; supported: one backward pass")

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode(BACKWARD)


# autograd.Function.apply itself would refuse to run inside of a torch.func transform, which it expects to have been
# handed over as a whole. A kernel is called below that, for one transform at a time, as those of torch's operators are.
_record = super(torch.autograd.Function, DhpAttention).apply
_record_gradients = super(torch.autograd.Function, DhpAttentionGradients).apply


def _is_recorded(*tensors: Any) -> bool:
    if forward_ad._current_level >= 0:  # then autograd finds out which tensors are dual numbers
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*tensors)


def _kernel(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.dhp, name).default

    def kernel(keys: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
        if not _is_recorded(q, k, v):
            return _below_autograd(operator, keys, q, k, v, *options)
        out, lse = _record(keys, options, q, k, v)
        return out if name == "attention" else (out, lse)

    return kernel


def _backward_kernel(keys: Any, *arguments: Any) -> Any:
    if not _is_recorded(*arguments):
        return _below_autograd(_attention_backward, keys, *arguments)
    return _record_gradients(keys, *arguments)


for _name in OPERATORS:
    LIBRARY.impl(_name, _kernel(_name), "Autograd", with_keyset=True)
LIBRARY.impl(BACKWARD, _backward_kernel, "Autograd", with_keyset=True)
