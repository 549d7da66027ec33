"""Sliding windows: query i sees key j only if -left <= j - i - causal_offset <= right. On CUDA the forward."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    FUNCTIONS,
    Target,
    assert_compiled_and_vmapped,
    attend,
    gradients,
    needs_hopper,
    needs_kernels,
    normal,
    on_the_cpu,
    qkv,
    refusal,
    same_bits,
)
from reference import (
    Mask,
    assert_accurate,
    assert_gradients_accurate,
    assert_gradients_match,
    assert_matches,
    reference,
    reference_gradients,
    visible_keys,
)
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import gradcheck

import dhp_safe_fa
from dhp_safe_fa import _inspect, _windows

Window = tuple[int, int]

# Narrower and wider than a block of rows, a tile of keys and a tile of queries; one key; a side without a bound; all.
WINDOWS = [(0, 0), (3, 0), (0, 5), (95, 0), (96, 96), (130, 40), (-1, 7), (7, -1), (-1, 0), (1000, 1000), (-1, -1)]


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_against_float64(target: Target, rng: torch.Generator, window: Window, is_causal: bool) -> None:
    for shape in ((1, 4, 2, 300, 300, 64), (1, 2, 2, 65, 400, 40), (1, 2, 1, 200, 90, 128)):
        q, k, v = qkv(rng, target, *shape)
        for offset in (0, k.shape[2] - q.shape[2], -130) if is_causal or window != (-1, -1) else (0,):
            options: Any = {"is_causal": is_causal, "causal_offset": offset, "window": window}
            assert_matches(*attend(q, k, v, **options), reference(q, k, v, **options))


def test_accuracy(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 4, 2, 1024, 1024, 64)
    options: Any = {"is_causal": True, "window": (255, 0)}
    assert_accurate(*attend(q, k, v, **options), reference(q, k, v, **options))


@on_the_cpu
@pytest.mark.parametrize("window", [(40, 0), (0, 40), (25, 70), (-1, 3)], ids=str)
def test_against_sdpa(target: Target, rng: torch.Generator, window: Window) -> None:
    """With the band written out as torch's mask."""
    q, k, v = qkv(rng, target, 2, 4, 4, 150, 150, 64)
    mask = torch.zeros(150, 150, dtype=torch.bool)
    for i in range(150):
        seen = visible_keys(i, 150, Mask.of_call(False, 0, window))
        mask[i, seen.start : seen.stop] = True
    out = dhp_safe_fa.attention(q, k, v, window=window)
    want = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), attn_mask=mask)
    torch.testing.assert_close(out.float(), want, atol=2e-2 if target.dtype == torch.bfloat16 else 3e-3, rtol=0)


def test_numbers_at_the_ends_of_int64(target: Target, rng: torch.Generator) -> None:
    """A sum that int64 cannot hold is a bound that nothing reaches."""
    q, k, v = qkv(rng, target, 1, 1, 1, 20, 30, 16)
    large, want = sys.maxsize, attend(q, k, v)
    for options in ({"window": (large, large)}, {"window": (large, large), "causal_offset": 5}):
        assert all(same_bits(g, w) for g, w in zip(attend(q, k, v, **options), want, strict=True))
    for window, offset in (((large, 0), large), ((0, large), -large), ((large - 3, 3), large)):
        options = {"window": window, "causal_offset": offset}
        assert_matches(*attend(q, k, v, **options), reference(q, k, v, **options))


def test_rows_that_see_nothing(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 100, 40, 64)
    out, lse = attend(q, k, v, window=(10, 0))
    assert same_bits(out[:, :, 50:], torch.zeros_like(out[:, :, 50:])) and (lse[:, :, 50:] == -torch.inf).all()
    assert lse[:, :, :50].isfinite().all()


@on_the_cpu
def test_nothing_crosses_the_window(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 200, 200, 64)
    k[:, :, :60], v[:, :, :60] = torch.nan, torch.inf
    out, lse = attend(q, k, v, True, window=(30, 0))
    assert out[:, :, 90:].isfinite().all() and lse[:, :, 90:].isfinite().all() and out[:, :, :60].isnan().all()


# ---- bits -----------------------------------------------------------------------------------------------------------


def test_a_window_that_hides_nothing_changes_no_bit(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 4, 2, 150, 200, 64)
    for options in ({}, {"is_causal": True, "causal_offset": 50}):
        want = attend(q, k, v, **options)
        for window in ((200, 200), (200, -1), (-1, 200)):
            assert all(same_bits(g, w) for g, w in zip(attend(q, k, v, **options, window=window), want, strict=True))
    causal = attend(q, k, v, True, causal_offset=50)
    assert all(same_bits(g, w) for g, w in zip(attend(q, k, v, causal_offset=50, window=(-1, 0)), causal, strict=True))


