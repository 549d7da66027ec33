"""torch.func: vmap becomes more batches; grad, vjp and jvp are autograd on tensors of one level."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dhp_safe_fa._operator.gradients import is_recorded, record
from dhp_safe_fa._operator.schema import BACKWARD, LIBRARY, OPERATORS, refuse

# [B, H, S, D], but for what has one number a row, or a head.
_RANKS = {"lse": 3, "grad_lse": 3, "sinks": 1}


def _rule(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.dhp, name).default
    ranks = [_RANKS.get(argument.name, 4) for argument in operator._schema.arguments]

    def rule(*arguments: Any) -> Any:
        # Imported by the first transform: at the start it would cost everybody a part of the import time.
        from torch._functorch.pyfunctorch import FunctionalizeInterpreter as Functionalize
        from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

        transform: Any = retrieve_current_functorch_interpreter()
        if isinstance(transform, VmapInterpreter):
            return _mapped(name, operator, transform, list(zip(arguments, ranks, strict=False)))
        if isinstance(transform, Functionalize):
            refuse(name, "torch.func.functionalize is not supported; vmap, grad and vjp are")
        arguments, _ = transform.lift(arguments, {})
        if is_recorded(arguments):
            return record(name, partial(_recording, transform), arguments)
        return _lowered(transform, operator, *arguments)

    return rule


# ---- grad, vjp, jvp ------------------------------------------------------------------------------------------------


def _lowered(transform: Any, operator: Any, *arguments: Any) -> Any:
    """The operator on what this level's tensors wrap, and its results wrapped."""
    level = transform.level()

    def unwrapped(argument: Any) -> Any:
        return torch._C._functorch._unwrap_for_grad(argument, level) if isinstance(argument, Tensor) else argument

    inner = [unwrapped(argument) for argument in arguments]
    with transform.lower():
        result = operator(*inner)
    if isinstance(result, Tensor):
        return torch._C._functorch._wrap_for_grad(result, level)
    return tuple(torch._C._functorch._wrap_for_grad(output, level) for output in result)


def _recording(transform: Any, operator: Any, *arguments: Any) -> Any:
    """The same while autograd records this level, for which it switches gradients off: lower levels have their own."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        return _lowered(transform, operator, *arguments)


# ---- vmap ------------------------------------------------------------------------------------------------------------


def _mapped(name: str, operator: Any, transform: Any, arguments: Iterable[tuple[Any, int]]) -> Any:
    """N calls with batches of B as one call with a batch of N * B. Of each argument: its rank without N."""
    level, size = transform.level(), transform.batch_size()

    def unwrap(argument: Any) -> Any:
        is_tensor = isinstance(argument, Tensor)
        return torch._C._functorch._unwrap_batched(argument, level) if is_tensor else (argument, None)

    unwrapped = [(*unwrap(argument), rank) for argument, rank in arguments]
    with transform.lower():
        if all(dim is None for _, dim, _ in unwrapped):
            return operator(*(argument for argument, _, _ in unwrapped))
        stacked = [_stacked(name, size, *each) for each in unwrapped]
        result = operator(
            *(each.flatten(0, 1) if isinstance(each, Tensor) and each.dim() > 1 else each for each in stacked)
        )
        outputs = [result] if isinstance(result, Tensor) else list(result)
        found = [output.dim() > 1 for output in outputs]  # the others are gradients that nobody needs
        outputs = [o.unflatten(0, stacked[0].shape[:2]) if f else o for o, f in zip(outputs, found, strict=True)]
    add = torch._C._functorch._add_batch_dim
    outputs = [add(o, 0, level) if f else o for o, f in zip(outputs, found, strict=True)]
    return outputs[0] if isinstance(result, Tensor) else tuple(outputs)


def _stacked(name: str, size: int, argument: Any, dim: int | None, rank: int) -> Any:
    """A tensor as [N, B, ...], N being what vmap maps over."""
    if not isinstance(argument, Tensor):
        return argument
    if rank == _RANKS["sinks"]:  # of a head, which all batches share
        if dim is not None:
            refuse(name, "sinks: mapped by vmap; supported: the same for all that is mapped")
        return argument
    stacked = argument.expand(size, *argument.shape) if dim is None else argument.movedim(dim, 0)
    if stacked.dim() != rank + 1:
        shape = "[B, H, S, D]" if rank == 4 else "[B, H, S]"
        refuse(name, f"rank {stacked.dim() - 1} inside of vmap; expected {rank} dimensions {shape}")
    return stacked


for _name in (*OPERATORS, BACKWARD):
    LIBRARY.impl(_name, _rule(_name), "FuncTorchDynamicLayerFrontMode")
