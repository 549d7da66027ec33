"""A few calls of every shipped kernel, small enough for compute-sanitizer: run by `make sanitize` on a Hopper GPU.

Odd lengths, causal and full, GQA, a query longer than its keys, fully masked rows, head dimensions that need zero fill.
"""

from __future__ import annotations

import itertools

import torch

import dhp_safe_fa
from dhp_safe_fa import _inspect

SHAPES = [  # B, Hq, Hk, Sq, Sk
    (1, 2, 2, 65, 129),
    (2, 4, 2, 130, 300),
    (1, 1, 1, 200, 40),
    (1, 132, 12, 100, 130),
]


def main() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    used = set()
    for dtype, head_dim in itertools.product((torch.float16, torch.bfloat16), (64, 56, 128, 72)):
        for b, hq, hk, sq, sk in SHAPES:
            q = torch.randn(b, hq, sq, head_dim, device="cuda", generator=generator).to(dtype)
            k, v = torch.randn(2, b, hk, sk, head_dim, device="cuda", generator=generator).to(dtype)
            for is_causal, offset in ((False, 0), (True, sk - sq), (True, -70)):
                out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=is_causal, causal_offset=offset)
                finite = bool(out.isfinite().all()) and not bool(lse.isnan().any())
                assert finite, f"{dtype}, head_dim {head_dim}, {(b, hq, hk, sq, sk)}, causal {is_causal}, {offset}"
            name = str(dtype).removeprefix("torch.")
            used.add(_inspect.plan(list(q.shape), list(k.shape), name)["kernel"])
    torch.cuda.synchronize()
    missing = {kernel["name"] for kernel in _inspect.kernels()} - used
    assert not missing, f"these kernels were not reached: {sorted(missing)}"
    print(f"{len(used)} kernels ran")


if __name__ == "__main__":
    main()
