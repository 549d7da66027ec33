"""The classes of inputs hold what they say, in every supported shape and dtype."""

from __future__ import annotations

import math

import pytest
import torch

from dhp_safe_fa.gates import inputs
from dhp_safe_fa.gates.inputs import Shape

DTYPES = ("float16", "bfloat16")
SHAPES = [Shape(2, 4, 1, 37, 150, 56, dtype, True) for dtype in DTYPES] + [Shape(1, 1, 1, 1, 1, 8, "float16", False)]


@pytest.fixture(params=SHAPES, ids=str)
def shape(request: pytest.FixtureRequest) -> Shape:
    param: Shape = request.param
    return param


@pytest.mark.parametrize("name", inputs.CLASSES)
def test_layout_and_repeatability(name: str, shape: Shape) -> None:
    first, again, other = (inputs.make(name, shape, seed, "cpu") for seed in (1, 1, 2))
    for tensor, same, size in zip(first, again, (shape.q, shape.k, shape.k), strict=True):
        assert (tuple(tensor.shape), tensor.dtype) == (size, shape.torch_dtype)
        assert tensor.is_contiguous()
        assert torch.equal(tensor.view(torch.int16), same.view(torch.int16))
    same_bits = [torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(first, other, strict=True)]
    assert all(same_bits) == (name == "zeros") or shape.seqlen_k == 1


def test_classes_are_not_each_other(shape: Shape) -> None:
    made = {name: inputs.make(name, shape, 1, "cpu") for name in inputs.CLASSES}
    bits = {name: b"".join(t.view(torch.int16).numpy().tobytes() for t in qkv) for name, qkv in made.items()}
    assert len(set(bits.values())) == len(bits) or shape.seqlen_k == 1


def scores(shape: Shape, name: str) -> torch.Tensor:
    q, k, _ = (t.double() for t in inputs.make(name, shape, 1, "cpu"))
    return q @ k.repeat_interleave(shape.heads_q // shape.heads_k, dim=1).mT / math.sqrt(shape.head_dim)


@pytest.mark.parametrize(("name", "sign"), [("ascending", 1), ("descending", -1)])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_running_maximum(name: str, sign: int, shape: Shape) -> None:
    steps = scores(shape, name).diff(dim=-1) * sign
    assert (steps >= 0).all() and (steps > 0).any(dim=-1).all()


@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_one_hot(shape: Shape) -> None:
    assert (scores(shape, "one-hot").softmax(-1).amax(-1) > 0.99).float().mean() > 0.9


def test_extremes(shape: Shape) -> None:
    info = torch.finfo(shape.torch_dtype)
    for tensor in inputs.make("max-finite", shape, 1, "cpu"):
        assert (tensor.abs() == info.max).all()
    for tensor in inputs.make("denormals", shape, 1, "cpu"):
        size = tensor.double().abs()
        assert (size > 0).all() and (size < info.tiny).all()


@pytest.mark.parametrize(("name", "is_bad"), [("NaN rows", torch.isnan), ("Inf rows", torch.isinf)])
def test_rows_are_spoilt_throughout(name: str, is_bad: object, shape: Shape) -> None:
    assert callable(is_bad)
    for tensor in inputs.make(name, shape, 1, "cpu"):
        bad = is_bad(tensor)
        assert torch.equal(bad.any(-1), bad.all(-1)) and bad.any()
    if name == "Inf rows" and shape.seqlen_k > 1:
        q, *_ = inputs.make(name, shape, 1, "cpu")
        assert (q == torch.inf).any() and (q == -torch.inf).any()


def test_planted_secrets_end_every_loop() -> None:
    secrets = inputs.planted_secrets(1, "cpu")
    for tensor in secrets.values():
        assert (tuple(tensor.shape), tensor.dtype) == ((inputs.SECRETS,), torch.float32)
        assert tensor.nan_to_num().abs().max() < 2**9
    assert secrets["NaN"].isnan().any()
    assert (secrets["large"] < -126).any()  # 2^x is denormal
