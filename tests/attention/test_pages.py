"""A cache in pages of any size and order: the bits of keys that lie one behind the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from harness import Target, needs_hopper, normal, poisoned_memory, refusal, same_bits
from reference import assert_matches, reference
from torch import Tensor

import dhp_safe_fa

page_sizes = pytest.mark.parametrize("page_size", [16, 32, 64, 128, 256])

QUERIES, KEYS = [1, 130, 1, 5, 64, 7], [300, 130, 1, 0, 97, 193]
HQ, HK, D = 4, 2, 40


class Call(NamedTuple):
    """The same sequences twice: one behind the other, and in the pages of a cache."""

    packed: dict[str, Any]
    paged: dict[str, Any]


def int32(numbers: list[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def table(*rows: list[int]) -> Tensor:
    return torch.tensor(rows, dtype=torch.int32)


def cumulative(lengths: list[int], device: torch.device | str) -> Tensor:
    return int32([sum(lengths[:i]) for i in range(len(lengths) + 1)], device)


def page(t: Tensor, page_size: int, places: Tensor, pages: int) -> Tensor:
    """The sequences of t [tokens, Hk, D], by KEYS, in pages at these places; NaN in the rest."""
    cache = t.new_full((pages, page_size, HK, D), torch.nan)
    for b, keys in enumerate(t.split(KEYS)):
        for j, row in enumerate(keys):
            cache[places[b, j // page_size], j % page_size] = row
    return cache


def call(rng: torch.Generator, target: Target, page_size: int) -> Call:
    q = normal(rng, (sum(QUERIES), HQ, D), target)
    k, v = (normal(rng, (sum(KEYS), HK, D), target) for _ in range(2))
    width = -(-max(KEYS) // page_size) + 1
    pages = len(KEYS) * width + 3
    places = torch.randperm(pages, generator=rng)[: len(KEYS) * width].view(len(KEYS), width).int()
    both = {"q": q, "cu_seqlens_q": cumulative(QUERIES, q.device), "max_seqlen_q": 130, "max_seqlen_k": 300}
    packed = both | {"k": k, "v": v, "cu_seqlens_k": cumulative(KEYS, q.device)}
    cached = {"k": page(k, page_size, places, pages), "v": page(v, page_size, places, pages)}
    for b, count in enumerate(KEYS):  # entries that no key needs name no page
        places[b, -(-count // page_size) :] = -1 if b % 2 else pages
    where = {"cu_seqlens_k": None, "seqused_k": int32(KEYS, q.device), "page_table": places.to(q.device)}
    return Call(packed, both | cached | where)


def attend(given: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
    with poisoned_memory():
        return dhp_safe_fa.attention_varlen_lse(**given, **options)


@page_sizes
def test_bits(target: Target, rng: torch.Generator, page_size: int) -> None:
    packed, paged = call(rng, target, page_size)
    for options in ({}, {"is_causal": True}, {"window": (50, 9), "alignment": "top-left"}):
        got, want = attend(paged, **options), attend(packed, **options)
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True)), options


def test_against_float64(target: Target, rng: torch.Generator) -> None:
    packed, paged = call(rng, target, 64)
    out, lse = attend(paged, is_causal=True)
    q, k, v = (packed[n].transpose(0, 1)[None] for n in "qkv")
    rows, keys = slice(1, 131), slice(300, 430)
    want = reference(q[:, :, rows], k[:, :, keys], v[:, :, keys], is_causal=True)
    assert_matches(out[rows].transpose(0, 1)[None], lse[None, :, rows], want)


def test_float64(rng: torch.Generator) -> None:
    packed, paged = call(rng, Target("cpu", torch.float32), 32)
    packed, paged = ({n: t.double() if n in "qkv" else t for n, t in c.items()} for c in (packed, paged))
    got, want = (dhp_safe_fa.attention_varlen_lse(**c, is_causal=True) for c in (paged, packed))
    assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


def test_a_shared_prefix(target: Target, rng: torch.Generator) -> None:
    """Two sequences whose first 128 keys are the same pages, and one page that is read twice by one sequence."""
    k, v = (normal(rng, (5, 64, HK, D), target) for _ in range(2))
    tables = [[3, 1, 0], [3, 1, 4], [2, 2, 2]]
    q = normal(rng, (6, HQ, D), target)
    used, starts = (int32(numbers, q.device) for numbers in ([150, 192, 190], [0, 2, 3, 6]))
    options: dict[str, Any] = {"is_causal": True, "seqused_k": used, "page_table": table(*tables).to(q.device)}
    out = dhp_safe_fa.attention_varlen(q, k, v, starts, None, 3, 192, **options)
    for b, entries in enumerate(tables):
        rows, count = slice(int(starts[b]), int(starts[b + 1])), int(used[b])
        keys, values = (t[entries].flatten(0, 1)[:count].transpose(0, 1)[None] for t in (k, v))
        one = q[rows].transpose(0, 1)[None]
        offset = count - one.shape[2]
        want = dhp_safe_fa.attention(one, keys, values, is_causal=True, causal_offset=offset)
        assert same_bits(out[rows].transpose(0, 1)[None], want)


def test_a_growing_cache(target: Target, rng: torch.Generator) -> None:
    """Prefill, then token by token into pages: the rows of one causal call over everything."""
    q, k, v = (normal(rng, (150, heads, D), target) for heads in (HQ, HK, HK))
    whole = [t.transpose(0, 1)[None] for t in (q, k, v)]
    want = dhp_safe_fa.attention(*whole, is_causal=True)[0].transpose(0, 1)
    cache = torch.full((2, 12, 16, HK, D), torch.nan, dtype=target.dtype, device=q.device)
    places = torch.randperm(12, generator=rng)[None, :10].int()
    filled = 0
    for count in (90, 1, 1, 30, 1, 27):
        for j in range(filled, filled + count):
            cache[0, places[0, j // 16], j % 16], cache[1, places[0, j // 16], j % 16] = k[j], v[j]
        rows, filled = slice(filled, filled + count), filled + count
        used, starts = int32([filled], q.device), int32([0, count], q.device)
        options: dict[str, Any] = {"is_causal": True, "seqused_k": used, "page_table": places.to(q.device)}
        out = dhp_safe_fa.attention_varlen(q[rows], *cache, starts, None, 90, 150, **options)
        assert same_bits(out, want[rows])


def test_layouts(target: Target, rng: torch.Generator) -> None:
    """Heads outermost in a page, and keys beside values in one tensor."""
    _, paged = call(rng, target, 64)
    want = attend(paged)[0]
    outermost = {n: paged[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "kv"}
    joined = dict(zip("kv", torch.stack([paged["k"], paged["v"]], dim=1).unbind(dim=1), strict=True))
    wide = {"page_table": torch.stack([paged["page_table"]] * 2, dim=2)[..., 0]}
    for moved in (outermost, joined, wide):
        assert same_bits(attend(paged | moved)[0], want)


def test_opcheck(rng: torch.Generator) -> None:
    _, paged = call(rng, Target("cpu", torch.float16), 16)
    torch.library.opcheck(torch.ops.dhp.attention_varlen.default, (), paged | {"is_causal": True})


@needs_hopper
def test_no_page_of_another_memory(rng: torch.Generator) -> None:
    """On CUDA the table is read on the device alone: an entry that is no page reads nothing, and its rows are NaN."""
    _, paged = call(rng, Target("cuda", torch.bfloat16), 16)
    want = attend(paged)[0]
    for entry in (-1, 10**6, 2**31 - 1, -(2**31)):
        wrong = paged["page_table"].clone()
        wrong[1, 2] = entry
        out, lse = attend(paged | {"page_table": wrong})
        assert out[1:131].isnan().all() and lse[:, 1:131].isnan().all()
        assert same_bits(out[:1], want[:1]) and same_bits(out[131:], want[131:])


# ---- errors ----------------------------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    """Two sequences of 3 and 4 queries, 20 and 6 keys, in 5 pages of 16 keys."""
    cache = torch.zeros(5, 16, 2, 16)
    return {
        "q": torch.zeros(7, 4, 16),
        "k": cache,
        "v": cache.clone(),
        "cu_seqlens_q": int32([0, 3, 7]),
        "cu_seqlens_k": None,
        "max_seqlen_q": 4,
        "max_seqlen_k": 20,
        "seqused_k": int32([20, 6]),
        "page_table": torch.tensor([[4, 0], [2, 99]], dtype=torch.int32),
    }


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_k": int32([0, 3, 7])}, "cu_seqlens_k: given beside page_table; supported: one of them"),
    ({"seqused_k": None}, "seqused_k: None beside page_table; expected a tensor [sequences]"),
    ({"page_table": int32([4, 0])}, "page_table: shape [2]; expected [2, pages of a sequence]"),
    ({"page_table": table([1], [2], [3])}, "page_table: shape [3, 1]; expected [2, pages of a sequence]"),
    ({"page_table": torch.zeros(2, 2)}, "page_table: dtype float32; expected int32"),
    ({"k": torch.zeros(80, 2, 16)}, "k: rank 3; expected 4 dimensions [pages, page_size, H, D], because of page_table"),
    ({"v": torch.zeros(5, 16, 1, 16)}, "v: shape [5, 16, 1, 16] differs from k's [5, 16, 2, 16]"),
    (dict.fromkeys("kv", torch.zeros(5, 16, 2, 8)), "(k [5, 16, 2, 8], q [7, 4, 16])"),
    (dict.fromkeys("kv", torch.zeros(5, 24, 2, 16)), "k: pages of 24 keys; supported: 16, 32, 64, 128, 256"),
]

MISTAKES_IN_NUMBERS: list[tuple[dict[str, Any], str]] = [
    ({"page_table": table([4, 5], [2, 99])}, "page_table: 5 at [0, 1]; supported: a page of k and v, which have 5"),
    ({"page_table": table([4, 0], [-1, 99])}, "page_table: -1 at [1, 0]; supported: a page of k and v, which have 5"),
    ({"seqused_k": int32([33, 6])}, "seqused_k: 33 for sequence 0; supported: 0 to its 32 keys"),
    ({"max_seqlen_k": 19}, "max_seqlen_k: 19, but sequence 0 has 20 keys"),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes(changes: dict[str, Any], words: str) -> None:
    assert words in refusal([dhp_safe_fa.attention_varlen], good() | changes)


@pytest.mark.parametrize(("changes", "words"), MISTAKES_IN_NUMBERS, ids=[words for _, words in MISTAKES_IN_NUMBERS])
def test_mistakes_in_numbers(changes: dict[str, Any], words: str) -> None:
    assert words in refusal([dhp_safe_fa.attention_varlen], good() | changes, fake=False)
