"""The bits of decode and forward kernels, on the emulated machine: what a cluster shares out changes none of them.

A GPU's products, exponentials and reciprocals have other bits than the machine's, but the same in both kernels. So this
finds a row whose sums are taken in another order, of other elements, or with other rescaling. And it finds a cluster
that reads what has not come, writes where somebody still reads, or gives rows of which a tile is lost: which CTA goes
on, and when anything arrives there, is random.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
from compiling import Substitution, families, needs_c, needs_compiler
from emulated import DECODE, KERNELS, Emulator, Violation, build
from harness import same_bits
from torch import Tensor

pytestmark = [needs_compiler, needs_c]

Emulators = Callable[[families.Kernel], Emulator]  # of conftest.py


class Call(NamedTuple):
    """B, Hq, Hk, Sq, Sk, D in 128ths of the kernel's, and the mask; what q, k and v hold; how far rows lie apart."""

    batch: int
    heads: int
    key_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int = 128
    is_causal: bool = False
    causal_offset: int = 0
    largest: float = 1.0
    has_nan: bool = False
    gap: int = 0
    right: int = -1  # the window's right side


CALLS = [
    Call(1, 8, 1, 1, 1500),
    Call(1, 3, 1, 5, 700, 128, True, 695),
    Call(1, 2, 1, 5, 600, 128, causal_offset=500, right=9),
    Call(2, 2, 1, 4, 130, 80, True, 100, largest=30.0, gap=8),
    Call(1, 1, 1, 16, 900, 128, True, -3, has_nan=True),
    Call(1, 4, 1, 1, 4096),
    Call(1, 1, 1, 1, 100),
    Call(1, 16, 1, 1, 2100, largest=30.0),
    Call(1, 3, 1, 1, 1999, gap=8),
    Call(1, 2, 1, 11, 1, 128, True, -4),
    Call(1, 2, 2, 2, 4096, 96, True, 4000),
]
FEW = CALLS[:6]


