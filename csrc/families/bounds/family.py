"""The bounds family: how large the keys and values are that a query row sees. Four kernels out of bounds.cu."""

from __future__ import annotations

from families import Family, Kernel
from wgmma import header

# (head_dim, warpgroups, rows, ctas_per_sm). rows: of a CTA, the keys of a tile, one for each thread in the end. Only
# head_dims that one_pass.cu serves. ctas_per_sm: at head_dim 128 a lane reads 32 times 16 bytes; with fewer registers
# ptxas spills.
SHAPES = [(64, 1, 128, 6), (128, 1, 128, 3)]


def kernel(dtype: str, head_dim: int, warpgroups: int, rows: int, ctas_per_sm: int) -> Kernel:
    # no step of keys, no stage: a CTA reads its keys once
    return Kernel(f"bounds_{dtype}_d{head_dim}", dtype, head_dim, 0, warpgroups, rows, 0, ctas_per_sm, 0, "bounds")


def products(of: Kernel) -> str:
    """None: a norm is a sum over one row."""
    return header()


FAMILY = Family(
    name="bounds",
    source="bounds.cu",
    entry="dhp_attention_bounds",
    params="params.h",
    shared_bytes="DHP_BOUNDS_SHARED_BYTES",
    kernels=tuple(kernel(dtype, *shape) for dtype in ("float16", "bfloat16") for shape in SHAPES),
    products=products,
)
