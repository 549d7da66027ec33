"""Gradients of packed sequences: every row has the bits that it has in a call for its sequence alone; and vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from harness import (
    Gradients,
    Target,
    gradients,
    normal,
    on_the_cpu,
    poisoned_memory,
    refusal,
    same_bits,
    torch_jit_is_deprecated,
)
from reference import assert_gradients_accurate, assert_gradients_match, reference_gradients
from test_varlen import KEYS, OPTIONS, QUERIES, Packed, alone, cumulative, pack
from torch import Tensor
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint

import dhp_safe_fa

BACKWARD = torch.ops.dhp.attention_varlen_backward
FLOAT32 = Target("cpu", torch.float32)
CAUSAL: dict[str, Any] = {"is_causal": True}
USED = [200, 130, 0, 0, 1, 1, 96]


def int32(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


class Given(NamedTuple):
    """A packed call, and the gradients of its results."""

    call: Packed
    grad_out: Tensor
    grad_lse: Tensor

    def rows(self, b: int) -> slice:
        return slice(int(self.call.cu_seqlens_q[b]), int(self.call.cu_seqlens_q[b + 1]))

    def keys(self, b: int, count: int | None = None) -> slice:
        first, last = int(self.call.cu_seqlens_k[b]), int(self.call.cu_seqlens_k[b + 1])
        return slice(first, last if count is None else first + count)


def given_of(
    rng: torch.Generator,
    target: Target,
    queries: Sequence[int] = QUERIES,
    keys: Sequence[int] = KEYS,
    heads: tuple[int, int] = (4, 2),
    d: int = 40,
) -> Given:
    call = pack(rng, target, queries, keys, *heads, d)
    grad_out = normal(rng, tuple(call.q.shape), target)
    return Given(call, grad_out, torch.randn(heads[0], call.q.shape[0], generator=rng))


def double(given: Given) -> Given:
    call = given.call._replace(q=given.call.q.double(), k=given.call.k.double(), v=given.call.v.double())
    return Given(call, given.grad_out.double(), given.grad_lse.double())


def spelled(alignment: str = "bottom-right", window: tuple[int, int] = (-1, -1), **options: Any) -> dict[str, Any]:
    """As the operators take it."""
    sides = {"window_left": window[0], "window_right": window[1]}
    return {**options, "is_bottom_right": alignment == "bottom-right", **sides}


def packed_gradients(given: Given, with_lse: bool = True, **options: Any) -> Gradients:
    """(dq, dk, dv) of the operator on poisoned memory: each contiguous, alone with the same bits, else left out."""
    named = spelled(**options)
    with poisoned_memory():
        out, lse = torch.ops.dhp.attention_varlen(*given.call, **named)
        grad_lse = given.grad_lse if with_lse else None
        q, k, v, *lengths = given.call
        call = partial(BACKWARD, given.grad_out, q, k, v, out, lse, *lengths, **named, grad_lse=grad_lse)
        found = Gradients(*call())
        for i, like in enumerate((q, k, v)):
            assert found[i].shape == like.shape and found[i].dtype == like.dtype and found[i].is_contiguous()
            needed = {f"need_d{name}": i == j for j, name in enumerate("qkv")}
            only = call(**needed)
            assert same_bits(only[i], found[i]), f"d{'qkv'[i]} alone differs"
            assert all(only[j].shape == (0,) for j in range(3) if j != i)
    return found


def assert_same(got: Sequence[Tensor | None], want: Sequence[Tensor]) -> None:
    assert all(g is not None and same_bits(g, w) for g, w in zip(got, want, strict=True))


def compare_sequences(
    given: Given, found: Gradients, used: Sequence[int] | None, compare: Callable[..., None], **options: Any
) -> None:
    """Calls compare(gradients of a sequence, its tensors, its options) for each; what is left has gradient 0."""
    seen = torch.zeros(given.call.k.shape[0], dtype=torch.bool)
    for b in range(len(given.call.cu_seqlens_q) - 1):
        rows, keys = given.rows(b), given.keys(b, None if used is None else used[b])
        q, k, v = given.call.sequence(b, None if used is None else used[b])
        part = [found.dq[rows], found.dk[keys], found.dv[keys]]
        grad_out, grad_lse = given.grad_out[rows].transpose(0, 1)[None], given.grad_lse[None, :, rows]
        own = [t.transpose(0, 1)[None] for t in part]
        compare(own, (q, k, v, grad_out, grad_lse), alone(q, k, v, **options))
        seen[keys] = True
    for gradient in (found.dk, found.dv):
        assert same_bits(gradient[~seen], torch.zeros_like(gradient[~seen]))
    rest = found.dq[int(given.call.cu_seqlens_q[-1]) :]
    assert same_bits(rest, torch.zeros_like(rest))


def bits_of_its_own_call(got: Sequence[Tensor], tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    assert_same(got, gradients(*tensors, **options))


def within_rounding(got: Sequence[Tensor], tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    assert_gradients_match(got, reference_gradients(*tensors, **options))


# ---- values and bits -------------------------------------------------------------------------------------------------


@on_the_cpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("heads", "d"), [((4, 2), 64), ((3, 3), 40), ((2, 1), 256)])
def test_sequences(
    target: Target, rng: torch.Generator, heads: tuple[int, int], d: int, options: dict[str, Any]
) -> None:
    given = given_of(rng, target, heads=heads, d=d)
    compare_sequences(given, packed_gradients(given, **options), None, bits_of_its_own_call, **options)


@on_the_cpu
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_against_float64(target: Target, rng: torch.Generator, options: dict[str, Any]) -> None:
    given = given_of(rng, target)
    compare_sequences(given, packed_gradients(given, **options), None, within_rounding, **options)


@on_the_cpu
def test_accuracy(target: Target, rng: torch.Generator) -> None:
    given = given_of(rng, target, [200, 130], [300, 130], d=64)

    def accurate(got: Sequence[Tensor], tensors: tuple[Tensor, ...], options: dict[str, Any]) -> None:
        assert_gradients_accurate(got, reference_gradients(*tensors, **options))

    compare_sequences(given, packed_gradients(given, **CAUSAL), None, accurate, **CAUSAL)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("used", [None, USED], ids=["all keys", "used keys"])
def test_float64(rng: torch.Generator, options: dict[str, Any], used: list[int] | None) -> None:
    given = double(given_of(rng, FLOAT32, d=24))
    seqused_k = {} if used is None else {"seqused_k": int32(*used)}
    found = packed_gradients(given, **options, **seqused_k)
    compare_sequences(given, found, used, bits_of_its_own_call, **options)


@on_the_cpu
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_used_keys(target: Target, rng: torch.Generator, options: dict[str, Any]) -> None:
    """Keys that do not count may hold anything, and have gradient 0."""
    given = given_of(rng, target)
    for b, count in enumerate(USED):
        unused = slice(given.keys(b).start + count, given.keys(b).stop)
        given.call.k[unused], given.call.v[unused] = torch.nan, torch.inf
    given = given._replace(call=given.call._replace(max_seqlen_k=200))
    found = packed_gradients(given, **options, seqused_k=int32(*USED))
    compare_sequences(given, found, USED, bits_of_its_own_call, **options)


@on_the_cpu
def test_rows_and_keys_of_no_sequence(target: Target, rng: torch.Generator) -> None:
    """What is behind the last sequence: no number of it reaches a gradient."""
    given = given_of(rng, target, [5, 200], [9, 130])
    for tensor in (given.call.q, given.grad_out):
        tensor[65:] = torch.nan
    given.call.k[50:], given.call.v[50:] = torch.inf, torch.nan
    given.grad_lse[:, 65:] = torch.nan
    given = given._replace(call=given.call._replace(cu_seqlens_q=cumulative([5, 60]), cu_seqlens_k=cumulative([9, 41])))
    compare_sequences(given, packed_gradients(given, **CAUSAL), None, bits_of_its_own_call, **CAUSAL)


@on_the_cpu
@pytest.mark.parametrize(
    ("queries", "keys", "heads"), [([], [], 2), ([0], [5], 2), ([3], [0], 2), ([3], [4], 0)], ids=str
)
def test_empty(target: Target, rng: torch.Generator, queries: list[int], keys: list[int], heads: int) -> None:
    q, k = normal(rng, (sum(queries), heads, 16), target), normal(rng, (sum(keys), 2, 16), target)
    given = Given(Packed(q, k, k, cumulative(queries), cumulative(keys), 3, 5), q, torch.ones(heads, sum(queries)))
    for gradient in packed_gradients(given):
        assert same_bits(gradient, torch.zeros_like(gradient))


def test_keys_without_a_sequence(rng: torch.Generator) -> None:
    q, k = normal(rng, (3, 2, 16), FLOAT32), normal(rng, (150, 2, 16), FLOAT32)
    given = Given(Packed(q, k, k, int32(0), int32(0), 0, 0), q, torch.ones(2, 3))
    for gradient in packed_gradients(given):
        assert same_bits(gradient, torch.zeros_like(gradient))


@on_the_cpu
def test_without_grad_lse(target: Target, rng: torch.Generator) -> None:
    given = given_of(rng, target, [7, 130], [100, 130])
    zero = given._replace(grad_lse=torch.zeros_like(given.grad_lse))
    assert_same(packed_gradients(given, with_lse=False), packed_gradients(zero))


@on_the_cpu
def test_layouts(target: Target, rng: torch.Generator) -> None:
    """Parts of a packed projection, heads outermost, columns that have to be copied; and gradients of any strides."""
    given = given_of(rng, target, [30, 1, 99], [30, 1, 99], heads=(4, 4))
    want = packed_gradients(given, **CAUSAL)
    tensors = (*given.call[:3], given.grad_out)
    projection = torch.stack(tensors, dim=1).unbind(dim=1)
    outermost = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in tensors]
    columns = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in tensors]
    grad_lse = given.grad_lse.t().contiguous().t()
    for q, k, v, grad_out in (projection, outermost, columns):
        moved = Given(Packed(q, k, v, *given.call[3:]), grad_out, grad_lse)
        assert_same(packed_gradients(moved, **CAUSAL), want)


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_thread_count(rng: torch.Generator, threads: int) -> None:
    given = given_of(rng, Target("cpu", torch.bfloat16))
    want, before = packed_gradients(given, **CAUSAL), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = packed_gradients(given, **CAUSAL)
    finally:
        torch.set_num_threads(before)
    assert_same(got, want)


# ---- autograd --------------------------------------------------------------------------------------------------------


def leaves(call: Packed, which: str = "qkv") -> Packed:
    tensors = [t.detach().clone().requires_grad_(name in which) for name, t in zip("qkv", call[:3], strict=True)]
    return Packed(*tensors, *call[3:])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_by_differences(rng: torch.Generator, options: dict[str, Any]) -> None:
    """out and lse; of sequences in which every row sees a key, or its lse of -inf would have no differences."""
    longer = options.get("alignment") == "top-left"
    given = double(given_of(rng, FLOAT32, [5, 3, 0, 2], [5, 9, 2, 4] if longer else [5, 7, 2, 2], d=3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dhp_safe_fa.attention_varlen_lse(q, k, v, *given.call[3:], **options)

    assert gradcheck(call, leaves(given.call)[:3])


@pytest.mark.parametrize("which", ["q", "k", "v", "qk", "kv", "qkv"])
@pytest.mark.parametrize("of", ["out", "lse", "both"])
def test_backward(rng: torch.Generator, which: str, of: str) -> None:
    """Of out alone, of lse alone, of both; only what requires grad has a gradient."""
    given = given_of(rng, FLOAT32)
    used = {"seqused_k": int32(*USED)}
    of_out, of_lse = of in ("out", "both"), of in ("lse", "both")
    of_these = given if of_out else given._replace(grad_out=torch.zeros_like(given.grad_out))
    want = packed_gradients(of_these, with_lse=of_lse, **CAUSAL, **used)
    call = leaves(given.call, which)
    out, lse = dhp_safe_fa.attention_varlen_lse(*call, **CAUSAL, **used)
    results = [(out, given.grad_out)] * of_out + [(lse, given.grad_lse)] * of_lse
    torch.autograd.backward([result for result, _ in results], [gradient for _, gradient in results])
    for name, tensor, gradient in zip("qkv", call[:3], want, strict=True):
        assert (tensor.grad is None) == (name not in which)
        assert tensor.grad is None or same_bits(tensor.grad, gradient)


def test_what_is_recorded(rng: torch.Generator) -> None:
    given = given_of(rng, FLOAT32)
    call = leaves(given.call, "k")
    out = dhp_safe_fa.attention_varlen(*call)
    assert out.requires_grad and same_bits(out.detach(), dhp_safe_fa.attention_varlen(*given.call))
    with torch.no_grad():
        assert not dhp_safe_fa.attention_varlen(*call).requires_grad
    assert not dhp_safe_fa.attention_varlen(*given.call).requires_grad
    call.cu_seqlens_q[1] = 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(rng: torch.Generator, use_reentrant: bool) -> None:
    given = given_of(rng, FLOAT32)
    call = leaves(given.call)
    out = checkpoint(partial(dhp_safe_fa.attention_varlen, **CAUSAL), *call, use_reentrant=use_reentrant)
    out.backward(given.grad_out)
    assert_same([t.grad for t in call[:3]], packed_gradients(given, with_lse=False, **CAUSAL))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch_jit_is_deprecated
def test_compiled(rng: torch.Generator, backend: str) -> None:
    given = given_of(rng, FLOAT32)
    used = int32(*USED)

    def results(call: Packed) -> tuple[Tensor, Tensor]:
        return dhp_safe_fa.attention_varlen_lse(*call, **CAUSAL, seqused_k=used)

    want = packed_gradients(given, **CAUSAL, seqused_k=used)
    torch.compiler.reset()
    call = leaves(given.call)
    outputs = torch.compile(results, fullgraph=True, backend=backend)(call)
    torch.autograd.backward(outputs, (given.grad_out, given.grad_lse))
    assert_same([t.grad for t in call[:3]], want)


def test_autocast(rng: torch.Generator) -> None:
    """As for attention: everything in the autocast dtype, and gradients in that of the inputs."""
    given = given_of(rng, FLOAT32)
    call = leaves(given.call)
    with torch.autocast("cpu", torch.bfloat16):
        out = dhp_safe_fa.attention_varlen(*call, **CAUSAL)
    assert out.dtype == torch.bfloat16
    out.backward(given.grad_out.bfloat16())
    halves = given.call._replace(q=call.q.bfloat16(), k=call.k.bfloat16(), v=call.v.bfloat16())
    want = packed_gradients(Given(halves, given.grad_out.bfloat16(), given.grad_lse), with_lse=False, **CAUSAL)
    assert_same([t.grad for t in call[:3]], [w.float() for w in want])


def test_under_a_policy(rng: torch.Generator) -> None:
    given = given_of(rng, FLOAT32)
    call = leaves(given.call)
    with dhp_safe_fa.policy("secure"):
        dhp_safe_fa.attention_varlen(*call).backward(given.grad_out)
    assert_same([t.grad for t in call[:3]], packed_gradients(given, with_lse=False))
    q, k, v, *lengths = given.call
    out, lse = dhp_safe_fa.attention_varlen_lse(*given.call)
    with dhp_safe_fa.policy("secure"):
        assert same_bits(BACKWARD(given.grad_out, q, k, v, out, lse, *lengths)[0], call.q.grad)


def test_opcheck(rng: torch.Generator) -> None:
    given = given_of(rng, FLOAT32)
    forward = torch.ops.dhp.attention_varlen.default
    q, k, v, *lengths = given.call
    for options in ((), (True, 0.2, False, 20, 3, 5.0, int32(*USED))):
        torch.library.opcheck(forward, (*leaves(given.call), *options))
        out, lse = forward(*given.call, *options)
        tensors = given.grad_out, q, k, v, out, lse, *lengths, *options
        torch.library.opcheck(BACKWARD.default, tensors)
        torch.library.opcheck(BACKWARD.default, tensors, {"grad_lse": given.grad_lse, "need_dk": False})


# ---- torch.func ------------------------------------------------------------------------------------------------------


def loss(call: Packed, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of out and lse, linear in neither."""
    out, lse = dhp_safe_fa.attention_varlen_lse(q, k, v, *call[3:], **CAUSAL)
    return out.square().sum() + lse.sin().sum()


