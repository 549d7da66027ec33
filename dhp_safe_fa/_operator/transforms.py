"""torch.func: vmap becomes more batches, or heads; grad, vjp and jvp are autograd on tensors of one level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dhp_safe_fa._operator import autocast
from dhp_safe_fa._operator.gradients import is_recorded, record
from dhp_safe_fa._operator.schema import BACKWARD, BACKWARDS, LIBRARY, OPERATORS, SINKS_BACKWARD, VARLEN, refuse


def _rule(name: str) -> Callable[..., Any]:
    operator = getattr(torch.ops.dhp, name).default

    def rule(*arguments: Any) -> Any:
        # Imported by the first transform: at the start it would cost everybody a part of the import time.
        from torch._functorch.pyfunctorch import FunctionalizeInterpreter as Functionalize
        from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

        # What autograd keeps has to be what is computed with: transforms come before autocast, which casts below them.
        if (cast := autocast.rule_for(name, arguments)) is not None:
            return cast(*arguments)
        transform: Any = retrieve_current_functorch_interpreter()
        if isinstance(transform, VmapInterpreter):
            return _mapped(name, operator, transform, arguments)
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


class _Folding(NamedTuple):
    """Where the N calls that vmap maps over become one: a dimension that they all have is N times as long."""

    shapes: Mapping[str, str]  # of the arguments that may be mapped
    dim: int  # of all of them and of the results


_ROWS, _SUMS = ("q", "k", "v", "out", "grad_out"), ("lse", "grad_lse")
# More batches.
_BATCHED = _Folding(dict.fromkeys(_ROWS, "[B, H, S, D]") | dict.fromkeys(_SUMS, "[B, H, S]"), 0)
# More heads, of which each reads its own key head as before: where each call has sinks, or a gradient of them, of its
# own. The head comes second; sinks have no other dimension, which is number 1 of 1 all the same.
_HEADS = _Folding({**_BATCHED.shapes, "sinks": "[H]"}, 1)
# The same of packed sequences, which are the same for all. The head comes last but one everywhere.
_PACKED = _Folding(dict.fromkeys(_ROWS, "[tokens, H, D]") | dict.fromkeys(_SUMS, "[H, tokens]") | {"sinks": "[H]"}, -2)
_PAGED = _Folding({**_PACKED.shapes, **dict.fromkeys("kv", "[pages, page_size, H, D]")}, -2)


def _mapped(name: str, operator: Any, transform: Any, arguments: tuple[Any, ...]) -> Any:
    """N calls as one."""
    level, size = transform.level(), transform.batch_size()

    def unwrap(argument: Any) -> Any:
        is_tensor = isinstance(argument, Tensor)
        return torch._C._functorch._unwrap_batched(argument, level) if is_tensor else (argument, None)

    unwrapped = [unwrap(argument) for argument in arguments]
    named = dict(zip((argument.name for argument in operator._schema.arguments), unwrapped, strict=False))
    folding = _folding_of(name, named)
    with transform.lower():
        if all(dim is None for _, dim in unwrapped):
            return operator(*(argument for argument, _ in unwrapped))
        if size == 0:
            refuse(name, "vmap over a dimension of size 0; supported: 1 and more")
        result = operator(*(_folded(name, folding, size, each, *given) for each, given in named.items()))
        outputs = [_unfolded(folding, size, each) for each in ([result] if isinstance(result, Tensor) else result)]
    add = torch._C._functorch._add_batch_dim
    mapped = [output if dim is None else add(output, dim, level) for output, dim in outputs]
    return mapped[0] if isinstance(result, Tensor) else tuple(mapped)


def _folding_of(name: str, named: Mapping[str, tuple[Any, int | None]]) -> _Folding:
    """Of a call of the operator whose arguments are mapped over these dimensions."""
    nothing = None, None
    if name in (*OPERATORS, BACKWARD, SINKS_BACKWARD):
        has_own_sinks = name == SINKS_BACKWARD or named.get("sinks", nothing)[1] is not None
        return _HEADS if has_own_sinks else _BATCHED
    return _PACKED if named.get("page_table", nothing)[0] is None else _PAGED


def _folded(operator: str, folding: _Folding, size: int, name: str, argument: Any, dim: int | None) -> Any:
    """What one call for all takes; dim: which one of the argument vmap maps over."""
    if not isinstance(argument, Tensor) or (dim is None and name not in folding.shapes):
        return argument
    if name not in folding.shapes:
        refuse(operator, f"{name}: mapped by vmap; supported: the same for all that vmap maps over")
    shape = folding.shapes[name]
    rank = shape.count(",") + 1
    stacked = argument.expand(size, *argument.shape) if dim is None else argument.movedim(dim, 0)
    if stacked.dim() != rank + 1:
        refuse(operator, f"{name}: rank {stacked.dim() - 1} inside of vmap; expected {rank} dimensions {shape}")
    place = folding.dim % rank
    return stacked.movedim(0, place).flatten(place, place + 1)


def _unfolded(folding: _Folding, size: int, output: Tensor) -> tuple[Tensor, int | None]:
    """A result of the N calls, and which of its dimensions they lie along; None: a gradient that nobody needs."""
    if output.dim() == 1 and output.numel() == 0:
        return output, None
    place = folding.dim % output.dim()
    return output.unflatten(place, (size, output.size(place) // size)), place


for _name in (*OPERATORS, VARLEN, *BACKWARDS):
    LIBRARY.impl(_name, _rule(_name), "FuncTorchDynamicLayerFrontMode")
