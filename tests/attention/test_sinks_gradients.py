"""Gradients of sinks, which are served on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from harness import (
    FUNCTIONS,
    LAYOUTS,
    Target,
    needs_hopper,
    normal,
    on_the_cpu,
    poisoned_memory,
    qkv,
    refusal,
    same_bits,
    torch_jit_is_deprecated,
)
from reference import assert_sinks_gradient_matches, reference, reference_sinks_gradient
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import dhp_safe_fa

BACKWARD = torch.ops.dhp.attention_sinks_backward
FLOAT32 = Target("cpu", torch.float32)

# All keys, causal with rows that see none, and windows.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_causal": True, "causal_offset": -30},
    {"is_causal": True, "causal_offset": 30, "window": (40, 0)},
    {"softcap": 3.0, "causal_offset": -20, "window": (5, 9)},
]


def sinks_of(rng: torch.Generator, heads: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """From below the scores to above them."""
    return 2 * torch.randn(heads, generator=rng).to(dtype)


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def gradient(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, grad_out: Tensor, grad_lse: Tensor | None = None, **options: Any
) -> Tensor:
    """Of the sinks alone, by autograd, on poisoned memory."""
    leaf = sinks.detach().clone().requires_grad_()
    with poisoned_memory():
        out, lse = dhp_safe_fa.attention_lse(q, k, v, sinks=leaf, **options)
        results, given = ([out], [grad_out]) if grad_lse is None else ([out, lse], [grad_out, grad_lse])
        (found,) = torch.autograd.grad(results, leaf, given)
    assert found.dtype == sinks.dtype and found.shape == sinks.shape and found.is_contiguous()
    return found


# ---- values ---------------------------------------------------------------------------------------------------------


@on_the_cpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_against_float64(target: Target, rng: torch.Generator, options: dict[str, Any]) -> None:
    for shape, dv in (((2, 8, 2, 200, 170, 64), 64), ((1, 4, 1, 129, 100, 40), 24), ((3, 2, 2, 1, 33, 16), 7)):
        b, hq, hk, sq, sk, _ = shape
        q, k, _ = qkv(rng, target, *shape)
        v, grad_out = normal(rng, (b, hk, sk, dv), target), normal(rng, (b, hq, sq, dv), target)
        sinks, grad_lse = sinks_of(rng, hq), torch.randn(b, hq, sq, generator=rng)
        for of_lse in (None, grad_lse):
            want = reference_sinks_gradient(q, k, v, sinks, grad_out, of_lse, **options)
            assert_sinks_gradient_matches(gradient(q, k, v, sinks, grad_out, of_lse, **options), want)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_float64(rng: torch.Generator, options: dict[str, Any]) -> None:
    q, k, v = (t.double() for t in qkv(rng, FLOAT32, 2, 4, 2, 150, 90, 24))
    grad_out, grad_lse = torch.randn_like(q), torch.randn(q.shape[:3], dtype=torch.float64)
    sinks = sinks_of(rng, 4, torch.float64)
    want, _ = reference_sinks_gradient(q, k, v, sinks, grad_out, grad_lse, **options)
    got = gradient(q, k, v, sinks, grad_out, grad_lse, **options)
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "causal_offset": -2}, {"window": (1, 2)}], ids=str)
def test_by_differences(rng: torch.Generator, options: dict[str, Any]) -> None:
    shapes = ((2, 4, 5, 3), (2, 2, 7, 3), (2, 2, 7, 4), (4,))
    tensors = [torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert gradcheck(lambda q, k, v, s: dhp_safe_fa.attention_lse(q, k, v, sinks=s, **options), tensors)


@pytest.mark.parametrize("alignment", ["bottom-right", "top-left"])
def test_packed_by_differences(rng: torch.Generator, alignment: Any) -> None:
    """Sequences of which one has more queries than keys; the last two rows belong to none."""
    shapes = ((9, 4, 3), (8, 2, 3), (8, 2, 4), (4,))
    tensors = [torch.randn(shape, generator=rng, dtype=torch.float64, requires_grad=True) for shape in shapes]
    lengths = int32(0, 4, 7), int32(0, 2, 8), 4, 6

    def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        options: Any = {"is_causal": True, "alignment": alignment, "sinks": sinks}
        out, lse = dhp_safe_fa.attention_varlen_lse(q, k, v, *lengths, **options)
        return out, lse[:, :7]  # then -inf, of which there are no differences

    assert gradcheck(call, tensors)


@on_the_cpu
def test_packed(target: Target, rng: torch.Generator) -> None:
    """The sum over the sequences; rows of none add nothing, whatever their gradients hold."""
    queries, keys = [5, 130, 0, 77], [40, 96, 3, 0]
    q, grad_out = (normal(rng, (sum(queries) + 6, 4, 40), target) for _ in range(2))
    k, v = (normal(rng, (sum(keys), 2, 40), target) for _ in range(2))
    grad_lse, sinks = torch.randn(4, q.shape[0], generator=rng), sinks_of(rng, 4)
    grad_out[-6:], grad_lse[:, -6:] = torch.nan, torch.inf
    starts_q, starts_k = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in (queries, keys))
    leaf = sinks.clone().requires_grad_()
    lengths = int32(*starts_q), int32(*starts_k), max(queries), max(keys)
    results = dhp_safe_fa.attention_varlen_lse(q, k, v, *lengths, is_causal=True, sinks=leaf)
    (got,) = torch.autograd.grad(results, leaf, (grad_out, grad_lse))
    want, bound = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for b in range(4):
        rows, seen = slice(starts_q[b], starts_q[b + 1]), slice(starts_k[b], starts_k[b + 1])
        alone = [t.transpose(0, 1)[None] for t in (q[rows], k[seen], v[seen])]
        places: Any = {"is_causal": True, "causal_offset": keys[b] - queries[b]}
        of_results = grad_out[rows].transpose(0, 1)[None], grad_lse[None, :, rows]
        each = reference_sinks_gradient(*alone, sinks, *of_results, **places)
        want, bound = want + each[0], bound + each[1]
    assert_sinks_gradient_matches(got, (want, bound))


@on_the_cpu
def test_many_rows(target: Target, rng: torch.Generator) -> None:
    """An error that does not grow with their number: all rows have the same sign."""
    q, k, v = qkv(rng, target, 1, 2, 1, 100_000, 3, 8)
    sinks, grad_out, grad_lse = torch.tensor([0.1, 0.3]), torch.zeros_like(q), torch.ones(1, 2, 100_000)
    _, lse = dhp_safe_fa.attention_lse(q, k, v, sinks=sinks)
    want = (sinks[:, None].double() - lse.double()).exp().sum(dim=(0, 2))
    torch.testing.assert_close(gradient(q, k, v, sinks, grad_out, grad_lse).double(), want, rtol=2e-7, atol=0.0)


@on_the_cpu
def test_what_is_not_finite(target: Target, rng: torch.Generator) -> None:
    """A sink of -inf is none, and its gradient is 0, also where no row has another term; of +inf or NaN it is NaN."""
    q, k, v = qkv(rng, target, 2, 4, 4, 30, 40, 64)
    sinks = torch.tensor([0.5, -torch.inf, torch.nan, torch.inf])
    grad_out, grad_lse = normal(rng, (2, 4, 30, 64), target), torch.randn(2, 4, 30, generator=rng)
    for options in ({}, {"is_causal": True, "causal_offset": -10}, {"is_causal": True, "causal_offset": -50}):
        got = gradient(q, k, v, sinks, grad_out, grad_lse, **options)
        assert got[0].isfinite() and got[1] == 0.0 and got[2:].isnan().all()
    k[:, :, 7, 0], q[:, :, :, 0] = torch.inf, 1.0  # scores of +inf: out is NaN
    assert gradient(q, k, v, sinks, grad_out, grad_lse).isnan().all()


def test_nothing(rng: torch.Generator) -> None:
    """No rows, no batch, no keys, no heads."""
    for shape in ((2, 4, 2, 0, 5, 8), (0, 4, 2, 3, 5, 8), (2, 0, 2, 3, 5, 8)):
        q, k, v = qkv(rng, FLOAT32, *shape)
        sinks = sinks_of(rng, shape[1])
        assert same_bits(gradient(q, k, v, sinks, torch.ones_like(q)), torch.zeros_like(sinks))
    q, k, v = qkv(rng, FLOAT32, 2, 4, 2, 3, 0, 8)
    got = gradient(q, k, v, sinks_of(rng, 4), torch.ones_like(q), torch.ones(2, 4, 3))
    torch.testing.assert_close(got, torch.full([4], 6.0), rtol=2e-6, atol=0.0)  # lse is the sink, but for rounding


# ---- bits -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@on_the_cpu
def test_bits(target: Target, rng: torch.Generator, threads: None) -> None:
    """Not the number of threads, nor layouts, other heads, other gradients, the run."""
    q, k, v = qkv(rng, target, 3, 4, 2, 700, 50, 40)
    grad_out, grad_lse = normal(rng, (3, 4, 700, 40), target), torch.randn(3, 4, 700, generator=rng)
    sinks = sinks_of(rng, 4)
    want = gradient(q, k, v, sinks, grad_out, grad_lse)
    for count in (1, 2, 3, 5, 16):
        torch.set_num_threads(count)
        assert same_bits(gradient(q, k, v, sinks, grad_out, grad_lse), want)
    for layout in LAYOUTS.values():
        assert same_bits(gradient(layout(q), k, v, sinks, layout(grad_out), grad_lse.mT.contiguous().mT), want)
    spread = torch.stack((sinks, sinks), dim=1)[:, 0]
    head = gradient(q[:, 2:], k[:, 1:], v[:, 1:], spread[2:], grad_out[:, 2:], grad_lse[:, 2:])
    assert same_bits(head, want[2:])
    leaves = [t.clone().requires_grad_() for t in (q, k, v, sinks)]
    results = dhp_safe_fa.attention_lse(*leaves[:3], sinks=leaves[3])
    assert same_bits(torch.autograd.grad(results, leaves, (grad_out, grad_lse))[3], want)


# ---- torch ----------------------------------------------------------------------------------------------------------


class Seen(TorchDispatchMode):
    """Names of our operators, as they are called below autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dhp":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def test_only_what_requires_grad_is_computed(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, FLOAT32, 1, 4, 2, 9, 7, 8)
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    calls: dict[str, Any] = {
        "attention_lse": lambda q, k, v, s: dhp_safe_fa.attention(q, k, v, sinks=s),
        "attention_varlen": lambda q, k, v, s: dhp_safe_fa.attention_varlen(
            q, k, v, int32(0, 9), int32(0, 7), 9, 7, sinks=s
        ),
    }
    for name, call in calls.items():
        tensors = (q, k, v) if name == "attention_lse" else packed
        gradients = "attention_backward" if name == "attention_lse" else "attention_varlen_backward"
        for of_q, of_sinks in ((True, False), (False, True), (True, True)):
            leaves = tensors[0].clone().requires_grad_(of_q), sinks_of(rng, 4).requires_grad_(of_sinks)
            with Seen() as seen:
                call(leaves[0], *tensors[1:], leaves[1]).sum().backward()
            wanted = [gradients] * of_q + ["attention_sinks_backward"] * of_sinks
            assert seen.names == [name, *wanted]
            assert [leaf.grad is not None for leaf in leaves] == [of_q, of_sinks]


