"""Packed sequences: every row has the bits that it has in a call for its sequence alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from harness import Target, needs_hopper, normal, poisoned_memory, refusal, same_bits
from reference import assert_accurate, assert_matches, reference
from torch import Tensor

import dhp_safe_fa

# Shorter and longer than tiles of queries and of keys, one query as in decoding, and either side empty.
QUERIES, KEYS = [1, 130, 0, 5, 64, 1, 7], [300, 130, 9, 0, 97, 1, 193]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True},
    {"is_causal": True, "alignment": "top-left"},
    {"window": (40, 3)},
    {"window": (40, 3), "alignment": "top-left"},
    {"is_causal": True, "window": (100, -1), "scale": 0.3},
]


def cumulative(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


class Packed(NamedTuple):
    """The arguments of attention_varlen, in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def sequence(self, b: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[1, H, S, D] of sequence b, of its first `keys` keys."""
        q = self.q[self.cu_seqlens_q[b] : self.cu_seqlens_q[b + 1]]
        first, last = int(self.cu_seqlens_k[b]), int(self.cu_seqlens_k[b + 1])
        seen = slice(first, last if keys is None else first + keys)
        return q.transpose(0, 1)[None], self.k[seen].transpose(0, 1)[None], self.v[seen].transpose(0, 1)[None]


def pack(
    rng: torch.Generator, target: Target, queries: Sequence[int], keys: Sequence[int], hq: int, hk: int, d: int
) -> Packed:
    q = normal(rng, (sum(queries), hq, d), target)
    k, v = (normal(rng, (sum(keys), hk, d), target) for _ in range(2))
    return Packed(q, k, v, cumulative(queries, q.device), cumulative(keys, q.device), max(queries), max(keys))


def alone(q: Tensor, k: Tensor, v: Tensor, alignment: str = "bottom-right", **options: Any) -> dict[str, Any]:
    """What says the same of a call for one sequence."""
    is_placed = options.get("is_causal") or "window" in options
    offset = k.shape[2] - q.shape[2] if alignment == "bottom-right" and is_placed else 0
    return {**options, "causal_offset": offset}


def attend_alone(tensors: tuple[Tensor, Tensor, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) of one sequence [1, H, S, D] in a call of its own."""
    q, k, _ = tensors
    if q.is_cuda and "window" in options:  # attention refuses windows there
        packed = [t[0].transpose(0, 1) for t in tensors]
        starts = [cumulative([t.shape[2]], q.device) for t in (q, k)]
        out, lse = dhp_safe_fa.attention_varlen_lse(*packed, *starts, q.shape[2], k.shape[2], **options)
        return out.transpose(0, 1)[None], lse[None]
    return dhp_safe_fa.attention_lse(*tensors, **alone(*tensors, **options))


def attend(given: Packed, **options: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) on poisoned memory."""
    with poisoned_memory():
        out, lse = dhp_safe_fa.attention_varlen_lse(*given, **options)
        assert same_bits(out, dhp_safe_fa.attention_varlen(*given, **options))
    assert out.shape == given.q.shape and out.dtype == given.q.dtype and out.is_contiguous()
    assert lse.shape == (given.q.shape[1], given.q.shape[0]) and lse.dtype == torch.float32
    return out, lse


# ---- values and bits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("hq", "hk", "d"), [(4, 2, 64), (3, 3, 40), (2, 1, 256)])
def test_sequences(target: Target, rng: torch.Generator, hq: int, hk: int, d: int, options: dict[str, Any]) -> None:
    """Against float64, and against a call for each."""
    given = pack(rng, target, QUERIES, KEYS, hq, hk, d)
    out, lse = attend(given, **options)
    for b in range(len(QUERIES)):
        rows = slice(int(given.cu_seqlens_q[b]), int(given.cu_seqlens_q[b + 1]))
        part = out[rows].transpose(0, 1)[None], lse[None, :, rows]
        tensors = given.sequence(b)
        assert_matches(*part, reference(*tensors, **alone(*tensors, **options)))
        want = attend_alone(tensors, **options)
        assert same_bits(part[0], want[0]) and same_bits(part[1], want[1])


def test_accuracy(target: Target, rng: torch.Generator) -> None:
    given = pack(rng, target, [513, 511], [700, 511], 4, 2, 64)
    out, lse = attend(given, is_causal=True)
    tensors = given.sequence(0)
    want = reference(*tensors, **alone(*tensors, is_causal=True))
    assert_accurate(out[:513].transpose(0, 1)[None], lse[None, :, :513], want)


def test_float64(rng: torch.Generator) -> None:
    given = pack(rng, Target("cpu", torch.float32), QUERIES, KEYS, 4, 2, 24)
    given = given._replace(q=given.q.double(), k=given.k.double(), v=given.v.double())
    out, lse = dhp_safe_fa.attention_varlen_lse(*given, is_causal=True)
    for b in range(len(QUERIES)):
        rows, tensors = slice(int(given.cu_seqlens_q[b]), int(given.cu_seqlens_q[b + 1])), given.sequence(b)
        want = dhp_safe_fa.attention_lse(*tensors, **alone(*tensors, is_causal=True))
        assert same_bits(out[rows].transpose(0, 1)[None], want[0]) and same_bits(lse[None, :, rows], want[1])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_used_keys(target: Target, rng: torch.Generator, options: dict[str, Any]) -> None:
    """Keys that do not count may hold anything, and change no bit; alignment counts from the last one that does."""
    given = pack(rng, target, QUERIES, KEYS, 4, 2, 64)
    used = [200, 130, 0, 0, 1, 1, 96]
    for b, count in enumerate(used):
        unused = slice(int(given.cu_seqlens_k[b]) + count, int(given.cu_seqlens_k[b + 1]))
        given.k[unused], given.v[unused] = torch.nan, torch.inf
    counts = torch.tensor(used, dtype=torch.int32, device=given.q.device)
    out, lse = attend(given._replace(max_seqlen_k=200), seqused_k=counts, **options)
    for b, count in enumerate(used):
        rows, tensors = slice(int(given.cu_seqlens_q[b]), int(given.cu_seqlens_q[b + 1])), given.sequence(b, count)
        want = attend_alone(tensors, **options)
        assert same_bits(out[rows].transpose(0, 1)[None], want[0]) and same_bits(lse[None, :, rows], want[1])


def test_prefill_chunks_and_decoding(target: Target, rng: torch.Generator) -> None:
    """The rows of one causal prefill, from packed calls in which other sequences are at other stages."""
    prefill = pack(rng, target, [300], [300], 4, 2, 64)
    want, want_lse = attend(prefill, is_causal=True)
    other = pack(rng, target, [40], [90], 4, 2, 64)
    for first, last in ((0, 70), (70, 71), (71, 200), (200, 201), (299, 300)):
        q = torch.cat((other.q, prefill.q[first:last], other.q))
        k, v = (torch.cat((o, p[:last], o)) for o, p in ((other.k, prefill.k), (other.v, prefill.v)))
        cu_q, cu_k = cumulative([40, last - first, 40], q.device), cumulative([90, last, 90], q.device)
        out, lse = attend(Packed(q, k, v, cu_q, cu_k, 300, 300), is_causal=True)
        rows = slice(40, 40 + last - first)
        assert same_bits(out[rows], want[first:last]) and same_bits(lse[:, rows], want_lse[:, first:last])


def test_rows_of_no_sequence(target: Target, rng: torch.Generator) -> None:
    given = pack(rng, target, [5, 200], [9, 30], 4, 2, 64)
    padded = given._replace(cu_seqlens_q=cumulative([5, 60], given.q.device))
    out, lse = attend(padded, is_causal=True)
    assert same_bits(out[65:], torch.zeros_like(out[65:])) and (lse[:, 65:] == -torch.inf).all()
    want, _ = attend(given._replace(q=given.q[:65], cu_seqlens_q=cumulative([5, 60], given.q.device)), is_causal=True)
    assert same_bits(out[:65], want)


@pytest.mark.parametrize(
    ("queries", "keys", "heads"), [([], [], 2), ([0], [5], 2), ([3], [0], 2), ([3], [4], 0)], ids=str
)
def test_empty(target: Target, rng: torch.Generator, queries: list[int], keys: list[int], heads: int) -> None:
    q, k = normal(rng, (sum(queries), heads, 16), target), normal(rng, (sum(keys), 2, 16), target)
    out, lse = attend(Packed(q, k, k, cumulative(queries, q.device), cumulative(keys, q.device), 3, 5))
    assert not out.any() and (lse == -torch.inf).all()


def test_layouts(target: Target, rng: torch.Generator) -> None:
    """Parts of a packed projection, heads outermost, and columns that have to be copied."""
    given = pack(rng, target, [30, 1, 99], [30, 1, 99], 4, 4, 40)
    want, want_lse = attend(given, is_causal=True)
    tensors = given[:3]
    projection = torch.stack(tensors, dim=1).unbind(dim=1)
    outermost = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    columns = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    for moved in (projection, outermost, columns):
        out, lse = attend(Packed(*moved, *given[3:]), is_causal=True)
        assert same_bits(out, want) and same_bits(lse, want_lse)
    every_second = torch.stack((given.cu_seqlens_q, given.cu_seqlens_q), dim=1)[:, 0]
    assert same_bits(attend(given._replace(cu_seqlens_q=every_second), is_causal=True)[0], want)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_thread_count(rng: torch.Generator, threads: int) -> None:
    given = pack(rng, Target("cpu", torch.bfloat16), QUERIES, KEYS, 4, 2, 64)
    want, before = attend(given, is_causal=True), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = attend(given, is_causal=True)
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


# ---- torch -----------------------------------------------------------------------------------------------------------


def test_opcheck(rng: torch.Generator) -> None:
    given = pack(rng, Target("cpu", torch.float16), QUERIES, KEYS, 4, 2, 64)
    used = torch.tensor([200, 130, 0, 0, 1, 1, 96], dtype=torch.int32)
    operator = torch.ops.dhp.attention_varlen.default
    torch.library.opcheck(operator, given)
    torch.library.opcheck(operator, (*given, True, 0.2, False, 20, 3), {"seqused_k": used})


def test_compiled_and_autocast(rng: torch.Generator) -> None:
    given = pack(rng, Target("cpu", torch.float32), QUERIES, KEYS, 4, 2, 64)
    want = attend(given, is_causal=True)
    torch.compiler.reset()
    compiled = torch.compile(dhp_safe_fa.attention_varlen_lse, fullgraph=True, backend="aot_eager")
    assert all(same_bits(g, w) for g, w in zip(compiled(*given, is_causal=True), want, strict=True))
    halves = given._replace(q=given.q.bfloat16(), k=given.k.bfloat16(), v=given.v.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert same_bits(dhp_safe_fa.attention_varlen(*given), dhp_safe_fa.attention_varlen(*halves))


def test_under_a_policy(rng: torch.Generator) -> None:
    given = pack(rng, Target("cpu", torch.float32), QUERIES, KEYS, 4, 2, 64)
    with dhp_safe_fa.policy("secure"):
        out = dhp_safe_fa.attention_varlen(*given)
    assert same_bits(out, attend(given)[0])


# ---- errors ----------------------------------------------------------------------------------------------------------


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def good() -> dict[str, Any]:
    """[7 tokens, 4 heads, 16], sequences of 3 and 4 queries, 5 and 6 keys."""
    q, k = torch.zeros(7, 4, 16), torch.zeros(11, 2, 16)
    lengths = {"cu_seqlens_q": int32(0, 3, 7), "cu_seqlens_k": int32(0, 5, 11)}
    return {"q": q, "k": k, "v": k.clone(), **lengths, "max_seqlen_q": 4, "max_seqlen_k": 6}


def refused(changed: dict[str, Any], fake: bool) -> str:
    return refusal([dhp_safe_fa.attention_varlen], changed, fake)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"q": torch.zeros(1, 7, 4, 16)}, r"q: rank 4; expected 3 dimensions [tokens, H, D]"),
    ({"v": torch.zeros(11, 1, 16)}, "v: shape [11, 1, 16] differs from k's [11, 2, 16]"),
    ({"q": torch.zeros(7, 3, 16)}, "k: 2 key heads for 3 query heads; the number of query heads must be a multiple"),
    ({"q": torch.zeros(7, 4, 8)}, "k: head_dim 16 differs from q's head_dim 8 (k [11, 2, 16], q [7, 4, 8])"),
    ({"k": torch.zeros(11, 2, 16).half()}, "k: dtype float16 differs from q's float32"),
    ({"q": torch.zeros(7, 4, 16).int()}, "q: dtype int32; supported: float16"),
    ({"cu_seqlens_q": torch.tensor([0, 3, 7])}, "cu_seqlens_q: dtype int64; expected int32"),
    ({"cu_seqlens_k": int32(0, 11)}, "cu_seqlens_k: shape [2]; expected [3]"),
    ({"cu_seqlens_k": None}, "cu_seqlens_k: None; expected a tensor [sequences + 1], or page_table in its place"),
    ({"cu_seqlens_q": torch.zeros(2, 2).int()}, "cu_seqlens_q: shape [2, 2]; expected [sequences + 1]"),
    ({"seqused_k": int32(1, 2, 3)}, "seqused_k: shape [3]; expected [2]"),
    ({"max_seqlen_k": -1}, "max_seqlen_k: -1; supported: not negative"),
    ({"scale": -1.0}, "scale: -1; supported: 0 to 2^100"),
    ({"window": (-2, 0)}, "window: (-2, 0); supported: on each side -1"),
    ({"window": (1,)}, "window: (1,); expected (left, right)"),
    ({"alignment": "left"}, "alignment: 'left'; supported: 'bottom-right', 'top-left'"),
    ({"alignment": np.array(["top-left"])}, "alignment: array(['top-left'], dtype='<U8'); supported: 'bottom-right'"),
]

MISTAKES_IN_LENGTHS: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": int32(1, 3, 7)}, "cu_seqlens_q: begins with 1; supported: 0"),
    ({"cu_seqlens_q": int32(0, 3, 2)}, "cu_seqlens_q: 2 behind 3, at 2; supported: ascending numbers"),
    ({"cu_seqlens_k": int32(0, -5, 11)}, "cu_seqlens_k: -5 behind 0, at 1; supported: ascending numbers"),
    ({"cu_seqlens_q": int32(0, 4, 8)}, "cu_seqlens_q: ends with 8, but q has 7 rows"),
    ({"cu_seqlens_k": int32(0, 6, 12)}, "cu_seqlens_k: ends with 12, but k has 11 rows"),
    ({"max_seqlen_q": 3}, "max_seqlen_q: 3, but sequence 1 has 4 rows; supported: no less than the longest"),
    ({"max_seqlen_k": 5}, "max_seqlen_k: 5, but sequence 1 has 6 rows; supported: no less than the longest"),
    ({"seqused_k": int32(6, 1)}, "seqused_k: 6 for sequence 0; supported: 0 to its 5 keys"),
    ({"seqused_k": int32(1, -1)}, "seqused_k: -1 for sequence 1; supported: 0 to its 6 keys"),
    ({"seqused_k": int32(5, 3), "max_seqlen_k": 4}, "max_seqlen_k: 4, but sequence 0 has 5 keys"),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes(changes: dict[str, Any], words: str) -> None:
    assert words in refused(good() | changes, fake=True)


@pytest.mark.parametrize(("changes", "words"), MISTAKES_IN_LENGTHS, ids=[words for _, words in MISTAKES_IN_LENGTHS])
def test_mistakes_in_lengths(changes: dict[str, Any], words: str) -> None:
    assert words in refused(good() | changes, fake=False)


@pytest.mark.parametrize("name", ["q", "k", "v", "cu_seqlens_q"])
def test_none_and_other_devices(name: str) -> None:
    if name in "qkv":
        with pytest.raises(RuntimeError, match=f"{name}: None; expected a tensor"):
            dhp_safe_fa.attention_varlen(**(good() | {name: None}))
    with pytest.raises(RuntimeError, match="device"):
        dhp_safe_fa.attention_varlen(**(good() | {name: good()[name].to("meta")}))


ON_CUDA: list[tuple[dict[str, Any], str]] = [
    ({name: torch.zeros(1, 4, 16) for name in "qkv"}, "q: dtype float32; supported on CUDA: float16, bfloat16"),
    ({name: torch.zeros(9, 4, 20).half() for name in "qkv"}, "q: head_dim 20; supported on CUDA: a multiple of 8"),
    ({"v": torch.zeros(11, 2, 9).half()}, "v: head_dim 9 differs from q's 16; supported on CUDA: equal ones"),
]


@needs_hopper
@pytest.mark.parametrize(("changes", "words"), ON_CUDA, ids=[words for _, words in ON_CUDA])
def test_cuda_refuses(changes: dict[str, Any], words: str) -> None:
    given = {name: t.half() if name in "qkv" else t for name, t in good().items()} | changes
    on_cuda = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in given.items()}
    assert words in refused(on_cuda, fake=False)


@needs_hopper
def test_cuda_refuses_gradients() -> None:
    given = {name: t.half() if name in "qkv" else t for name, t in good().items()}
    on_cuda = {name: t.cuda() if isinstance(t, Tensor) else t for name, t in given.items()}
    on_cuda["q"].requires_grad_()
    with pytest.raises(RuntimeError, match="cu_seqlens_q: gradients of packed sequences; supported on CUDA: none"):
        dhp_safe_fa.attention_varlen(**on_cuda).sum().backward()
