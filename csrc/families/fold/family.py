"""The fold family: rows out of the parts that other CTAs made of them, each over a key segment. Six kernels out of
fold.cu."""

from __future__ import annotations

from families import family_of_rows

# (head_dim, warpgroups, rows, ctas_per_sm). rows: of a CTA, so that every thread has four columns. ctas_per_sm: all
# that fit; it is a few rows that are waited for.
SHAPES = [(64, 1, 8, 8), (128, 1, 4, 8), (256, 1, 2, 8)]

FAMILY = family_of_rows("fold", SHAPES)