def test_opcheck(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, FLOAT32, 2, 4, 2, 5, 7, 8)
    sinks = sinks_of(rng, 4)
    for options in ({}, {"is_causal": True, "causal_offset": -2}):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        given = options | {"sinks": sinks.clone().requires_grad_()}
        torch.library.opcheck(torch.ops.dhp.attention_lse.default, tuple(leaves), given)
        out, lse = torch.ops.dhp.attention_lse(q, k, v, **options, sinks=sinks)
        for grad_lse in (None, lse):
            torch.library.opcheck(BACKWARD.default, (out.mT.contiguous().mT, out, lse, sinks), {"grad_lse": grad_lse})


def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=True, sinks=sinks)
    return out.float().square().sum() + lse.sum()


def packed_loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    lengths = int32(0, 4, 9), int32(0, 7, 12), 5, 7
    out, lse = dhp_safe_fa.attention_varlen_lse(q, k, v, *lengths, is_causal=True, sinks=sinks)
    return out.float().square().sum() + lse.sum()


def given_to(function: Any, rng: torch.Generator) -> list[Tensor]:
    shapes = ((2, 4, 9, 8), (2, 2, 7, 8), (2, 2, 7, 8)) if function is loss else ((9, 4, 8), (12, 2, 8), (12, 2, 8))
    return [*(torch.randn(shape, generator=rng) for shape in shapes), sinks_of(rng, 4)]


