"""Attention on DTensors: importing this module tells torch.distributed.tensor how the operators may be sharded.

    import dhp_safe_fa.integrations.dtensor

Without communication run: q, k, v sharded alike over the batch (dimension 0); or over the heads (dimension 1), where
the size of the mesh divides the number of key heads, so that every query head finds its key head on its own rank; or,
with one key head, q sharded over the heads and k, v replicated. Other placements are gathered first, as DTensor does
for any operator. Outputs lie as q does.

Packed sequences (attention_varlen) over the heads alone, which are dimension 1 of [tokens, H, D] and 2 of a cache in
pages; lengths and tables are DTensors, too, replicated.

Gradients likewise, but that the key head shared by all ranks has the query heads gathered: its gradients are sums over
them, in the order of one process, and so every gradient has the bits that it has there. So are batches for the gradient
of sinks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from dhp_safe_fa._operator.schema import BACKWARD, OPERATORS, SINKS_BACKWARD, VARLEN, VARLEN_BACKWARD

Ways = list[tuple[list[Any], list[Any]]]


def _alike(q: Any, k: Any) -> list[Any]:
    """Placements that q and k may share."""
    heads = [Shard(1)] if k.shape[1] % q.mesh.size() == 0 else []
    return [Replicate(), Shard(0), *heads]


def _of_options(options: tuple[object, ...], rows: Any) -> list[Any]:
    """None for what is no tensor. Sinks, a number for each query head, lie as the heads do."""
    sinks = Shard(0) if rows == Shard(1) else Replicate()
    return [None if option is None or isinstance(option, (bool, int, float)) else sinks for option in options]


def _forward_rule(outputs: int) -> Any:
    def shardings(q: Any, k: Any, v: Any, *options: object, **_named: object) -> Ways:
        ways = [(placement, placement) for placement in _alike(q, k)]
        if k.shape[1] == 1:
            ways.append((Shard(1), Replicate()))
        return [([rows] * outputs, [rows, keys, keys, *_of_options(options, rows)]) for rows, keys in ways]

    return shardings


def _backward_rule(grad_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *options: Any, **named: Any) -> Ways:
    arguments = dict(zip(_BACKWARD_OPTIONS, options, strict=False)) | named
    needed = [arguments.get(name, True) for name in ("need_dq", "need_dk", "need_dv")]
    ways = []
    for placement in _alike(q, k):
        gradients = [placement if need else Replicate() for need in needed]
        given: list[Any] = [placement] * 6
        for name in _BACKWARD_OPTIONS[: len(options)]:
            given.append(placement if name == "grad_lse" and arguments[name] is not None else None)
        ways.append((gradients, given))
    return ways


def _packed_heads(key_heads: int, ranks: int, shares_a_head: bool) -> list[tuple[Any, Any, Any]]:
    """Placements of [tokens, Hq, D], of [Hq, tokens], and whether keys are divided, too."""
    ways: list[tuple[Any, Any, Any]] = [(Replicate(), Replicate(), False)]
    if key_heads % ranks == 0:
        ways.append((Shard(1), Shard(0), True))
    if key_heads == 1 and shares_a_head:
        ways.append((Shard(1), Shard(0), False))
    return ways


def _lengths_and_numbers(names: list[str], options: tuple[Any, ...], **of_name: Any) -> list[Any]:
    """None for what is no tensor; lengths and tables lie whole on every rank, if nothing else is said of a name."""
    numbers = (bool, int, float)
    return [
        None if option is None or isinstance(option, numbers) else of_name.get(name, Replicate())
        for name, option in zip(names, options, strict=False)
    ]


def _varlen_rule(q: Any, k: Any, _v: Any, *options: Any, **_named: Any) -> Ways:
    heads = len(k.shape) - 2  # of pages [pages, page_size, H, D], or of [tokens, H, D]
    ways = []
    for rows, of_rows, is_divided in _packed_heads(k.shape[heads], q.mesh.size(), shares_a_head=True):
        keys = Shard(heads) if is_divided else Replicate()
        rest = _lengths_and_numbers(_VARLEN_OPTIONS, options, sinks=of_rows)
        ways.append(([rows, of_rows], [rows, keys, keys, *rest]))
    return ways


def _varlen_backward_rule(
    _grad_out: Any, q: Any, k: Any, _v: Any, _out: Any, _lse: Any, *options: Any, **named: Any
) -> Ways:
    arguments = dict(zip(_VARLEN_BACKWARD_OPTIONS, options, strict=False)) | named
    needed = [arguments.get(name, True) for name in ("need_dq", "need_dk", "need_dv")]
    ways = []
    for rows, of_rows, _ in _packed_heads(k.shape[1], q.mesh.size(), shares_a_head=False):
        gradients = [rows if need else Replicate() for need in needed]
        rest = _lengths_and_numbers(_VARLEN_BACKWARD_OPTIONS, options, grad_lse=of_rows)
        ways.append((gradients, [rows, rows, rows, rows, rows, of_rows, *rest]))
    return ways


def _sinks_rule(grad_out: Any, _out: Any, _lse: Any, _sinks: Any, *grad_lse: Any) -> Ways:
    """A head's is a sum over the batch, in the order of one process."""
    ways: list[tuple[Any, Any]] = [(Replicate(), Replicate())]
    if grad_out.shape[1] % grad_out.mesh.size() == 0:
        ways.append((Shard(1), Shard(0)))
    return [
        ([sinks], [rows, rows, rows, sinks, *(None if given is None else rows for given in grad_lse)])
        for rows, sinks in ways
    ]


for _name in OPERATORS:
    _operator = getattr(torch.ops.dhp, _name).default
    register_sharding(_operator)(_forward_rule(outputs=len(_operator._schema.returns)))
_backward = getattr(torch.ops.dhp, BACKWARD).default
_BACKWARD_OPTIONS = [argument.name for argument in _backward._schema.arguments[6:]]
register_sharding(_backward)(_backward_rule)
register_sharding(getattr(torch.ops.dhp, SINKS_BACKWARD).default)(_sinks_rule)
_varlen = getattr(torch.ops.dhp, VARLEN).default
_VARLEN_OPTIONS = [argument.name for argument in _varlen._schema.arguments[3:]]
register_sharding(_varlen)(_varlen_rule)
_varlen_backward = getattr(torch.ops.dhp, VARLEN_BACKWARD).default
_VARLEN_BACKWARD_OPTIONS = [argument.name for argument in _varlen_backward._schema.arguments[6:]]
register_sharding(_varlen_backward)(_varlen_backward_rule)