@pytest.mark.parametrize("window", [(5, 0), (100, 0), (150, 30), (-1, 9)], ids=str)
def test_rows_of_prefill_chunks_and_decoding(target: Target, rng: torch.Generator, window: Window) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 300, 300, 64)
    out, lse = attend(q, k, v, window=window)
    for first, last in ((0, 17), (17, 140), (140, 141), (299, 300), (141, 300)):
        rows = slice(first, last)
        chunk = attend(q[:, :, rows], k, v, window=window, causal_offset=first)
        assert same_bits(chunk[0], out[:, :, rows]) and same_bits(chunk[1], lse[:, :, rows])
        keys = slice(0, min(last + max(window[1], 0), 300))  # keys behind the last row's window need not exist
        cached = attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], window=window, causal_offset=first)
        assert same_bits(cached[0], out[:, :, rows]) and same_bits(cached[1], lse[:, :, rows])


# ---- as packed sequences, which is how CUDA has wide ones, soft caps and sinks --------------------------------------


def test_every_band_is_one_of_a_packed_sequence() -> None:
    """Which keys each row sees, all small calls."""
    sides = (-1, 0, 1, 3, 9)
    for queries, keys, offset in itertools.product(range(5), range(5), range(-7, 8)):
        for is_causal, left, right in itertools.product((False, True), sides, sides):
            seen = _windows.band(queries, keys, is_causal, offset, (left, right))
            assert 0 <= seen.queries <= queries and 0 <= seen.keys <= keys and min(seen.window) >= -1
            mask = Mask.of_call(False, seen.keys - seen.queries, seen.window)
            for i in range(queries):
                want = set(visible_keys(i, keys, Mask.of_call(is_causal, offset, (left, right))))
                got = set(visible_keys(i, seen.keys, mask)) if i < seen.queries else set()
                assert got == want, (queries, keys, offset, is_causal, left, right, i, seen)


@on_the_cpu
@pytest.mark.parametrize("window", WINDOWS[:-1], ids=str)
def test_packed_rows_have_the_bits_of_the_call(target: Target, rng: torch.Generator, window: Window) -> None:
    """What CUDA does, on the CPU, whose operator knows windows, too: every layout, offset and length."""
    for shape in ((2, 4, 2, 130, 130, 64), (3, 2, 1, 33, 200, 40), (2, 2, 2, 120, 40, 64), (1, 2, 1, 5, 0, 8)):
        q, k, v = qkv(rng, target, *shape)
        as_stored = q.transpose(1, 2).contiguous().transpose(1, 2)
        for is_causal, offset in itertools.product((False, True), (0, k.shape[2] - q.shape[2], -50, 60)):
            for queries in (q, as_stored):
                want = attend(queries, k, v, is_causal, causal_offset=offset, window=window)
                got = _windows.attend(queries, k, v, is_causal, None, offset, window)
                for found, wanted in zip(got, want, strict=True):
                    assert same_bits(found, wanted) and strides(found) == strides(wanted)


