"""A few calls of every shipped kernel, small enough for compute-sanitizer: run by `make sanitize` on a Hopper GPU.

Odd lengths, causal and full, GQA, a query longer than its keys, fully masked rows, head dimensions that need zero fill.
Every output row must be right, or NaN from end to end: the tools slow the warps that load, now and then by more than
the kernel is willing to wait for a tile; it must then fail closed, never return wrong numbers.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect

SHAPES = [  # B, Hq, Hk, Sq, Sk
    (1, 2, 2, 65, 129),
    (2, 4, 2, 130, 300),
    (1, 1, 1, 200, 40),
    (1, 132, 12, 100, 130),
    (1, 132, 12, 192, 1500),
]


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
    for dtype, head_dim in itertools.product((torch.float16, torch.bfloat16), (64, 56, 128, 72, 256, 200)):
        for b, hq, hk, sq, sk in SHAPES:
            q = torch.randn(b, hq, sq, head_dim, device="cuda").to(dtype)
            k, v = torch.randn(2, b, hk, sk, head_dim, device="cuda").to(dtype)
            for is_causal, offset in ((False, 0), (True, sk - sq), (True, -70)):
                out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=is_causal, causal_offset=offset)
                call = f"{dtype}, head_dim {head_dim}, {(b, hq, hk, sq, sk)}, causal {is_causal}, offset {offset}"
                failed = out.isnan().all(3) & lse.isnan()
                wrong = (out - expected(q, k, v, is_causal, offset)).abs().amax(3) > 0.05
                wrong |= out.isnan().any(3) | lse.isnan()
                assert not bool((wrong & ~failed).any()), f"wrong rows: {call}"
                name = str(dtype).removeprefix("torch.")
                plan = _inspect.plan(list(q.shape), list(k.shape), name, is_causal, offset)
                assert plan is not None
                right[plan["kernel"]] += not bool(failed.all())
                closed += bool(failed.any())
    missing = [kernel for kernel, calls in right.items() if calls == 0]
    assert not missing, f"these kernels gave no right row: {missing}"
    print(f"{len(right)} kernels ran, no row wrong; calls with rows that failed closed: {closed}")


if __name__ == "__main__":
    main()
