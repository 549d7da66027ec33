"""The tiles family: the list of query tiles of packed sequences. One kernel, for every dtype and head_dim."""

from __future__ import annotations

from families import Family, Kernel
from wgmma import header

FAMILY = Family(
    name="tiles",
    source="tiles.cu",
    entry="dhp_attention_tiles",
    params="params.h",
    shared_bytes="DHP_TILES_SHARED_BYTES",
    # a warp for each tile of the list; of the constants the kernel knows the number of warps alone
    kernels=(Kernel("tiles", "bfloat16", 128, 0, 1, 4, 0, 1, 0, "tiles"),),
    products=lambda of: header(),
)
