"""Forms of attention beside masks: soft caps, sinks, and values of a head_dim of their own. Gradients of sinks are in
test_sinks_gradients.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import (
    DTYPE_NAMES,
    FUNCTIONS,
    Gradients,
    Target,
    assert_compiled_and_vmapped,
    attend,
    gradients,
    needs_hopper,
    normal,
    on_the_cpu,
    qkv,
    refusal,
    same_bits,
)
from reference import (
    ELEMENTS_FOR_NORM,
    RELATIVE_ERROR,
    assert_gradients_accurate,
    assert_gradients_match,
    assert_matches,
    reference,
    reference_gradients,
)
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.autograd import gradcheck

import dhp_safe_fa
from dhp_safe_fa import _widths

# Caps that no score reaches, that most feel, and that make nearly all equal.
SOFTCAPS = [None, 50.0, 2.0, 0.1]


def inputs(rng: torch.Generator, target: Target, shape: tuple[int, ...], dv: int) -> tuple[Tensor, Tensor, Tensor]:
    """q three times the usual size, so that caps are felt; v [B, Hk, Sk, dv]."""
    b, hq, hk, sq, sk, d = shape
    q, k, _ = qkv(rng, target, b, hq, hk, sq, sk, d)
    return (3 * q), k, normal(rng, (b, hk, sk, dv), target)


def sinks_of(
    rng: torch.Generator, heads: int, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> Tensor:
    """From far below the scores to above them."""
    return (4 * torch.randn(heads, generator=rng)).to(device, dtype)


# ---- values ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", SOFTCAPS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "window": (70, 0)}], ids=str)
def test_against_float64(
    target: Target, rng: torch.Generator, options: dict[str, Any], softcap: float | None, has_sinks: bool
) -> None:
    for shape, dv in (((1, 4, 2, 300, 300, 64), 64), ((2, 8, 2, 1, 333, 40), 24), ((1, 2, 2, 3, 150, 192), 128)):
        q, k, v = inputs(rng, target, shape, dv)
        placed = options | ({"causal_offset": k.shape[2] - q.shape[2]} if options else {})
        form: Any = {"softcap": softcap, "sinks": sinks_of(rng, q.shape[1], device=q.device) if has_sinks else None}
        want = reference(q, k, v, **placed, **form)
        assert_matches(*attend(q, k, v, **placed, **form), want, head_dim=q.shape[3])


@on_the_cpu
@pytest.mark.parametrize(("d", "dv"), [(192, 128), (64, 256), (16, 8), (7, 13), (24, 200)])
def test_values_of_another_head_dim(target: Target, rng: torch.Generator, d: int, dv: int) -> None:
    """The columns of v do not know of each other: so many of them, or all, have the same bits."""
    q, k, v = inputs(rng, target, (1, 4, 2, 140, 200, d), dv)
    for options in ({}, {"is_causal": True, "causal_offset": 60}):
        out, lse = attend(q, k, v, **options)
        assert_matches(out, lse, reference(q, k, v, **options), head_dim=d)
        some, same = attend(q, k, v[..., :5], **options)
        assert same_bits(some, out[..., :5]) and same_bits(same, lse)


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """On the CPU, too, v and q are filled up to one width; what was."""
    seen: list[object] = []
    monkeypatch.setattr(_widths, "differ", lambda q, k, v: q.shape[-1] != v.shape[-1])
    fill = _widths.fill
    monkeypatch.setattr(_widths, "fill", lambda *given: (seen.append(given), fill(*given))[1])
    return seen


@pytest.mark.parametrize(("d", "dv"), [(192, 128), (64, 256), (16, 8), (24, 200)])
def test_values_that_are_filled_up(
    filling: list[object], target: Target, rng: torch.Generator, d: int, dv: int
) -> None:
    """As on CUDA, gradients too; also in packed sequences."""
    q, k, v = inputs(rng, target, (1, 4, 2, 140, 200, d), dv)
    for options in ({}, {"is_causal": True, "causal_offset": 60}, {"scale": 0.1}):
        out, lse = attend(q, k, v, **options)
        assert out.shape == (1, 4, 140, dv) and out.is_contiguous()
        assert_matches(out, lse, reference(q, k, v, **options), head_dim=d)
    starts = [torch.tensor([0, t.shape[2]], dtype=torch.int32, device=q.device) for t in (q, k)]
    packed = dhp_safe_fa.attention_varlen(*(t[0].transpose(0, 1) for t in (q, k, v)), *starts, 140, 200)
    assert same_bits(packed.transpose(0, 1)[None], attend(q, k, v)[0]) and packed.is_contiguous()
    q = q / 3
    grad_out = normal(rng, (1, 4, 140, dv), target)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    filling.clear()
    out = dhp_safe_fa.attention(*leaves, is_causal=True, causal_offset=60)
    got = Gradients(*torch.autograd.grad(out, leaves, grad_out))
    assert_gradients_match(got, reference_gradients(q, k, v, grad_out, is_causal=True, causal_offset=60))
    assert filling


def test_which_head_dims_are_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, and only what its kernels take then."""
    with FakeTensorMode() as mode:

        def on_cuda(head_dim: int) -> Tensor:
            meta = torch.empty((1, 2, 8, head_dim), dtype=torch.float16, device="meta")
            return FakeTensor(mode, meta, torch.device("cuda:0"))

        monkeypatch.setattr(_widths, "CUDA_MAX_HEAD_DIM", 256)
        assert _widths.differ(on_cuda(192), on_cuda(192), on_cuda(128))
        for q, k, v in ((64, 64, 64), (64, 64, 20), (20, 20, 64), (64, 32, 128), (64, 64, 264), (64, 64, 0)):
            assert not _widths.differ(on_cuda(q), on_cuda(k), on_cuda(v))
        assert not _widths.differ(None, on_cuda(8), on_cuda(16))
    assert not _widths.differ(torch.empty(1, 2, 8, 64), torch.empty(1, 2, 8, 64), torch.empty(1, 2, 8, 32))


