"""The derivative of attention: which calls are recorded, what is kept of them, and what is not there.

Where an input requires grad, attention runs as attention_lse and keeps q, k, v, out and lse; a backward pass then
calls attention_backward, once, for the gradients that are needed. attention_varlen, which has its lse, keeps its
lengths, too, and calls attention_varlen_backward. Sinks that require grad, of either, get theirs by
attention_sinks_backward. Nothing else computes or keeps more than the operator that was called. Gradients of gradients
and forward mode are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from dhp_safe_fa._operator.schema import (
    BACKWARD,
    BACKWARDS,
    LIBRARY,
    OPERATORS,
    SINKS_BACKWARD,
    VARLEN,
    VARLEN_BACKWARD,
    refuse,
)

_AFTER_AUTOGRAD = torch._C._after_autograd_keyset

# How an operator runs below what records it.
Run = Callable[..., Any]


class Derivative(NamedTuple):
    """How an operator is recorded: as one that takes q, k, v and options, and returns (out, lse)."""

    name: str  # of the operator, where something is refused
    forward: Any
    backward: Any  # takes grad_out, q, k, v, out, lse, the options but sinks, grad_lse, and which gradients are needed
    options: dict[str, Any]  # what they are where a call leaves them out

    @classmethod
    def of(cls, name: str, forward: str, backward: str) -> Derivative:
        operator, derivative = (getattr(torch.ops.dhp, each).default for each in (forward, backward))
        options = operator._schema.arguments[3:]
        return cls(name, operator, derivative, {each.name: each.default_value for each in options})


_ATTENTION = Derivative.of("attention", "attention_lse", BACKWARD)
_VARLEN = Derivative.of(VARLEN, VARLEN, VARLEN_BACKWARD)
_sinks_backward = getattr(torch.ops.dhp, SINKS_BACKWARD).default


def _refuse_forward_mode(operator: str) -> NoReturn:
    refuse(operator, "forward-mode differentiation (jvp, dual numbers) does not exist; supported: reverse mode")


def refuse_double_backward(operator: str) -> NoReturn:
    refuse(operator, "gradients of gradients (double backward) do not exist; supported: one backward pass")


# What the names of the classes below begin with: by them, as names of autograd's nodes, policies know whose attention a
# backward pass differentiates.
NODES = "DhpAttention"

# Of a single level: inside of torch.func transforms the operators run for one of them at a time, as torch's own do.


class _Node(_SingleLevelFunction):
    """What torch gives to its own functions of all levels alone, and asks of all."""

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        return (ctx._autograd_function_id,)


class DhpAttention(_Node):
    """(out, lse) of attention, recorded."""

    @staticmethod
    def forward(ctx: Any, run: Run, derivative: Derivative, *arguments: Any) -> Any:
        out, lse = run(derivative.forward, *arguments)
        ctx.set_materialize_grads(False)
        ctx.derivative = derivative
        # The other arguments in their order, with a hole for each tensor.
        ctx.numbers = [None if isinstance(argument, Tensor) else (argument,) for argument in arguments]
        ctx.save_for_backward(out, lse, *(argument for argument in arguments if isinstance(argument, Tensor)))
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        if grad_out is None and grad_lse is None:
            return (None,) * (2 + len(ctx.numbers))
        out, lse, *tensors = ctx.saved_tensors
        following = iter(tensors)
        q, k, v, *options = (next(following) if number is None else number[0] for number in ctx.numbers)
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        derivative = ctx.derivative
        given = derivative.options | dict(zip(derivative.options, options, strict=False))
        sinks = given.pop("sinks")  # which are in the lse
        needed = dict(zip(("q", "k", "v", *derivative.options), ctx.needs_input_grad[2:], strict=False))
        gradients: dict[str, Tensor] = {}
        if any(needed[name] for name in "qkv"):
            names = {f"need_d{name}": needed[name] for name in "qkv"}
            found = derivative.backward(grad_out, q, k, v, out, lse, **given, grad_lse=grad_lse, **names)
            gradients |= zip("qkv", found, strict=True)
        if needed.get("sinks"):
            gradients["sinks"] = _sinks_gradient(derivative.name, grad_out, out, lse, sinks, grad_lse)
        return None, None, *(gradients[name] if need else None for name, need in needed.items())

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode(ctx.derivative.name)


def _sinks_gradient(
    operator: str, grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, grad_lse: Tensor | None
) -> Tensor:
    if operator == VARLEN:  # one batch: it does not matter which rows are a sequence
        grad_out, out = (t.transpose(0, 1).unsqueeze(0) for t in (grad_out, out))
        lse, grad_lse = lse.unsqueeze(0), None if grad_lse is None else grad_lse.unsqueeze(0)
    return _sinks_backward(grad_out, out, lse, sinks, grad_lse)  # type: ignore[no-any-return]


class DhpAttentionGradients(_Node):
    """(dq, dk, dv), or the gradient of sinks: none can be differentiated once more."""

    @staticmethod
    def forward(ctx: Any, run: Run, name: str, *arguments: Any) -> Any:
        ctx.operator = name  # name is a method of autograd's nodes
        return run(getattr(torch.ops.dhp, name).default, *arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        refuse_double_backward(ctx.operator)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        _refuse_forward_mode(ctx.operator)


def is_recorded(arguments: Sequence[Any]) -> bool:
    """Whether gradients are recorded, and one of the arguments takes part."""
    if forward_ad._current_level >= 0:  # then autograd finds out which tensors are dual numbers
        return True
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments)


def record(name: str, run: Run, arguments: Sequence[Any]) -> Any:
    """A call of the operator as a node of autograd's graph."""
    if name in BACKWARDS:
        return _apply(DhpAttentionGradients, run, name, *arguments)
    derivative = _VARLEN if name == VARLEN else _ATTENTION
    _refuse_undifferentiable(name, arguments, dict(zip(derivative.options, arguments[3:], strict=False)))
    out, lse = _apply(DhpAttention, run, derivative, *arguments)
    return out if name == "attention" else (out, lse)


