"""What every call of the operators was given and gave in each rank, and that one process gives the same bits."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from harness import as_tuple, same_bits
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Call(NamedTuple):
    operator: str
    arguments: list[Any]
    results: list[torch.Tensor]


class Recorded(TorchDispatchMode):
    """Keeps the calls of the operators made inside, of backward passes too; of DTensors, the whole tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "dhp":
            assert not kwargs, "the operators are called with positional arguments"
            self.calls.append(Call(func._opname, [_whole(a) for a in args], [_whole(r) for r in as_tuple(results)]))
        return results


def _whole(value: Any) -> Any:
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def assert_as_one_process(ranks: Sequence[Sequence[Call]], dim: int, operators: Sequence[str]) -> None:
    """Each call of the ranks, put together along dim (0: batch, 1: heads) and made here once, gives the same bits.

    operators are the calls that each rank made, in order: an empty record would show nothing.
    """
    for calls in ranks:
        assert [call.operator for call in calls] == list(operators)
    for index, parts in enumerate(zip(*ranks, strict=True)):
        arguments = [_joined(given, dim) for given in zip(*(part.arguments for part in parts), strict=True)]
        want = as_tuple(getattr(torch.ops.dhp, parts[0].operator)(*arguments))
        for number, got in enumerate(zip(*(part.results for part in parts), strict=True)):
            assert same_bits(torch.cat(got, dim), want[number]), f"result {number} of call {index}, {parts[0].operator}"


def assert_packed_as_one_process(ranks: Sequence[Sequence[Call]], calls: int) -> None:
    """The same of ranks that have other heads of attention_varlen, at least so many times: which of the arguments are
    [tokens, H, D], and which lengths that all ranks share, follows from their shapes."""
    assert min(map(len, ranks)) >= calls
    for index, parts in enumerate(zip(*ranks, strict=True)):
        assert {call.operator for call in parts} == {"attention_varlen"}
        arguments = [_joined(given, 1, of_heads=3) for given in zip(*(part.arguments for part in parts), strict=True)]
        out, lse = torch.ops.dhp.attention_varlen(*arguments)
        got, got_lse = zip(*(part.results for part in parts), strict=True)
        assert same_bits(torch.cat(got, 1), out) and same_bits(torch.cat(got_lse, 0), lse), f"call {index}"


def _joined(given: Sequence[Any], dim: int, of_heads: int = 0) -> Any:
    """of_heads: so many dimensions at least has what is divided, and all else is alike."""
    first = given[0]
    if isinstance(first, torch.Tensor) and first.dim() >= of_heads:
        return torch.cat(list(given), dim)
    alike = torch.equal if isinstance(first, torch.Tensor) else operator.eq
    assert all(alike(value, first) for value in given)
    return first
