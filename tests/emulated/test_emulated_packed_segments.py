"""Packed rows whose keys are of several segments, on the emulated machine: folds, but for windows that are no wider
than a segment, within which a row is one chain.

Segments are short here, as no kernel that ships has them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from compiling import Substitution, families, needs_c, needs_compiler
from emulated import LISTED, Emulator, Violation, build
from harness import same_bits
from test_emulated_packed import FEW, Sequences, assert_right
from test_emulated_segments import CHEAP, TILES, of_short_segments

pytestmark = [needs_compiler, needs_c]

Emulators = Callable[[families.Kernel], Emulator]  # of conftest.py

QUERIES = 21


def assert_one_chain(emulator: Emulator, of_one_segment: Emulator, kernel: families.Kernel, seed: int) -> None:
    """Windows as wide as a segment, wherever they begin: the bits that rows have where all keys are of one."""
    segment = TILES * kernel.tile_k
    packed = Sequences([QUERIES, kernel.tile_q + 9], [5 * kernel.tile_k + 9, 2 * segment + 3], kernel.head_dim, seed)
    for window, is_causal in (((segment - 1, 0), False), ((segment - 1, -1), True), ((segment - 31, 30), False)):
        out, lse = packed.attend(emulator, window=window, is_causal=is_causal)
        assert_right(packed, out, lse, is_causal, window)
        want, want_lse = packed.attend(of_one_segment, window=window, is_causal=is_causal)
        assert same_bits(out, want) and same_bits(lse, want_lse), window


def assert_fold(emulator: Emulator, of_one_segment: Emulator, kernel: families.Kernel, seed: int) -> None:
    """Wider ones, and none: other bits than those; and each row has them alone, too."""
    keys = 5 * kernel.tile_k + 9
    packed = Sequences([QUERIES], [keys], kernel.head_dim, seed)
    for window in ((TILES * kernel.tile_k, -1), (keys, -1), (-1, -1)):
        out, lse = packed.attend(emulator, window=window, is_causal=True)
        assert_right(packed, out, lse, True, window)
        assert not same_bits(out, packed.attend(of_one_segment, window=window, is_causal=True)[0]), window
        for row in (0, 8, QUERIES - 1):
            alone_out, alone_lse = packed.part(row, row + 1).attend(emulator, window=window, is_causal=True)
            assert same_bits(alone_out[:1], out[row : row + 1]) and same_bits(alone_lse[:, :1], lse[:, row : row + 1])


@pytest.mark.parametrize("kernel", LISTED, ids=lambda kernel: kernel.name)
def test_rows_are_chains_or_folds_by_the_window_alone(
    kernel: families.Kernel, emulators: Emulators, session_seed: int
) -> None:
    print(f"to repeat these calls: pytest --seed {session_seed}")
    short, of_one_segment = emulators(of_short_segments(kernel, CHEAP)), emulators(kernel)
    assert_one_chain(short, of_one_segment, kernel, session_seed)
    assert_fold(short, of_one_segment, kernel, session_seed)


# A narrow window in segments has no memory for parts, and would read at null: that ends the process.
MISTAKES: dict[str, Substitution] = {
    "a_wide_window_in_none": ("tile.last & list->segment_of", "tile.last & 0"),
    "never_resumed": ("{ return steps_before(tile) > 0; }", "{ return 0 * steps_before(tile); }"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_found(tmp_path: Path, host: list[Path], emulators: Emulators, mistake: Substitution) -> None:
    wrong = build(tmp_path, of_short_segments(FEW, CHEAP), host, (mistake,))
    with pytest.raises((AssertionError, Violation)):
        assert_one_chain(wrong, emulators(FEW), FEW, 0)
        assert_fold(wrong, emulators(FEW), FEW, 0)