def by_autograd(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    own = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*own), own)


def test_grad_and_vjp(rng: torch.Generator) -> None:
    call = given_of(rng, FLOAT32, [5, 130], [40, 130]).call
    want = by_autograd(partial(loss, call), *call[:3])
    assert_same(torch.func.grad(partial(loss, call), argnums=(0, 1, 2))(*call[:3]), want)
    value, pull = torch.func.vjp(partial(loss, call), *call[:3])
    assert_same(pull(torch.ones_like(value)), want)


def samples(rng: torch.Generator, call: Packed) -> list[Tensor]:
    """[3, tokens, H, D] of q, k and v."""
    return [normal(rng, (3, *t.shape), FLOAT32) for t in call[:3]]


@pytest.mark.parametrize("in_dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (None, None, 0), (1, 2, -1)], ids=str)
def test_vmap(rng: torch.Generator, in_dims: tuple[int | None, ...]) -> None:
    """The bits of a call for each sample, of grouped heads, whatever is shared and wherever the samples lie."""
    call = given_of(rng, FLOAT32, [5, 130, 1], [40, 130, 99]).call
    stacked = samples(rng, call)
    inputs = [t[0] if dim is None else t.movedim(0, dim) for t, dim in zip(stacked, in_dims, strict=True)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return dhp_safe_fa.attention_varlen_lse(q, k, v, *call[3:], **CAUSAL)

    out, lse = torch.func.vmap(run, in_dims=in_dims)(*inputs)
    for i in range(3):
        want = run(*(t[0 if dim is None else i] for t, dim in zip(stacked, in_dims, strict=True)))
        assert_same((out[i], lse[i]), want)


def test_vmap_twice(rng: torch.Generator) -> None:
    call = given_of(rng, FLOAT32, [5, 1], [40, 9]).call
    stacked = torch.stack(samples(rng, call)[:1] * 2)

    def run(q: Tensor) -> Tensor:
        return dhp_safe_fa.attention_varlen(q, *call[1:], **CAUSAL)

    out = torch.func.vmap(torch.func.vmap(run))(stacked)
    for i in range(3):
        assert same_bits(out[1, i], run(stacked[1, i]))


def test_vmap_over_a_cache(rng: torch.Generator) -> None:
    q = normal(rng, (3, 6, 4, 16), FLOAT32)
    cache = normal(rng, (3, 4, 16, 2, 16), FLOAT32)
    lengths = (int32(0, 5, 6), None, 5, 40)
    pages = {"seqused_k": int32(5, 40), "page_table": torch.tensor([[3, 0, 0], [3, 2, 1]], dtype=torch.int32)}

    def run(q: Tensor, cache: Tensor) -> Tensor:
        return dhp_safe_fa.attention_varlen(q, cache, cache, *lengths, **CAUSAL, **pages)

    out = torch.func.vmap(run)(q, cache)
    assert_same(out.unbind(), [run(q[i], cache[i]) for i in range(3)])


def test_gradients_of_each_sample(rng: torch.Generator) -> None:
    """vmap over grad, of all inputs and of shared ones; grad and autograd of the sum of a vmap."""
    call = given_of(rng, FLOAT32, [5, 70], [40, 130]).call
    stacked = samples(rng, call)
    of = partial(loss, call)
    each = torch.func.vmap(torch.func.grad(of, argnums=(0, 1, 2)))
    want = [by_autograd(of, *(t[i] for t in stacked)) for i in range(3)]
    together = [torch.stack(gradient) for gradient in zip(*want, strict=True)]
    assert_same(each(*stacked), together)
    q, k, v = stacked
    shared = torch.func.vmap(torch.func.grad(of, argnums=(0, 1)), in_dims=(0, None, None))(q, k[0], v[0])
    for i in range(3):
        assert_same([gradient[i] for gradient in shared], by_autograd(of, q[i], k[0], v[0])[:2])

    def sum_of_all(*tensors: Tensor) -> Tensor:
        return torch.func.vmap(of)(*tensors).sum()

    assert_same(torch.func.grad(sum_of_all, argnums=(0, 1, 2))(*stacked), together)
    assert_same(by_autograd(sum_of_all, *stacked), together)


def test_jacobian(rng: torch.Generator) -> None:
    given = double(given_of(rng, FLOAT32, [2, 1], [3, 2], heads=(2, 1), d=3))

    def run(*tensors: Tensor) -> Tensor:
        return dhp_safe_fa.attention_varlen(*tensors, *given.call[3:], **CAUSAL)

    got = torch.func.jacrev(run, argnums=(0, 1, 2))(*given.call[:3])
    assert_same(got, torch.autograd.functional.jacobian(run, given.call[:3]))


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k", "seqused_k"])
def test_mapped_lengths(rng: torch.Generator, name: str) -> None:
    call = given_of(rng, FLOAT32, [3, 2], [3, 2], d=8).call
    lengths = {"cu_seqlens_q": call.cu_seqlens_q, "cu_seqlens_k": call.cu_seqlens_k, "seqused_k": int32(1, 1)}

    def run(mapped: Tensor) -> Tensor:
        named = {**lengths, name: mapped}
        return dhp_safe_fa.attention_varlen(*call[:3], **named, max_seqlen_q=3, max_seqlen_k=3)

    words = f"attention_varlen: {name}: mapped by vmap; supported: the same for all that vmap maps over"
    with pytest.raises(RuntimeError, match=words):
        torch.func.vmap(run)(torch.stack([lengths[name]] * 2))


def test_ranks_inside_of_vmap(rng: torch.Generator) -> None:
    call = given_of(rng, FLOAT32, [3, 2], [3, 2], d=8).call
    with pytest.raises(RuntimeError, match=r"rank 2 inside of vmap; expected 3 dimensions \[tokens, H, D\]"):
        torch.func.vmap(lambda q: dhp_safe_fa.attention_varlen(q, *call[1:]))(call.q)


@torch_jit_is_deprecated
def test_what_derivatives_there_are_not(rng: torch.Generator) -> None:
    given = given_of(rng, FLOAT32, [3], [4], d=8)
    call = leaves(given.call)
    found = torch.autograd.grad(dhp_safe_fa.attention_varlen(*call).sum(), call[:3], create_graph=True)
    with pytest.raises(RuntimeError, match=r"attention_varlen_backward: gradients of gradients .* do not exist"):
        torch.autograd.grad(found[0].sum(), call[:3])

    def of_q(q: Tensor) -> Tensor:
        return dhp_safe_fa.attention_varlen(q, *given.call[1:])

    words = r"attention_varlen: forward-mode differentiation .* does not exist"
    with pytest.raises(RuntimeError, match=words):
        torch.func.jvp(of_q, (given.call.q,), (given.call.q,))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=words):
        of_q(forward_ad.make_dual(given.call.q, given.call.q))
    with pytest.raises(RuntimeError, match=r"attention_varlen: torch\.func\.functionalize is not supported"):
        torch.func.functionalize(of_q)(given.call.q)


@pytest.mark.parametrize("which", ["q", "k"])
def test_a_cache_has_no_gradients(rng: torch.Generator, which: str) -> None:
    q, cache = normal(rng, (3, 2, 8), FLOAT32), normal(rng, (2, 16, 2, 8), FLOAT32)
    pages = {"seqused_k": int32(16), "page_table": int32(1)[None]}
    run = partial(dhp_safe_fa.attention_varlen, cu_seqlens_q=int32(0, 3), cu_seqlens_k=None, **pages)
    run = partial(run, max_seqlen_q=3, max_seqlen_k=16)
    tensors = {"q": q, "k": cache, "v": cache.clone()}
    tensors[which].requires_grad_()
    words = "page_table: given, but a cache in pages has no gradients; supported: cu_seqlens_k in its place"
    with pytest.raises(RuntimeError, match=f"attention_varlen: {words}, calls under torch.no_grad"):
        run(**tensors)
    with torch.no_grad():
        run(**tensors)
    with pytest.raises(RuntimeError, match=f"attention_varlen: {words}"):
        torch.func.grad(lambda t: run(**{**tensors, which: t}).sum())(tensors[which].detach())


NAMES = ["grad_out", "q", "k", "v", "out", "lse", "grad_lse"]


def good() -> dict[str, Any]:
    """[7 tokens, 4 heads, 16], sequences of 3 and 4 queries, 5 and 6 keys."""
    q, k, rows = torch.zeros(7, 4, 16), torch.zeros(11, 2, 16), torch.zeros(4, 7)
    tensors = dict(zip(NAMES, (q, q, k, k, q, rows, rows), strict=True))
    lengths = {"cu_seqlens_q": int32(0, 3, 7), "cu_seqlens_k": int32(0, 5, 11)}
    return {**{name: t.clone() for name, t in tensors.items()}, **lengths, "max_seqlen_q": 4, "max_seqlen_k": 6}


def refused(arguments: dict[str, Any], fake: bool = True) -> str:
    return refusal([BACKWARD], arguments, fake)


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"grad_out": torch.zeros(7, 4, 8)}, "grad_out: shape [7, 4, 8] differs from out's [7, 4, 16]; they must be equal"),
    ({"grad_out": torch.zeros(4, 16)}, "grad_out: rank 2; expected 3 dimensions [tokens, H, D]"),
    ({"grad_out": torch.zeros(7, 4, 16).half()}, "grad_out: dtype float16 differs from q's float32; they must agree"),
    ({"out": torch.zeros(8, 4, 16)}, "out: shape [8, 4, 16] differs from q's [7, 4, 16] with v's head_dim 16"),
    ({"out": torch.zeros(7, 4, 16).int()}, "out: dtype int32; supported: float16"),
    ({"lse": torch.zeros(7, 4)}, "lse: shape [7, 4]; expected [4, 7], one number for each query row"),
    ({"lse": torch.zeros(4, 7).half()}, "lse: dtype float16; expected float32"),
    ({"grad_lse": torch.zeros(4)}, "grad_lse: shape [4]; expected [4, 7], one number for each query row"),
    ({"v": torch.zeros(11, 1, 16)}, "v: shape [11, 1, 16] differs from k's [11, 2, 16]"),
    ({"cu_seqlens_k": int32(0, 11)}, "cu_seqlens_k: shape [2]; expected [3]"),
    ({"max_seqlen_k": -1}, "max_seqlen_k: -1; supported: not negative"),
    ({"scale": -1.0}, "scale: -1; supported: 0 to 2^100"),
    (
        {
            "k": torch.zeros(2, 16, 2, 16),
            "v": torch.zeros(2, 16, 2, 16),
            "cu_seqlens_k": None,
            "seqused_k": int32(1, 1),
            "page_table": int32(0, 1)[:, None],
        },
        "page_table: given, but a cache in pages has no gradients; supported: cu_seqlens_k in its place",
    ),
]

