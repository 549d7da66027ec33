"""The bounds family: how large the keys and values are that a query row sees. Four kernels out of bounds.cu."""

from __future__ import annotations

from families import family_of_rows

# (head_dim, warpgroups, rows, ctas_per_sm). rows: of a CTA, the keys of a tile, one for each thread in the end. Only
# head_dims that one_pass.cu serves. ctas_per_sm: so few that a lane's reads, 16 or 32 times 16 bytes, can be under way
# together.
SHAPES = [(64, 1, 128, 4), (128, 1, 128, 2)]

FAMILY = family_of_rows("bounds", SHAPES)
