"""Autocast: the policy of torch's own attention, everything in the autocast dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dhp_safe_fa._operator.schema import AUTOCAST, LIBRARY, OPERATORS, VARLEN


def device_of(name: str, arguments: Sequence[object]) -> str | None:
    """Whose autocast casts a call of an operator: the device type of its first argument, if it is on there."""
    if name not in (*OPERATORS, VARLEN) or not isinstance(arguments[0], Tensor):
        return None
    device_type = arguments[0].device.type
    return device_type if device_type in _KEYS and torch.is_autocast_enabled(device_type) else None


def rule_of(name: str, device_type: str) -> Callable[..., object]:
    operator = getattr(torch.ops.dhp, name)

    def rule(q: Tensor, k: Tensor, v: Tensor, *arguments: object, **keywords: object) -> object:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Tensor) -> Tensor:  # None is refused by the operator
            eligible = tensor is not None and tensor.device.type == device_type and tensor.dtype in AUTOCAST
            return tensor.to(dtype) if eligible else tensor

        with torch.autocast(device_type, enabled=False):
            return operator(cast(q), cast(k), cast(v), *arguments, **keywords)

    return rule


_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
# The backward gets what the forward was cast to, and has no rule.
for _name in (*OPERATORS, VARLEN):
    for _device_type, _key in _KEYS.items():
        LIBRARY.impl(_name, rule_of(_name, _device_type), _key)