MISTAKES_IN_LENGTHS: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": int32(0, 3, 2)}, "cu_seqlens_q: 2 behind 3, at 2; supported: ascending numbers"),
    ({"cu_seqlens_k": int32(0, 6, 12)}, "cu_seqlens_k: ends with 12, but k has 11 rows"),
    ({"max_seqlen_q": 3}, "max_seqlen_q: 3, but sequence 1 has 4 rows; supported: no less than the longest"),
    ({"seqused_k": int32(6, 1)}, "seqused_k: 6 for sequence 0; supported: 0 to its 5 keys"),
]


@pytest.mark.parametrize(("changes", "words"), MISTAKES, ids=[words for _, words in MISTAKES])
def test_mistakes(changes: dict[str, Any], words: str) -> None:
    message = refused(good() | changes)
    assert message.startswith("dhp::attention_varlen_backward: ") and words in message


@pytest.mark.parametrize(("changes", "words"), MISTAKES_IN_LENGTHS, ids=[words for _, words in MISTAKES_IN_LENGTHS])
def test_mistakes_in_lengths(changes: dict[str, Any], words: str) -> None:
    assert words in refused(good() | changes, fake=False)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "grad_lse"])
def test_none_and_other_devices(name: str) -> None:
    shapes = {"lse": r"\[H, tokens\]", "k": r"\[tokens, H, D\] or", "v": r"\[tokens, H, D\] or"}
    shape = shapes.get(name, r"\[tokens, H, D\]")
    with pytest.raises(RuntimeError, match=f"attention_varlen_backward: {name}: None; expected a tensor {shape}"):
        BACKWARD(**(good() | {name: None}))
    with pytest.raises(RuntimeError, match="device"):
        BACKWARD(**(good() | {name: good()[name].to("meta")}))
