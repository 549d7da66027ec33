"""The operators as torch sees them: schemas, opcheck, fake and meta tensors, deterministic mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import EXPANSIONS, LAYOUTS, OPERATORS, Target, as_tuple, attend, both_operators, qkv, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dhp_safe_fa

FIRST = "bool is_causal=False, float? scale=None, SymInt causal_offset=0"
LATER = "int window_left=-1, int window_right=-1, float? softcap=None"
ARGUMENTS = f"Tensor q, Tensor k, Tensor v, {FIRST}, {LATER}, Tensor? sinks=None"
SCHEMAS = {
    "attention": f"dhp::attention({ARGUMENTS}) -> Tensor",
    "attention_lse": f"dhp::attention_lse({ARGUMENTS}) -> (Tensor out, Tensor lse)",
    "attention_backward": "dhp::attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, "
    f"Tensor lse, {FIRST}, Tensor? grad_lse=None, bool need_dq=True, bool need_dk=True, bool need_dv=True, {LATER})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    "attention_sinks_backward": "dhp::attention_sinks_backward(Tensor grad_out, Tensor out, Tensor lse, Tensor sinks, "
    "Tensor? grad_lse=None) -> Tensor",
}
BACKWARD = torch.ops.dhp.attention_backward.default
SINKS_BACKWARD = torch.ops.dhp.attention_sinks_backward.default


# ---- registration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operator", [*OPERATORS, BACKWARD, SINKS_BACKWARD], ids=lambda operator: operator.name())
def test_schema(operator: Any) -> None:
    name = operator.name().removeprefix("dhp::")
    want = torch._C.parse_schema(SCHEMAS[name])
    assert str(operator._schema) == str(want)
    assert not operator._schema.is_mutable
    assert torch.Tag.pt2_compliant_tag in operator.tags


def samples(rng: torch.Generator, device: str) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    q, k, v = qkv(rng, Target(device, torch.float16), 2, 4, 4, 33, 70, 64)
    yield (q, k, v), {}
    yield (q, k, v), {"is_causal": True, "scale": 0.2, "causal_offset": 37}
    yield (q, k[:, :2], v[:, :2]), {"is_causal": True}
    yield (q, k[:, :1], v[:, :1]), {"is_causal": True, "causal_offset": -3}
    for layout in ("transposed_bshd", "heads_of_packed_qkv", "every_second_column", "columns_outermost"):
        yield tuple(LAYOUTS[layout](t) for t in (q, k, v)), {"is_causal": True, "causal_offset": -5}
    yield tuple(EXPANSIONS["head_stride_0"](t) for t in (q, k, v)), {}
    if device == "cpu":
        yield (q, k, v), {"causal_offset": 37, "window_left": 20, "window_right": 3}
        yield (q, k, v[..., :40]), {"is_causal": True, "softcap": 20.0}
    yield (q[:0], k[:0], v[:0]), {}
    yield (q[:, :, :0], k, v), {}
    yield (q, k[:, :, :0], v[:, :, :0]), {"is_causal": True}
    yield (q[:, :, :1], k, v), {}


@both_operators
def test_opcheck(operator: Any, device: str, rng: torch.Generator) -> None:
    for arguments, options in samples(rng, device):
        torch.library.opcheck(operator, arguments, options)


@both_operators
def test_opcheck_with_gradients(operator: Any, target: Target, rng: torch.Generator) -> None:
    for which in ("qkv", "q", "kv"):
        tensors = qkv(rng, target, 1, 4, 2, 3, 5, 64)
        given = tuple(t.requires_grad_(name in which) for name, t in zip("qkv", tensors, strict=True))
        torch.library.opcheck(operator, given, {"is_causal": True, "causal_offset": 1})


def test_opcheck_of_the_backward(device: str, rng: torch.Generator) -> None:
    for arguments, options in samples(rng, device):
        out, lse = torch.ops.dhp.attention_lse(*arguments, **options)
        for extra in ({}, {"grad_lse": lse, "need_dk": False}, {"need_dq": False, "need_dv": False}):
            grad_out = out.transpose(1, 2).contiguous().transpose(1, 2)
            torch.library.opcheck(BACKWARD, (grad_out, *arguments, out, lse), options | extra)


def test_functions_are_the_operators(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=True, scale=0.3, causal_offset=9)
    assert same_bits(out, dhp_safe_fa.attention(q, k, v, is_causal=True, scale=0.3, causal_offset=9))
    assert same_bits(out, torch.ops.dhp.attention(q, k, v, True, 0.3, 9))
    op_out, op_lse = torch.ops.dhp.attention_lse(q, k, v, is_causal=True, scale=0.3, causal_offset=9)
    assert same_bits(out, op_out) and same_bits(lse, op_lse)


def test_deterministic_mode_changes_no_bit(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    want = dhp_safe_fa.attention_lse(q, k, v)
    assert all(same_bits(g, w) for g, w in zip(attend(q, k, v), want, strict=True)), "attend runs deterministically"


# ---- shapes and strides without data --------------------------------------------------------------------------------


def described(result: Tensor | tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    """Strides of an empty tensor mean nothing, and torch.empty_like's own differ between real and fake ones."""
    return [(t.shape, t.stride() if t.numel() else None, t.dtype, t.storage_offset()) for t in as_tuple(result)]


@both_operators
@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPANSIONS])
@pytest.mark.parametrize("shape", [(2, 4, 33, 64), (2, 4, 1, 64), (1, 4, 5, 8), (2, 4, 0, 64), (0, 4, 5, 64)], ids=str)
def test_fake_and_meta_agree_with_the_real_result(
    operator: Any, target: Target, rng: torch.Generator, layout: str, shape: tuple[int, int, int, int]
) -> None:
    b, h, s, d = shape
    q, k, v = ((LAYOUTS | EXPANSIONS)[layout](t) for t in qkv(rng, target, b, h, h, s, s, d))
    want = operator(q, k, v, True)
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(t) for t in (q, k, v)), True)
    assert described(fake) == described(want)
    assert all(f.device == w.device for f, w in zip(as_tuple(fake), as_tuple(want), strict=True))
    meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (q, k, v)]
    assert described(operator(*meta, True)) == described(want)


@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPANSIONS])
@pytest.mark.parametrize("needed", [(True, True, True), (True, False, False), (False, True, True)], ids=str)
def test_fake_and_meta_gradients_agree_with_the_real_ones(
    target: Target, rng: torch.Generator, layout: str, needed: tuple[bool, bool, bool]
) -> None:
    q, k, v = ((LAYOUTS | EXPANSIONS)[layout](t) for t in qkv(rng, target, 2, 4, 4, 33, 33, 64))
    given = (q.contiguous(), q, k, v, *torch.ops.dhp.attention_lse(q, k, v))
    options = (False, None, 0, None, *needed)
    want = BACKWARD(*given, *options)
    with FakeTensorMode() as mode:
        fake = BACKWARD(*(mode.from_tensor(t) for t in given), *options)
    assert described(fake) == described(want)
    meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in given]
    assert described(BACKWARD(*meta, *options)) == described(want)


def test_meta_allocates_nothing() -> None:
    q = torch.empty(64, 128, 2**20, 128, dtype=torch.bfloat16, device="meta")
    out, lse = dhp_safe_fa.attention_lse(q, q, q)
    assert out.is_meta and out.shape == q.shape and lse.is_meta and lse.dtype == torch.float32
