"""The delta family: what the backward needs of each query row. Six kernels out of delta.cu."""

from __future__ import annotations

from families import family_of_rows

# (head_dim, warpgroups, rows, ctas_per_sm). rows: of a CTA, so that every thread has four reads of 16 bytes of each
# tensor under way, which fills the memory pipe; a lane reads eight elements of a row.
SHAPES = [(64, 1, 64, 8), (128, 1, 32, 8), (256, 1, 16, 8)]

FAMILY = family_of_rows("delta", SHAPES)
