"""Packed sequences, pages and windows without a GPU: host code, the kernel that lists query tiles, and those that go
through the list, thread by thread, on the emulated machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from compiling import Substitution, families, needs_c, needs_compiler
from emulated import KERNELS, LISTED, Emulator, Violation, build
from harness import same_bits
from reference import reference
from torch import Tensor

pytestmark = [needs_compiler, needs_c]

Emulators = Callable[[families.Kernel], Emulator]  # of conftest.py

OUT_ERROR, LSE_ERROR = 4e-3, 1e-5
HEADS, KEY_HEADS = 4, 2
BEHIND = 3  # rows of q that belong to no sequence


@dataclass
class Sequences:
    """Packed rows, or a cache in pages; NaN wherever nobody may look. lengths_k: keys that count."""

    lengths_q: list[int]
    lengths_k: list[int]
    head_dim: int
    seed: int
    page_size: int = 0
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    keys: dict[str, Tensor] = field(init=False)  # how the operator is told where keys lie

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)
        d = self.head_dim
        self.cu_seqlens_q = cumulative(self.lengths_q)
        self.q = torch.randn(int(self.cu_seqlens_q[-1]) + BEHIND, HEADS, d, generator=rng).bfloat16()
        self.of_sequence = [
            tuple(torch.randn(n, KEY_HEADS, d, generator=rng).bfloat16() for _ in "kv") for n in self.lengths_k
        ]
        if self.page_size:
            self._fill_pages(rng)
            return
        nothing = self.q.new_full((5, KEY_HEADS, d), torch.nan)
        self.k, self.v = (torch.cat([*(one[i] for one in self.of_sequence), nothing]) for i in (0, 1))
        self.keys = {"cu_seqlens_k": cumulative(self.lengths_k)}

    def _fill_pages(self, rng: torch.Generator) -> None:
        size = self.page_size
        pages = [-(-n // size) for n in self.lengths_k]
        order = torch.randperm(sum(pages) + 2, generator=rng).int()
        table = torch.full((len(pages), max(pages) + 1), 2**30, dtype=torch.int32)  # entries that no key needs
        self.k = self.q.new_full((len(order), size, KEY_HEADS, self.head_dim), torch.nan)
        self.v = self.k.clone()
        taken = 0
        for b, (k, v) in enumerate(self.of_sequence):
            for i in range(pages[b]):
                page = table[b, i] = order[taken]
                taken += 1
                part = slice(i * size, (i + 1) * size)
                self.k[page, : len(k[part])] = k[part]
                self.v[page, : len(v[part])] = v[part]
        self.keys = {"page_table": table, "seqused_k": torch.tensor(self.lengths_k, dtype=torch.int32)}

    def rows(self, b: int) -> slice:
        return slice(int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1]))

    def part(self, first: int, last: int) -> Sequences:
        """Rows [first, last) of the only sequence, without pages, and the keys up to where the last of them stands."""
        end = self.lengths_k[0] - self.lengths_q[0] + last
        part = Sequences([last - first], [end], self.head_dim, self.seed)
        part.q[: last - first] = self.q[first:last]
        part.k[:end], part.v[:end] = self.k[:end], self.v[:end]
        return part

    def attend(self, emulator: Emulator, **options: object) -> tuple[Tensor, Tensor]:
        """out and lse; nothing beside out is written."""
        around = torch.full((len(self.q) + 2, HEADS, self.head_dim + 8), 7.0).bfloat16()
        out = around[1:-1, :, : self.head_dim]
        given = {"cu_seqlens_q": self.cu_seqlens_q, **self.keys, **options}
        lse = emulator.varlen(
            self.q, self.k, self.v, out, max_seqlen_q=max(self.lengths_q), max_seqlen_k=max(self.lengths_k), **given
        )
        result = out.clone()
        out.fill_(7)
        assert (around == 7).all(), "something beside the rows of out was written"
        return result, lse


def cumulative(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def assert_right(
    packed: Sequences, out: Tensor, lse: Tensor, is_causal: bool = False, window: tuple[int, int] = (-1, -1),
    is_bottom_right: bool = True, softcap: float = 0.0, sinks: Tensor | None = None, scale: float | None = None,
) -> None:  # fmt: skip
    """Every row is what float64 says."""
    for b, (k, v) in enumerate(packed.of_sequence):
        rows = packed.rows(b)
        q, k, v = (t.transpose(0, 1)[None] for t in (packed.q[rows], k, v))
        if q.shape[2] == 0:
            continue
        offset = k.shape[2] - q.shape[2] if is_bottom_right else 0
        given = {"causal_offset": offset, "window": window, "softcap": softcap, "sinks": sinks, "scale": scale}
        want, want_lse = (t[0] for t in reference(q, k, v, is_causal, **given)[:2])
        got, got_lse = out[rows].transpose(0, 1).double(), lse[:, rows].double()
        seen = ~want_lse.isneginf()
        assert torch.equal(~got_lse.isneginf(), seen)
        assert (got[want == 0] == 0).all()
        if seen.any():
            steps = torch.finfo(torch.float32).eps * want_lse[seen].abs()  # in which float32 has so large a number
            assert ((got_lse[seen] - want_lse[seen]).abs() <= LSE_ERROR + 4 * steps).all()
            assert (got - want).norm() <= OUT_ERROR * want.norm()
    behind = slice(int(packed.cu_seqlens_q[-1]), None)
    assert (out[behind] == 0).all() and lse[:, behind].isneginf().all()


def lengths_for(kernel: families.Kernel) -> tuple[list[int], list[int]]:
    """More than a tile and less, one row, no row, no key; a rest of every kind."""
    rows, keys = kernel.warpgroups * kernel.rows, kernel.tile_k
    return [5, 0, rows + 9, 1, 33], [keys + 9, 7, 2 * keys + 50, keys, 0]


@pytest.fixture(scope="module", params=LISTED, ids=lambda kernel: kernel.name)
def chosen(request: pytest.FixtureRequest, emulators: Emulators) -> tuple[families.Kernel, Emulator]:
    return request.param, emulators(request.param)


PAGE_SIZES = (0, 16, 64, 256)  # 0: no pages


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_a_sequence_has_the_bits_of_a_call_of_its_own(
    chosen: tuple[families.Kernel, Emulator],
    emulators: Emulators,
    page_size: int,
    is_causal: bool,
    session_seed: int,
) -> None:
    kernel, emulator = chosen
    shape = (kernel.head_dim, kernel.warpgroups, kernel.rows)
    plain = emulators(next(one for one in KERNELS if (one.head_dim, one.warpgroups, one.rows) == shape))
    packed = Sequences(*lengths_for(kernel), kernel.head_dim, session_seed, page_size)
    out, lse = packed.attend(emulator, is_causal=is_causal)
    assert_right(packed, out, lse, is_causal)
    for b, (k, v) in enumerate(packed.of_sequence):
        q = packed.q[packed.rows(b)].transpose(0, 1)[None]
        if q.shape[2] and len(k):
            alone = torch.empty_like(q)
            offset = len(k) - q.shape[2] if is_causal else 0
            alone_lse = plain.attention(q, k.transpose(0, 1)[None], v.transpose(0, 1)[None], alone, is_causal, offset)
            assert same_bits(alone[0].transpose(0, 1), out[packed.rows(b)])
            assert same_bits(alone_lse[0], lse[:, packed.rows(b)])


WINDOWS = {"left": (40, -1, False), "causal": (70, 0, True), "both": (30, 20, False), "itself": (0, 0, False)}


@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS.keys())
@pytest.mark.parametrize("is_bottom_right", [False, True])
def test_windows(
    chosen: tuple[families.Kernel, Emulator], window: tuple[int, int, bool], is_bottom_right: bool, session_seed: int
) -> None:
    kernel, emulator = chosen
    packed = Sequences(*lengths_for(kernel), kernel.head_dim, session_seed, page_size=32)
    out, lse = packed.attend(emulator, window=window[:2], is_causal=window[2], is_bottom_right=is_bottom_right)
    assert_right(packed, out, lse, window[2], window[:2], is_bottom_right)


def test_a_row_in_a_window_has_its_bits_in_other_company(
    chosen: tuple[families.Kernel, Emulator], session_seed: int
) -> None:
    """A prefill in one, in chunks, and row by row."""
    kernel, emulator = chosen
    keys = 2 * kernel.tile_k + 11
    whole = Sequences([keys], [keys], kernel.head_dim, session_seed)
    out, lse = whole.attend(emulator, is_causal=True, window=(kernel.tile_k + 5, -1))
    rows_alone = [(i, i + 1) for i in range(keys - 8, keys)]
    for first, last in (*rows_alone, (kernel.tile_k - 20, kernel.tile_k + 30)):
        part = whole.part(first, last)
        part_out, part_lse = part.attend(emulator, is_causal=True, window=(kernel.tile_k + 5, -1))
        assert same_bits(part_out[: last - first], out[first:last])
        assert same_bits(part_lse[:, : last - first], lse[:, first:last])


def test_padding_on_the_left_is_as_if_it_were_not_there(
    chosen: tuple[families.Kernel, Emulator], session_seed: int
) -> None:
    kernel, emulator = chosen
    lengths_q, lengths_k = [6, 40], [kernel.tile_k + 20, 70]
    packed = Sequences(lengths_q, lengths_k, kernel.head_dim, session_seed)
    out, lse = packed.attend(emulator, is_causal=True)
    padded = Sequences(lengths_q, lengths_k, kernel.head_dim, session_seed)
    nothing = padded.k.new_full((9, KEY_HEADS, kernel.head_dim), torch.nan)
    split = lengths_k[0]
    for name in ("k", "v"):
        t = getattr(padded, name)
        setattr(padded, name, torch.cat([nothing, t[:split], nothing[:4], t[split:]]))
    padded.keys = {
        "cu_seqlens_k": cumulative([split + 9, lengths_k[1] + 4]), "leftpad_k": torch.tensor([9, 4], dtype=torch.int32),
    }  # fmt: skip
    padded.lengths_k = [split + 9, lengths_k[1] + 4]
    padded_out, padded_lse = padded.attend(emulator, is_causal=True)
    assert same_bits(out, padded_out) and same_bits(lse, padded_lse)


# ---- what a host would refuse ---------------------------------------------------------------------------------------

FEW = next(one for one in LISTED if (one.head_dim, one.rows) == (64, 32))


@pytest.fixture(scope="module")
def small(emulators: Emulators) -> Emulator:
    return emulators(FEW)


@pytest.mark.parametrize("wrong", [[0, 9, 4, 20], [1, 5, 9, 20], [0, 5, 9, 2**31 - 1], [0, -5, 9, 20], [0, 5, 9, 24]])
def test_wrong_rows_of_q_make_all_rows_nan(small: Emulator, wrong: list[int]) -> None:
    packed = Sequences([5, 4, 11], [30, 20, 10], 64, 0)
    out, lse = packed.attend(small, cu_seqlens_q=torch.tensor(wrong, dtype=torch.int32))
    assert out.isnan().all() and lse.isnan().all()


def assert_only_one_is_nan(packed: Sequences, out: Tensor, lse: Tensor, which: int) -> None:
    for b in range(len(packed.lengths_q)):
        assert out[packed.rows(b)].isnan().all() == (b == which)
        assert lse[:, packed.rows(b)].isnan().all() == (b == which)
    assert not out[int(packed.cu_seqlens_q[-1]) :].isnan().any()


@pytest.mark.parametrize("page", [-1, 10**6, 2**31 - 1])
def test_a_page_that_does_not_exist_makes_the_rows_of_its_sequence_nan(small: Emulator, page: int) -> None:
    packed = Sequences([5, 4, 11], [30, 150, 10], 64, 0, page_size=16)
    packed.keys["page_table"][1, 3] = page
    assert_only_one_is_nan(packed, *packed.attend(small), 1)


@pytest.mark.parametrize("used", [-1, 10**6, 2**31 - 1])
def test_more_keys_than_there_are_make_the_rows_of_their_sequence_nan(small: Emulator, used: int) -> None:
    packed = Sequences([5, 4, 11], [30, 150, 10], 64, 0, page_size=16)
    packed.keys["seqused_k"][2] = used
    assert_only_one_is_nan(packed, *packed.attend(small), 2)


def test_wrong_rows_of_k_make_the_rows_of_their_sequence_nan(small: Emulator) -> None:
    packed = Sequences([5, 4, 11], [30, 50, 10], 64, 0)
    packed.keys["cu_seqlens_k"][3] = 2**31 - 1
    assert_only_one_is_nan(packed, *packed.attend(small), 2)


def test_nothing_to_attend_to(small: Emulator) -> None:
    """No sequence, or none with a key."""
    none = Sequences([4], [3], 64, 0)
    none.lengths_q, none.lengths_k = [0], [0]
    out, lse = none.attend(small, cu_seqlens_q=cumulative([]), cu_seqlens_k=cumulative([]))
    assert (out == 0).all() and lse.isneginf().all()
    empty = Sequences([4, 2], [0, 0], 64, 0, page_size=16)
    out, lse = empty.attend(small)
    assert (out == 0).all() and lse.isneginf().all()


MISTAKES: dict[str, Substitution] = {
    "rest_of_v_not_cleared": ("clear_shared_four(first", "clear_shared_four(0 && first"),
    "window_one_key_short": ("column >= first[r]", "column > first[r]"),
    "hidden_tile_rescales": ("SEES_NONE_OF(r, step) ? 1.f", "SEES_NONE_OF(r, step) ? stats.rescale[r]"),
    "page_of_the_first_piece": ("of_lane.batch, piece)", "of_lane.batch, 0)"),
    "words_of_the_next_lane": ("offsetof(dhp_listed_tile, member) / 4)", "offsetof(dhp_listed_tile, member) / 4 + 1)"),
    "two_tiles_in_one_place": ("choose(other < b, as_long, 0)", "choose(other < 0, as_long, 0)"),
    "bad_pages_followed": ("bad |= (page < 0) | (page >= p->pages);", "bad |= page < 0;"),
    "last_rows_of_the_next_sequence": (".row_end = s.row + last_query + 1", ".row_end = s.row + last_query + 2"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_a_mistake_is_found(tmp_path: Path, host: list[Path], mistake: Substitution) -> None:
    emulator = build(tmp_path, FEW, host, (mistake,))
    with pytest.raises((AssertionError, Violation)):
        packed = Sequences([5, 0, 70, 1, 33], [137, 7, 300, 128, 0], 64, 0, page_size=16)
        assert_right(packed, *packed.attend(emulator, is_causal=True), True)
        for window in ((40, -1), (140, 0)):
            out, lse = packed.attend(emulator, window=window)
            assert_right(packed, out, lse, False, window)
        test_a_row_in_a_window_has_its_bits_in_other_company((FEW, emulator), 0)
        test_a_page_that_does_not_exist_makes_the_rows_of_its_sequence_nan(emulator, 2**31 - 1)
