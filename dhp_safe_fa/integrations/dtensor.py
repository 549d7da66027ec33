"""Attention on DTensors: importing this module tells torch.distributed.tensor how the operators may be sharded.

    import dhp_safe_fa.integrations.dtensor

Without communication run: q, k, v sharded alike over the batch (dimension 0); or over the heads (dimension 1), where
the size of the mesh divides the number of key heads, so that every query head finds its key head on its own rank; or,
with one key head, q sharded over the heads and k, v replicated. Other placements are gathered first, as DTensor does
for any operator. Outputs lie as q does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dhp_safe_fa._ops import OPERATORS


def _rule(outputs: int) -> Any:
    def shardings(q: Any, k: Any, v: Any, *options: object, **_named: object) -> list[tuple[list[Any], list[Any]]]:
        ways: list[tuple[Any, Any]] = [(Replicate(), Replicate()), (Shard(0), Shard(0))]
        if k.shape[1] == 1:
            ways.append((Shard(1), Replicate()))
        elif k.shape[1] % q.mesh.size() == 0:
            ways.append((Shard(1), Shard(1)))
        return [([rows] * outputs, [rows, keys, keys] + [None] * len(options)) for rows, keys in ways]

    return shardings


for _name in OPERATORS:
    _operator = getattr(torch.ops.dhp, _name).default
    register_sharding(_operator)(_rule(outputs=len(_operator._schema.returns)))
