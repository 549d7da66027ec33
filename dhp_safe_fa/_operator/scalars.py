"""Tensors where a call takes numbers: torch makes a number of one, and of its gradient nothing."""

from __future__ import annotations

import numbers
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dhp_safe_fa._operator.schema import NUMBERS, refuse


def loses_gradient(value: object) -> bool:
    """A gradient or a tangent is asked for that nobody computes."""
    if not isinstance(value, Tensor):
        return False
    is_dual = forward_ad._current_level >= 0 and forward_ad.unpack_dual(value).tangent is not None
    return is_dual or (value.requires_grad and torch.is_grad_enabled())


def is_number(value: object) -> bool:
    """A real one, which float() takes: also of numpy, and a tensor of one element."""
    if isinstance(value, NUMBERS):  # first: torch.compile knows these
        return True
    if isinstance(value, Tensor):
        return _is_single(value) and not value.is_complex()
    return isinstance(value, numbers.Real)


def is_flag(value: object) -> bool:
    """True or False, or 0 or 1: also of numpy, and a tensor of one of torch.bool."""
    if isinstance(value, (bool, torch.SymBool)):  # first: torch.compile knows these
        return True
    if isinstance(value, Tensor):
        return value.dtype == torch.bool and _is_single(value)
    return getattr(value, "ndim", 0) == 0 and value in (0, 1)


def wrong_flag(value: object) -> str:
    """What to say of a value that is no flag, or nothing. Of None and 0.5 torch makes False and True."""
    return "" if is_flag(value) else f"{shown(value)}; supported: True or False"


def is_too_large(value: object) -> bool:
    """A whole number that no float is as large as."""
    return isinstance(value, int) and abs(value) >= 2**1024


def shown(value: object) -> str:
    """In an error: a tensor without its elements, which may be secret, or many."""
    if isinstance(value, Tensor):
        where = ", on meta" if value.is_meta else ""
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}{where}"
    if isinstance(value, (tuple, list)) and any(isinstance(one, Tensor) for one in value):
        return f"({', '.join(map(shown, value))})"
    return repr(value)


def in_words(number: object) -> str:
    """In an error: a number, however large."""
    if is_too_large(number):
        return f"a number of {number.bit_length()} bits"  # type: ignore[attr-defined]
    return f"{float(number):g}"  # type: ignore[arg-type]


def refuse_tensors(operator: str, given: Mapping[str, object], whole: Mapping[str, object]) -> None:
    """Names the first that is a tensor and no number: one real element that is known, the same for all, without a
    gradient that would be lost; and of whole numbers none of a floating-point dtype, whose fraction would be."""
    for name, value in (*given.items(), *whole.items()):
        if not isinstance(value, Tensor):
            continue
        if torch._C._functorch.is_batchedtensor(value):
            refuse(operator, f"{name}: mapped by vmap; supported: the same for all that vmap maps over")
        if loses_gradient(value):
            refuse(operator, f"{name}: a tensor that requires a gradient; supported: a number, which has none")
        if value.is_meta or not is_number(value):
            refuse(operator, f"{name}: {shown(value)}; expected a number")
        if name in whole and value.is_floating_point():
            refuse(operator, f"{name}: {shown(value)}; expected a whole number")


def number_of(value: float | Tensor | None) -> float | None:
    """Of a tensor of one element its number, which torch.compile does not take out by itself; else the value."""
    return value.item() if isinstance(value, Tensor) else value


def _is_single(value: Tensor) -> bool:
    """Of one element. dim first: to compare a size is a warning of torch.jit.trace, whose numbers have none."""
    return value.dim() == 0 or value.numel() == 1
