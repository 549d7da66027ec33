"""Which query tiles the CTAs of a forward launch get: forward/dealing.cpp asks for all of every CTA, on the host."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from compiling import C_COMPILER, COMPILER, Substitution, families, needs_c, needs_compiler, run
from harness import needs_kernels
from simulated import VIOLATION, compile_kernel
from simulated_forward import FORWARD, WINDOWED

import dhp_safe_fa

pytestmark = needs_compiler

# The library that plans.
LIBRARY = Path(dhp_safe_fa.__file__).parent / "libdhp_fa.so"


class Call(NamedTuple):
    """B, Hq, Hk, Sq, Sk, D of a call in float16, its mask, and the sides of its window."""

    batch: int
    heads: int
    key_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    is_causal: int
    causal_offset: int = 0
    left: int = -1
    right: int = -1


def causal(batch: int, heads: int, key_heads: int, seqlen: int, head_dim: int) -> Call:
    return Call(batch, heads, key_heads, seqlen, seqlen, head_dim, 1)


# How busy the CTAs have to be kept at least. Head groups one after another, each longest first, kept those of the
# second 55 % busy.
BUSY = {
    causal(4, 16, 16, 900, 128): 0.96,
    causal(4, 8, 8, 2500, 256): 0.95,
    causal(1, 16, 16, 5001, 256): 0.96,
    causal(16, 16, 16, 300, 128): 0.96,
    causal(32, 8, 8, 512, 256): 0.96,
    causal(32, 32, 32, 512, 64): 0.97,
    causal(4, 32, 4, 2500, 64): 0.97,
    causal(2, 32, 32, 8192, 64): 0.98,
    causal(1, 16, 16, 16384, 128): 0.98,
    causal(2, 8, 8, 8192, 256): 0.98,
    causal(1, 1, 1, 200_000, 128): 0.98,
    causal(1, 8, 8, 512, 64): 0.6,  # one tile for each CTA: nothing to even out
    # where the diagonal is cut off, a tile and its mirror image are not equally long
    Call(4, 16, 16, 8192, 8192, 128, 1, -4096): 0.88,
    Call(1, 8, 8, 16384, 2048, 128, 1, -8192): 0.85,
    # tiles that key 0 cuts off fill up the last round; at head_dim 256 there are too few of them
    Call(1, 16, 16, 16384, 16384, 128, 1, 0, 1023): 0.98,
    Call(1, 32, 32, 16384, 16384, 64, 1, 0, 1023): 0.96,
    Call(1, 8, 8, 16384, 16384, 256, 1, 0, 1023): 0.92,
}


# Three warpgroups at head_dim 64 serve long sequences, which are few among the random ones.
LONG = [
    Call(batch, heads, heads // group, seqlen_q, seqlen_k, 64, is_causal, offset)
    for batch, heads, group in ((1, 16, 1), (3, 40, 4), (1, 24, 8))
    for seqlen_q, seqlen_k in ((8192, 8192), (12_000, 5001), (5001, 9000))
    for is_causal, offset in ((0, 0), (1, 0), (1, seqlen_k - seqlen_q), (1, -700))
]


SEGMENT_KEYS = {kernel.head_dim: kernel.tile_k * kernel.segment_tiles for kernel in FORWARD.kernels}
# Rows of several key segments: so few that these are split, and so many that they are not. Where the diagonal crosses
# the end of the second segment, some query tiles see nothing of the third.
SEGMENTS = [
    causal(2, 8, 8, 16384, 256),
    *(
        Call(*heads, seqlen_q, seqlen_k, head_dim, is_causal, offset)
        for head_dim, segment_keys in SEGMENT_KEYS.items()
        for heads in ((1, 6, 6), (1, 16, 4), (33, 4, 4), (60, 16, 16))
        for seqlen_q in (30, 60, 190, 700)
        for seqlen_k in (11_000, 40_000)
        for is_causal, offset in ((0, 0), (1, seqlen_k - seqlen_q), (1, 2 * segment_keys - seqlen_q // 2))
    ),
]


def random_call(random: Random) -> Call:
    key_heads, group = random.choice([1, 2, 3, 8, 16]), random.choice([1, 1, 2, 4, 8, 11])
    seqlen_q, seqlen_k = (int(10 ** random.uniform(0, 3.7)) for _ in range(2))
    offset = random.choice([0, seqlen_k - seqlen_q, random.randint(-2 * seqlen_q, 2 * seqlen_k)])
    head_dim = random.choice([64, 72, 128, 256])
    batch = random.choice([1, 2, 5, 32])
    is_causal = random.randint(0, 1)
    return Call(batch, key_heads * group, key_heads, seqlen_q, seqlen_k, head_dim, is_causal, is_causal * offset)


def within_a_window(random: Random, call: Call) -> Call:
    """That its kernels serve: no wider than a segment, or over no more keys than one has."""
    left, right = (random.choice([0, 1, 63, int(10 ** random.uniform(0, 3.2))]) for _ in "lr")
    if call.seqlen_k <= 4096:
        left, right = (random.choice([side, -1]) for side in (left, right))
    return call._replace(left=left, right=right, causal_offset=call.causal_offset if max(left, right) >= 0 else 0)


def deal(folder: Path, kernel: families.Kernel, calls: Sequence[Call], changes: tuple[Substitution, ...]) -> str:
    """What forward/dealing.cpp says of the calls that are planned for this kernel."""
    compiled = compile_kernel(FORWARD, kernel, "dealing.cpp", folder, changes)
    schedule = folder / "schedule.o"
    source = FORWARD.family.folder / "schedule.c"
    assert run(*C_COMPILER, "-std=gnu11", "-O2", "-c", source, "-o", schedule).returncode == 0
    program = folder / "deal"
    # without the kernel itself, and so without the simulator that it would call
    options = ["-Wl,--gc-sections", f"-Wl,-rpath,{LIBRARY.parent}"]
    linked = run(*COMPILER, compiled, schedule, LIBRARY, *options, "-o", program)
    assert linked.returncode == 0, linked.stderr
    lines = "".join(" ".join(map(str, call)) + "\n" for call in calls)
    result = subprocess.run([program], input=lines, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode in (0, VIOLATION), f"ended with status {result.returncode}: {result.stderr}"
    return result.stdout


class Dealt(NamedTuple):
    """What dealing.cpp says of a call: how busy CTAs are kept, how many items a query tile is, and its segments."""

    busy: float
    splits: int
    segments: int


def dealt_well(said: str) -> dict[Call, Dealt]:
    """The calls in what `deal` returned: without a violation, and CTAs as busy as BUSY wants."""
    assert "violation" not in said, said
    dealt = {}
    for line in said.splitlines():
        call, (busy, splits, segments) = (side.split() for side in line.split(":"))
        dealt[Call(*map(int, call))] = Dealt(float(busy), int(splits), int(segments))
    assert dealt, "none of the calls is planned for this kernel"
    for call, least in BUSY.items():
        assert call not in dealt or dealt[call].busy >= least, call
    return dealt


@needs_kernels
@needs_c
@pytest.mark.parametrize("kernel", [*FORWARD.kernels, *WINDOWED.kernels], ids=lambda kernel: kernel.name)
def test_every_query_tile_is_computed_once(tmp_path: Path, session_seed: int, kernel: families.Kernel) -> None:
    print(f"to repeat these calls: pytest --seed {session_seed}")
    random = Random(session_seed)
    calls = [*BUSY, *LONG, *SEGMENTS, *(random_call(random) for _ in range(2000))]
    calls += [within_a_window(random, call) for call in calls]
    dealt = dealt_well(deal(tmp_path, kernel, calls, ()))
    are_split = {one.splits > 1 for one in dealt.values() if one.segments > 1}
    assert are_split == (set() if kernel.is_short else {False, True}), "segments are always split, or never"


# Mistakes in the dealing: a tile or a segment is left out, or computed twice, or some CTAs have more to do.
WRONG_DEALS = {
    "nobody_takes_the_rest": ("p->ordered_rounds + (cta < p->ordered_rest)", "p->ordered_rounds"),
    "one_of_two_only": ("(whole << p->mirrored) + second", "(whole << p->mirrored)"),
    "no_mirror_image": ("along_q = second ? shorter :", "along_q = 0 ? shorter :"),
    "list_begins_early": ("(in_order ? 0 : p->ordered_items)", "0"),
    "the_last_segment_again": ("from < 0 ? top : from;", "from < 0 ? top : top;"),
    "segments_from_the_last_key_on": ("tile.last % SEGMENT_TILES + 1", "min(tile.last + 1, SEGMENT_TILES)"),
    "a_key_tile_between_segments": (": tile->last - tile->key_tiles;", ": tile->last - tile->key_tiles - 1;"),
    "never_resumed": ("(tile->last < top_tile(", "(tile->last < 0 * top_tile("),
    "split_segments_resumed": ("(p->splits == 1) & (tile->last <", "(tile->last <"),
    "split_segments_go_on": ("return p->splits > 1 ? -1 :", "return p->splits > 99 ? -1 :"),
    "head_groups_as_if_nothing_were_split": ("quotient(in_batch, p->by_splits)", "in_batch"),
    "segments_counted_through_a_batch": (
        "(in_batch - head_group * p->splits) * SEGMENT_TILES",
        "in_batch * SEGMENT_TILES",
    ),
    "keys_that_no_row_sees": ("top < begin ? begin + DHP_NOT_SEEN_TILES :", "top < begin ? begin :"),
    "a_masked_tile_too_few": ("return tile->last + 1 - max(", "return tile->last - max("),
    "a_warpgroup_stops_before_its_last_key": ("((group + 1) << p->log2_rows)", "(group << p->log2_rows)"),
    "masks_of_the_first_warpgroup": ("OWN_TILES ? group : 0), 0)", "0 * group), 0)"),
    "too_few_steps_of_others": ("WARPGROUPS - 1) - tile->last;", "0) - tile->last;"),
    "a_key_tile_of_the_window_left_out": ("lowest, 0) / TILE_K, top)", "lowest, 0) / TILE_K + 1, top)"),
    "no_warpgroup_leaves_early": (
        "tile->row + (group << p->log2_rows), tile->last, lowest)",
        "tile->row, tile->last, lowest)",
    ),
    "a_last_half_that_is_seen_left_out": ("tile->last * TILE_K + TILE_K / 2);", "tile->last * TILE_K + TILE_K);"),
    "a_first_half_that_is_seen_left_out": ("steps) * TILE_K + TILE_K / 2);", "steps) * TILE_K);"),
    "a_window_that_ends_unmasked": ("(max(last_row + lowest, 0) + TILE_K - 1)", "max(last_row + lowest, 0)"),
}


@needs_kernels
@needs_c
@pytest.mark.parametrize("wrong", WRONG_DEALS.values(), ids=WRONG_DEALS.keys())
def test_a_wrong_deal_is_found(tmp_path: Path, wrong: Substitution) -> None:
    # two warpgroups at head_dim 256 serve most of these calls with that head_dim: rows of one segment, and of several,
    # and windows; three at 64 serve windows, too, and each ends where its own rows do
    calls = [*BUSY, *SEGMENTS]
    calls += [call._replace(left=700, right=30) for call in calls]
    chosen = [*FORWARD.kernels[-2:], WINDOWED.kernels[-1], WINDOWED.kernels[1]]
    for kernel in chosen:
        dealt_well(deal(tmp_path, kernel, calls, ()))
    with pytest.raises(AssertionError):
        for kernel in chosen:
            dealt_well(deal(tmp_path, kernel, calls, (wrong,)))