def by_autograd(function: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


@pytest.mark.parametrize("function", [loss, packed_loss])
def test_transforms(function: Any, rng: torch.Generator) -> None:
    """grad, and vmap over it: of samples with the same sinks, of sinks with the same samples, of both, and of sums."""
    given = given_to(function, rng)
    of_all = torch.func.grad(function, argnums=(0, 1, 2, 3))
    assert all(same_bits(g, w) for g, w in zip(of_all(*given), by_autograd(function, *given), strict=True))
    many = [torch.stack((t, 2 * t, -t)) for t in given]
    for dims in ((0, 0, 0, None), (None, None, None, 0), (0, None, None, 0), (0, 0, 0, 0)):
        picked = [given[i] if dims[i] is None else many[i] for i in range(4)]
        got = torch.func.vmap(of_all, in_dims=dims)(*picked)
        for n in range(3):
            want = by_autograd(function, *(t if dim is None else t[n] for t, dim in zip(picked, dims, strict=True)))
            assert all(same_bits(g[n], w) for g, w in zip(got, want, strict=True))
    summed = by_autograd(lambda *t: torch.func.vmap(function, in_dims=(0, 0, 0, 0))(*t).sum(), *many)
    for n in range(3):
        assert same_bits(summed[3][n], by_autograd(function, *(t[n] for t in many))[3])


def test_jacobian(rng: torch.Generator) -> None:
    q, k, v, sinks = (t.double() for t in given_to(loss, rng))
    run = partial(dhp_safe_fa.attention, q[:1, :, :2], k[:1], v[:1])
    got = torch.func.jacrev(lambda s: run(sinks=s))(sinks)
    assert same_bits(got, torch.autograd.functional.jacobian(lambda s: run(sinks=s), sinks))


@torch_jit_is_deprecated
@pytest.mark.parametrize("function", [loss, packed_loss])
def test_compiled(function: Any, rng: torch.Generator) -> None:
    given = given_to(function, rng)
    torch.compiler.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert all(
        same_bits(g, w) for g, w in zip(by_autograd(compiled, *given), by_autograd(function, *given), strict=True)
    )


def test_checkpoints_autocast_and_policies(rng: torch.Generator) -> None:
    given = given_to(loss, rng)
    want = by_autograd(loss, *given)[3]
    assert same_bits(by_autograd(lambda *t: checkpoint(loss, *t, use_reentrant=False), *given)[3], want)
    with dhp_safe_fa.policy("secure"):
        assert same_bits(by_autograd(loss, *given)[3], want)
    halves = [t.bfloat16() for t in given[:3]]
    with torch.autocast("cpu", torch.bfloat16):
        narrow = by_autograd(loss, *given)[3]
    assert narrow.dtype == torch.float32 and same_bits(narrow, by_autograd(loss, *halves, given[3])[3])


# ---- refused --------------------------------------------------------------------------------------------------------


@torch_jit_is_deprecated
def test_what_there_is_not(rng: torch.Generator) -> None:
    q, k, v, sinks = given_to(loss, rng)
    leaf = sinks.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(q, k, v, leaf), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match=r"dhp::attention_sinks_backward: gradients of gradients .* do not exist"):
        torch.autograd.grad(first.sum(), leaf)
    with pytest.raises(RuntimeError, match=r"gradients of gradients .* do not exist"):
        torch.func.grad(lambda s: torch.func.grad(loss, argnums=3)(q, k, v, s).sum())(sinks)
    with pytest.raises(RuntimeError, match=r"dhp::attention: forward-mode differentiation .* does not exist"):
        torch.func.jvp(lambda s: loss(q, k, v, s), (sinks,), (sinks,))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(sinks, torch.ones_like(sinks))
        with pytest.raises(RuntimeError, match=r"dhp::attention: forward-mode differentiation .* does not exist"):
            dhp_safe_fa.attention(q, k, v, sinks=dual)
        out, lse = dhp_safe_fa.attention_lse(q, k, v, sinks=sinks)
        with pytest.raises(RuntimeError, match="dhp::attention_sinks_backward: forward-mode differentiation"):
            BACKWARD(out, out, lse, dual)
    with pytest.raises(RuntimeError, match=r"rank 2 inside of vmap; expected 1 dimensions \[H\]"):
        torch.func.vmap(lambda s: dhp_safe_fa.attention(q, k, v, sinks=s))(torch.zeros(3, 2, 4))


