"""The kernels of the backward as subjects, with a plan and an operator that are made up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dhp_safe_fa import _inspect
from dhp_safe_fa.gates import gradients, subjects
from dhp_safe_fa.gates.families import backward, delta
from dhp_safe_fa.gates.inputs import Shape
from dhp_safe_fa.gates.tools import NotRun

DELTA = {"kernel": "delta_bf16", "entry": "dhp_attention_delta"}
# part -> names of the kernels that compute it; those of head_dim 256 have a kernel for each gradient
KERNELS = {"dk dv": "bwd_dkdv", "dq": "bwd_dq", "dk": "bwd_dk", "dv": "bwd_dv"}


def kernel(part: str, head_dim: int = 128) -> dict[str, Any]:
    family = "delta" if part == "delta" else "backward"
    one = DELTA if part == "delta" else {"kernel": KERNELS[part], "entry": "dhp_attention_bwd"}
    return {"name": one["kernel"], "entry": one["entry"], "family": family, "part": part, "head_dim": head_dim,
            "dtype": "bfloat16", "cubin_sha256": "0"}  # fmt: skip


def plan_backward(
    q: Any, k: Any, dtype: str, is_causal: bool, offset: int, *, need_dq: bool, need_dk: bool, need_dv: bool
) -> list[dict[str, Any]]:
    assert dtype == "bfloat16" and offset == 0
    parts = [name for name, need in {"dk": need_dk, "dv": need_dv}.items() if need]
    if parts and q[3] <= 128:
        parts = ["dk dv"]
    parts += ["dq"] if need_dq else []
    return [DELTA, *({"kernel": KERNELS[part], "entry": "dhp_attention_bwd"} for part in parts)]


@pytest.fixture(autouse=True)
def planned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inspect, "plan_backward", plan_backward, raising=False)


@pytest.mark.parametrize(
    ("part", "head_dim", "outputs"),
    [
        ("dk dv", 64, ("dk", "dv")),
        ("dq", 128, ("dq",)),
        ("dk", 256, ("dk",)),
        ("dv", 256, ("dv",)),
        ("delta", 256, ("dq",)),
    ],
)
def test_a_kernel_is_reached_by_the_gradients_it_computes(part: str, head_dim: int, outputs: tuple[str, ...]) -> None:
    one = kernel(part, head_dim)
    found = subjects._of_family(one)
    assert (found.name, found.entry, found.outputs, found.why_not) == (one["name"], one["entry"], outputs, "")
    assert found.kernels == (one["name"],) and found.classes == gradients.CLASSES
    assert {shape.is_causal for shape in found.shapes} == {True, False} and len(found.shapes) == 4
    assert any(shape.heads_q > shape.heads_k for shape in found.shapes)


def test_a_kernel_that_no_call_launches_says_so() -> None:
    found = subjects._of_family(kernel("dk dv", 256))
    assert not found.shapes and "no shape was found" in found.why_not


def test_a_function_that_a_call_launches_twice_is_not_told_apart() -> None:
    with pytest.raises(NotRun, match="no shape was found"):
        backward.subject_of(kernel("dk", 256), backward.Call(("dk", "dv")))


def test_a_part_that_no_call_can_ask_for_says_so() -> None:
    found = subjects._of_family({**kernel("dq"), "part": "out"})
    assert "computes 'out'; a call can ask for dq, dk, dv" in found.why_not


@pytest.mark.parametrize("offset", [None, -3])
def test_the_operator_is_asked_for_no_more_than_needed(offset: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def operator(*given: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        asked.append((given, options))
        return tuple(torch.full((2,), float(at)) for at in range(3))

    monkeypatch.setattr(torch.ops, "dhp", SimpleNamespace(attention_backward=operator))
    shape = Shape(1, 2, 1, 5, 6, 8, "float16", True)
    inputs = tuple(torch.full((1,), float(at)) for at in range(6))
    of_keys = backward.Call(("dk", "dv"))
    got = of_keys.attend(inputs, True) if offset is None else of_keys.attend_offset(inputs, offset)
    assert [int(tensor[0]) for tensor in got] == [1, 2] and shape.is_causal
    ((given, options),) = asked
    assert [int(tensor[0]) for tensor in given[:6]] == [5, 0, 1, 2, 3, 4] and given[6] is True
    assert options == {"causal_offset": offset or 0, "need_dq": False, "need_dk": True, "need_dv": True}


def test_delta_shows_in_dq() -> None:
    found = delta.subject(kernel("delta", 64))
    assert (found.outputs, found.entry) == (("dq",), "dhp_attention_delta")


@pytest.mark.parametrize(
    "kernel",
    [one for one in _inspect.kernels() if one["family"] != "forward"],
    ids=lambda one: str(one["name"]),
)
def test_every_shipped_kernel_is_reached(kernel: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = subjects._of_family(kernel)
    assert found.shapes and not found.why_not
