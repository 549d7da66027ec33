"""What becomes of a call under autocast and under vmap."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dhp_safe_fa._operator.schema import BACKWARD, DTYPES, LIBRARY, OPERATORS, refuse

# ---- autocast: the policy of torch's own attention, everything in the autocast dtype ---------------------------------


def _autocast_rule(name: str, device_type: str) -> Callable[..., object]:
    operator = getattr(torch.ops.dhp, name)

    def rule(q: Tensor, k: Tensor, v: Tensor, *arguments: object, **keywords: object) -> object:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Tensor) -> Tensor:
            eligible = tensor.dtype in DTYPES and tensor.dtype != torch.float64  # which torch leaves alone everywhere
            return tensor.to(dtype) if eligible and tensor.device.type == device_type else tensor

        with torch.autocast(device_type, enabled=False):
            return operator(cast(q), cast(k), cast(v), *arguments, **keywords)

    return rule


# The backward gets what the forward was cast to, and has no rule.
for _name in OPERATORS:
    for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        LIBRARY.impl(_name, _autocast_rule(_name, _device_type), _key)


# ---- vmap: more batches ----------------------------------------------------------------------------------------------

# [B, H, S, D], but for what has one number a row.
_RANKS = {"lse": 3, "grad_lse": 3}


def _vmap_rule(name: str) -> Callable[..., object]:
    operator = getattr(torch.ops.dhp, name)
    ranks = [_RANKS.get(argument.name, 4) for argument in operator.default._schema.arguments]

    def rule(*arguments: Any) -> object:
        from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

        transform = retrieve_current_functorch_interpreter()
        level, size = transform.level(), transform.batch_size()

        def mapped(argument: Any, rank: int) -> Any:
            """[N, B, ...], N being what vmap maps over, as one batch."""
            if not isinstance(argument, Tensor):
                return argument
            tensor, dim = torch._C._functorch._unwrap_batched(argument, level)
            with transform.lower():
                tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
                if tensor.dim() != rank + 1:
                    shape = "[B, H, S, D]" if rank == 4 else "[B, H, S]"
                    refuse(name, f"rank {tensor.dim() - 1} inside of vmap; expected {rank} dimensions {shape}")
                batches.append(tensor.shape[:2])
                return tensor.flatten(0, 1)

        batches: list[torch.Size] = []
        given = [mapped(argument, rank) for argument, rank in zip(arguments, ranks, strict=False)]
        with transform.lower():
            result = operator(*given)
            outputs = [result] if isinstance(result, Tensor) else list(result)
            for i, output in enumerate(outputs):
                if output.dim() > 1:  # or it is a gradient that nobody needs
                    outputs[i] = output.unflatten(0, batches[0])
        for i, output in enumerate(outputs):
            if output.dim() > 1:
                outputs[i] = torch._C._functorch._add_batch_dim(output, 0, level)
        return outputs[0] if isinstance(result, Tensor) else tuple(outputs)

    return rule


for _name in (*OPERATORS, BACKWARD):
    LIBRARY.impl(_name, _vmap_rule(_name), "FuncTorchBatched")