def good() -> dict[str, Any]:
    rows = torch.zeros(2, 4, 5)
    out = torch.zeros(2, 4, 5, 8, dtype=torch.float16)
    return {"grad_out": out, "out": out.clone(), "lse": rows, "sinks": torch.zeros(4), "grad_lse": rows.clone()}


HALF, ROWS = torch.float16, (2, 4, 5)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"out": torch.zeros(4, 5, 8).half()}, "out: rank 3; expected 4 dimensions [B, H, S, D]"),
    ({"out": torch.zeros(*ROWS, 8).int()}, "out: dtype int32; supported: float16, bfloat16"),
    ({"grad_out": torch.zeros(*ROWS)}, "grad_out: rank 3; expected 4 dimensions [B, H, S, D]"),
    ({"grad_out": torch.zeros(*ROWS, 8)}, "grad_out: dtype float32 differs from out's float16; they must agree"),
    ({"grad_out": torch.zeros(*ROWS, 9).half()}, "grad_out: shape [2, 4, 5, 9] differs from out's [2, 4, 5, 8]"),
    ({"lse": torch.zeros(2, 4)}, "lse: shape [2, 4]; expected [2, 4, 5], one number for each query row"),
    ({"lse": torch.zeros(ROWS).half()}, "lse: dtype float16; expected float32"),
    ({"grad_lse": torch.zeros(2, 5, 4)}, "grad_lse: shape [2, 5, 4]; expected [2, 4, 5]"),
    ({"sinks": torch.zeros(3)}, "sinks: shape [3]; expected [4], one number for each query head"),
    ({"sinks": torch.zeros(4).half()}, "sinks: dtype float16; expected float32"),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes(changes: dict[str, Any], words: str) -> None:
    message = refusal([BACKWARD], good() | changes)
    assert message.startswith("dhp::attention_sinks_backward: ") and words in message


