"""The forward's numbers without a GPU: host code and kernels, thread by thread, on the emulated machine.

What a GPU adds (that products are waited for, how long anything takes, exact bits) is tested elsewhere: tests/schedule,
tests/attention.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from compiling import Substitution, families, needs_c, needs_compiler
from emulated import KERNELS, Emulator, Violation, build
from harness import same_bits
from reference import reference
from torch import Tensor

pytestmark = [needs_compiler, needs_c]

Emulators = Callable[[families.Kernel], Emulator]  # of conftest.py

# bfloat16 of out and of the probabilities; float32 sums of lse.
OUT_ERROR, LSE_ERROR = 4e-3, 1e-5
FEW_ELEMENTS = 64  # of fewer the norm of the error is one draw of the rounding


class Call(NamedTuple):
    """B, Hq, Hk, Sq, Sk, D, the mask and the window; how rows lie: apart from each other by so many elements more than
    D."""

    batch: int
    heads: int
    key_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    is_causal: bool = False
    causal_offset: int = 0
    gap: int = 0
    window: tuple[int, int] = (-1, -1)

    @property
    def mask(self) -> dict[str, Any]:
        return {"is_causal": self.is_causal, "causal_offset": self.causal_offset, "window": self.window}


def calls_for(kernel: families.Kernel, random: Random) -> list[Call]:
    """Tiles that are full, cut off, alone, and more than a CTA has; short rows of packed heads; no key at all."""
    d, rows, keys = kernel.head_dim, kernel.warpgroups * kernel.rows, kernel.tile_k
    chosen = [
        Call(1, 1, 1, 1, 1, d),
        Call(1, 8, 1, 1, 2 * keys + 5, d),
        Call(2, 6, 2, 5, keys, d, True, keys - 5),
        Call(1, 2, 1, rows + 1, keys - 1, d - 8, True),
        Call(1, 2, 2, 2 * rows, 3 * keys, d, gap=8),
        Call(2, 1, 1, rows - 3, 2 * keys + 1, d, True, -7, gap=16),
        Call(1, 1, 1, 3, 0, d),
        Call(1, 1, 1, rows, keys, d, True, -rows),
        Call(1, 2, 1, rows, 3 * keys, d, True, 2 * keys - rows // 2),  # the diagonal enters another key tile
        Call(1, 140, 70, 40, 30, 64 if d == 64 else d - 56, True),  # more tiles than multiprocessors
    ]
    for _ in range(4):
        key_heads, group = random.choice([1, 2]), random.choice([1, 3, 4])
        sq, sk = random.randint(1, 2 * rows), random.randint(1, 4 * keys)
        is_causal = random.random() < 0.5
        offset = random.choice([0, sk - sq, random.randint(-sq, sk)]) if is_causal else 0
        chosen.append(
            Call(1, key_heads * group, key_heads, sq, sk, 8 * random.randint(1, d // 8), is_causal, offset, 8)
        )
    return chosen


def rows_apart(t: Tensor, gap: int) -> Tensor:
    """The same numbers, with NaN between rows and around them."""
    b, h, s, d = t.shape
    return t.new_full((b, h, s + 2, d + gap), torch.nan)[:, :, 1 : s + 1, :d].copy_(t)


def inputs(call: Call, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    b, hq, hk, sq, sk, d = call[:6]
    shapes = ((b, hq, sq, d), (b, hk, sk, d), (b, hk, sk, d))
    q, k, v = (rows_apart(torch.randn(shape, generator=rng).bfloat16(), call.gap) for shape in shapes)
    return q, k, v


def usual_norm(call: Call, q: Tensor, k: Tensor, v: Tensor, lse: Tensor) -> Tensor:
    """[B, H, S]: what the norm of a row of out is where the signs of its terms are chance: the root of the sum of all
    (p v)². In a few columns it may be much less, and the error is not."""
    options = {**call.mask, "scale": 2 * q.shape[3] ** -0.5}  # p² is exp(2 s - 2 lse)
    squares, lse_of_squares = reference(q, k, v.double().square(), **options)[:2]
    return (squares.sum(dim=3) * (lse_of_squares - 2 * lse).exp()).sqrt()


def compute(emulator: Emulator, call: Call, seed: int) -> tuple[Tensor, Tensor]:
    """out and lse, held to float64; nothing beside the rows of out is written."""
    q, k, v = inputs(call, seed)
    b, h, s, d = q.shape
    around = torch.full((b, h, s + 2, d + call.gap), 7.0, dtype=torch.bfloat16)
    out = around[:, :, 1 : s + 1, :d]
    lse = emulator.attention(q, k, v, out, **call.mask)
    result = out.clone()
    out.fill_(7)
    assert (around == 7).all(), "something beside the rows of out was written"
    want, want_lse = reference(q, k, v, **call.mask)[:2]
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    seen = ~want_lse.isneginf()
    assert (result[~seen] == 0).all(), "a row that sees no key is not 0"
    if seen.any():
        assert (lse[seen].double() - want_lse[seen]).abs().max() <= LSE_ERROR * want_lse[seen].abs().clamp(min=1).max()
        error, usual = (result[seen].double() - want[seen]).norm(dim=1), usual_norm(call, q, k, v, want_lse)[seen]
        assert (error <= 4 * OUT_ERROR * usual).all()
        are_few = result[seen].numel() < FEW_ELEMENTS
        assert error.norm() <= (2 if are_few else 1) * OUT_ERROR * usual.norm()
    return result, lse


@pytest.fixture(scope="module", params=KERNELS, ids=lambda kernel: kernel.name)
def chosen(request: pytest.FixtureRequest, emulators: Emulators) -> tuple[families.Kernel, Emulator]:
    return request.param, emulators(request.param)


def compute_all(emulator: Emulator, calls: list[Call], seed: int) -> None:
    print(f"to repeat these calls: pytest --seed {seed}")
    for nth, call in enumerate(calls):
        print(call)
        compute(emulator, call, seed + nth)


def test_every_shape_is_what_float64_says(chosen: tuple[families.Kernel, Emulator], session_seed: int) -> None:
    kernel, emulator = chosen
    compute_all(emulator, calls_for(kernel, Random(session_seed)), session_seed)


def test_a_row_keeps_its_bits_in_other_company(chosen: tuple[families.Kernel, Emulator], session_seed: int) -> None:
    """The last rows alone, as decoding steps, and a chunk from the middle."""
    kernel, emulator = chosen
    d, s = kernel.head_dim, 2 * kernel.tile_k + 9
    q, k, v = inputs(Call(1, 4, 2, s, s, d), session_seed)
    out = torch.empty_like(q)
    lse = emulator.attention(q, k, v, out, True)
    for first, last in ((s - 1, s), (s - 5, s), (kernel.tile_k - 3, kernel.tile_k + 20)):
        part = q[:, :, first:last].contiguous()
        part_out = torch.empty_like(part)
        part_lse = emulator.attention(part, k, v, part_out, True, first)
        assert same_bits(part_out, out[:, :, first:last])
        assert same_bits(part_lse, lse[:, :, first:last])


def test_a_hidden_nan_stays_where_it_is(chosen: tuple[families.Kernel, Emulator]) -> None:
    """Behind the last visible key, and in another row."""
    kernel, emulator = chosen
    d, s = kernel.head_dim, kernel.tile_k + 7
    q, k, v = inputs(Call(1, 1, 1, 20, s, d), 0)
    clean = torch.empty_like(q)
    emulator.attention(q, k, v, clean, True, s - 27)
    k[:, :, -7:] = torch.nan
    v[:, :, -7:] = torch.inf
    q[:, :, 3] = torch.nan
    out = torch.empty_like(q)
    emulator.attention(q, k, v, out, True, s - 27)
    assert out[:, :, 3].isnan().all()
    others = [i for i in range(20) if i != 3]
    assert same_bits(out[:, :, others], clean[:, :, others])


def test_more_keys_than_any_kernel_serves(tmp_path: Path, host: list[Path]) -> None:
    """In a build whose only kernel is of one segment."""
    kernel = next(one for one in KERNELS if one.is_short)
    q = torch.randn(1, 1, 5, kernel.head_dim).bfloat16()
    k = torch.randn(1, 1, kernel.segment_tiles * kernel.tile_k + 1, kernel.head_dim).bfloat16()
    with pytest.raises(Violation, match="k: 8193 keys; no forward kernel of this build serves so many"):
        build(tmp_path, kernel, host).attention(q, k, k, torch.empty_like(q))


@pytest.mark.parametrize("head_dim", sorted({kernel.head_dim for kernel in KERNELS}))
def test_all_kernels_of_a_head_dim_give_the_same_bits(emulators: Emulators, head_dim: int, session_seed: int) -> None:
    several = [kernel for kernel in KERNELS if kernel.head_dim == head_dim]
    tile_k = several[0].tile_k
    for call in (
        Call(1, 2, 1, 150, 2 * tile_k + 3, head_dim, True, 90),
        Call(1, 8, 2, 3, 3 * tile_k - 1, head_dim),
    ):
        results = [compute(emulators(kernel), call, session_seed) for kernel in several]
        for out, lse in results[1:]:
            assert same_bits(out, results[0][0]) and same_bits(lse, results[0][1])


# Mistakes in the numbers that a schedule does not show.
MISTAKES: dict[str, Substitution] = {
    "mask_one_key_late": ("column <= limit[r]", "column <= limit[r] + 1"),
    "mask_of_another_column": ("lane % 4 * 2;", "lane % 4 * 2 + 1;"),
    "diagonal_left_unmasked": ("return tile->last + 1 - max(", "return tile->last - max("),
    "the_other_half_not_zero": ("(part) == FIRST_HALF ? SCORES / 4 : 0) + i] = 0;", "0) + i] |= 0;"),
    "lanes_do_not_exchange": ("swap_across(&x[1], &x[3], in_quad & 2, 2);", ""),
    "rows_of_the_other_half": ("twos[i] = {o[(first + i) * 4 + 2 * r],", "twos[i] = {o[(first + i) * 4],"),
    "out_of_another_head": ("(HEAD_OF(of) + x.head) * p.out_stride[1]", "HEAD_OF(of) * p.out_stride[1]"),
    "last_row_not_stored": ("x.row < row_end ? p.head_dim : 0", "x.row + 1 < row_end ? p.head_dim : 0"),
    "columns_beyond_head_dim": ("x.row < row_end ? p.head_dim : 0", "x.row < row_end ? HEAD_DIM : 0"),
    "sum_of_half_a_quad": ("stats.sum[r] += __shfl_xor_sync(FULL_MASK, stats.sum[r], 2);", ""),
    "maximum_of_a_lane": ("shift = fmaxf(shift, __shfl_xor_sync(FULL_MASK, shift, 2));", ""),
    "lse_unscaled": ("stats.shift[r] * p.scale + poison", "stats.shift[r] + poison"),
    "hidden_rows_not_zero": ("((uint32_t)(x.last_key < 0) - 1)", "0xffffffffu"),
}

# Of several warpgroups, where a branch leads around the mask of a first key tile that all rows see.
OF_SEVERAL: dict[str, Substitution] = {"first_key_tile_left_unmasked": ("MASKED_STEPS() > 0,", "MASKED_STEPS() > 1,")}


@pytest.mark.parametrize(
    ("warpgroups", "mistake"),
    [(1, mistake) for mistake in MISTAKES.values()] + [(3, mistake) for mistake in OF_SEVERAL.values()],
    ids=[*MISTAKES, *OF_SEVERAL],
)
def test_a_mistake_is_found(tmp_path: Path, host: list[Path], warpgroups: int, mistake: Substitution) -> None:
    kernel = next(one for one in KERNELS if (one.head_dim, one.warpgroups, one.rows) == (64, warpgroups, 64))
    emulator = build(tmp_path, kernel, host, (mistake,))
    with pytest.raises((AssertionError, Violation)):
        for nth, call in enumerate(calls_for(kernel, Random(0))):
            compute(emulator, call, nth)
