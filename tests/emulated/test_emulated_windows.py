"""Sliding windows without a GPU: host code and the kernels of calls with a window, thread by thread, on the emulated
machine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from compiling import Substitution, families, needs_c, needs_compiler
from emulated import LISTED, WINDOWED, Emulator, Violation, build
from harness import same_bits
from test_emulated_forward import Call, compute_all, inputs

pytestmark = [needs_compiler, needs_c]

Emulators = Callable[[families.Kernel], Emulator]  # of conftest.py


@pytest.fixture(scope="module", params=WINDOWED, ids=lambda kernel: kernel.name)
def chosen(request: pytest.FixtureRequest, emulators: Emulators) -> tuple[families.Kernel, Emulator]:
    return request.param, emulators(request.param)


def calls_for(kernel: families.Kernel, random: Random) -> list[Call]:
    """Of which the last row does not see key 0, or the kernel would not serve them: windows within a key tile, and over
    several; a last row alone; rows before the first key and behind the last one; packed heads; more query tiles than
    multiprocessors."""
    d, rows, keys = kernel.head_dim, kernel.warpgroups * kernel.rows, kernel.tile_k
    chosen = [
        Call(1, 2, 1, 2 * rows + 5, 2 * rows + 5, d, True, 0, 8, (20, 0)),
        Call(1, 1, 1, rows + 30, rows + 200, d, False, 170, 0, (keys + 3, 9)),
        Call(1, 8, 2, 1, 3 * keys + 5, d - 8, True, 3 * keys + 4, 0, (keys - 1, 0)),
        Call(2, 4, 2, 5, 2 * keys, d, False, 2 * keys - 9, 16, (0, 0)),
        Call(1, 1, 1, 3 * keys, keys, d, True, 0, 0, (30, 0)),  # the last rows see nothing
        Call(1, 1, 1, rows + 70, 3 * keys, d, True, -40, 0, (25, 0)),  # nor do the first ones
        Call(1, 1, 1, 2 * keys, 2 * keys, d, False, 0, 0, (keys, -1)),  # no end on the right
        Call(1, 140, 70, 60, 60, 64 if d == 64 else d - 56, True, 0, 0, (17, 0)),
    ]
    for _ in range(4):
        sq, sk = random.randint(2, 2 * rows), random.randint(1, 4 * keys)
        offset = random.choice([0, sk - sq, random.randint(0, sk)])
        left = random.randint(0, max(0, sq + offset - 2))
        window, is_causal = (left, random.choice([0, 1, random.randint(0, sk)])), random.random() < 0.5
        if left < sq + offset - 1:
            chosen.append(Call(1, 2, 1, sq, sk, 8 * random.randint(1, d // 8), is_causal, offset, 8, window))
    return chosen


def test_every_shape_is_what_float64_says(chosen: tuple[families.Kernel, Emulator], session_seed: int) -> None:
    kernel, emulator = chosen
    compute_all(emulator, calls_for(kernel, Random(session_seed)), session_seed)


def test_a_row_keeps_its_bits_in_other_company(
    chosen: tuple[families.Kernel, Emulator], emulators: Emulators, session_seed: int
) -> None:
    """Among packed sequences; the last rows alone, as decoding steps, and a chunk from the middle."""
    kernel, emulator = chosen
    d, s, left = kernel.head_dim, 2 * kernel.tile_k + 9, kernel.tile_k + 5
    q, k, v = inputs(Call(1, 4, 2, s, s, d), session_seed)
    out = torch.empty_like(q)
    lse = emulator.attention(q, k, v, out, True, window=(left, 0))
    shape = (kernel.head_dim, kernel.warpgroups, kernel.rows)
    listed = emulators(next(one for one in LISTED if (one.head_dim, one.warpgroups, one.rows) == shape))
    begins, tokens = torch.tensor([0, s], dtype=torch.int32), [t[0].transpose(0, 1).contiguous() for t in (q, k, v)]
    packed = torch.empty_like(tokens[0])
    packed_lse = listed.varlen(*tokens, packed, begins, s, s, begins, is_causal=True, window=(left, 0))
    assert same_bits(packed.transpose(0, 1)[None], out) and same_bits(packed_lse[None], lse)
    for first, last in ((s - 1, s), (s - 5, s), (kernel.tile_k + 7, kernel.tile_k + 30)):
        part = q[:, :, first:last].contiguous()
        part_out = torch.empty_like(part)
        part_lse = emulator.attention(part, k, v, part_out, True, first, window=(left, 0))
        assert same_bits(part_out, out[:, :, first:last])
        assert same_bits(part_lse, lse[:, :, first:last])


def test_a_wide_window_is_refused(chosen: tuple[families.Kernel, Emulator]) -> None:
    """Rows would be folds, of which these kernels know nothing."""
    kernel, emulator = chosen
    most = kernel.tile_k * kernel.segment_tiles
    q, k, v = inputs(Call(1, 1, 1, 2, most + 1, kernel.head_dim), 0)
    with pytest.raises(Violation, match=rf"window: \({most}, 0\), with {most + 1} keys seen; supported on CUDA"):
        emulator.attention(q, k, v, torch.empty_like(q), True, most + 1, window=(most, 0))


def test_a_hidden_nan_stays_where_it_is(chosen: tuple[families.Kernel, Emulator]) -> None:
    """Key tiles that no row of the query tile sees are not read."""
    kernel, emulator = chosen
    keys = 3 * kernel.tile_k
    q, k, v = inputs(Call(1, 1, 1, 10, keys, kernel.head_dim), 0)
    place = {"is_causal": True, "causal_offset": keys - 10, "window": (20, 0)}
    clean, out = torch.empty_like(q), torch.empty_like(q)
    emulator.attention(q, k, v, clean, **place)
    k[:, :, : kernel.tile_k], v[:, :, : kernel.tile_k] = torch.nan, torch.nan
    emulator.attention(q, k, v, out, **place)
    assert same_bits(out, clean) and out.isfinite().all()


MISTAKES: dict[str, Substitution] = {
    "a_column_too_few": ("min(from_0 % 8, 2)", "min(from_0 % 8, 1)"),
    "window_one_key_short": ("~columns_before(first[r])", "~columns_before(first[r] + 1)"),
    "last_key_hidden": ("columns_before(limit[r] + 1)", "columns_before(limit[r])"),
    "hidden_tile_rescales": ("SEES_NONE_OF(r, step) ? 1.f", "SEES_NONE_OF(r, step) ? stats.rescale[r]"),
    "a_tile_left_out": ("max(row + lowest, 0) / TILE_K, top)", "max(row + lowest, 0) / TILE_K + 1, top)"),
    "half_a_tile_of_other_keys": ("FIRST_KEY(t) + KEYS_BEFORE(part)", "FIRST_KEY(t)"),
    "the_end_unmasked": ("(max(last_row + lowest, 0) + TILE_K - 1)", "max(last_row + lowest, 0)"),
    "rows_without_keys": ("row.last_key < row.first_key ? -1", "row.last_key < row.first_key ? row.last_key"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_found(tmp_path: Path, host: list[Path], emulators: Emulators, mistake: Substitution) -> None:
    few = next(one for one in WINDOWED if (one.head_dim, one.rows) == (64, 32))
    emulator = build(tmp_path, few, host, (mistake,))
    with pytest.raises((AssertionError, Violation)):
        compute_all(emulator, calls_for(few, Random(0)), 0)
        test_a_row_keeps_its_bits_in_other_company((few, emulator), emulators, 0)
