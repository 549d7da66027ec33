"""The operators as torch sees them: schemas, opcheck, fake and meta tensors, deterministic mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import EXPANSIONS, LAYOUTS, Target, as_tuple, attend, both_operators, qkv, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dhp_safe_fa

ARGUMENTS = "Tensor q, Tensor k, Tensor v, bool is_causal=False, float? scale=None, int causal_offset=0"
SCHEMAS = {
    "attention": f"dhp::attention({ARGUMENTS}) -> Tensor",
    "attention_lse": f"dhp::attention_lse({ARGUMENTS}) -> (Tensor out, Tensor lse)",
}


# ---- registration ---------------------------------------------------------------------------------------------------


@both_operators
def test_schema(operator: Any) -> None:
    name = operator.name().removeprefix("dhp::")
    want = torch._C.parse_schema(SCHEMAS[name])
    assert str(operator._schema) == str(want)
    assert not operator._schema.is_mutable


def samples(rng: torch.Generator, device: str) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    q, k, v = qkv(rng, Target(device, torch.float16), 2, 4, 4, 33, 70, 64)
    yield (q, k, v), {}
    yield (q, k, v), {"is_causal": True, "scale": 0.2, "causal_offset": 37}
    yield (q, k[:, :2], v[:, :2]), {"is_causal": True}
    yield (q, k[:, :1], v[:, :1]), {"is_causal": True, "causal_offset": -3}
    for layout in ("transposed_bshd", "heads_of_packed_qkv", "every_second_column", "columns_outermost"):
        yield tuple(LAYOUTS[layout](t) for t in (q, k, v)), {"is_causal": True, "causal_offset": -5}
    yield tuple(EXPANSIONS["head_stride_0"](t) for t in (q, k, v)), {}
    yield (q[:0], k[:0], v[:0]), {}
    yield (q[:, :, :0], k, v), {}
    yield (q, k[:, :, :0], v[:, :, :0]), {"is_causal": True}
    yield (q[:, :, :1], k, v), {}


@both_operators
def test_opcheck(operator: Any, device: str, rng: torch.Generator) -> None:
    for arguments, options in samples(rng, device):
        torch.library.opcheck(operator, arguments, options)


@both_operators
def test_opcheck_of_autograd_registration(operator: Any, target: Target, rng: torch.Generator) -> None:
    """Needs inputs that require grad, which the operator refuses to run with; the check itself does not run it."""
    tensors = [t.requires_grad_() for t in qkv(rng, target, 1, 2, 2, 3, 4, 64)]
    torch.library.opcheck(operator, tuple(tensors), test_utils="test_autograd_registration")


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


def test_meta_allocates_nothing() -> None:
    q = torch.empty(64, 128, 2**20, 128, dtype=torch.bfloat16, device="meta")
    out, lse = dhp_safe_fa.attention_lse(q, q, q)
    assert out.is_meta and out.shape == q.shape and lse.is_meta and lse.dtype == torch.float32
