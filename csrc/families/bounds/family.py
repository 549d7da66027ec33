"""The bounds family: how large the keys and values are that a query row sees. Four kernels out of bounds.cu."""

from __future__ import annotations

from families import family_of_rows

# (head_dim, warpgroups, rows, ctas_per_sm). rows: of a CTA, the keys of a tile, one for each thread in the end. Only
# head_dims that one_pass.cu serves. ctas_per_sm: at head_dim 128 a lane reads 32 times 16 bytes; with fewer registers
# ptxas spills.
SHAPES = [(64, 1, 128, 6), (128, 1, 128, 3)]

FAMILY = family_of_rows("bounds", SHAPES)