def _refuse_undifferentiable(name: str, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
    if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*arguments):
        return  # forward mode, which is refused where there are dual numbers
    window = tuple(options.get(f"window_{side}", -1) for side in ("left", "right"))
    is_cuda = any(isinstance(argument, Tensor) and argument.is_cuda for argument in arguments[:3])
    if name != VARLEN and is_cuda and window != (-1, -1):
        supported = "none, (-1, -1), but under torch.no_grad(), or of tensors without grad"
        refuse(name, f"window: {window}, of which a gradient is recorded; supported on CUDA: {supported}")
    if options.get("page_table") is not None:
        supported = "cu_seqlens_k in its place, calls under torch.no_grad(), or of tensors without grad"
        refuse(name, f"page_table: given, but a cache in pages has no gradients; supported: {supported}")


def _apply(function: Any, *arguments: Any) -> Any:
    if torch._C._functorch.peek_interpreter_stack() is None:
        return function.apply(*arguments)
    with enable_single_level_autograd_function():
        return function.apply(*arguments)


# ---- without transforms ----------------------------------------------------------------------------------------------


def _below_autograd(keys: Any, operator: Any, *arguments: Any) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator._handle.redispatch_boxed(keys & _AFTER_AUTOGRAD, *arguments)


def _kernel(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.dhp, name).default

    def kernel(keys: Any, *arguments: Any) -> Any:
        if is_recorded(arguments):
            return record(name, partial(_below_autograd, keys), arguments)
        return _below_autograd(keys, operator, *arguments)

    return kernel


for _name in (*OPERATORS, VARLEN, *BACKWARDS):
    LIBRARY.impl(_name, _kernel(_name), "Autograd", with_keyset=True)
