"""The forward family: twenty-four kernels out of attention_fwd.cu, twelve for calls with a window, and thirty-six for
query tiles in a list.

Why these shapes: docs/kernel.md.
"""

from __future__ import annotations

from families import Family, Kernel
from wgmma import GROUP_BYTES, header, product

# (head_dim, tile_k, warpgroups, rows, stages, ctas_per_sm, step_cycles). tile_k is fixed for a head_dim: it decides
# the order of the sums, hence the output bits. More warpgroups in a CTA read k and v less often and take turns at the
# tensor cores. One alone serves grids too small to fill the GPU otherwise, and with half the rows (the other half of
# what wgmma computes is unused) still smaller ones: a thread then has half the softmax to compute, which nothing hides
# there. At head_dim 64 three such CTAs fit a multiprocessor and overlap each other, which suits short sequences.
SHAPES = [
    (64, 128, 1, 32, 6, 1, 1100),
    (64, 128, 1, 64, 2, 3, 2935),
    (64, 128, 3, 64, 3, 1, 2680),
    (128, 128, 1, 32, 3, 1, 1400),
    (128, 128, 1, 64, 3, 1, 2300),
    (128, 128, 2, 64, 3, 1, 2600),
    (256, 80, 1, 64, 2, 1, 2890),
    (256, 80, 2, 64, 2, 1, 2900),
]


# Key tiles of a segment, by head_dim: like tile_k they decide the output bits. Why these: docs/kernel.md.
SEGMENT_TILES = {64: 64, 128: 32, 256: 128}

# Of them, those that there are for rows of one segment: what goes on from segment to segment is two fifths of a kernel,
# and costs every query tile some instructions. Where the GPU is full, and for a small call alone, whose CTAs have one
# query tile each. The others, and these but for the one that suits short sequences, are for rows of any number of
# segments.
SHORT = {(64, 1, 32), (64, 1, 64), (64, 3, 64), (128, 2, 64), (256, 2, 64)}
NEVER_LONG = {(64, 1, 64)}

# Of the short ones, those with a second place for q, which comes while the query tile before is computed: where shared
# memory has room for it, and no other CTA fills the gap.
TWO_PLACES = {(64, 3, 64)}

# Of all, those that there are for query tiles in a list, too (packed sequences): for many rows of a sequence, and few.
LISTED = {(64, 1, 32), (64, 3, 64), (128, 1, 32), (128, 2, 64), (256, 1, 64), (256, 2, 64)}


# Of all, those that there are for calls with a window whose rows have one segment: for many rows of a call, and few.
WINDOWED = LISTED

# What those with a list are for beside plain attention: FORM, by its number in params.h.
FORMS = ("", "sinks", "softcap")


def kernel(
    dtype: str, is_short: bool, is_listed: bool, is_windowed: bool, form: int, head_dim: int, tile_k: int,
    warpgroups: int, rows: int, *others: int,
) -> Kernel:
    name = f"fwd_{dtype}_d{head_dim}_k{tile_k}_w{warpgroups}" + ("" if rows == 64 else f"_r{rows}")
    places = 2 if is_short and (head_dim, warpgroups, rows) in TWO_PLACES else 1
    extra = (("LISTED", int(is_listed)), ("WINDOWED", int(is_windowed)), ("FORM", form), ("Q_PLACES", places))
    name += "_window" if is_windowed else "_short" if is_short else "_listed" if is_listed else ""
    name += f"_{FORMS[form]}" if form else ""
    part = "window out" if is_windowed else "packed out" if is_listed else "out"
    part += f" {FORMS[form]}" if form else ""
    tiles = SEGMENT_TILES[head_dim]
    return Kernel(
        name, dtype, head_dim, tile_k, warpgroups, rows, *others, part=part, extra=extra, segment_tiles=tiles,
        is_short=is_short,
    )


def kernels(is_listed: bool = False, is_windowed: bool = False, form: int = 0) -> list[Kernel]:
    """Those of one form. A short one comes before the other of its shape: of two as fast the plan takes the first."""
    found = []
    for shape in SHAPES:
        key = shape[0], shape[2], shape[3]
        if key in WINDOWED if is_windowed else key in SHORT and not is_listed:
            found += [(True, shape)]
        if not is_windowed and (key in LISTED if is_listed else key not in NEVER_LONG):
            found += [(False, shape)]
    return [
        kernel(dtype, is_short, is_listed, is_windowed, form, *shape)
        for dtype in ("float16", "bfloat16")
        for is_short, shape in found
    ]


def products(of: Kernel) -> str:
    """S = q k^T and O = P v.

    With 32 rows of Q every other group of eight of the 64 rows is unused. The groups overlap, four rows apart: so group
    2 g begins at row 8 g, and Q lies in shared memory as always.
    """
    in_registers = (of.head_dim, of.warpgroups) == (128, 2)  # Q_IN_REGISTERS in layout.cuh
    rows = "Q in registers, K" if in_registers else "both"
    scores = product(
        "wgmma_scores",
        f"S[64, {of.tile_k}] (+)= Q[64, 16] K[{of.tile_k}, 16]^T, {rows} K-major in shared memory",
        of.tile_k, of.dtype, a_group_bytes=None if in_registers else GROUP_BYTES * of.rows // 64, transpose_b=False,
        high_is_given=True,
    )
    output = product(
        "wgmma_output",
        f"O[64, {of.head_dim}] (+)= P[64, 16] V[16, {of.head_dim}], P in registers, V MN-major in shared memory",
        of.head_dim, of.dtype, a_group_bytes=None, transpose_b=True, high_is_given=True,
    )
    return header(scores, output)


FAMILY = Family(
    name="forward",
    source="attention_fwd.cu",
    entry="dhp_attention_fwd",
    params="params.h",
    shared_bytes="DHP_FWD_SHARED_BYTES",
    kernels=(
        *kernels(),
        *kernels(is_windowed=True),
        *(kernel for form in range(len(FORMS)) for kernel in kernels(is_listed=True, form=form)),
    ),
    products=products,
)
