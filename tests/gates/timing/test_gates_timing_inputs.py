"""Inputs of the gate timing: the same bits in other places, scores that ascend, classes that draw unlike power."""

from __future__ import annotations

import pytest
import torch

from dhp_safe_fa.gates.inputs import Shape
from dhp_safe_fa.gates.timing import inputs as timing_inputs
from dhp_safe_fa.gates.timing.inputs import MATCHED, REFERENCE, SAME

SHAPE = Shape(1, 4, 2, 40, 50, 64, "float16", True)


def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[B, Hq, Sq, Sk]"""
    return q.float() @ k.float().repeat_interleave(q.size(1) // k.size(1), dim=1).mT


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_matched_classes_hold_the_same_bits(dtype: str) -> None:
    shape = Shape(2, 4, 2, 30, 40, 64, dtype, False)
    found = timing_inputs.matched(shape, 1, "cpu")
    assert list(found) == [REFERENCE, *SAME, *MATCHED]
    reference = found[REFERENCE]
    for name, tensors in found.items():
        for at, (tensor, like) in enumerate(zip(tensors, reference, strict=True)):
            assert tensor.dtype == shape.torch_dtype and tensor.is_contiguous()
            if name == "signs permuted":
                assert torch.equal(tensor.abs(), like.abs()) and not torch.equal(tensor, like)
                assert torch.equal(tensor.signbit().sum(-1), like.signbit().sum(-1))
            elif name in (REFERENCE, *SAME) or at == 0:
                assert torch.equal(tensor, like)
            else:
                rows, like_rows = (sorted(t[1, 1].tolist()) for t in (tensor, like))
                assert rows == like_rows and not torch.equal(tensor, like)
    assert all(found[name][1].data_ptr() != reference[1].data_ptr() for name in SAME)


def test_keys_and_values_move_together() -> None:
    found = timing_inputs.matched(SHAPE, 1, "cpu")
    (_, k, v), (_, sorted_k, sorted_v) = found[REFERENCE], found["ascending"]
    order = [int((k[0, 0] == row).all(-1).nonzero()[0]) for row in sorted_k[0, 0]]
    assert torch.equal(v[0, 0][order], sorted_v[0, 0])


def test_scores_ascend_and_descend_in_every_row() -> None:
    found = timing_inputs.matched(Shape(1, 4, 2, 30, 400, 64, "float16", False), 1, "cpu")
    q, up, _ = found["ascending"]
    rising = scores(q, up)
    falling = scores(q, found["descending"][1])
    third = 400 // 3
    assert (rising[..., :third].mean(-1) < rising[..., -third:].mean(-1)).all()
    assert torch.equal(found["descending"][1], up.flip(2)) and (falling[..., 0] > falling[..., -1]).all()
    maximum = rising.cummax(-1).values
    assert ((maximum[..., -1] - maximum[..., 0]) / 64**0.5).mean() > 10


def test_power_classes() -> None:
    found = timing_inputs.power(SHAPE, 1, "cpu")
    assert list(found) == [timing_inputs.POWER_REFERENCE, *timing_inputs.POWER]
    assert not found["zeros"][0].any() and (found["ones"][2] == 1).all()
    assert all(t.shape == (SHAPE.q if at == 0 else SHAPE.k) for ts in found.values() for at, t in enumerate(ts))
