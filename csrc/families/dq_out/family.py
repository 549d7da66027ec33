"""The dq_out family: dq from the integer sums that one pass leaves. Four kernels out of dq_out.cu."""

from __future__ import annotations

from families import family_of_rows

# (head_dim, warpgroups, rows, ctas_per_sm). rows: of a CTA, so that every thread has four vectors of eight elements to
# write, whose eight reads of 16 bytes fill the memory pipe. Only head_dims that one_pass.cu serves.
SHAPES = [(64, 1, 64, 6), (128, 1, 32, 6)]

FAMILY = family_of_rows("dq_out", SHAPES)