@pytest.mark.parametrize("name", list(good()))
def test_none_and_other_devices(name: str) -> None:
    if name != "grad_lse":
        shape = {"lse": r"\[B, H, S\]", "sinks": r"\[H\]"}.get(name, r"\[B, H, S, D\]")
        with pytest.raises(RuntimeError, match=f"attention_sinks_backward: {name}: None; expected a tensor {shape}"):
            BACKWARD(**(good() | {name: None}))
    with pytest.raises(RuntimeError, match=r"on (meta, out on cpu|cpu, out on meta); all tensors must"):
        BACKWARD(**(good() | {name: good()[name].to("meta")}))


def test_head_dim() -> None:
    out = torch.zeros(1, 2, 3, 257)
    with pytest.raises(RuntimeError, match="out: head_dim 257; supported on CPU: 1 to 256"):
        BACKWARD(out, out, torch.zeros(1, 2, 3), torch.zeros(2))


def test_dtype_of_sinks(rng: torch.Generator) -> None:
    """Sinks of another dtype are refused, whether they require grad or not."""
    q, k, v = qkv(rng, FLOAT32, 1, 2, 2, 5, 6, 8)
    sinks = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    assert "sinks: dtype bfloat16; expected float32" in refusal(FUNCTIONS, {"q": q, "k": k, "v": v, "sinks": sinks})


@needs_hopper
def test_cuda_refuses(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda", torch.float16), 1, 2, 2, 64, 64, 64)
    sinks = torch.zeros(2, device="cuda", requires_grad=True)
    for call in FUNCTIONS:
        with pytest.raises(RuntimeError, match="sinks: given; supported on CUDA: None"):
            call(q, k, v, sinks=sinks)
    out, lse = dhp_safe_fa.attention_lse(q, k, v)
    with pytest.raises(RuntimeError, match="sinks: a gradient; supported on CUDA: none"):
        BACKWARD(out, out, lse, sinks.detach())


def test_the_comparison_sees_a_wrong_gradient(rng: torch.Generator) -> None:
    """A gradient that misses grad_lse, or the rows without keys, is found."""
    q, k, v = qkv(rng, FLOAT32, 1, 4, 2, 60, 40, 16)
    sinks, grad_out, grad_lse = sinks_of(rng, 4), torch.randn(1, 4, 60, 16), torch.randn(1, 4, 60)
    options: Any = {"is_causal": True, "causal_offset": -20}
    want = reference_sinks_gradient(q, k, v, sinks, grad_out, grad_lse, **options)
    lse = reference(q, k, v, **options, sinks=sinks).lse
    assert (lse[0, :, :20] == sinks[:, None]).all() and math.isfinite(float(want[1].sum()))
    with pytest.raises(AssertionError, match="dsinks"):
        assert_sinks_gradient_matches(gradient(q, k, v, sinks, grad_out, **options), want)
    grad_lse[:, :, :20] = 0.0
    with pytest.raises(AssertionError, match="dsinks"):
        assert_sinks_gradient_matches(gradient(q, k, v, sinks, grad_out, grad_lse, **options), want)
