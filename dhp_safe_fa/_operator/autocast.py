"""Autocast: the policy of torch's own attention, everything in the autocast dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dhp_safe_fa._operator.schema import AUTOCAST, LIBRARY, OPERATORS, VARLEN


def dtype_on(device_type: str) -> torch.dtype | None:
    """What autocast casts to on such devices; None where it is off, or not known, as on meta."""
    if torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type):
        return torch.get_autocast_dtype(device_type)
    return None


def _rule(name: str, device_type: str) -> Callable[..., object]:
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
# By operator and device type. The backward gets what the forward was cast to, and has none.
_RULES = {(name, device_type): _rule(name, device_type) for name in (*OPERATORS, VARLEN) for device_type in _KEYS}
for (_name, _device_type), _each in _RULES.items():
    LIBRARY.impl(_name, _each, _KEYS[_device_type])


def rule_for(name: str, arguments: Sequence[object]) -> Callable[..., object] | None:
    """What casts a call of an operator: there is one if autocast is on where its first argument lies."""
    device_type = arguments[0].device.type if isinstance(arguments[0], Tensor) else ""
    rule = _RULES.get((name, device_type))
    return rule if rule is not None and torch.is_autocast_enabled(device_type) else None