@pytest.mark.parametrize("softcap", [30.0, None])
def test_accuracy(target: Target, rng: torch.Generator, softcap: float | None) -> None:
    q, k, v = qkv(rng, target, 1, 4, 2, 1024, 1024, 64)
    options: Any = {"is_causal": True, "softcap": softcap, "sinks": sinks_of(rng, 4, device=q.device)}
    out, _ = attend(q, k, v, **options)
    want = reference(q, k, v, **options).out
    assert out.numel() >= ELEMENTS_FOR_NORM
    assert float((out.double() - want).norm() / want.norm()) <= RELATIVE_ERROR[target.dtype]


def test_forms_that_change_nothing(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 4, 2, 150, 200, 64)
    want = attend(q, k, v, True, causal_offset=50)
    for form in ({"softcap": 0.0}, {"sinks": torch.full([4], -torch.inf, device=q.device)}):
        assert all(same_bits(g, w) for g, w in zip(attend(q, k, v, True, None, 50, **form), want, strict=True))


def test_rows_that_see_nothing(target: Target, rng: torch.Generator) -> None:
    """Of a row without a key its head's sink is left."""
    q, k, v = qkv(rng, target, 1, 4, 2, 40, 20, 64)
    sinks = sinks_of(rng, 4, device=q.device)
    out, lse = attend(q, k, v, True, causal_offset=-10, sinks=sinks)
    assert same_bits(out[:, :, :10], torch.zeros_like(out[:, :, :10]))
    torch.testing.assert_close(lse[0, :, :10], sinks[:, None].expand(4, 10))
    assert all(
        same_bits(attend(q, k, v, True, causal_offset=-i - 1, sinks=sinks)[1][:, :, i], lse[:, :, 0]) for i in (0, 7)
    )


def test_what_is_not_finite(target: Target, rng: torch.Generator) -> None:
    """As float64 arithmetic takes it: a cap makes a score of +inf finite; a sink of +inf or NaN is its rows alone."""
    q, k, v = qkv(rng, target, 1, 4, 4, 30, 100, 64)
    k[:, :, 60, 0], q[:, :, 7:9, 0] = torch.inf, 1.0
    q[:, :, 9:, 0] = 0.0
    for softcap in (None, 5.0):
        assert_matches(*attend(q, k, v, softcap=softcap), reference(q, k, v, softcap=softcap))
    q, k, v = qkv(rng, target, 1, 4, 4, 30, 100, 64)
    sinks = torch.tensor([0.5, torch.nan, -torch.inf, torch.inf], device=q.device)
    out, lse = attend(q, k, v, sinks=sinks)
    assert_matches(out[:, ::2], lse[:, ::2], reference(q[:, ::2], k[:, ::2], v[:, ::2], sinks=sinks[::2]))
    assert out[:, 1].isnan().all() and lse[:, 1].isnan().all()
    assert (out[:, 3] == 0).all() and (lse[:, 3] == torch.inf).all()


# ---- bits -----------------------------------------------------------------------------------------------------------


