"""The backward family: ten kernels out of attention_bwd.cu, four out of one_pass.cu. Why these shapes:
docs/kernel-backward.md."""

from __future__ import annotations

from functools import partial

from families import Family, Kernel
from wgmma import GROUP_BYTES, header, product

# What a kernel computes, and the macros that say so: whether it owns keys or queries, and the gradients it adds up.
PARTS = {
    "dq dk dv": (("OWNS_KEYS", 1), ("WITH_DS", 1), ("WITH_P", 1), ("WITH_DQ", 1)),
    "dk dv": (("OWNS_KEYS", 1), ("WITH_DS", 1), ("WITH_P", 1), ("WITH_DQ", 0)),
    "dk": (("OWNS_KEYS", 1), ("WITH_DS", 1), ("WITH_P", 0), ("WITH_DQ", 0)),
    "dv": (("OWNS_KEYS", 1), ("WITH_DS", 0), ("WITH_P", 1), ("WITH_DQ", 0)),
    "dq": (("OWNS_KEYS", 0), ("WITH_DS", 1), ("WITH_P", 0), ("WITH_DQ", 0)),
}

# (part, head_dim, tile_k, warpgroups, stages, dp_stages, step_cycles). tile_k: rows of a walked tile; it is fixed for
# a part and a head_dim, because it decides the order of the sums. It is as large as registers and shared memory allow
# beside the gradients: at head_dim 256 those of dk alone are 128 floats a thread, so dk and dv are two kernels there.
# Up to 128 one kernel computes all three; dk and dv without dq have their own, which saves a product of five.
# dp_stages: of the walked tiles of dP; as many as the others, or 1 where shared memory has no room for more.
SHAPES = [
    ("dq dk dv", 64, 128, 2, 2, 2, 2600),
    ("dq dk dv", 128, 64, 2, 3, 3, 2900),
    ("dk dv", 64, 96, 2, 4, 4, 2000),
    ("dk dv", 128, 64, 2, 4, 4, 2300),
    ("dk", 256, 64, 2, 2, 1, 3100),
    ("dv", 256, 80, 2, 2, 2, 2900),
    ("dq", 256, 64, 2, 2, 1, 3100),
]

ROWS = 64  # owned rows of a warpgroup: those of a wgmma


def kernel(
    dtype: str, part: str, head_dim: int, tile_k: int, warpgroups: int, stages: int, dp_stages: int, cycles: int
) -> Kernel:
    name = f"bwd_{part.replace(' ', '')}_{dtype}_d{head_dim}_k{tile_k}_w{warpgroups}"
    source = "one_pass.cu" if part == "dq dk dv" else ""
    extra = (*PARTS[part], ("DP_STAGES", dp_stages))
    return Kernel(name, dtype, head_dim, tile_k, warpgroups, ROWS, stages, 1, cycles, part, extra, source)


def products(of: Kernel) -> str:
    """S and dP, the first step of which begins anew, and the gradients; for one_pass.cu a share of dq, too."""
    scores = partial(
        product,
        comment=f"S[64, {of.tile_k}] (+)= OWN[64, 16] WALK[{of.tile_k}, 16]^T, both K-major in shared memory",
        n=of.tile_k, dtype=of.dtype, a_group_bytes=GROUP_BYTES, transpose_b=False,
    )
    dq = partial(
        product,
        comment="DQ[64, 64] (+)= DS[64, 16] K[16, 64], DS K-major, K MN-major in shared memory",
        n=64, dtype=of.dtype, a_group_bytes=GROUP_BYTES, transpose_b=True,
    )
    gradient = product(
        "wgmma_gradient",
        f"D[64, {of.head_dim}] (+)= P[64, 16] WALK[16, {of.head_dim}], P in registers, WALK MN-major in shared memory",
        of.head_dim, of.dtype, a_group_bytes=None, transpose_b=True,
    )
    common = scores("wgmma_scores_fresh", fresh=True), scores("wgmma_scores"), gradient
    return header(*common, dq("wgmma_dq_fresh", fresh=True), dq("wgmma_dq")) if of.source else header(*common)


FAMILY = Family(
    name="backward",
    source="attention_bwd.cu",
    entry="dhp_attention_bwd",
    params="params.h",
    shared_bytes="DHP_BWD_SHARED_BYTES",
    kernels=tuple(kernel(dtype, *shape) for dtype in ("float16", "bfloat16") for shape in SHAPES),
    products=products,
)
