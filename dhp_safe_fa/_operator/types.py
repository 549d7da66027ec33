"""What is wrong with the arguments of a call that torch has refused for their types, in this package's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dhp_safe_fa._operator.schema import refuse

_NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
_END = 2**63  # of the integers that the schemas take


def refuse_types(
    operator: str,
    shape: str,
    tensors: Mapping[str, object],
    optional: Mapping[str, object],
    flags: Mapping[str, object],
    numbers: Mapping[str, object],
    integers: Mapping[str, Sequence[object]],
) -> None:
    """Names the first argument of a type that is not served; nothing if there is none. shape: of the tensors that have
    to be there, in words. integers: one or more of a name."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            kind = "None" if tensor is None else type(tensor).__name__
            refuse(operator, f"{name}: {kind}; expected a tensor {shape}")
        if tensor.is_nested:
            refuse(operator, f"{name}: a nested tensor; supported: strided tensors, one call for each length")
        if tensor.layout != torch.strided or tensor.is_quantized:
            kind = "quantized" if tensor.is_quantized else "sparse"
            refuse(operator, f"{name}: a {kind} tensor; supported: strided tensors of floating-point numbers")
    for name, tensor in optional.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            refuse(operator, f"{name}: {type(tensor).__name__}; expected a tensor, or None")
    for name, flag in flags.items():
        if not isinstance(flag, (int, torch.SymBool)):
            refuse(operator, f"{name}: {flag!r}; supported: True or False")
    for name, number in numbers.items():
        if number is not None and not isinstance(number, _NUMBERS):
            refuse(operator, f"{name}: {number!r}; expected a number, or None")
    for name, given in integers.items():
        text = f"{name}: {given[0]!r}" if len(given) == 1 else f"{name}: {tuple(given)!r}"
        if not all(hasattr(one, "__index__") for one in given):
            refuse(operator, f"{text}; expected whole numbers")
        if not all(-_END <= one < _END for one in given if isinstance(one, int)):
            refuse(operator, f"{text}; supported: integers of 64 bits")
