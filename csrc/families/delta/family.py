"""The delta family: what the backward needs of each query row. Six kernels out of delta.cu."""

from __future__ import annotations

from families import Family, Kernel
from wgmma import header

# (head_dim, warpgroups, rows, ctas_per_sm). rows: of a CTA, so that every thread has four reads of 16 bytes of each
# tensor under way, which fills the memory pipe; a lane reads eight elements of a row.
SHAPES = [(64, 1, 64, 8), (128, 1, 32, 8), (256, 1, 16, 8)]


def kernel(dtype: str, head_dim: int, warpgroups: int, rows: int, ctas_per_sm: int) -> Kernel:
    # no step of keys, no stage: a CTA reads its rows once
    return Kernel(f"delta_{dtype}_d{head_dim}", dtype, head_dim, 0, warpgroups, rows, 0, ctas_per_sm, 0, "delta")


def products(of: Kernel) -> str:
    """None: the sums are of products of two elements."""
    return header()


FAMILY = Family(
    name="delta",
    source="delta.cu",
    entry="dhp_attention_delta",
    params="params.h",
    shared_bytes="DHP_DELTA_SHARED_BYTES",
    kernels=tuple(kernel(dtype, *shape) for dtype in ("float16", "bfloat16") for shape in SHAPES),
    products=products,
)
