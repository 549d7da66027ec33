"""The kernels of the backward as subjects, with kernels, a plan and an operator that are made up."""

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

PARTS = {64: ("dk dv", "dq"), 128: ("dk dv", "dq"), 256: ("dk", "dv", "dq")}


def kernel(part: str, head_dim: int = 128) -> dict[str, Any]:
    family, entry = ("delta", "dhp_attention_delta") if part == "delta" else ("backward", "dhp_attention_bwd")
    return {"name": f"{part.replace(' ', '')}_{head_dim}", "entry": entry, "family": family, "part": part,
            "head_dim": head_dim, "dtype": "bfloat16", "cubin_sha256": "0"}  # fmt: skip


KERNELS = [kernel(part, head_dim) for head_dim, parts in PARTS.items() for part in ("delta", *parts)]


def plan_backward(q: Any, k: Any, dtype: str, is_causal: bool, offset: int, **needs: bool) -> list[dict[str, Any]]:
    """The kernels of the smallest head_dim that serves the shape, delta first."""
    assert dtype == "bfloat16" and offset == 0 and set(needs) == {"need_dq", "need_dk", "need_dv"}
    head_dim = min(size for size in PARTS if size >= q[3])
    wanted = {name.removeprefix("need_") for name, need in needs.items() if need}
    parts = ["delta", *(part for part in PARTS[head_dim] if wanted & set(part.split()))]
    return [{"kernel": kernel(part, head_dim)["name"], "grid": 1} for part in parts]


@pytest.fixture(autouse=True)
def shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inspect, "kernels", lambda: [{"name": "fwd", "family": "forward", "entry": "fwd"}, *KERNELS])
    monkeypatch.setattr(_inspect, "plan_backward", plan_backward)


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
    found = subjects._of_family({**kernel("dq", 256), "name": "another"})
    assert not found.shapes and "no shape was found" in found.why_not


def test_a_function_that_a_call_launches_twice_is_not_told_apart() -> None:
    """At head_dim 256 dk and dv are two launches of one function."""
    with pytest.raises(NotRun, match="no shape was found"):
        backward.subject_of(kernel("dk", 256), backward.Call(("dk", "dv")))


def test_a_smaller_head_dim_is_served_by_its_own_kernel() -> None:
    for one in KERNELS:
        found = subjects._of_family(one)
        assert max(shape.head_dim for shape in found.shapes) == one["head_dim"]
        assert min(shape.head_dim for shape in found.shapes) == one["head_dim"] - 8


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
    inputs = tuple(torch.full((1,), float(at)) for at in range(7))
    of_keys = backward.Call(("dk", "dv"))
    got = of_keys.attend(inputs, True) if offset is None else of_keys.attend_offset(inputs, offset)
    assert [int(tensor[0]) for tensor in got] == [1, 2] and shape.is_causal
    ((given, options),) = asked
    assert [int(tensor[0]) for tensor in given[:6]] == [5, 0, 1, 2, 3, 4] and given[6] is True
    assert int(options.pop("grad_lse")[0]) == 6
    assert options == {"causal_offset": offset or 0, "need_dq": False, "need_dk": True, "need_dv": True}


def test_delta_shows_in_dq() -> None:
    found = delta.subject(kernel("delta", 64))
    assert (found.outputs, found.entry) == (("dq",), "dhp_attention_delta")


@pytest.mark.parametrize(
    "kernel",
    [one for one in _inspect.kernels() if one["family"] in ("delta", "backward")],
    ids=lambda one: str(one["name"]),
)
def test_every_shipped_kernel_is_reached(kernel: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    found = subjects._of_family(kernel)
    assert found.shapes and not found.why_not
    whole = found.call()
    assert whole.shapes and whole.launches
    for shape in whole.shapes:
        assert [name for name, _ in whole.launches(shape)].count(found.name) == 1


def test_a_whole_call_is_of_all_gradients_where_it_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of "dk dv" is not launched where a call of all gradients has one kernel for them."""
    assert subjects._of_family(kernel("dk", 256)).call().outputs == backward.GRADIENTS
    shape = subjects._of_family(kernel("dv", 256)).call().shapes[0]
    launches = subjects._of_family(kernel("dv", 256)).call().launches
    entries = ["dhp_attention_delta", *["dhp_attention_bwd"] * 3]
    assert launches and launches(shape) == list(zip(["delta_256", "dk_256", "dv_256", "dq_256"], entries, strict=True))

    def at_once(*given: Any, **needs: bool) -> list[dict[str, Any]]:
        return [{"kernel": "one_pass"}] if needs["need_dq"] else plan_backward(*given, **needs)

    monkeypatch.setattr(_inspect, "plan_backward", at_once)
    whole = subjects._of_family(kernel("dk dv", 64)).call()
    assert (whole.outputs, whole.name) == (("dk", "dv"), "delta_64 dkdv_64")
