"""Tensors where a call takes numbers: torch makes a number of one, and of its gradient nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from dhp_safe_fa._operator.schema import LARGEST, refuse


def loses_gradient(value: object) -> bool:
    """A gradient is asked for that nobody computes."""
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def shown(value: object) -> str:
    """In an error: a tensor without its elements, which may be secret, or many."""
    return f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else repr(value)


def in_words(number: object) -> str:
    """In an error: a number, however large."""
    if isinstance(number, int) and abs(number) > LARGEST:
        return f"a number of {number.bit_length()} bits"
    return f"{float(number):g}"  # type: ignore[arg-type]


def refuse_tensors(operator: str, numbers: dict[str, object], whole: dict[str, object]) -> None:
    """Names the first that is a tensor and no number: one element, without a gradient that would be lost; and of whole
    numbers none of a floating-point dtype, whose fraction would be."""
    for name, value in (numbers | whole).items():
        if not isinstance(value, Tensor):
            continue
        if loses_gradient(value):
            refuse(operator, f"{name}: a tensor that requires a gradient; supported: a number, which has none")
        if value.numel() != 1:
            refuse(operator, f"{name}: {shown(value)}; expected a number")
        if name in whole and (value.is_floating_point() or value.is_complex()):
            refuse(operator, f"{name}: {shown(value)}; expected a whole number")
