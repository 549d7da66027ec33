"""The derivative of attention: which calls are recorded, what is kept of them, and what is not there.

Where an input requires grad, either operator runs as attention_lse and keeps q, k, v, out and lse; a backward pass then
calls attention_backward, once, for the gradients that are needed. Nothing else computes or keeps more than the operator
that was called. Gradients of gradients and forward mode are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from dhp_safe_fa._operator.schema import BACKWARD, DEFAULTS, LIBRARY, OPERATORS, VARLEN, refuse

_attention_lse = torch.ops.dhp.attention_lse.default
_attention_backward = torch.ops.dhp.attention_backward.default
_OPTIONS = tuple(DEFAULTS.values())
_SHARED = len(_OPTIONS) - 1  # by the backward, which finds sinks in the lse
_PLACES = 3  # of these come before what the backward alone is given
_AFTER_AUTOGRAD = torch._C._after_autograd_keyset

# How an operator runs below what records it.
Run = Callable[..., Any]


def _refuse_forward_mode(operator: str) -> NoReturn:
    refuse(operator, "forward-mode differentiation (jvp, dual numbers) does not exist; supported: reverse mode")


def refuse_double_backward() -> NoReturn:
    refuse(BACKWARD, "gradients of gradients (double backward) do not exist; supported: one backward pass")


# What the names of the classes below begin with: by them, as names of autograd's nodes, policies know whose attention a
# backward pass differentiates.
NODES = "DhpAttention"

# Of a single level: inside of torch.func transforms the operators run for one of them at a time, as torch's own do.


class DhpAttention(_SingleLevelFunction):
    """(out, lse) of attention, recorded."""

    @staticmethod
    def forward(ctx: Any, run: Run, options: tuple[Any, ...], q: Tensor, k: Tensor, v: Tensor) -> Any:
        out, lse = run(_attention_lse, q, k, v, *options)
        ctx.set_materialize_grads(False)
        ctx.options = (*options, *_OPTIONS[len(options) :])[:_SHARED]
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if grad_out is None and grad_lse is None:
            return (None,) * 5
        q, k, v, out, lse = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        needed = ctx.needs_input_grad[2:]
        places, forms = ctx.options[:_PLACES], ctx.options[_PLACES:]
        found = _attention_backward(grad_out, q, k, v, out, lse, *places, grad_lse, *needed, *forms)
        return None, None, *(gradient if need else None for need, gradient in zip(needed, found, strict=True))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode("attention")


class DhpAttentionGradients(_SingleLevelFunction):
    """(dq, dk, dv), which cannot be differentiated once more."""

    @staticmethod
    def forward(ctx: Any, run: Run, *arguments: Any) -> Any:
        return run(_attention_backward, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        refuse_double_backward()

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode(BACKWARD)


def is_recorded(arguments: Sequence[Any]) -> bool:
    """Whether gradients are recorded, and one of the arguments takes part."""
    if forward_ad._current_level >= 0:  # then autograd finds out which tensors are dual numbers
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)


def record(name: str, run: Run, arguments: Sequence[Any]) -> Any:
    """A call of the operator as a node of autograd's graph."""
    if name == BACKWARD:
        return _apply(DhpAttentionGradients, run, *arguments)
    options = arguments[3:]
    if len(options) == len(_OPTIONS) and isinstance(options[-1], Tensor) and is_recorded(options[-1:]):
        refuse(name, "sinks: require grad; supported: gradients of q, k and v (sinks.detach() for these)")
    out, lse = _apply(DhpAttention, run, tuple(options), *arguments[:3])
    return out if name == "attention" else (out, lse)


def _apply(function: Any, *arguments: Any) -> Any:
    if torch._C._functorch.peek_interpreter_stack() is None:
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


# ---- without transforms ----------------------------------------------------------------------------------------------


def _below_autograd(keys: Any, operator: Any, *arguments: Any, **named: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator._handle.redispatch_boxed(keys & _AFTER_AUTOGRAD, *arguments, **named)


def _kernel(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.dhp, name).default

    def kernel(keys: Any, *arguments: Any) -> Any:
        if is_recorded(arguments):
            return record(name, partial(_below_autograd, keys), arguments)
        return _below_autograd(keys, operator, *arguments)

    return kernel


def _undifferentiated(keys: Any, *arguments: Any, **named: Any) -> Any:
    if is_recorded([*arguments, *named.values()]):
        refuse(VARLEN, "gradients do not exist; supported: calls under torch.no_grad(), or of tensors without grad")
    return _below_autograd(keys, getattr(torch.ops.dhp, VARLEN).default, *arguments, **named)


for _name in (*OPERATORS, BACKWARD):
    LIBRARY.impl(_name, _kernel(_name), "Autograd", with_keyset=True)
LIBRARY.impl(VARLEN, _undifferentiated, "Autograd", with_keyset=True)
