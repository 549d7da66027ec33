"""Soft caps and sinks of packed sequences without a GPU: their kernels, thread by thread, on the emulated machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from compiling import Substitution, families, needs_c, needs_compiler
from emulated import FORMED, LISTED, Emulator, Violation, build
from harness import same_bits
from test_emulated_packed import HEADS, Sequences, assert_right, lengths_for

pytestmark = [needs_compiler, needs_c]

Emulators = Callable[[families.Kernel], Emulator]  # of conftest.py

WINDOWS = {"none": (-1, -1, False), "causal": (-1, -1, True), "left": (40, -1, True), "both": (30, 20, False)}
# From next to none of a row's sum to nearly all of it, and exactly none.
SINKS = torch.tensor([-3.0, 1.5, 9.0, -torch.inf])


def options_of(kernel: families.Kernel, seed: int) -> dict[str, object]:
    """A soft cap that bends scores of 1, with sinks or without."""
    is_capped = kernel.part.endswith("softcap")
    return {"softcap": 1.5 if is_capped else 0.0, "sinks": None if is_capped and seed % 2 else SINKS}


@pytest.fixture(scope="module", params=FORMED, ids=lambda kernel: kernel.name)
def chosen(request: pytest.FixtureRequest, emulators: Emulators) -> tuple[families.Kernel, Emulator]:
    return request.param, emulators(request.param)


@pytest.mark.parametrize("page_size", [0, 32])
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
def test_every_row_is_what_float64_says(
    chosen: tuple[families.Kernel, Emulator], window: tuple[int, int, bool], page_size: int, session_seed: int
) -> None:
    kernel, emulator = chosen
    packed = Sequences(*lengths_for(kernel), kernel.head_dim, session_seed, page_size)
    given = {"window": window[:2], "is_causal": window[2], **options_of(kernel, session_seed)}
    out, lse = packed.attend(emulator, **given)
    assert_right(packed, out, lse, **given)


def test_scales(chosen: tuple[families.Kernel, Emulator], session_seed: int) -> None:
    """None of the scores, and more of them than a soft cap leaves."""
    kernel, emulator = chosen
    for scale in (0.0, 0.7):
        packed = Sequences([20], [kernel.tile_k + 9], kernel.head_dim, session_seed)
        given = {"scale": scale, **options_of(kernel, session_seed)}
        out, lse = packed.attend(emulator, **given)
        assert_right(packed, out, lse, **given)


def test_a_sink_of_minus_infinity_is_none(emulators: Emulators, session_seed: int) -> None:
    """With the bits of the kernel without sinks."""
    for kernel in (kernel for kernel in FORMED if kernel.part.endswith("sinks")):
        plain = next(one for one in LISTED if kernel.name == f"{one.name}_sinks")
        packed = Sequences(*lengths_for(kernel), kernel.head_dim, session_seed)
        for given in ({"is_causal": True}, {"window": (40, 5)}):
            out, lse = packed.attend(emulators(plain), **given)
            same, same_lse = packed.attend(emulators(kernel), sinks=torch.full([HEADS], -torch.inf), **given)
            assert same_bits(same, out) and same_bits(same_lse, lse)


@pytest.mark.parametrize("window", [(-1, -1), (150, -1)])
def test_a_row_has_its_bits_in_other_company(
    chosen: tuple[families.Kernel, Emulator], window: tuple[int, int], session_seed: int
) -> None:
    """A prefill in one, in chunks, and row by row: tiles that a row sees nothing of leave its sink as it is."""
    kernel, emulator = chosen
    given = {"is_causal": True, "window": window, **options_of(kernel, session_seed)}
    keys = 2 * kernel.tile_k + 11
    whole = Sequences([keys], [keys], kernel.head_dim, session_seed)
    out, lse = whole.attend(emulator, **given)
    rows_alone = [(i, i + 1) for i in (0, 5, kernel.tile_k - 1, kernel.tile_k, keys - 1)]
    for first, last in (*rows_alone, (kernel.tile_k - 20, kernel.tile_k + 30)):
        part = Sequences([last - first], [last], kernel.head_dim, session_seed)
        part.q[: last - first] = whole.q[first:last]
        part.k[:last], part.v[:last] = whole.k[:last], whole.v[:last]
        part_out, part_lse = part.attend(emulator, **given)
        assert same_bits(part_out[: last - first], out[first:last])
        assert same_bits(part_lse[:, : last - first], lse[:, first:last])


@pytest.mark.parametrize("sink", [torch.inf, torch.nan, 80.0])
def test_other_sinks(emulators: Emulators, sink: float, session_seed: int) -> None:
    """All of the sum, or not a number, in one head alone."""
    kernel = next(kernel for kernel in FORMED if kernel.part.endswith("sinks"))
    packed = Sequences([9], [20], kernel.head_dim, session_seed)
    sinks = SINKS.clone()
    sinks[1] = sink
    out, lse = packed.attend(emulators(kernel), sinks=sinks)
    rows = packed.rows(0)
    if sink != sink:
        assert out[rows, 1].isnan().all() and lse[1, rows].isnan().all()
    else:
        assert (out[rows, 1].abs() < 1e-20).all() and (lse[1, rows] == sink).all()
    others = [0, 2, 3]
    expected, expected_lse = packed.attend(emulators(kernel), sinks=SINKS)
    assert same_bits(out[:, others], expected[:, others]) and same_bits(lse[others], expected_lse[others])


MISTAKES: dict[str, Substitution] = {
    "sink_of_the_first_head": ("HEAD_OF(now) + row[r].head, lane", "HEAD_OF(now), lane"),
    "sink_in_every_lane": ("lane % 4 == 0 ? term : 0.f", "lane >= 0 ? term : 0.f"),
    "rows_of_none_have_sinks": ("sink_of(!is_of_none", "sink_of(1 | is_of_none"),
    "no_key_no_sink": ("x.last_key < 0 ? of_none : lse", "x.last_key < 0 ? of_none - INFINITY : lse"),
    "not_capped": ("if (FORM == DHP_FORM_SOFTCAP) cap_scores(s, &forms);", ""),
    "half_a_cap": ("-2.f * forms->cap", "-forms->cap"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_found(tmp_path: Path, host: list[Path], mistake: Substitution) -> None:
    kernel = next(one for one in FORMED if (one.head_dim, one.rows) == (64, 32) and one.part.endswith("softcap"))
    emulator = build(tmp_path, kernel, host, (mistake,))
    with pytest.raises((AssertionError, Violation)):
        for lengths, is_causal in ((lengths_for(kernel), True), (lengths_for(kernel), False), (([2], [30]), False)):
            packed = Sequences(*lengths, kernel.head_dim, 0)  # the last of them packs heads together
            given = {"softcap": 1.5, "sinks": SINKS, "is_causal": is_causal}
            assert_right(packed, *packed.attend(emulator, **given), **given)


def test_a_tile_that_a_row_does_not_see_leaves_its_sink(tmp_path: Path, host: list[Path]) -> None:
    """Were it rescaled there, its bits would depend on the rows beside it."""
    kernel = next(one for one in FORMED if (one.head_dim, one.rows) == (64, 64) and one.part.endswith("sinks"))
    broken = build(tmp_path, kernel, host, (("| (limit[r] < -(lane % 4 * 2))", ""),))
    found = False
    for seed in range(4):
        try:
            test_a_row_has_its_bits_in_other_company((kernel, broken), (-1, -1), seed)
        except AssertionError:
            found = True
    assert found
