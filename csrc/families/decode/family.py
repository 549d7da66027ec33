"""The decode family: few queries over many keys. Ten kernels out of attention_decode.cu.

Why these: docs/kernel-decode.md.
"""

from __future__ import annotations

from families import Family, Kernel
from wgmma import header

# (head_dim, tile_k, warpgroups, stages, unit_cycles, step_cycles, TILES_PER_WARP, STRIP). tile_k is the forward's: it
# decides the order of the sums, hence the output bits. A cluster has a CTA for every STRIP columns, and each of its
# warps keeps the scores of TILES_PER_WARP key tiles: so many it has room for, and where that is a segment of the
# forward's, longer rows are split into units of one segment each. stages: groups of four key tiles for which there are
# places for strips of v. unit_cycles: beside key tiles; step_cycles: of a key tile more.
SHAPES = [
    (64, 128, 2, 4, 6600, 260, 2, 32),
    (64, 128, 2, 4, 10700, 300, 2, 16),
    (128, 128, 2, 4, 8300, 300, 1, 32),
    (128, 128, 1, 4, 6600, 310, 1, 16),
    (256, 80, 2, 4, 14800, 170, 1, 32),
]


def kernel(
    dtype: str, head_dim: int, tile_k: int, warpgroups: int, stages: int, unit: int, cycles: int, tiles: int, strip: int
) -> Kernel:
    cluster, extra = head_dim // strip, (("TILES_PER_WARP", tiles), ("STRIP", strip))
    name = f"dec_{dtype}_d{head_dim}_k{tile_k}_c{cluster}"
    return Kernel(
        name, dtype, head_dim, tile_k, warpgroups, 8, stages, 1, cycles, extra=extra, shares_rows=True,
        segment_tiles=cluster * warpgroups * 4 * tiles, cluster=cluster, unit_cycles=unit,
    )


FAMILY = Family(
    name="decode",
    source="attention_decode.cu",
    entry="dhp_attention_decode",
    params="params.h",
    shared_bytes="DHP_DECODE_SHARED_BYTES",
    kernels=tuple(kernel(dtype, *shape) for dtype in ("float16", "bfloat16") for shape in SHAPES),
    products=lambda of: header(),
)
