"""The classes of inputs of the backward hold what they say, and the matched ones hold the same bits."""

from __future__ import annotations

import pytest
import torch

import dhp_safe_fa
from dhp_safe_fa.gates import gradients, inputs
from dhp_safe_fa.gates.inputs import Shape
from dhp_safe_fa.gates.timing import inputs as timing_inputs

SHAPES = [Shape(2, 4, 1, 37, 150, 56, dtype, True) for dtype in ("float16", "bfloat16")]


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", gradients.CLASSES)
def test_layout_and_repeatability(name: str, shape: Shape) -> None:
    first, again, other = (gradients.make(name, shape, seed, "cpu") for seed in (1, 1, 2))
    of_rows = shape.q[:3]
    shapes = [shape.q, shape.k, shape.k, shape.q, of_rows, shape.q, of_rows]
    assert [tuple(tensor.shape) for tensor in first] == shapes
    assert all(tensor.dtype == (torch.float32 if tensor.ndim == 3 else shape.torch_dtype) for tensor in first)
    assert all(tensor.is_contiguous() for tensor in first)
    assert [*map(raw, first)] == [*map(raw, again)]
    assert all(raw(a) != raw(b) for a, b in zip(first[:3], other[:3], strict=True)) == (name != "zeros")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_classes_are_not_each_other(shape: Shape) -> None:
    made = {b"".join(map(raw, gradients.make(name, shape, 1, "cpu"))) for name in gradients.CLASSES}
    assert len(made) == len(gradients.CLASSES) == len(inputs.CLASSES) + 10


@pytest.mark.parametrize("name", gradients.CLASSES)
def test_out_and_lse_are_the_forwards(name: str) -> None:
    shape = SHAPES[0]
    q, k, v, *given, _, _ = gradients.make(name, shape, 1, "cpu")
    expected = dhp_safe_fa.attention_lse(q, k, v, is_causal=True)
    assert ([*map(raw, given)] == [*map(raw, expected)]) == (name != gradients.FOREIGN)
    scores = q.float() @ k.float().mT / shape.head_dim**0.5
    if name == gradients.FOREIGN:
        assert (scores.amax(-1) - given[1]).max() > 88, "probabilities overflow in float32"


def test_grad_out_is_unlike() -> None:
    shape = SHAPES[0]
    made = {name: gradients.make(name, shape, 1, "cpu")[5] for name in gradients.CLASSES}
    assert all(made[name].float().std() == pytest.approx(1, rel=0.1) for name in inputs.CLASSES)
    assert not made["grad_out zeros"].any()
    assert made["grad_out large"].float().std() > 20
    assert (made["grad_out one-hot"].float().sum(-1) == 1).all() and (made["grad_out one-hot"] != 0).sum(-1).max() == 1
    assert (made["grad_out max-finite"].abs() == torch.finfo(shape.torch_dtype).max).all()
    size = made["grad_out denormals"].double().abs()
    assert (size > 0).all() and (size < torch.finfo(shape.torch_dtype).tiny).all()
    for name, is_bad in (("grad_out NaN rows", torch.isnan), ("grad_out Inf rows", torch.isinf)):
        bad = is_bad(made[name])
        assert bad.any() and not bad.all() and torch.equal(bad.any(-1), bad.all(-1))


def test_grad_lse_is_unlike() -> None:
    made = {name: gradients.make(name, SHAPES[0], 1, "cpu")[6] for name in gradients.CLASSES}
    assert all(made[name].std() == pytest.approx(1, rel=0.1) for name in made if name not in gradients.GRAD_LSE)
    assert (made["grad_lse max-finite"].abs() == torch.finfo(torch.float32).max).all()
    spoilt = made["grad_lse NaN and Inf"]
    assert spoilt.isnan().any() and spoilt.isinf().any() and spoilt.isfinite().any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_matched_classes_hold_the_same_bits(is_causal: bool) -> None:
    shape = Shape(2, 4, 2, 30, 40, 64, "bfloat16", is_causal)
    found = gradients.matched(shape, 1, "cpu")
    assert list(found) == [timing_inputs.REFERENCE, *timing_inputs.SAME, *gradients.TESTED]
    reference = found[timing_inputs.REFERENCE]
    for name, tensors in found.items():
        q, k, v, out, lse, *grads = tensors
        for tensor, like in zip((q, k, v, *grads), (*reference[:3], *reference[5:]), strict=True):
            assert torch.equal(tensor.abs().flatten().sort().values, like.abs().flatten().sort().values)
            assert tensor.signbit().sum() == like.signbit().sum()
        expected = dhp_safe_fa.attention_lse(q, k, v, is_causal=is_causal)
        assert [raw(out), raw(lse)] == [*map(raw, expected)]
        is_same = all(map(torch.equal, tensors, reference))
        assert is_same == (name in (timing_inputs.REFERENCE, *timing_inputs.SAME))
    assert not torch.equal(found["signs permuted"][5], reference[5])
    assert found[timing_inputs.SAME[0]][5].data_ptr() != reference[5].data_ptr()


def test_queries_move_with_their_gradients() -> None:
    found = gradients.matched(Shape(1, 2, 2, 30, 40, 16, "float16", False), 1, "cpu")
    (q, *_, out, _, grad_out, grad_lse), moved = found[timing_inputs.REFERENCE], found["queries in other order"]
    order = [int((q[0, 0] == row).all(-1).nonzero()[0]) for row in moved[0][0, 0]]
    for at, was in ((5, grad_out), (6, grad_lse), (3, out)):
        assert torch.equal(moved[at], was[:, :, order])


def test_power_classes() -> None:
    found = gradients.power(SHAPES[0], 1, "cpu")
    assert list(found) == [timing_inputs.POWER_REFERENCE, *timing_inputs.POWER]
    assert not found["zeros"][5].any() and (found["ones"][5] == 1).all() and found["large"][5].float().std() > 20