def inputs(call: Call, kernel: families.Kernel, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    d = call.head_dim * kernel.head_dim // 128

    def tensor(heads: int, rows: int) -> Tensor:
        t = torch.full((call.batch, heads, rows, d + call.gap), torch.nan, dtype=torch.bfloat16)[..., :d]
        t.copy_(torch.randn(t.shape, generator=rng) * call.largest)
        if call.has_nan:
            rare = torch.tensor([torch.nan, torch.inf, -torch.inf]).bfloat16()
            places = torch.rand(t.shape, generator=rng) < 1 / 3000
            t[places] = rare[torch.randint(3, (int(places.sum()),), generator=rng)]
        return t

    q, k, v = (
        tensor(call.heads, call.seqlen_q),
        tensor(call.key_heads, call.seqlen_k),
        tensor(call.key_heads, call.seqlen_k),
    )
    return q, k, v


def attend(emulator: Emulator, call: Call, tensors: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """out and lse; nothing beside the rows of out is written. Any NaN becomes one."""
    q, k, v = tensors
    b, h, s, d = q.shape
    around = torch.full((b, h, s + 2, d + call.gap), 7.0, dtype=torch.bfloat16)
    out = around[:, :, 1 : s + 1, :d]
    lse = emulator.attention(q, k, v, out, call.is_causal, call.causal_offset, window=(-1, call.right))
    result = out.clone()
    out.fill_(7)
    assert (around == 7).all(), "something beside the rows of out was written"
    return tuple(t.masked_fill(t.isnan(), torch.nan) for t in (result, lse))  # type: ignore[return-value]


def assert_same_bits(
    forward: Emulator, decode: Emulator, kernel: families.Kernel, calls: Sequence[Call], seed: int
) -> None:
    for nth, call in enumerate(calls):
        print(call)
        tensors = inputs(call, kernel, seed + nth)
        decode.disturb(seed + nth)
        got = attend(decode, call, tensors)
        expected = attend(forward, call, tensors)
        for mine, its in zip(got, expected, strict=True):
            assert same_bits(mine, its)


def assert_poisoned(
    forward: Emulator, decode: Emulator, kernel: families.Kernel, calls: Sequence[Call], seed: int
) -> None:
    """Where a load is lost, rows are NaN from end to end, or right."""
    for nth, call in enumerate(calls):
        print(call)
        tensors = inputs(call, kernel, seed + nth)
        expected, expected_lse = attend(forward, call, tensors)
        decode.disturb(seed + nth, Random(seed + nth).randrange(4))
        out, lse = attend(decode, call, tensors)
        decode.disturb(0)
        nan = lse.isnan() & out.isnan().all(dim=3)
        assert nan.any(), "a cluster waited in vain, and says nothing"
        assert same_bits(out[~nan], expected[~nan]) and same_bits(lse[~nan], expected_lse[~nan])


def of_forward(head_dim: int) -> families.Kernel:
    """The one with the fewest rows: all have the same bits."""
    return min((one for one in KERNELS if one.head_dim == head_dim), key=lambda one: one.tile_q)


@pytest.fixture(scope="module", params=DECODE, ids=lambda kernel: kernel.name)
def chosen(request: pytest.FixtureRequest, emulators: Emulators) -> tuple[Emulator, Emulator, families.Kernel]:
    kernel: families.Kernel = request.param
    return emulators(of_forward(kernel.head_dim)), emulators(kernel), kernel


def test_rows_have_the_bits_of_the_forward(
    chosen: tuple[Emulator, Emulator, families.Kernel], session_seed: int
) -> None:
    print(f"to repeat: pytest --seed {session_seed}")
    assert_same_bits(*chosen, CALLS, session_seed)


def test_rows_fill_a_cluster(chosen: tuple[Emulator, Emulator, families.Kernel], session_seed: int) -> None:
    """And a tile less, which is not whole."""
    kernel = chosen[2]
    room = kernel.segment_tiles * kernel.tile_k
    assert_same_bits(*chosen, [Call(1, 4, 1, 1, room), Call(1, 3, 1, 2, room - kernel.tile_k - 3)], session_seed)


def test_rows_of_a_cluster_that_waited_in_vain_are_nan(
    chosen: tuple[Emulator, Emulator, families.Kernel], session_seed: int
) -> None:
    print(f"to repeat: pytest --seed {session_seed}")
    assert_poisoned(*chosen, FEW, session_seed)


# The cluster does not meet before what its CTAs tell each other is awaited.
MEETS_AFTER_SCORES: Substitution = (
    "cluster_arrive(); cluster_wait(); arrived &= await(base + SHARED_BARRIERS + TOPS_FULL",
    "arrived &= await(base + SHARED_BARRIERS + TOPS_FULL",
)
MEETS_AFTER_PROBABILITIES: Substitution = ("cluster_arrive(); cluster_wait(); /* 3. O", "/* 3. O")

# Mistakes in the decode kernel that must be found.
MISTAKES: dict[str, Substitution] = {
    "sums_of_another_tile": (
        "*sum = dhp_ct_select(mask, fmaf(*sum, x->lane.x,",
        "*sum = dhp_ct_select(mask, fmaf(*sum, 1.f,",
    ),
    "a_tile_of_its_own_maximum": ("top_before(base, tile, -p.highest_score, lane)", "-p.highest_score"),
    "a_tile_past_the_end_counts": ("DHP_CT_MASK(there)", "DHP_CT_MASK(there || 1)"),
    "another_strip": ("(warp ^ lane * STRIP_ROW_BYTES / 128 %", "(warp ^ lane * STRIP_ROW_BYTES / 64 %"),
    "k_not_awaited": ("await(k_full + 8 * nth, p.zero)", "(k_full > 0)"),
    "first_strips_not_awaited": ("arrived &= await(group_full(base, 0), p.zero);", ""),
    "strips_not_awaited": ("min(first + GROUP, u.tiles - 1)", "min(first, u.tiles - 1)"),
    "loads_over_what_is_read": ("barrier_sync(1, FINISHED", "barrier_sync(0, FINISHED"),
    "loads_over_k_that_is_read": (
        "hand_to_tma(warp); if (nth",
        "__syncwarp(); if (nth",
    ),
    "not_poisoned": ("dhp_ct_reciprocal(sum) + poison", "dhp_ct_reciprocal(sum)"),
    "probabilities_before_all_have_told_the_highest": (
        "arrived &= await(base + SHARED_BARRIERS + TOPS_FULL, p.zero);",
        "",
    ),
    "stores_before_all_have_begun": ("cluster_wait(); #pragma unroll", "\n#pragma unroll"),
    "highest_awaited_while_others_may_sleep": MEETS_AFTER_SCORES,
    "probabilities_awaited_while_others_may_sleep": MEETS_AFTER_PROBABILITIES,
    "poison_awaited_while_others_may_sleep": (
        "cluster_wait(); cluster_arrive(); const uint32_t told",
        "const uint32_t told",
    ),
    "ends_before_what_nobody_needs": ("for (first = (u.tiles + GROUP - 1)", "for (first = (TILES + GROUP - 1)"),
    "poison_before_all_have_told": ("await(base + SHARED_BARRIERS + POISON_FULL, p.zero)", "1"),
    "fewer_bytes_than_come": ("i * WARPS + warp)) * SHARE_BYTES", "i * WARPS + warp)) * P_BYTES"),
    "tells_another_group": (
        "address_in_cta(full, rank));\n  }",
        "address_in_cta(group_full(base, 0), rank)); }",
    ),
    "copied_before_the_fence": ("hand_to_tma(warp); mbarrier", "bar_sync(1, OWN_BARRIER + warp, 32); mbarrier"),
    "copied_before_the_warp_has_met": (
        "hand_to_tma(warp); mbarrier",
        "fence_async_shared(); (void)warp; mbarrier",
    ),
    "own_share_not_told": ("mbarrier_arrive_expect_tx(1, full, 0);", ""),
    "own_share_expected_of_others": ("? GROUP / CLUSTER :", "? GROUP / CLUSTER - 1 :"),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_found(tmp_path: Path, host: list[Path], emulators: Emulators, mistake: Substitution) -> None:
    kernel = next(one for one in DECODE if one.head_dim == 128)
    forward, decode = emulators(of_forward(128)), build(tmp_path, kernel, host, (mistake,))
    with pytest.raises((AssertionError, Violation)):
        assert_same_bits(forward, decode, kernel, FEW, 0)
        assert_poisoned(forward, decode, kernel, FEW, 0)


def test_a_warp_that_runs_ahead_of_the_loader_is_found(
    tmp_path: Path, host: list[Path], emulators: Emulators
) -> None:
    """Where it only arrived at the barrier of a group, and had waited in vain, the loader waited for ever. Rare where
    the cluster meets before."""
    kernel = next(one for one in DECODE if one.head_dim == 256)  # the most groups
    arrives = ("barrier_sync(first + STAGES", "bar_arrive(first + STAGES")
    changes = (arrives, MEETS_AFTER_SCORES, MEETS_AFTER_PROBABILITIES)
    right, wrong = emulators(kernel), build(tmp_path, kernel, host, changes)
    call, hung = Call(1, 4, 1, 1, 4096), 0
    for seed in (12, 13, 15, 19):
        tensors = inputs(call, kernel, seed)
        for decode in (right, wrong):
            decode.disturb(seed, seed % 4)
        attend(right, call, tensors)
        try:
            attend(wrong, call, tensors)
        except Violation as violation:
            hung += "no thread can go on" in str(violation)
    right.disturb(0)
    assert hung > 0
