"""Gradients computed again in other company: right ones pass every way, and each way finds what it is for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from gradient_samples import OUTPUTS, gradients

from dhp_safe_fa.gates import gradients as inputs
from dhp_safe_fa.gates.bitwise.key_rows import gradient_ways
from dhp_safe_fa.gates.bitwise.rows import Rows, rows_of_shape
from dhp_safe_fa.gates.inputs import Inputs, Shape
from dhp_safe_fa.gates.subjects import Subject

CAUSAL = Shape(2, 4, 2, 18, 22, 8, "float16", True)
FULL = Shape(2, 4, 2, 18, 22, 8, "float16", False)
SQUARE = Shape(1, 2, 1, 19, 19, 8, "bfloat16", True)

# (the number of queries, of keys, whether it is causal, the offset) -> the share by which a result is wrong
Fault = Callable[[Inputs, int], float]


def subject(outputs: tuple[str, ...], fault: Fault = lambda given, offset: 0.0, has_offset: bool = True) -> Subject:
    def attend(given: Inputs, is_causal: bool, offset: int = 0) -> Inputs:
        found = gradients(given, is_causal, offset)
        chosen = [gradient for name, gradient in zip(OUTPUTS, found, strict=True) if name in outputs]
        return tuple(gradient * (1 + fault(given, offset) * 2**-20) for gradient in chosen)

    return Subject(
        "bwd",
        attend,
        nullcontext,
        ("bwd",),
        (CAUSAL,),
        attend_offset=(lambda given, offset: attend(given, True, offset)) if has_offset else None,
        outputs=outputs,
        ways=gradient_ways,
        make=inputs.make,
    )


def rows(of: Subject, shape: Shape, own: str = "normal", company: str = "large") -> Rows:
    return rows_of_shape(of, shape, own, company, seed=1, device="cpu")


def found_by(lines: list[str]) -> set[str]:
    return {line.partition(":")[0] for line in lines}


@pytest.mark.parametrize("outputs", [("dq",), ("dk", "dv"), ("dv",), OUTPUTS], ids=" ".join)
@pytest.mark.parametrize("shape", [CAUSAL, FULL, SQUARE], ids=str)
def test_right_gradients_pass(outputs: tuple[str, ...], shape: Shape) -> None:
    found = rows(subject(outputs), shape)
    assert (found.differing, found.refused) == ([], []) and found.ways >= 9


@pytest.mark.parametrize(("own", "company"), inputs.ROW_CLASSES.items())
def test_right_gradients_pass_on_every_class(own: str, company: str) -> None:
    found = rows(subject(OUTPUTS), Shape(1, 2, 1, 9, 12, 8, "float16", True), own, company)
    assert (found.differing, found.refused) == ([], [])


def test_without_offset_there_are_fewer_ways() -> None:
    with_offset, without = (rows(subject(("dk",), has_offset=has), CAUSAL).ways for has in (True, False))
    assert with_offset == without + 3


@pytest.mark.parametrize(
    ("fault", "ways"),
    [
        (lambda given, offset: given[0].size(0) > 2, {"other batches beside"}),
        (lambda given, offset: given[0].size(0) == 1, {"its batch alone"}),
        (lambda given, offset: given[0].size(1) > 4, {"other heads beside"}),
        (lambda given, offset: given[0].size(1) == 2, {"its key head alone"}),
        (lambda given, offset: given[1].size(2) == 1, {"the first 1 keys", "key 11 alone", "key 21 alone"}),
        (lambda given, offset: given[1].size(2) == 11, {"the last half of the keys"}),
        (lambda given, offset: given[1].size(2) > 22, {"1 more keys", "130 more keys"}),
        (lambda given, offset: given[0].size(2) > 100, {"130 more queries that add nothing"}),
        (lambda given, offset: float(given[1].float().abs().amax() > 20), {"other keys beside"}),
        (lambda given, offset: float(given[0].float().abs().amax() > 20), {"other queries that do not see it"}),
    ],
)
def test_each_way_of_keys_finds_its_fault(fault: Fault, ways: set[str]) -> None:
    assert ways <= found_by(rows(subject(("dk", "dv"), fault), CAUSAL).differing)


def test_of_a_subject_with_all_gradients_each_side_is_looked_at() -> None:
    def fault(given: Inputs, offset: int) -> float:
        return float(given[0].size(2) == 1 or given[1].size(2) == 1)

    found = rows(subject(OUTPUTS, fault), FULL).differing
    assert {"row 9 alone", "row 17 alone", "the first 1 rows", "the first 1 keys"} <= found_by(found)
    by_way = {line.partition(":")[0]: line for line in found}
    assert "dq[" in by_way["row 9 alone"] and "dk[" not in by_way["row 9 alone"]
    assert "dk[" in by_way["the first 1 keys"] and "dq[" not in by_way["the first 1 keys"]


def test_queries_that_do_not_see_a_key_must_not_reach_it() -> None:
    """A mask that is applied as a factor lets an infinite product of a hidden pair through."""

    def attend(given: Inputs, is_causal: bool) -> Inputs:
        dk = gradients(given, is_causal)[1]
        return (dk + 0 * (given[5].float().amax() * 1e35 * 1e4),)

    def make(name: str, shape: Shape, seed: int, device: str) -> Inputs:
        made = inputs.make("normal", shape, seed, device)
        return (*made[:5], made[5] * (30000 if name == "loud" else 0), made[6])

    leaking = Subject("bwd", attend, nullcontext, ("bwd",), (FULL,), outputs=("dk",), ways=gradient_ways, make=make)
    found = rows(leaking, SQUARE, "quiet", "loud")
    assert "other queries that do not see it" in found_by(found.differing)
    assert not torch.isnan(gradients(make("loud", SQUARE, 1, "cpu"), True)[1]).any()
