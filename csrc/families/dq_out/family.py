"""The dq_out family: dq from the integer sums that one pass leaves. Four kernels out of dq_out.cu."""

from __future__ import annotations

from families import Family, Kernel
from wgmma import header

# (head_dim, warpgroups, rows, ctas_per_sm). rows: of a CTA, so that every thread has four vectors of eight elements to
# write, whose eight reads of 16 bytes fill the memory pipe. Only head_dims that one_pass.cu serves.
SHAPES = [(64, 1, 64, 6), (128, 1, 32, 6)]


def kernel(dtype: str, head_dim: int, warpgroups: int, rows: int, ctas_per_sm: int) -> Kernel:
    # no step of keys, no stage: a CTA reads its rows once
    return Kernel(f"dqout_{dtype}_d{head_dim}", dtype, head_dim, 0, warpgroups, rows, 0, ctas_per_sm, 0, "dq out")


def products(of: Kernel) -> str:
    """None: nothing is multiplied but by the scale."""
    return header()


FAMILY = Family(
    name="dq_out",
    source="dq_out.cu",
    entry="dhp_attention_dq_out",
    params="params.h",
    shared_bytes="DHP_DQ_OUT_SHARED_BYTES",
    kernels=tuple(kernel(dtype, *shape) for dtype in ("float16", "bfloat16") for shape in SHAPES),
    products=products,
)
