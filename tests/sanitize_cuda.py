"""A few calls of every shipped kernel, small enough for compute-sanitizer: run by `make sanitize` on a Hopper GPU.

Odd lengths, causal and full, GQA, a query longer than its keys, fully masked rows, head dimensions that need zero fill.
Every output row must be right, or NaN from end to end: the tools slow the warps that load, now and then by more than
the kernel is willing to wait for a tile; it must then fail closed, never return wrong numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

SHAPES = [  # B, Hq, Hk, Sq, Sk
    (1, 2, 2, 65, 129),
    (2, 4, 2, 130, 300),
    (1, 1, 1, 200, 40),
    (1, 66, 6, 100, 130),
    (1, 132, 12, 100, 130),
    (1, 132, 12, 192, 1500),
]


class Call(NamedTuple):
    """q and k are shapes, v has that of k; dtype is torch's name."""

    q: tuple[int, int, int, int]
    k: tuple[int, int, int, int]
    dtype: str
    is_causal: bool
    causal_offset: int

    def kernel(self) -> str:
        """Name of the shipped kernel that serves it."""
        plan = _inspect.plan(*self)
        assert plan is not None
        return str(plan["kernel"])


def calls() -> Iterator[Call]:
    for dtype, d in itertools.product(("float16", "bfloat16"), (64, 56, 128, 72, 256, 200)):
        for b, hq, hk, sq, sk in SHAPES:
            for is_causal, offset in ((False, 0), (True, sk - sq), (True, -70)):
                yield Call((b, hq, sq, d), (b, hk, sk, d), dtype, is_causal, offset)


def expected(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, offset: int) -> Tensor:
    """Attention in float32; rows that see no key are 0."""
    k, v = (t.float().repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
    scores = q.float() @ k.transpose(2, 3) * q.size(3) ** -0.5
    if is_causal:
        query, key = (torch.arange(n, device=q.device) for n in (q.size(2), k.size(2)))
        scores = scores.masked_fill(key > query[:, None] + offset, -math.inf)
    out: Tensor = scores.softmax(3).nan_to_num(0.0) @ v
    return out


def main() -> None:
    right = dict.fromkeys((kernel["name"] for kernel in _inspect.kernels()), 0)  # calls with right rows, by kernel
    closed = 0
    for call in calls():
        dtype = getattr(torch, call.dtype)
        q = torch.randn(call.q, device="cuda").to(dtype)
        k, v = torch.randn(2, *call.k, device="cuda").to(dtype)
        mask = {"is_causal": call.is_causal, "causal_offset": call.causal_offset}
        out, lse = dhp_safe_fa.attention_lse(q, k, v, **mask)
        failed = out.isnan().all(3) & lse.isnan()
        wrong = (out - expected(q, k, v, call.is_causal, call.causal_offset)).abs().amax(3) > 0.05
        wrong |= out.isnan().any(3) | lse.isnan()
        assert not bool((wrong & ~failed).any()), f"wrong rows: {call}"
        right[call.kernel()] += not bool(failed.all())
        closed += bool(failed.any())
    missing = [kernel for kernel, count in right.items() if count == 0]
    assert not missing, f"these kernels gave no right row: {missing}"
    print(f"{len(right)} kernels ran, no row wrong; calls with rows that failed closed: {closed}")


if __name__ == "__main__":
    main()
