"""The operators under torch.func: vmap, grad, vjp, and one over another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from harness import Target, gradients, normal, qkv, same_bits, torch_jit_is_deprecated
from torch import Tensor

import dhp_safe_fa


def test_vmap(target: Target, rng: torch.Generator) -> None:
    """Any dimension may be mapped over, of any of the inputs; the rows have the bits of separate calls."""
    q, k, v = (normal(rng, (3, *t), target) for t in ((2, 4, 33, 64), (2, 2, 70, 64), (2, 2, 70, 64)))
    want = [dhp_safe_fa.attention(q[i], k[i], v[i], is_causal=True) for i in range(3)]
    for d in range(5):
        mapped = torch.func.vmap(lambda *t: dhp_safe_fa.attention(*t, is_causal=True), in_dims=(0, d, -1), out_dims=d)
        out = mapped(q, k.movedim(0, d), v.movedim(0, -1))
        assert same_bits(out.movedim(d, 0), torch.stack(want))
    shared = torch.func.vmap(dhp_safe_fa.attention, in_dims=(0, None, None))(q, k[0], v[0])
    assert same_bits(shared, torch.stack([dhp_safe_fa.attention(q[i], k[0], v[0]) for i in range(3)]))


def test_nested_vmap(target: Target, rng: torch.Generator) -> None:
    """Every query set with every key set."""
    q, k, v = (normal(rng, (n, *t), target) for n, t in ((3, (2, 4, 9, 64)), (2, (2, 2, 7, 64)), (2, (2, 2, 7, 64))))
    over_q = torch.func.vmap(dhp_safe_fa.attention_lse, in_dims=(0, None, None))
    out, lse = torch.func.vmap(over_q, in_dims=(None, 0, 0))(q, k, v)
    for i in range(2):
        for j in range(3):
            want, want_lse = dhp_safe_fa.attention_lse(q[j], k[i], v[i])
            assert same_bits(out[i, j], want) and same_bits(lse[i, j], want_lse)


def test_vmap_over_something_else(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    want = dhp_safe_fa.attention(q, k, v)
    added = torch.func.vmap(lambda x: dhp_safe_fa.attention(q, k, v) + x)(torch.zeros(3, device=q.device).to(q.dtype))
    assert same_bits(added, (want + 0).expand(3, *want.shape))


def test_vmap_of_nothing(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    mapped = torch.func.vmap(dhp_safe_fa.attention, in_dims=(0, None, None))
    out = mapped(q[None, :0].expand(3, 0, 4, 9, 64), k[:0], v[:0])
    assert out.shape == (3, 0, 4, 9, 64)


def test_vmap_refusals(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    with pytest.raises(RuntimeError, match=r"rank 3 inside of vmap; expected 4 dimensions \[B, H, S, D\]"):
        torch.func.vmap(dhp_safe_fa.attention)(q, k, v)
    with pytest.raises(RuntimeError, match="functionalize is not supported"):
        torch.func.functionalize(dhp_safe_fa.attention)(q, k, v)


@pytest.mark.parametrize("name", ["scale", "softcap", "causal_offset", "window"])
def test_vmap_over_a_number(name: str, target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 3, 4, 64)

    def attend(number: Tensor) -> Tensor:
        options = {name: (number, 0) if name == "window" else number}
        return dhp_safe_fa.attention(q, k, v, is_causal=True, **options)  # type: ignore[arg-type]

    with pytest.raises(RuntimeError, match=f"{name}.*: mapped by vmap; supported: the same for all"):
        torch.func.vmap(attend)(torch.arange(1, 4))


# ---- gradients ------------------------------------------------------------------------------------------------------


def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=True)
    return out.float().square().sum() + lse.sum()


def by_autograd(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    return torch.autograd.grad(function(*leaves), leaves)


def assert_same(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))


def test_grad_and_vjp(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    want = by_autograd(loss, q, k, v)
    assert_same(torch.func.grad(loss, argnums=(0, 1, 2))(q, k, v), want)
    assert_same([torch.func.grad(loss, argnums=1)(q, k, v)], want[1:2])
    value, pull = torch.func.vjp(loss, q, k, v)
    assert_same(pull(torch.ones_like(value)), want)
    only_out, pull = torch.func.vjp(lambda *t: dhp_safe_fa.attention(*t, scale=0.3), q, k, v)
    assert_same(pull(q), gradients(q, k, v, q, scale=0.3))
    assert same_bits(only_out, dhp_safe_fa.attention(q, k, v, scale=0.3))


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "is_causal": True}], ids=["plain", "options"])
def test_grad_under_autocast(device: str, rng: torch.Generator, options: dict[str, float]) -> None:
    """Of float32 inputs, whose attention autocast computes in another dtype, and of mixed ones."""
    q, k, v = (t.float() for t in qkv(rng, Target(device, torch.bfloat16), 2, 4, 2, 9, 7, 64))

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return dhp_safe_fa.attention(q, k, v, **options).float().square().sum()  # type: ignore[arg-type]

    with torch.autocast(device, dtype=torch.bfloat16):
        for given in ((q, k, v), (q, k.bfloat16(), v)):
            want = by_autograd(loss, *given)
            assert_same(torch.func.grad(loss, argnums=(0, 1, 2))(*given), want)
            value, pull = torch.func.vjp(loss, *given)
            assert_same(pull(torch.ones_like(value)), want)
            stacked = [torch.stack([t, t]) for t in given]
            each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked)
            assert_same([t[1] for t in each], want)


def test_gradients_of_each_sample(target: Target, rng: torch.Generator) -> None:
    """vmap over grad, of all inputs and of shared ones; and of the sum of a vmap."""
    q, k, v = (normal(rng, (3, *t), target) for t in ((2, 4, 9, 64), (2, 2, 7, 64), (2, 2, 7, 64)))
    every = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))
    want = [by_autograd(loss, q[i], k[i], v[i]) for i in range(3)]
    for got, each in zip(every(q, k, v), zip(*want, strict=True), strict=True):
        assert same_bits(got, torch.stack(each))
    shared = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None, None))(q, k[0], v[0])
    want = [by_autograd(loss, q[i], k[0], v[0])[:2] for i in range(3)]
    for got, each in zip(shared, zip(*want, strict=True), strict=True):
        assert same_bits(got, torch.stack(each))
    of_a_sum = torch.func.grad(lambda q: torch.func.vmap(loss)(q, k, v).sum())(q)
    assert same_bits(of_a_sum, every(q, k, v)[0])


def test_vmap_of_what_autograd_records(target: Target, rng: torch.Generator) -> None:
    q, k, v = (normal(rng, (3, 2, 4, 9, 64), target) for _ in range(3))
    got = by_autograd(lambda *t: torch.func.vmap(loss)(*t).sum(), q, k, v)
    for i in range(3):
        assert_same([g[i] for g in got], by_autograd(loss, q[i], k[i], v[i]))


def test_jacobian(rng: torch.Generator) -> None:
    """jacrev is a vmap over one vjp: many grad_outs for one forward."""
    q, k, v = (t.double() for t in qkv(rng, Target("cpu", torch.float32), 1, 2, 1, 3, 4, 5))
    got = torch.func.jacrev(dhp_safe_fa.attention, argnums=(0, 1, 2))(q, k, v)
    want = torch.autograd.functional.jacobian(dhp_safe_fa.attention, (q, k, v))
    assert_same(got, want)


def test_no_grad_inside_of_a_transform(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 9, 7, 64)

    def partly(q: Tensor) -> Tensor:
        with torch.no_grad():
            constant = dhp_safe_fa.attention(q, k, v)
        return (q * constant).float().sum()

    assert same_bits(torch.func.grad(partly)(q), dhp_safe_fa.attention(q, k, v))


@torch_jit_is_deprecated
def test_what_transforms_do_not_have(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 3, 4, 64)
    of_q = partial(loss, k=k, v=v)
    with pytest.raises(RuntimeError, match=r"forward-mode differentiation .* does not exist"):
        torch.func.jvp(of_q, (q,), (q,))
    with pytest.raises(RuntimeError, match=r"forward-mode differentiation .* does not exist"):
        torch.func.jacfwd(lambda q: dhp_safe_fa.attention(q, k, v))(q)
    with pytest.raises(RuntimeError, match=r"gradients of gradients .* do not exist"):
        torch.func.grad(lambda q: torch.func.grad(of_q)(q).float().sum())(q)
    twice = torch.func.jvp(lambda x: x * dhp_safe_fa.attention(q, k, v), (q,), (q,))[1]
    assert same_bits(twice, q * dhp_safe_fa.attention(q, k, v)), "what has no tangent is a constant"


def test_over_nothing() -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match="vmap over a dimension of size 0; supported: 1 and more"):
        torch.func.vmap(lambda x: dhp_safe_fa.attention(x, q, q))(torch.randn(0, 1, 2, 5, 8))
    beside = torch.func.vmap(lambda x: dhp_safe_fa.attention(q, q, q).sum() + x)(torch.randn(0, 3))
    assert beside.shape == (0, 3), "what is not mapped is computed"
