"""Gradients without a GPU: host code and kernels, thread by thread, on the emulated machine."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
from compiling import Substitution, needs_c, needs_compiler
from emulated import FAMILY, ONE_PASS, Emulator, Violation, build_gradients
from harness import Gradients, same_bits
from reference import assert_gradients_match, reference, reference_gradients
from test_emulated_forward import Call, rows_apart
from test_emulated_forward import inputs as inputs_of_forward
from torch import Tensor

pytestmark = [needs_compiler, needs_c]

Emulators = Callable[[int], Emulator]  # of conftest.py

HEAD_DIMS = sorted({kernel.head_dim for kernel in FAMILY["backward"].kernels})
NAMES = Gradients._fields


def options_of(call: Call) -> dict[str, int]:
    return {"is_causal": call.is_causal, "causal_offset": call.causal_offset}


def calls_for(head_dim: int, random: Random) -> list[Call]:
    """Tiles that are full, cut off and alone; grouped heads; rows that see no key, keys that no row sees."""
    d = head_dim
    chosen = [
        Call(1, 1, 1, 1, 1, d),
        Call(1, 2, 1, 129, 257, d),
        Call(2, 4, 2, 64, 128, d, True, 64),
        Call(1, 2, 2, 140, 150, d - 8, True, gap=8),
        Call(1, 1, 1, 200, 130, d, True, -90, gap=16),
        Call(1, 1, 1, 30, 300, d, True, 20),  # two tiles of keys are seen by no query
        Call(1, 1, 1, 70, 60, d, True, -70),
        Call(2, 3, 1, 3, 5, 8),
    ]
    for _ in range(3):
        key_heads, group, sq, sk = random.choice([1, 2]), random.choice([1, 3]), *(random.randint(1, 300) for _ in "qk")
        is_causal = random.random() < 0.7
        offset = random.choice([0, sk - sq, random.randint(-sq, sk)]) if is_causal else 0
        chosen.append(Call(1, key_heads * group, key_heads, sq, sk, 8 * random.randint(1, d // 8), is_causal, offset))
    return chosen


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None


def inputs(call: Call, seed: int, of_lse: bool = False) -> Inputs:
    """of_lse: whether lse has a gradient."""
    q, k, v = inputs_of_forward(call, seed)
    rng = torch.Generator().manual_seed(seed + 1)  # other numbers than q's
    grad_out = rows_apart(torch.randn(q.shape, generator=rng).bfloat16(), call.gap)
    return Inputs(q, k, v, grad_out, torch.randn(q.shape[:3], generator=rng) if of_lse else None)


def compute(emulator: Emulator, call: Call, given: Inputs, needed: str = "qkv") -> Gradients:
    """Those that are needed; the others are NaN. Nothing beside their rows is written."""
    q, k, v, grad_out, grad_lse = given
    right = reference(q, k, v, **options_of(call))
    around = [torch.full((*t.shape[:2], t.shape[2] + 2, t.shape[3] + call.gap), 7.0).bfloat16() for t in given[:3]]
    places = [a[:, :, 1:-1, : q.shape[3]] for a in around]
    is_needed = [name[1] in needed for name in NAMES]
    wanted = [place if need else None for need, place in zip(is_needed, places, strict=True)]
    out, lse = right.out.bfloat16(), right.lse.float()
    emulator.gradients(grad_out, q, k, v, out, lse, *wanted, **options_of(call), grad_lse=grad_lse)
    found = Gradients(*(p.clone() if need else p * math.nan for need, p in zip(is_needed, places, strict=True)))
    for place in places:
        place.fill_(7)
    assert all((a == 7).all() for a in around), "something beside the rows of a gradient was written"
    return found


def assert_right(found: Gradients, call: Call, given: Inputs) -> None:
    assert_gradients_match(found, reference_gradients(*given, **options_of(call)))


@pytest.fixture(scope="module", params=HEAD_DIMS)
def chosen(request: pytest.FixtureRequest, gradient_emulators: Emulators) -> tuple[int, Emulator]:
    return request.param, gradient_emulators(request.param)


def test_every_shape_is_what_float64_says(chosen: tuple[int, Emulator], session_seed: int) -> None:
    print(f"to repeat these calls: pytest --seed {session_seed}")
    head_dim, emulator = chosen
    for nth, call in enumerate(calls_for(head_dim, Random(session_seed))):
        print(call)
        emulator.disturb(session_seed + nth)
        given = inputs(call, session_seed + nth, of_lse=nth % 2 == 1)
        assert_right(compute(emulator, call, given), call, given)


def test_what_is_needed_changes_no_bit(chosen: tuple[int, Emulator], session_seed: int) -> None:
    """Also where it takes other kernels, and another order of threads and loads."""
    head_dim, emulator = chosen
    call = Call(1, 4, 2, 150, 260, head_dim, True, 110)
    given = inputs(call, session_seed, of_lse=True)
    whole = compute(emulator, call, given)
    for nth, needed in enumerate(("qkv", "q", "k", "v", "kv", "qk")):
        emulator.disturb(session_seed + nth + 1)
        for name, mine, its in zip(NAMES, compute(emulator, call, given, needed), whole, strict=True):
            assert name[1] not in needed or same_bits(mine, its), f"{name} of {needed}"
    emulator.disturb(0)


def test_rows_keep_their_bits_in_other_company(chosen: tuple[int, Emulator], session_seed: int) -> None:
    """Rows of dq alone; rows of dk and dv from a key tile on, for the queries that see them."""
    head_dim, emulator = chosen
    call = Call(1, 2, 1, 300, 300, head_dim, True)
    given = inputs(call, session_seed)
    whole = compute(emulator, call, given)
    for first, last in ((299, 300), (100, 180), (0, 1)):
        some = Inputs(*(t[:, :, first:last] if i in (0, 3) else t for i, t in enumerate(given[:4])), None)
        part = Call(1, 2, 1, last - first, 300, head_dim, True, first)
        assert same_bits(compute(emulator, part, some, "q").dq, whole.dq[:, :, first:last])
    for first in (128, 256):
        some = Inputs(*(t if i in (0, 3) else t[:, :, first:] for i, t in enumerate(given[:4])), None)
        right = reference(*given[:3], True)
        part = compute_with(emulator, some, right.out.bfloat16(), right.lse.float(), -first)
        assert same_bits(part.dk, whole.dk[:, :, first:]) and same_bits(part.dv, whole.dv[:, :, first:])


def compute_with(emulator: Emulator, given: Inputs, out: Tensor, lse: Tensor, offset: int) -> Gradients:
    """dk and dv of some keys; out and lse are of all."""
    found = Gradients(*(torch.full_like(t, math.nan) for t in given[:3]))
    q, k, v, grad_out, _ = given
    emulator.gradients(grad_out, q, k, v, out, lse, None, found.dk, found.dv, True, offset)
    return found


@pytest.mark.parametrize("special", [math.nan, math.inf])
@pytest.mark.parametrize("which", range(4), ids=["q", "k", "v", "grad_out"])
def test_what_is_not_finite(chosen: tuple[int, Emulator], which: int, special: float, session_seed: int) -> None:
    """Goes where float64 takes it; under the mask, where no tile is crossed by the diagonal, nowhere."""
    head_dim, emulator = chosen
    call = Call(1, 1, 1, 140, 300, head_dim)
    given = inputs(call, session_seed)
    given[which][:, :, 130, 3] = special
    assert_right(compute(emulator, call, given), call, given)
    call = Call(1, 1, 1, 300, 300, head_dim, True, -140)
    given = inputs(call, session_seed)
    clean = compute(emulator, call, given)
    given[which][:, :, slice(0, 12) if which in (0, 3) else slice(288, None)] = special
    for mine, its in zip(compute(emulator, call, given), clean, strict=True):
        assert same_bits(mine, its)


def test_who_waits_in_vain_says_so(chosen: tuple[int, Emulator], session_seed: int) -> None:
    """Rows of a CTA that has waited in vain are NaN, and all of dq where it has a share in that."""
    head_dim, emulator = chosen
    call = Call(1, 1, 1, 200, 250, head_dim)
    given = inputs(call, session_seed)
    right = compute(emulator, call, given)
    found_any = False
    for lost in range(12):
        emulator.disturb(session_seed, lost)
        found = compute(emulator, call, given)
        for mine, its in zip(found, right, strict=True):
            nan = mine.isnan()
            found_any |= bool(nan.any())
            assert torch.equal(nan.all(-1), nan.any(-1)) and same_bits(mine[~nan], its[~nan])
        if head_dim in ONE_PASS and found.dk.isnan().any():
            assert found.dq.isnan().all()
    emulator.disturb(0)
    assert found_any, "a CTA waited in vain, and says nothing"


# Mistakes in the numbers that a schedule does not show, and the head_dim at whose kernels they are made.
MISTAKES: dict[str, tuple[int, Substitution]] = {
    "mask_one_query_early": (64, ("- p.causal_offset : p.seqlen_q", "- p.causal_offset - 1 : p.seqlen_q")),
    "keys_past_the_end_are_seen": (64, (": p.seqlen_q + WALK;", ": 0;")),
    "diagonal_left_unmasked": (64, ("tiles_of(all_see_from) - w.start", "tiles_of(all_see_from) - 1 - w.start")),
    "walk_begins_late": (64, ("w.start = first_seeing / WALK;", "w.start = (first_seeing + WALK - 1) / WALK;")),
    "mask_of_dq_one_key_late": (256, ("column_of(i) <= limit[row_of(i)]", "column_of(i) <= limit[row_of(i)] + 1")),
    "lse_of_the_other_column": (128, ("i % 2 ? lse.y : lse.x", "i % 2 ? lse.x : lse.y")),
    "delta_of_the_other_row": (256, ("queries.delta[r] = of_row[2];", "queries.delta[r] = of_row[3];")),
    "grad_lse_added": (128, ("delta = sum - grad_lse[turn]", "delta = sum + grad_lse[turn]")),
    "dk_unscaled": (64, ("dk, r, p.scale + poison", "dk, r, 1.f + poison")),
    "dq_unscaled": (128, ("(p.scale + failed)", "(1.f + failed)")),
    "ds_not_transposed_as_it_lies": (64, ("((chunk ^ (lane & 7)) << 4)", "((chunk ^ (lane & 3)) << 4)")),
    "units_of_the_row_before": (128, ("lane / 4 + 8 * r, p->seqlen_q", "lane / 4 + 8 * r - (lane > 3), p->seqlen_q")),
    "share_of_the_other_half": (128, ("BOXES + (SPLITS_ROWS ? 0 : group);", "BOXES + (SPLITS_ROWS ? 0 : 1 - group);")),
    "sums_not_cleared": (64, ("store_four(octet < 2 * p->blocks,", "store_four(octet < p->blocks,")),
    "rows_of_dq_exchanged": (64, ("at.row * 4;", "(at.row ^ 1) * 4;")),
    "columns_of_k_not_noted": (128, ("columns |= take_not_finite(&of_key);", "take_not_finite(&of_key);")),
    "the_whole_tile_bounds_a_row": (64, ("max_or_nan(bounds[last], bounds[", "max_or_nan(bounds[last | 127], bounds[")),
    "bounds_of_one_warp": (64, ("up_to[before < warp ? before * 32 + 31 : thread]", "up_to[thread]")),
    "grouped_heads_summed_once": (64, ("w.heads = p->heads_per_key_head;", "w.heads = 1;")),
    "last_row_not_stored": (256, ("columns = row[r] < p.own_rows ?", "columns = row[r] + 1 < p.own_rows ?")),
}


def exercise(emulator: Emulator, head_dim: int) -> None:
    """What finds every mistake: all shapes, a column of k that is not finite, and keys of very different size."""
    for nth, call in enumerate(calls_for(head_dim, Random(0))):
        given = inputs(call, nth, of_lse=nth % 2 == 1)
        assert_right(compute(emulator, call, given), call, given)
    call = Call(1, 1, 1, 140, 300, head_dim)
    given = inputs(call, 0)
    given.k[:, :, 130, 3] = math.inf
    assert_right(compute(emulator, call, given), call, given)
    given = inputs(call, 1)
    given.q[..., 7] = 0  # so that no score knows of this one, of the first warp that looks at its tile
    given.k[:, :, 5, 7] = 2**17
    assert_right(compute(emulator, call, given), call, given)
    call = Call(1, 1, 1, 256, 256, head_dim, True)
    given = inputs(call, 0)
    clean = compute(emulator, call, given)
    given.k[:, :, 255] *= 2**40  # seen by the last row alone
    given.v[:, :, 127] *= 2**40
    large = compute(emulator, call, given)
    assert same_bits(large.dq[:, :, :127], clean.dq[:, :, :127])


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_found(tmp_path: Path, host: list[Path], mistake: tuple[int, Substitution]) -> None:
    head_dim, change = mistake
    emulator = build_gradients(tmp_path, head_dim, host, (change,))
    with pytest.raises((AssertionError, Violation)):
        exercise(emulator, head_dim)


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_no_mistake_is_found_where_there_is_none(gradient_emulators: Emulators, head_dim: int) -> None:
    exercise(gradient_emulators(head_dim), head_dim)