def test_rows_of_prefill_chunks_and_decoding(target: Target, rng: torch.Generator) -> None:
    q, k, v = inputs(rng, target, (2, 8, 2, 300, 300, 64), 40)
    form: Any = {"softcap": 4.0, "sinks": sinks_of(rng, 8, device=q.device)}
    out, lse = attend(q, k, v, True, **form)
    for first, last in ((0, 17), (17, 140), (140, 141), (298, 300), (299, 300)):
        rows = slice(first, last)
        chunk = attend(q[:, :, rows], k[:, :, :last], v[:, :, :last], True, causal_offset=first, **form)
        assert same_bits(chunk[0], out[:, :, rows]) and same_bits(chunk[1], lse[:, :, rows])
    head = attend(q[:, 4:], k[:, 1:], v[:, 1:], True, softcap=4.0, sinks=form["sinks"][4:])
    assert same_bits(head[0], out[:, 4:]) and same_bits(head[1], lse[:, 4:])


def test_packed_and_in_pages(target: Target, rng: torch.Generator) -> None:
    """The bits of a call for each sequence alone, wherever its keys lie and whatever lies before them."""
    queries, keys, pad, page = [5, 1, 130], [200, 96, 130], [0, 13, 1], 16
    q = 3 * normal(rng, (sum(queries), 4, 64), target)
    widths = (64, 40 if target.device == "cpu" else 64)  # on CUDA no other width of v in pages
    tensors = [normal(rng, (sum(keys) + sum(pad), 2, d), target) for d in widths]

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=q.device)

    form: Any = {"softcap": 4.0, "sinks": sinks_of(rng, 4, device=q.device), "is_causal": True}
    starts_q, starts_k = (
        [0, *torch.tensor(n).cumsum(0).tolist()] for n in (queries, [a + b for a, b in zip(keys, pad, strict=True)])
    )
    for start, count in zip(starts_k, pad, strict=False):
        for t in tensors:
            t[start : start + count] = torch.nan
    lengths = numbers(starts_q), numbers(starts_k), max(queries), max(keys) + max(pad)
    out, lse = dhp_safe_fa.attention_varlen_lse(q, *tensors, *lengths, **form, leftpad_k=numbers(pad))

    pages = [[3 * 20 + 19 - i for i in range(20)][: -(-n // page)] for n in keys]
    pages = [[p - 20 * b for p in each] for b, each in enumerate(pages)]
    cache = [torch.full([80, page, 2, t.shape[2]], torch.nan, dtype=target.dtype, device=q.device) for t in tensors]
    for b, (start, skip, count) in enumerate(zip(starts_k, pad, keys, strict=False)):
        for t, pool in zip(tensors, cache, strict=True):
            for i in range(count):
                pool[pages[b][i // page], i % page] = t[start + skip + i]
    table = torch.full([3, 20], -1, dtype=torch.int32, device=q.device)
    for b, each in enumerate(pages):
        table[b, : len(each)] = numbers(each)
    paged = dhp_safe_fa.attention_varlen_lse(
        q, *cache, lengths[0], None, *lengths[2:], **form, seqused_k=numbers(keys), page_table=table
    )
    assert same_bits(paged[0], out) and same_bits(paged[1], lse)

    for b in range(3):
        rows, seen = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b] + pad[b], starts_k[b + 1])
        alone = [t.transpose(0, 1)[None] for t in (q[rows], *(t[seen] for t in tensors))]
        want = attend(*alone, causal_offset=keys[b] - queries[b], **form)
        assert same_bits(out[rows].transpose(0, 1)[None], want[0]) and same_bits(lse[None, :, rows], want[1])


@pytest.mark.parametrize("dtype", [*DTYPE_NAMES, torch.float64], ids=str)
def test_packed_rows_of_no_sequence(dtype: torch.dtype, rng: torch.Generator) -> None:
    """They have no sink either, whereas a sequence without keys has."""
    q, k, v = (normal(rng, (n, 2, 16), Target("cpu", torch.float32)).to(dtype) for n in (140, 6, 6))
    sinks = sinks_of(rng, 2, torch.float64 if dtype == torch.float64 else torch.float32)
    lengths = torch.tensor([0, 3, 5]).int(), torch.tensor([0, 6, 6]).int(), 3, 6
    out, lse = dhp_safe_fa.attention_varlen_lse(q, k, v, *lengths, sinks=sinks)
    assert (out[3:] == 0).all() and (lse[:, 5:] == -torch.inf).all() and lse[:, :3].isfinite().all()
    torch.testing.assert_close(lse[:, 3:5], sinks[:, None].expand(2, 2))


# ---- gradients ------------------------------------------------------------------------------------------------------


@on_the_cpu
@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("softcap", [None, 50.0, 5.0])
@pytest.mark.parametrize(("d", "dv"), [(64, 64), (96, 40), (40, 96)])
def test_gradients(
    target: Target, rng: torch.Generator, d: int, dv: int, softcap: float | None, has_sinks: bool
) -> None:
    q, k, _ = qkv(rng, target, 1, 4, 2, 200, 230, d)
    v, grad_out = normal(rng, (1, 2, 230, dv), target), normal(rng, (1, 4, 200, dv), target)
    grad_lse = torch.randn(q.shape[:3], generator=rng)
    form: Any = {"softcap": softcap, "sinks": sinks_of(rng, 4) if has_sinks else None}
    for options in ({}, {"is_causal": True, "causal_offset": 30}):
        got = gradients(q, k, v, grad_out, grad_lse, **options, **form)
        assert_gradients_accurate(got, reference_gradients(q, k, v, grad_out, grad_lse, **options, **form))


@pytest.mark.parametrize(
    "options", [{"softcap": 0.7}, {"softcap": 3.0, "is_causal": True, "causal_offset": 2}], ids=str
)
def test_gradients_by_differences(rng: torch.Generator, options: dict[str, Any]) -> None:
    shapes = ((1, 2, 5, 3), (1, 1, 7, 3), (1, 1, 7, 4))
    tensors = [torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True) for shape in shapes]
    sinks = sinks_of(rng, 2, torch.float64)
    assert gradcheck(lambda *given: dhp_safe_fa.attention_lse(*given, **options, sinks=sinks), tensors)


def test_float64(rng: torch.Generator) -> None:
    q, k, v = (t.double() for t in inputs(rng, Target("cpu", torch.float32), (1, 4, 2, 60, 90, 24), 40))
    for softcap in SOFTCAPS:
        form: Any = {"softcap": softcap, "sinks": sinks_of(rng, 4, torch.float64)}
        out, lse = dhp_safe_fa.attention_lse(q, k, v, **form)
        want = reference(q, k, v, **form)
        torch.testing.assert_close(out, want.out, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(lse, want.lse, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("softcap", [1e4, 1e8, 1e16, 1e30])
def test_large_softcap_of_float64(rng: torch.Generator, softcap: float) -> None:
    """The tangent keeps its digits near 0, where the cap multiplies them; from some 1e8 on scores are as without."""
    q, k, v = (t.double() for t in inputs(rng, Target("cpu", torch.float32), (1, 4, 2, 60, 90, 24), 40))
    want = reference(q, k, v, softcap=softcap)
    torch.testing.assert_close(dhp_safe_fa.attention(q, k, v, softcap=softcap), want.out, rtol=1e-12, atol=1e-13)


def test_largest_softcap_of_float32(rng: torch.Generator) -> None:
    """Of the scores' digits none is lost that float32 has beside a score of 1."""
    q, k, v = inputs(rng, Target("cpu", torch.float32), (1, 4, 2, 60, 90, 24), 40)
    want = reference(q, k, v, softcap=2.0**100)
    found = dhp_safe_fa.attention(q, k, v, softcap=2.0**100).double()
    torch.testing.assert_close(found, want.out, rtol=1e-5, atol=1e-5)


def test_recorded_vmapped_and_compiled(rng: torch.Generator) -> None:
    q, k, v = inputs(rng, Target("cpu", torch.float32), (2, 4, 2, 33, 70, 64), 40)
    sinks = sinks_of(rng, 4)
    options: Any = {"softcap": 6.0, "sinks": sinks, "is_causal": True, "causal_offset": 37}
    want = gradients(q, k, v, torch.ones(2, 4, 33, 40), **options)
    tensors = [t.clone().requires_grad_() for t in (q, k, v)]
    out = dhp_safe_fa.attention(*tensors, **options)
    found = torch.autograd.grad(out.sum(), tensors)
    assert all(same_bits(f, w) for f, w in zip(found, want, strict=True))
    assert_compiled_and_vmapped(q, k, v, out.detach(), **options)


# ---- errors ---------------------------------------------------------------------------------------------------------


def refused(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> str:
    return refusal(FUNCTIONS, {"q": q, "k": k, "v": v, **options})


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"softcap": -1.0}, "softcap: -1; supported: 0 for none, or positive and normal"),
    ({"softcap": math.inf}, "softcap: inf; supported: 0 for none, or positive and normal"),
    ({"softcap": math.nan}, "softcap: nan; supported: 0 for none, or positive and normal"),
    ({"softcap": 2.0**100 * 1.001}, "softcap: 1.26892e+30; supported: 0 for none"),
    ({"softcap": 1e-300}, "softcap: 1e-300; supported: 0 for none"),
    ({"softcap": 1e-31, "scale": 1.0}, "with softcap and scale / softcap no more than 2^100"),
    ({"sinks": torch.zeros(3)}, "sinks: shape [3]; expected [2], one number for each query head"),
    ({"sinks": torch.zeros(1, 2)}, "sinks: shape [1, 2]; expected [2]"),
    ({"sinks": torch.zeros(2).double()}, "sinks: dtype float64; expected float32"),
    ({"sinks": torch.zeros(2, device="meta")}, "sinks: on meta, q on cpu; all tensors must be on the same device"),
]


@pytest.mark.parametrize(("options", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes(rng: torch.Generator, options: dict[str, Any], words: str) -> None:
    assert words in refused(*qkv(rng, Target("cpu", torch.float16), 1, 2, 2, 5, 6, 8), **options)


def test_mistakes_in_values(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cpu", torch.float16), 1, 2, 2, 5, 6, 8)
    assert "v: shape [1, 2, 5, 8] differs from k's [1, 2, 6, 8]; they must be equal but for head_dim" in refused(
        q, k, v[:, :, :5]
    )
    assert "v: head_dim 0 in shape [1, 2, 6, 0]; supported: 1 to 256" in refused(q, k, v[..., :0])
    with pytest.raises(RuntimeError, match="v: head_dim 257; supported on CPU: 1 to 256"):
        dhp_safe_fa.attention(q, k, torch.zeros(1, 2, 6, 257, dtype=torch.float16))
    with pytest.raises(RuntimeError, match="softcap: 1e-300; supported: 0 for none, or positive and normal"):
        dhp_safe_fa.attention(q, k, v, softcap=1e-300)


@needs_hopper
def test_cuda_refuses(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda", torch.float16), 1, 2, 2, 64, 64, 64)
    sinks = torch.zeros(2, device="cuda")
    for options, words in (
        ({"softcap": 5.0}, "softcap: 5; supported on CUDA: none, but by attention_varlen and"),
        ({"sinks": sinks}, "sinks: given; supported on CUDA: None, but by attention_varlen and"),
    ):
        for tensor in (q, k, v, *([sinks] if "sinks" in options else [])):
            tensor.requires_grad_()
            with pytest.raises(RuntimeError, match=words):
                dhp_safe_fa.attention(q, k, v, **options)
            with torch.no_grad():
                assert dhp_safe_fa.attention(q, k, v, **options).isfinite().all()
            tensor.requires_grad_(False)
    with pytest.raises(RuntimeError, match="v: head_dim 20 differs from q's 64; supported on CUDA: equal ones"):
        dhp_safe_fa.attention(q, k, v[..., :20])


@needs_hopper
def test_mistakes_on_cuda(rng: torch.Generator) -> None:
    """Which go by packed sequences are refused in the same words."""
    q, k, v = qkv(rng, Target("cuda", torch.float16), 1, 2, 2, 5, 6, 8)
    for options, words in MISTAKES:
        is_elsewhere = getattr(options.get("sinks"), "is_meta", True)
        given = options if is_elsewhere else {"sinks": options["sinks"].cuda()}
        with pytest.raises(RuntimeError) as caught:
            dhp_safe_fa.attention(q, k, v, **given)
        assert words in str(caught.value)


@needs_hopper
def test_compiled_and_vmapped_on_cuda(rng: torch.Generator) -> None:
    q, k, v = inputs(rng, Target("cuda", torch.bfloat16), (2, 4, 2, 33, 70, 64), 40)
    options: Any = {"softcap": 6.0, "sinks": sinks_of(rng, 4, device="cuda"), "is_causal": True, "causal_offset": 37}
    out = dhp_safe_fa.attention(q, k, v, **options)
    assert_compiled_and_vmapped(q, k, v, out, **options)


@needs_hopper
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_graph_on_cuda(rng: torch.Generator, head_dim: int) -> None:
    """Nothing waits for the device, and sinks are read when the graph is replayed."""
    q, k, v = qkv(rng, Target("cuda", torch.bfloat16), 2, 4, 2, 200, 300, head_dim)
    sinks = sinks_of(rng, 4, device="cuda")
    options: Any = {"is_causal": True, "causal_offset": 100, "softcap": 3.0, "sinks": sinks}
    dhp_safe_fa.attention(q, k, v, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dhp_safe_fa.attention(q, k, v, **options)
    sinks.add_(1)
    graph.replay()
    assert same_bits(out, dhp_safe_fa.attention(q, k, v, **options))
