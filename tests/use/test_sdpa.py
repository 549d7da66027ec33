"""dhp_safe_fa.sdpa: the signature and the meaning of torch's scaled_dot_product_attention, or one sentence why not."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import Target, gradients, max_head_dim, needs_hopper, normal, qkv, same_bits
from torch import Tensor

import dhp_safe_fa

# Either side rounds; how exact ours is, tests/attention/test_attention.py measures against float64.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def assert_is_sdpa(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape and got.dtype == want.dtype
    torch.testing.assert_close(got, want, rtol=TOLERANCE[want.dtype], atol=TOLERANCE[want.dtype])


def test_signature() -> None:
    """Names, order and defaults as in torch's documentation, which is the only place that has them for a builtin."""
    documented = re.search(r"scaled_dot_product_attention\((.*?)\)", F.scaled_dot_product_attention.__doc__ or "", re.S)
    assert documented
    want = [part.strip() for part in documented.group(1).replace("\n", " ").split(",")]
    got = [
        name if parameter.default is inspect.Parameter.empty else f"{name}={parameter.default}"
        for name, parameter in inspect.signature(dhp_safe_fa.sdpa).parameters.items()
    ]
    assert got == [part for part in want if part != "*"]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("sq", "sk"), [(33, 33), (33, 70), (70, 33), (1, 40)])
def test_agrees_with_torch(
    target: Target, rng: torch.Generator, is_causal: bool, scale: float | None, sq: int, sk: int
) -> None:
    """Also where Sq and Sk differ: the causal diagonal starts at the first query and the first key."""
    q, k, v = qkv(rng, target, 2, 4, 4, sq, sk, 64)
    got = dhp_safe_fa.sdpa(q, k, v, is_causal=is_causal, scale=scale)
    assert_is_sdpa(got, F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale))


def test_grouped_heads(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 6, 2, 33, 70, 64)
    got = dhp_safe_fa.sdpa(q, k, v, enable_gqa=True)
    assert_is_sdpa(got, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))
    for call in (dhp_safe_fa.sdpa, F.scaled_dot_product_attention):
        with pytest.raises(RuntimeError):
            call(q, k, v)


@pytest.mark.parametrize("leading", [(), (4,), (3, 2, 4), (2, 1, 3, 4)], ids=str)
def test_any_rank(target: Target, rng: torch.Generator, leading: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*leading, s, 64, generator=rng).to(target.device, target.dtype) for s in (33, 70, 70))
    got = dhp_safe_fa.sdpa(q, k, v, is_causal=True)
    assert_is_sdpa(got, F.scaled_dot_product_attention(q, k, v, is_causal=True))
    if leading and leading[-1] == 4:
        k, v = k[..., :2, :, :], v[..., :2, :, :]
        got = dhp_safe_fa.sdpa(q, k, v, enable_gqa=True)
        assert_is_sdpa(got, F.scaled_dot_product_attention(q, k, v, enable_gqa=True))