def test_the_functions_go_this_way(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a call is to be packed: of a window, a soft cap, or sinks."""
    q, k, v = qkv(rng, Target("cpu", torch.float32), 2, 4, 2, 30, 50, 64)
    options: Any = {"is_causal": True, "causal_offset": 20, "window": (7, 0), "scale": 0.3}
    want = dhp_safe_fa.attention_lse(q, k, v, **options)
    monkeypatch.setattr(_windows, "are_packed", lambda *_: True)
    calls: list[object] = []
    packed = _windows.attend
    monkeypatch.setattr(_windows, "attend", lambda *given: (calls.append(given), packed(*given))[1])
    assert same_bits(dhp_safe_fa.attention(q, k, v, **options), want[0]) and len(calls) == 1
    assert all(same_bits(g, w) for g, w in zip(dhp_safe_fa.attention_lse(q, k, v, **options), want, strict=True))
    assert len(calls) == 2
    dhp_safe_fa.attention(q, k, v, is_causal=True)
    assert len(calls) == 2
    late = {"is_causal": True, "causal_offset": -9}  # rows that see no key have their head's sink as lse
    forms: list[dict[str, Any]] = [{"softcap": 3.0}, {"sinks": torch.randn(4, generator=rng)}]
    for form in forms:
        for given in (options, late):
            got = dhp_safe_fa.attention_lse(q, k, v, **given, **form)
            with monkeypatch.context() as plain:
                plain.setattr(_windows, "are_packed", lambda *_: False)
                want = dhp_safe_fa.attention_lse(q, k, v, **given, **form)
            assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))
    assert len(calls) == 6


def strides(t: Tensor) -> list[int]:
    """Of the dimensions in which there is a step."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def test_which_calls_are_packed() -> None:
    """On CUDA, and not where a gradient is recorded or something is wrong: then the operator has the words for it."""
    with FakeTensorMode() as mode:

        def on_cuda(*shape: int) -> Tensor:
            return FakeTensor(mode, torch.empty(shape, dtype=torch.float16, device="meta"), torch.device("cuda:0"))

        q, k = on_cuda(2, 4, 8, 64), on_cuda(2, 4, 8, 64)
        assert not _windows.are_packed(q, k, k, False, (3, 0))
        assert _windows.are_packed(q, k, k, False, (3, 0), 5.0)
        assert not _windows.are_packed(q, k, k, False, (3, -2), 5.0)
        for wrong in (None, on_cuda(4, 8, 64), on_cuda(1, 4, 8, 64)):
            assert not _windows.are_packed(q, wrong, k, False, (3, 0), 5.0)
        q.requires_grad_()
        assert not _windows.are_packed(q, k, k, False, (3, 0), 5.0)
        with torch.no_grad():
            assert _windows.are_packed(q, k, k, False, (3, 0), 5.0)
    assert not _windows.are_packed(*(torch.empty(2, 4, 8, 64) for _ in range(3)), False, (3, 0), 5.0)


@needs_kernels
@pytest.mark.parametrize(("head_dim", "segment"), [(64, 8192), (72, 4096), (128, 4096), (256, 10240)])
def test_wide_windows_are_packed_and_others_planned(head_dim: int, segment: int) -> None:
    """What goes where, by the rule in Python and by the plan: both hold the same."""
    sides = (-1, 0, 100, segment // 2, segment - 1, segment, 2**62)
    with FakeTensorMode() as mode:
        for keys, left, right, is_causal in itertools.product((segment, segment + 1), sides, sides, (False, True)):
            shape = (1, 2, keys, head_dim)
            q = FakeTensor(mode, torch.empty(shape, dtype=torch.float16, device="meta"), torch.device("cuda:0"))
            options = is_causal, (left, right)
            if not _windows.are_packed(q, q, q, *options):
                plan = _inspect.plan(shape, shape, "float16", is_causal, 0, left, right)
                assert plan["kernel"].endswith("_window") == (0 <= left < keys - 1), options
            elif left < keys - 1:  # else it hides nothing, and is served all the same
                with pytest.raises(ValueError, match=rf"window: \({left}, {right}\), with {keys} keys seen; supported"):
                    _inspect.plan(shape, shape, "float16", is_causal, 0, left, right)


# ---- gradients ------------------------------------------------------------------------------------------------------


@on_the_cpu
@pytest.mark.parametrize("window", [(0, 0), (20, 0), (96, 96), (-1, 7), (130, -1)], ids=str)
def test_gradients(target: Target, rng: torch.Generator, window: Window) -> None:
    q, k, v = qkv(rng, target, 1, 4, 2, 200, 230, 64)
    grad_out, grad_lse = normal(rng, tuple(q.shape), target), torch.randn(q.shape[:3], generator=rng)
    for options in ({"causal_offset": 30}, {"is_causal": True, "causal_offset": -40}):
        got = gradients(q, k, v, grad_out, grad_lse, **options, window=window)
        want = reference_gradients(q, k, v, grad_out, grad_lse, **options, window=window)
        few_keys = window in ((0, 0), (20, 0))  # what cancellation leaves of so few weighs more
        (assert_gradients_match if few_keys else assert_gradients_accurate)(got, want)


@pytest.mark.parametrize("options", [{"window": (2, 1)}, {"window": (1, 0), "is_causal": True, "causal_offset": 2}])
def test_gradients_by_differences(rng: torch.Generator, options: dict[str, Any]) -> None:
    shapes = ((1, 2, 5, 3), (1, 1, 7, 3), (1, 1, 7, 3))
    tensors = [torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert gradcheck(lambda *given: dhp_safe_fa.attention_lse(*given, **options), tensors)


def test_recorded_vmapped_and_compiled(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cpu", torch.float32), 2, 4, 2, 33, 70, 64)
    options: Any = {"window": (9, 4), "causal_offset": 37}
    want = gradients(q, k, v, torch.ones_like(q), **options)
    tensors = [t.clone().requires_grad_() for t in (q, k, v)]
    out = dhp_safe_fa.attention(*tensors, **options)
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(same_bits(f, w) for f, w in zip(found, want, strict=True))
    assert_compiled_and_vmapped(q, k, v, out.detach(), **options)


# ---- errors ---------------------------------------------------------------------------------------------------------


def refused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    return refusal(FUNCTIONS, {"q": q, "k": k, "v": v, **options})


@pytest.mark.parametrize("window", [(-2, 0), (0, -2), (-(2**63), -1)], ids=str)
def test_negative_sides(rng: torch.Generator, window: Window) -> None:
    message = refused(*qkv(rng, Target("cpu", torch.float16), 1, 2, 2, 5, 6, 8), window=window)
    assert f"window: ({window[0]}, {window[1]}); supported: on each side -1" in message


def test_not_two_sides(rng: torch.Generator) -> None:
    message = refused(*qkv(rng, Target("cpu", torch.float16), 1, 2, 2, 5, 6, 8), window=(1, 2, 3))
    assert "window: (1, 2, 3); expected (left, right)" in message


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_of_calls_and_of_packed_sequences_on_cuda(rng: torch.Generator, head_dim: int) -> None:
    """A narrow window has kernels of its own; the same rows by those of packed sequences have the same bits."""
    q, k, v = qkv(rng, Target("cuda", torch.bfloat16), 2, 4, 2, 700, 900, head_dim)
    for is_causal, offset, window in itertools.product((False, True), (0, 200, -50), ((70, 0), (300, 40), (0, 0))):
        got = attend(q, k, v, is_causal=is_causal, causal_offset=offset, window=window)
        want = _windows.attend(q, k, v, is_causal, None, offset, window)
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_few_queries_before_the_end_of_their_windows_on_cuda(rng: torch.Generator, head_dim: int) -> None:
    """Which clusters serve: of a window that hides no key on the left only the right side counts."""
    for queries, offset, window in ((2, 3000, (-1, 0)), (8, 2000, (-1, 5)), (16, 2500, (4000, 30)), (1, 2047, (-1, 0))):
        q, k, v = qkv(rng, Target("cuda", torch.bfloat16), 1, 8, 1, queries, 4096, head_dim)
        plan = _inspect.plan(tuple(q.shape), tuple(k.shape), "bfloat16", False, offset, *window)
        assert plan["kernel"].startswith("dec_")
        got = attend(q, k, v, causal_offset=offset, window=window)
        want = attend(q, k, v, is_causal=True, causal_offset=offset + window[1])
        assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


@needs_hopper
def test_wide_windows_on_cuda(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda", torch.float16), 1, 2, 2, 300, 9000, 128)
    for window in ((5000, 0), (4000, 3000), (-1, 4500), (8000, -1)):
        options: Any = {"causal_offset": 8500, "window": window}
        assert_matches(*attend(q, k, v, **options), reference(q, k, v, **options))


@needs_hopper
def test_cuda_refuses_gradients(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda", torch.float16), 1, 2, 2, 64, 64, 64)
    for tensor in (q, k, v):
        with pytest.raises(RuntimeError, match=r"window: \(5, 0\), of which a gradient is recorded; supported"):
            tensor.requires_grad_()
            dhp_safe_fa.attention(q, k, v, window=(5, 0))
        with torch.no_grad():
            assert dhp_safe_fa.attention(q, k, v, window=(5, 0)).isfinite().all()
        tensor.requires_grad_(False)


@needs_hopper
def test_compiled_and_vmapped_on_cuda(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda", torch.bfloat16), 2, 4, 2, 33, 70, 64)
    options: Any = {"window": (9, 4), "causal_offset": 37}
    out = dhp_safe_fa.attention(q, k, v, **options)
    assert_compiled_and_vmapped(q, k, v, out, **options)


@needs_hopper
def test_a_graph_on_cuda(rng: torch.Generator) -> None:
    """Nothing waits for the device."""
    q, k, v = qkv(rng, Target("cuda", torch.bfloat16), 2, 4, 2, 200, 300, 128)
    want = dhp_safe_fa.attention(q, k, v, is_causal=True, causal_offset=100, window=(90, 0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dhp_safe_fa.attention(q, k, v, is_causal=True, causal_offset=100, window=(90, 0))
    graph.replay()
    assert same_bits(out, want)
