"""Rows whose keys are of several segments, on the emulated machine: the bits of a row are the same whether one CTA goes
through its segments, or each is the work of another CTA or cluster, and whatever the rows beside it see.

Segments are short here, as no kernel that ships has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiling import Substitution, families, needs_c, needs_compiler
from emulated import DECODE, KERNELS, Emulator, Violation, build
from harness import same_bits
from test_emulated_forward import Call, compute, inputs
from torch import Tensor

pytestmark = [needs_compiler, needs_c]

Emulators = Callable[[families.Kernel], Emulator]  # of conftest.py

OF_SEGMENTS = [kernel for kernel in KERNELS if not kernel.is_short]
TILES = 2  # of a segment
CHEAP, DEAR = 1, 10**6  # cycles of a step: what they say of the cost of a fold decides whether segments are split


def of_short_segments(kernel: families.Kernel, step_cycles: int) -> families.Kernel:
    name = f"{kernel.name}_{step_cycles}"
    return replace(kernel, name=name, segment_tiles=TILES, step_cycles=step_cycles)


def calls_for(kernel: families.Kernel) -> list[Call]:
    """Segments that are full, cut off, and unseen by some rows of a tile, or by all of them; rows that see none."""
    d, rows, keys = kernel.head_dim, kernel.tile_q, kernel.tile_k
    return [
        Call(1, 1, 1, 1, 2 * keys + 1, d),
        Call(1, 8, 1, 1, 7 * keys - 3, d),
        Call(2, 4, 2, 5, 4 * keys, d - 8, gap=8),
        Call(1, 2, 1, rows + 3, 5 * keys, d, True, 2 * keys - 9),  # the diagonal crosses a segment's end
        Call(1, 1, 1, rows, 4 * keys, d, True, -rows // 2),
        Call(1, 2, 1, 2, 6 * keys - 1, d, True, 4 * keys),
        Call(1, 1, 1, 2 * keys + 9, 3 * keys, d, True, -3),  # first rows of a call that is split
    ]


@pytest.fixture(scope="module", params=OF_SEGMENTS, ids=lambda kernel: kernel.name)
def chosen(request: pytest.FixtureRequest, emulators: Emulators) -> tuple[families.Kernel, Emulator, Emulator]:
    whole, split = (emulators(of_short_segments(request.param, cycles)) for cycles in (CHEAP, DEAR))
    return request.param, whole, split


def test_split_segments_change_no_bit(chosen: tuple[families.Kernel, Emulator, Emulator], session_seed: int) -> None:
    """Both are what float64 says, too."""
    kernel, whole, split = chosen
    print(f"to repeat these calls: pytest --seed {session_seed}")
    for nth, call in enumerate(calls_for(kernel)):
        print(call)
        for mine, its in zip(*(compute(one, call, session_seed + nth) for one in (whole, split)), strict=True):
            assert same_bits(mine, its)


def attend(emulator: Emulator, q: Tensor, k: Tensor, v: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    out = torch.empty_like(q)
    return out, emulator.attention(q, k, v, out, True, offset)


def test_a_row_keeps_its_bits_in_other_company(
    chosen: tuple[families.Kernel, Emulator, Emulator], session_seed: int
) -> None:
    """Rows alone, which see fewer segments than those they had beside them."""
    kernel, whole, split = chosen
    d, s = kernel.head_dim, 5 * kernel.tile_k + 9
    q, k, v = inputs(Call(1, 2, 1, s, s, d), session_seed)
    out, lse = attend(whole, q, k, v, 0)
    for first, last in ((s - 1, s), (2 * kernel.tile_k - 3, 2 * kernel.tile_k + 2), (kernel.tile_k, kernel.tile_k + 1)):
        for emulator in (whole, split):
            part, part_lse = attend(emulator, q[:, :, first:last].contiguous(), k, v, first)
            assert same_bits(part, out[:, :, first:last])
            assert same_bits(part_lse, lse[:, :, first:last])


def forward_beside(kernel: families.Kernel) -> families.Kernel:
    """Of that head_dim the one with the fewest rows, as a CTA that goes through all segments."""
    forward = min((one for one in OF_SEGMENTS if one.head_dim == kernel.head_dim), key=lambda one: one.tile_q)
    return of_short_segments(forward, CHEAP)


def assert_same_bits(right: Emulator, other: Emulator, kernel: families.Kernel, seed: int) -> None:
    for nth, call in enumerate(calls_for(kernel)):
        print(call)
        other.disturb(seed + nth)
        for mine, its in zip(*(compute(one, call, seed + nth) for one in (right, other)), strict=True):
            assert same_bits(mine, its)


def assert_poisoned(right: Emulator, clusters: Emulator, kernel: families.Kernel, seed: int) -> None:
    """Where a load of one segment is lost, rows are NaN from end to end, or right."""
    for nth, call in enumerate(calls_for(kernel)[:3]):
        print(call)
        expected, expected_lse = compute(right, call, seed + nth)
        q, k, v = inputs(call, seed + nth)
        out = torch.empty_like(q)
        clusters.disturb(seed + nth, nth)
        lse = clusters.attention(q, k, v, out, call.is_causal, call.causal_offset)
        clusters.disturb(0)
        nan = lse.isnan() & out.isnan().all(dim=3)
        assert nan.any(), "a cluster waited in vain, and says nothing"
        assert same_bits(out[~nan], expected[~nan]) and same_bits(lse[~nan], expected_lse[~nan])


@pytest.mark.parametrize("kernel", DECODE, ids=lambda kernel: kernel.name)
def test_clusters_give_the_bits_of_one_cta(kernel: families.Kernel, emulators: Emulators, session_seed: int) -> None:
    """And NaN, if one of them has waited in vain."""
    whole, clusters = emulators(forward_beside(kernel)), emulators(of_short_segments(kernel, CHEAP))
    print(f"to repeat these calls: pytest --seed {session_seed}")
    assert_same_bits(whole, clusters, kernel, session_seed)
    assert_poisoned(whole, clusters, kernel, session_seed)


# Mistakes in parts, and in what is made of them, that must be found.
MISTAKES: dict[str, Substitution] = {
    "parts_of_another_query_tile": ("p->q_tiles + p->q_tiles - 1 - tile,", "p->q_tiles + tile,"),
    "segments_of_one_query_tile_alone": ("max(last - i, 0) * p.q_tiles", "max(last - i, 0)"),
    "parts_of_another_head": ("(head << p->log2_rows) + in_group}", "((head & 0) << p->log2_rows) + in_group}"),
    "the_first_segment_again": ("load_two_if(last - i >= 0,", "load_two_if(1,"),
    "other_columns": ("piece * DHP_PART_COLUMNS + in_quad * 2;", "piece * DHP_PART_COLUMNS + in_quad * 4;"),
    "columns_beyond_head_dim": ("column + 8 < p.head_dim,", "1,"),
    "hidden_rows_not_zero": ("seen = (uint32_t)(last_key < 0) - 1;", "seen = 0xffffffffu;"),
    "sums_as_they_are": ("fmaf(sum_before, by.before, __fmul_rn(*sum, by.later))", "sum_before + *sum"),
    "later_outputs_as_they_are": ("__fmul_rn(later, by.later))", "later)"),
}
OF_CLUSTERS: dict[str, Substitution] = {
    "keys_of_the_first_segment": ("(u->first_tile + u->tiles - 1 - tile)", "(u->tiles - 1 - tile)"),
    "a_place_of_another_query_tile": ("u.place = group * p->q_tiles + p->q_tiles - 1 - tile;", "u.place = index;"),
    "columns_of_a_piece_in_one_place": ("in_quad * 4 + second * 2;", "in_quad * 4 + second * 0;"),
    "parts_not_poisoned": ("shift, sum + poison);", "shift, sum);"),
}


# Of several warpgroups at head_dim 128, where a branch leads around the mask of a segment's first key tile.
OF_SEVERAL: dict[str, Substitution] = {"a_segment_begins_unmasked": ("MASKED_STEPS() > 0,", "MASKED_STEPS() > 1,")}


@pytest.mark.parametrize(
    ("shape", "mistake"),
    [((64, 1, 32), mistake) for mistake in MISTAKES.values()]
    + [((128, 2, 64), mistake) for mistake in OF_SEVERAL.values()],
    ids=[*MISTAKES, *OF_SEVERAL],
)
def test_a_mistake_is_found(
    tmp_path: Path, host: list[Path], emulators: Emulators, shape: tuple[int, int, int], mistake: Substitution
) -> None:
    kernel = next(one for one in OF_SEGMENTS if (one.head_dim, one.warpgroups, one.rows) == shape)
    whole, split = emulators(forward_beside(kernel)), of_short_segments(kernel, DEAR)
    wrong = build(tmp_path, split, host, (mistake,))
    with pytest.raises((AssertionError, Violation)):
        assert_same_bits(whole, wrong, kernel, 0)


@pytest.mark.parametrize("mistake", OF_CLUSTERS.values(), ids=OF_CLUSTERS.keys())
def test_a_mistake_of_clusters_is_found(
    tmp_path: Path, host: list[Path], emulators: Emulators, mistake: Substitution
) -> None:
    kernel = next(one for one in DECODE if one.head_dim == 64)  # the smallest cluster
    whole = emulators(forward_beside(kernel))
    wrong = build(tmp_path, of_short_segments(kernel, CHEAP), host, (mistake,))
    with pytest.raises((AssertionError, Violation)):
        assert_same_bits(whole, wrong, kernel, 0)
        assert_poisoned(whole, wrong, kernel, 0)