def test_arguments_by_position(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    want = dhp_safe_fa.sdpa(q, k, v, is_causal=True, scale=0.2, enable_gqa=True)
    assert same_bits(dhp_safe_fa.sdpa(q, k, v, None, 0.0, True, 0.2, True), want)


def test_autocast(device: str, rng: torch.Generator) -> None:
    q, k, v = (t.float() for t in qkv(rng, Target(device, torch.bfloat16), 2, 4, 4, 33, 70, 64))
    with torch.autocast(device, dtype=torch.bfloat16):
        assert dhp_safe_fa.sdpa(q, k, v).dtype == torch.bfloat16
        assert same_bits(dhp_safe_fa.sdpa(q, k, v), dhp_safe_fa.attention(q, k, v))


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_compile_with_dynamic_shapes(device: str, rng: torch.Generator, rank: int) -> None:
    torch.compiler.reset()
    compiled = torch.compile(dhp_safe_fa.sdpa, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (33, 50, 70):
        tensors = qkv(rng, Target(device, torch.float16), 2, 4, 4, length, length + 7, 64)
        q, k, v = (t[0] if rank == 3 else t[None] if rank == 5 else t for t in tensors)
        assert same_bits(compiled(q, k, v, is_causal=True), dhp_safe_fa.sdpa(q, k, v, is_causal=True))


def test_compile_with_a_scale_of_the_shape() -> None:
    def call(q: Tensor, scale: float | None = None) -> Tensor:
        return dhp_safe_fa.sdpa(q, q, q, scale=q.shape[-1] ** -0.25 if scale is None else scale)

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for q in (torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 16)):
        for scale in (None, 0.5, 0.25):
            assert torch.equal(compiled(q, scale), call(q, scale))


def test_largest_scale(target: Target, rng: torch.Generator) -> None:
    """Of the one key that it leaves a row sees the value: no softmax is NaN."""
    q, k, v = qkv(rng, target, 1, 2, 2, 5, 9, 64)
    assert not dhp_safe_fa.sdpa(q, k, v, scale=2.0**100).isnan().any()


# ---- what is not served ---------------------------------------------------------------------------------------------

Q = (2, 4, 5, 64)
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "mask": (Q, Q, {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "attn_mask: given, .*supported: None, .*causal"),
    "dropout": (Q, Q, {"dropout_p": 0.25}, r"dropout_p: 0\.25; supported: 0"),
    "negative_dropout": (Q, Q, {"dropout_p": -1.0}, r"dropout_p: -1; supported: 0"),
    "nan_dropout": (Q, Q, {"dropout_p": float("nan")}, r"dropout_p: nan; supported: 0"),
    "large_scale": (Q, Q, {"scale": math.nextafter(2.0**100, math.inf)}, r"scale: 1\.26765e\+30; supported: 0 to 2"),
    "huge_scale": (Q, Q, {"scale": 10**400}, "scale: a number of 1329 bits; supported: 0 to"),
    "trained_scale": (Q, Q, {"scale": torch.zeros((), requires_grad=True)}, "scale: a tensor that requires a gradient"),
    "complex_scale": (Q, Q, {"scale": np.complex64(1j)}, "scale: .*; supported: None, or a number"),
    "array_scale": (Q, Q, {"scale": np.ones(4)}, "scale: .*; supported: None, or a number"),
    "scales": (Q, Q, {"scale": torch.ones(4)}, r"scale: a tensor of shape \(4,\), torch.float32; supported: None, or"),
    "no_heads": ((2, 0, 5, 64), (2, 0, 5, 64), {}, "key: 0 heads for 0 query heads"),
    "negative_scale": (Q, Q, {"scale": -1.0}, r"scale: -1; supported: 0 to 2\^100"),
    "infinite_scale": (Q, Q, {"scale": float("inf")}, "scale: inf; supported: 0 to"),
    "heads": (Q, (2, 2, 5, 64), {}, "key: 2 heads for 4 query heads; pass enable_gqa=True"),
    "grouped_heads": (Q, (2, 3, 5, 64), {"enable_gqa": True}, "key: 3 heads for 4 query heads; supported: a divisor"),
    "no_key_head": (Q, (2, 0, 5, 64), {"enable_gqa": True}, "key: 0 heads for 4 query heads"),
    "batch": (Q, (1, 4, 5, 64), {}, "batch dimensions differ.*expand"),
    "rank": (Q, (4, 5, 64), {}, "rank 4 and 3; supported: equal"),
    "rank_1": ((64,), (64,), {}, "rank 1 and 1; supported: equal, at least 2"),
    "head_dim": (Q, (2, 4, 5, 32), {}, "key: head_dim 32 differs from query's 64"),
    "mask_in_a_list": (Q, Q, {"attn_mask": [1]}, "attn_mask: list; supported: None"),
    "no_dropout_p": (Q, Q, {"dropout_p": None}, "dropout_p: None; supported: 0"),
    "no_is_causal": (Q, Q, {"is_causal": None}, "is_causal: None; supported: True or False"),
    "no_enable_gqa": (Q, Q, {"enable_gqa": "no"}, "enable_gqa: 'no'; supported: True or False"),
    "rank_0": ((), (), {}, "rank 0 and 0; supported: equal, at least 2"),
    "scale_in_words": (Q, Q, {"scale": "x"}, "scale: 'x'; supported: None, or a number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(device: str, case: str) -> None:
    query, key, arguments, words = REFUSED[case]
    q, k = (torch.zeros(shape, device=device, dtype=torch.float16) for shape in (query, key))
    with pytest.raises(RuntimeError, match=f"^dhp_safe_fa.sdpa: .*{words}"):
        dhp_safe_fa.sdpa(q, k, k, **arguments)


@pytest.mark.parametrize("place", range(3))
def test_no_tensor(device: str, place: int) -> None:
    tensors: list[Any] = [torch.zeros(Q, device=device, dtype=torch.float16)] * 3
    tensors[place] = None
    name = ("query", "key", "value")[place]
    with pytest.raises(RuntimeError, match=f"^dhp_safe_fa.sdpa: {name}: NoneType; expected a tensor"):
        dhp_safe_fa.sdpa(*tensors)


def test_value_that_is_no_match(device: str) -> None:
    q = torch.zeros(Q, device=device, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="value: its shape differs from key's; they must be equal but for head_dim"):
        dhp_safe_fa.sdpa(q, q, torch.zeros((2, 4, 6, 64), device=device, dtype=torch.float16))
    if device == "cuda":
        with pytest.raises(RuntimeError, match=r"value: head_dim 60; supported on CUDA: multiples of 8"):
            dhp_safe_fa.sdpa(q, q, q[..., :60])
    else:
        with pytest.raises(RuntimeError, match=r"value: head_dim 257; supported on CPU: 1 to 256"):
            dhp_safe_fa.sdpa(q, q, torch.zeros((2, 4, 5, 257), dtype=torch.float16))


@pytest.mark.parametrize("rank", [2, 3, 4, 5])
def test_value_of_another_head_dim(rng: torch.Generator, rank: int) -> None:
    q, k = (torch.randn((2, 2, 3, 5, 64)[5 - rank :], generator=rng) for _ in range(2))
    v = torch.randn((*k.shape[:-1], 24), generator=rng)
    out = dhp_safe_fa.sdpa(q, k, v, is_causal=True)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, torch.bool], ids=str)
def test_dtype(device: str, dtype: torch.dtype) -> None:
    q = torch.zeros(Q, device=device, dtype=dtype)
    with pytest.raises(RuntimeError, match=f"dtype: {dtype} on {device}; supported: float16, bfloat16"):
        dhp_safe_fa.sdpa(q, q, q)


def test_mixed_dtypes_and_devices(device: str) -> None:
    q = torch.zeros(Q, device=device, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=r"dtype: query torch\.float16, key torch\.bfloat16"):
        dhp_safe_fa.sdpa(q, q.bfloat16(), q)
    with pytest.raises(RuntimeError, match=f"device: query is on {device}.*value on meta; they must agree"):
        dhp_safe_fa.sdpa(q, q, q.to("meta"))


def test_head_dim(device: str) -> None:
    limit = max_head_dim(device)
    q = torch.zeros(1, 1, 2, limit + 8, device=device, dtype=torch.float16)
    with pytest.raises(RuntimeError, match=f"head_dim {limit + 8}; supported on {device.upper()}: .*{limit}"):
        dhp_safe_fa.sdpa(q, q, q)
    assert dhp_safe_fa.sdpa(*(q[..., :limit],) * 3).shape == (1, 1, 2, limit)


@needs_hopper
def test_what_only_cuda_refuses() -> None:
    q = torch.zeros(Q, device="cuda")
    for wide in (q, q.double()):
        with pytest.raises(RuntimeError, match=rf"dtype: {wide.dtype} on cuda"):
            dhp_safe_fa.sdpa(wide, wide, wide)
    with pytest.raises(RuntimeError, match="head_dim 60; supported on CUDA: multiples of 8"):
        dhp_safe_fa.sdpa(*(q.half()[..., :60],) * 3)


def test_layouts() -> None:
    q = torch.zeros(Q)
    with pytest.raises(RuntimeError, match="sparse"):
        dhp_safe_fa.sdpa(q.to_sparse(), q, q)
    jagged = torch.nested.nested_tensor([torch.zeros(4, 5, 64), torch.zeros(4, 7, 64)], layout=torch.jagged)
    with pytest.raises(RuntimeError, match="nested"):
        dhp_safe_fa.sdpa(jagged, jagged, jagged)


def test_on_meta() -> None:
    """Where autocast is not known."""
    q = torch.empty(Q, device="meta")
    assert dhp_safe_fa.sdpa(q, q, q).shape == q.shape
    for name in ("audit", "hybrid", "secure"):
        with dhp_safe_fa.policy(name) as policy:
            assert F.scaled_dot_product_attention(q, q, q).is_meta
        (call,) = policy.calls
        assert (call.device, call.reason) == ("meta", None)


def test_gradients(target: Target, rng: torch.Generator) -> None:
    for shape in ((2, 2, 4, 33, 64), (4, 33, 64), (33, 64)):
        leaves = [normal(rng, shape, target).requires_grad_() for _ in range(3)]
        grad_out = normal(rng, shape, target)
        found = torch.autograd.grad(dhp_safe_fa.sdpa(*leaves, is_causal=True), leaves, grad_out)
        batched = [t.detach().reshape(-1, *((1,) * (3 - t.dim())), *shape[-3:]) for t in (*leaves, grad_out)]
        want = gradients(*batched, is_causal=True)
        assert all(same_bits(f, w.reshape(shape)) for f, w in zip(found, want, strict=True))
