"""The bits of an output row depend on its query, the keys and values it sees, head_dim, dtype and scale alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from harness import Target, attend, normal, on_the_cpu, poisoned_memory, qkv, same_bits
from torch import Tensor

import dhp_safe_fa

SQ, SK, D = 150, 200, 64
OFFSET = SK - SQ
ROWS = [0, 1, 16, 63, 64, 65, 127, 128, 149]

Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@pytest.fixture
def case(target: Target, rng: torch.Generator) -> Case:
    """q, k, v and the out and lse of one causal call, to be found again by other means."""
    q, k, v = qkv(rng, target, 2, 4, 2, SQ, SK, D)
    return q, k, v, *attend(q, k, v, True, causal_offset=OFFSET)


def other(rng: torch.Generator, like: Tensor) -> Tensor:
    """Other values of the same shape, some of them large."""
    return normal(rng, tuple(like.shape), Target(like.device.type, like.dtype)) * 8


@pytest.mark.parametrize("row", ROWS)
def test_row_alone(case: Case, row: int) -> None:
    q, k, v, out, lse = case
    one = slice(row, row + 1)
    for keys in (SK, row + OFFSET + 1):
        alone, alone_lse = attend(q[:, :, one], k[:, :, :keys], v[:, :, :keys], True, causal_offset=row + OFFSET)
        assert same_bits(alone, out[:, :, one]) and same_bits(alone_lse, lse[:, :, one])


@pytest.mark.parametrize("row", ROWS)
def test_row_alone_without_a_mask(case: Case, row: int) -> None:
    """Decoding reads exactly the cached keys; no mask is needed and the bits are those of the prefill."""
    q, k, v, out, lse = case
    one, keys = slice(row, row + 1), slice(0, row + OFFSET + 1)
    alone, alone_lse = attend(q[:, :, one], k[:, :, keys], v[:, :, keys])
    assert same_bits(alone, out[:, :, one]) and same_bits(alone_lse, lse[:, :, one])


@pytest.mark.parametrize("rows", [1, 17, 64, 65, 128, 149])
def test_prefix(case: Case, rows: int) -> None:
    q, k, v, out, lse = case
    part, part_lse = attend(q[:, :, :rows], k, v, True, causal_offset=OFFSET)
    assert same_bits(part, out[:, :, :rows]) and same_bits(part_lse, lse[:, :, :rows])


@pytest.mark.parametrize("first", [1, 17, 64, 100])
def test_chunk(case: Case, first: int) -> None:
    """Chunked prefill: later rows move to other places of their tiles."""
    q, k, v, out, lse = case
    part, part_lse = attend(q[:, :, first:], k, v, True, causal_offset=first + OFFSET)
    assert same_bits(part, out[:, :, first:]) and same_bits(part_lse, lse[:, :, first:])


@pytest.mark.parametrize("sq", [1, 65, 150])
def test_full_attention_on_fewer_rows(target: Target, rng: torch.Generator, sq: int) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, SQ, 1000, D)
    out, lse = attend(q, k, v)
    part, part_lse = attend(q[:, :, SQ - sq :], k, v)
    assert same_bits(part, out[:, :, SQ - sq :]) and same_bits(part_lse, lse[:, :, SQ - sq :])


@pytest.mark.parametrize("padding", [1, 56, 57, 300, 1000])
def test_more_invisible_keys(case: Case, rng: torch.Generator, padding: int) -> None:
    q, k, v, out, lse = case
    longer_k, longer_v = (torch.cat((t, other(rng, t)[:, :, :1].expand(-1, -1, padding, -1)), dim=2) for t in (k, v))
    padded, padded_lse = attend(q, longer_k, longer_v, True, causal_offset=OFFSET)
    assert same_bits(padded, out) and same_bits(padded_lse, lse)


@pytest.mark.parametrize("padding", [1, 42, 43, 300])
def test_more_query_rows(case: Case, rng: torch.Generator, padding: int) -> None:
    q, k, v, out, lse = case
    longer_q = torch.cat((q, other(rng, q)[:, :, :1].expand(-1, -1, padding, -1)), dim=2)
    padded, padded_lse = attend(longer_q, k, v, True, causal_offset=OFFSET)
    assert same_bits(padded[:, :, :SQ], out) and same_bits(padded_lse[:, :, :SQ], lse)


def test_other_rows(case: Case, rng: torch.Generator) -> None:
    q, k, v, out, lse = case
    for row in ROWS:
        changed = other(rng, q)
        changed[:, :, row] = q[:, :, row]
        got, got_lse = attend(changed, k, v, True, causal_offset=OFFSET)
        assert same_bits(got[:, :, row], out[:, :, row]) and same_bits(got_lse[:, :, row], lse[:, :, row])


def test_other_batch(case: Case, rng: torch.Generator) -> None:
    q, k, v, out, lse = case
    around = [torch.cat((other(rng, t), t[1:], other(rng, t)), dim=0) for t in (q, k, v)]
    got, got_lse = attend(*around, is_causal=True, causal_offset=OFFSET)
    assert same_bits(got[2], out[1]) and same_bits(got_lse[2], lse[1])
    alone, alone_lse = attend(q[1:], k[1:], v[1:], True, causal_offset=OFFSET)
    assert same_bits(alone, out[1:]) and same_bits(alone_lse, lse[1:])


def test_other_head_position(case: Case) -> None:
    q, k, v, out, lse = case
    got, got_lse = attend(q[:, [2, 3, 0, 1]], k[:, [1, 0]], v[:, [1, 0]], True, causal_offset=OFFSET)
    assert same_bits(got, out[:, [2, 3, 0, 1]]) and same_bits(got_lse, lse[:, [2, 3, 0, 1]])
    swapped, swapped_lse = attend(q[:, [1, 0, 3, 2]], k, v, True, causal_offset=OFFSET)
    assert same_bits(swapped, out[:, [1, 0, 3, 2]]) and same_bits(swapped_lse, lse[:, [1, 0, 3, 2]])


def test_other_head_count(case: Case, rng: torch.Generator) -> None:
    q, k, v, out, lse = case
    alone, alone_lse = attend(q[:, 2:3], k[:, 1:], v[:, 1:], True, causal_offset=OFFSET)
    assert same_bits(alone, out[:, 2:3]) and same_bits(alone_lse, lse[:, 2:3])
    many = [torch.cat([other(rng, t)] * 7 + [t], dim=1) for t in (q, k, v)]
    got, got_lse = attend(*many, is_causal=True, causal_offset=OFFSET)
    assert same_bits(got[:, -4:], out) and same_bits(got_lse[:, -4:], lse)


@pytest.mark.parametrize("d", [64, 128])
def test_among_many_more_rows(target: Target, rng: torch.Generator, d: int) -> None:
    """Another amount of work may be another kernel or schedule; the bits stay."""
    q, k, v = qkv(rng, target, 1, 2, 1, 70, 150, d)
    out, lse = attend(q, k, v, True, causal_offset=80)
    many = [t.repeat(8, 16, 1, 1) for t in (torch.cat([q] * 6, dim=2), k, v)]
    got, got_lse = attend(*many, is_causal=True, causal_offset=80)
    for b, h in ((0, 0), (3, 17), (7, 31)):
        assert same_bits(got[b, h, :70], out[0, h % 2]) and same_bits(got_lse[b, h, :70], lse[0, h % 2])


def test_group_expanded(case: Case) -> None:
    q, k, v, out, lse = case
    got, got_lse = attend(q, k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1), True, causal_offset=OFFSET)
    assert same_bits(got, out) and same_bits(got_lse, lse)


# ---- over several segments of keys -----------------------------------------------------------------------------------

# A row is a fold over segments, which few rows' keys are split by: on the CPU of so many keys (csrc/cpu/segments.h), on
# CUDA at this head_dim of twice as many (docs/kernel.md).
SEGMENT = 4096
LENGTHS = [SEGMENT - 1, SEGMENT, SEGMENT + 1, SEGMENT + 75, 2 * SEGMENT + 75]


@pytest.mark.parametrize("keys", LENGTHS)
def test_prefill_chunks_and_steps(target: Target, rng: torch.Generator, keys: int) -> None:
    """Causal rows that end before, at and behind the end of a segment."""
    q, k, v = qkv(rng, target, 1, 2, 1, SQ, keys, D)
    offset = keys - SQ
    out, lse = attend(q, k, v, True, causal_offset=offset)
    for first, last in [(0, 1), (1, 5), (73, 77), (74, 75), (75, 76), (20, 149), (149, 150)]:
        chunk = (slice(None), slice(None), slice(first, last))
        for seen in (keys, last + offset):
            got, got_lse = attend(q[chunk], k[:, :, :seen], v[:, :, :seen], True, causal_offset=first + offset)
            assert same_bits(got, out[chunk]) and same_bits(got_lse, lse[chunk]), (first, last, seen)


@pytest.mark.parametrize("keys", LENGTHS)
def test_full_rows_and_groups(target: Target, rng: torch.Generator, keys: int) -> None:
    """Rows alone and in groups of heads, few and many."""
    q, k, v = qkv(rng, target, 2, 6, 2, 6, keys, D)
    out, lse = attend(q, k, v)
    for rows in (slice(0, 1), slice(2, 6), slice(5, 6)):
        got, got_lse = attend(q[:, :, rows], k, v)
        assert same_bits(got, out[:, :, rows]) and same_bits(got_lse, lse[:, :, rows]), rows
        got, got_lse = attend(q[1:, 3:4, rows], k[1:, 1:], v[1:, 1:])
        assert same_bits(got, out[1:, 3:4, rows]) and same_bits(got_lse, lse[1:, 3:4, rows]), rows


@on_the_cpu
@pytest.mark.parametrize("window", [(20, 0), (500, 70), (SEGMENT - 1, 0), (SEGMENT + 700, 9), (-1, 30)], ids=str)
def test_windows_over_segments(target: Target, rng: torch.Generator, window: tuple[int, int]) -> None:
    """Windows that begin in the middle of a segment, and move over its end."""
    q, k, v = qkv(rng, target, 1, 2, 2, SQ, 2 * SEGMENT + 75, D)
    for offset in (SEGMENT - 75, 2 * SEGMENT - 75):
        out, lse = attend(q, k, v, causal_offset=offset, window=window)
        for first, last in [(0, 1), (53, 57), (74, 75), (75, 76), (95, 96), (9, 140), (149, 150)]:
            chunk = (slice(None), slice(None), slice(first, last))
            got, got_lse = attend(q[chunk], k, v, causal_offset=first + offset, window=window)
            assert same_bits(got, out[chunk]) and same_bits(got_lse, lse[chunk]), (offset, first, last)


@on_the_cpu
@pytest.mark.parametrize("page_size", [None, 16, 256])
def test_packed_sequences_over_segments(target: Target, rng: torch.Generator, page_size: int | None) -> None:
    """Steps and prefills whose keys are split, and not, in one call: positions count from each sequence's first key."""
    queries = [1, 3, 0, 130, 1, 1, 2]
    keys = [SEGMENT + 1, 2 * SEGMENT + 75, 5000, SEGMENT + 75, SEGMENT, 9, 2 * SEGMENT]
    q = normal(rng, (sum(queries) + 2, 4, D), target)
    k, v = (normal(rng, (sum(keys), 2, D), target) for _ in range(2))

    def starts(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths]).cumsum(0).int()

    options = {"max_seqlen_q": 130, "max_seqlen_k": max(keys), "is_causal": True}
    if page_size is None:
        given = {"k": k, "v": v, "cu_seqlens_k": starts(keys)}
    else:
        counts = [-(-n // page_size) for n in keys]
        table = torch.zeros(len(keys), max(counts), dtype=torch.int32)
        places = torch.randperm(sum(counts), generator=rng).int().split(counts)
        cache = [t.new_full((sum(counts), page_size, 2, D), torch.nan) for t in (k, v)]
        for b, rows in enumerate(zip(k.split(keys), v.split(keys), strict=True)):
            table[b, : counts[b]] = places[b]
            for pages, row in zip(cache, rows, strict=True):
                padded = torch.cat((row, row.new_full((counts[b] * page_size - keys[b], 2, D), torch.nan)))
                pages[places[b].long()] = padded.view(counts[b], page_size, 2, D)
        given = {"k": cache[0], "v": cache[1], "cu_seqlens_k": None, "page_table": table}
        given["seqused_k"] = torch.tensor(keys, dtype=torch.int32)
    with poisoned_memory():
        out, lse = dhp_safe_fa.attention_varlen_lse(q, cu_seqlens_q=starts(queries), **given, **options)
    parts = zip(q.split([*queries, 2]), out.split([*queries, 2]), lse.split([*queries, 2], dim=1), strict=True)
    for b, (part, got, got_lse) in enumerate(list(parts)[:-1]):
        if queries[b] == 0:
            continue
        alone = [t.transpose(0, 1)[None] for t in (part, k.split(keys)[b], v.split(keys)[b])]
        want, want_lse = attend(*alone, is_causal=True, causal_offset=keys[b] - queries[b])
        assert same_bits(got.transpose(0, 1)[None], want) and same_bits(got_lse[None], want_lse), b


# ---- and not on when or by whom -------------------------------------------------------------------------------------


def test_repeats(case: Case, target: Target) -> None:
    q, k, v, out, lse = case
    for _ in range(5 if target.device == "cpu" else 50):
        again, again_lse = attend(q, k, v, True, causal_offset=OFFSET)
        assert same_bits(again, out) and same_bits(again_lse, lse)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    """Sets torch's number of threads until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# One decoded token, heads that share keys, fewer tiles than threads, rows of several tiles, and few rows of many keys.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("b", "hq", "hk", "sq", "sk"),
    [
        (2, 4, 2, SQ, SK),
        (1, 8, 1, 1, 900),
        (1, 1, 1, 40, 300),
        (3, 5, 5, 129, 65),
        (1, 2, 2, 700, 300),
        (1, 6, 1, 1, 9000),
    ],
)
def test_thread_count(
    rng: torch.Generator,
    threads: Callable[[int], None],
    dtype: torch.dtype,
    b: int,
    hq: int,
    hk: int,
    sq: int,
    sk: int,
) -> None:
    q, k, v = qkv(rng, Target("cpu", dtype), b, hq, hk, sq, sk, D)
    for is_causal in (False, True):
        threads(1)
        out, lse = attend(q, k, v, is_causal)
        for count in (2, 3, 8):
            threads(count)
            got, got_lse = attend(q, k, v, is_causal)
            assert same_bits(got, out) and same_bits(got_lse, lse), f"{count} threads"


def test_concurrent_callers(target: Target, rng: torch.Generator) -> None:
    """Four Python threads at once: nothing is shared between calls."""
    problems = [qkv(rng, target, 1, 4, 2, 100 + i, 200 + 3 * i, D) for i in range(8)]
    want = [torch.ops.dhp.attention(*p, True) for p in problems]
    with ThreadPoolExecutor(max_workers=4) as pool:
        got = list(pool.map(lambda p: torch.ops.dhp.attention(*p, True), problems * 3))
    assert all(same_bits(g, w) for g, w in zip(got, want * 3, strict=True))
