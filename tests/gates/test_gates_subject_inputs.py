"""No gate knows how many tensors a subject reads or what they are: one that reads six goes through all three."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from dhp_safe_fa.gates import inputs
from dhp_safe_fa.gates.bitwise import gate as bitwise
from dhp_safe_fa.gates.bitwise.rows import Way, rows_of_shape
from dhp_safe_fa.gates.counters import calls
from dhp_safe_fa.gates.counters.calls import Calls
from dhp_safe_fa.gates.counters.counting import Request
from dhp_safe_fa.gates.inputs import Inputs, Shape
from dhp_safe_fa.gates.subjects import Subject
from dhp_safe_fa.gates.timing import gate as timing
from dhp_safe_fa.gates.timing.inputs import REFERENCE

SHAPE = Shape(1, 2, 1, 8, 12, 16, "float16", True)


class Gradients:
    """Reads q, k, v, out, lse and grad_out, and notes what it was fed with."""

    def __init__(self) -> None:
        self.fed: list[Inputs] = []
        self.subject = Subject(
            "gradients", self.attend, nullcontext, ("gradients",), (SHAPE,), outputs=("dq", "dk", "dv"), make=self.make
        )

    def make(self, name: str, shape: Shape, seed: int, _: str) -> Inputs:
        q, k, v = inputs.make(name, shape, seed, "cpu")
        return q, k, v, q.clone(), q.float().sum(-1), q.clone()

    def attend(self, given: Inputs, is_causal: bool) -> Inputs:
        assert is_causal
        q, k, v, out, lse, grad_out = given
        assert out.shape == grad_out.shape == q.shape and lse.shape == q.shape[:3]
        self.fed.append(tuple(tensor.clone() for tensor in given))
        return q, k, v


def asked(subject: Subject, data: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, **limits: Any) -> list[Calls]:
    monkeypatch.setattr(calls, "by_name", lambda name: subject)
    return list(calls.calls_of(Request((), {"bwd": data}, **limits)))


def test_counters_fill_every_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = Gradients()
    (one,) = asked(gradients.subject, ("zeros", "large"), monkeypatch, shapes=1)
    for data in one.data:
        one.fill(data)
        one.call()
    _, zeros, large = gradients.fed  # the first call has loaded what is loaded once
    assert not any(tensor.any() for tensor in zeros) and all(tensor.any() for tensor in large)


def test_counters_run_the_shapes_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(SHAPE, seqlen_k=SHAPE.seqlen_k + 1)
    subject = replace(Gradients().subject, shapes=(SHAPE, other))
    for labels in ((), (str(SHAPE),), (str(other),), (str(other), str(SHAPE))):
        found = asked(subject, ("zeros",), monkeypatch, shapes=2, labels={"bwd": labels})
        assert [one.label for one in found] == [
            str(shape) for shape in (SHAPE, other) if not labels or str(shape) in labels
        ]


def test_timing_launches_on_buffers_of_its_own() -> None:
    gradients = Gradients()
    contents = {REFERENCE: gradients.make("normal", SHAPE, 1, "cpu")}
    job = timing.attention_job(gradients.subject, SHAPE, contents)
    for buffer in job.buffers:
        buffer.zero_()
    job.launch()
    assert len(gradients.fed[0]) == 6 and not any(tensor.any() for tensor in gradients.fed[0])
    assert all(tensor.any() for tensor in contents[REFERENCE])


def test_bitwise_repeats_every_class_and_names_every_output(monkeypatch: pytest.MonkeyPatch) -> None:
    gradients = Gradients()
    named: list[tuple[str, ...]] = []

    def repeat(call: object, names: tuple[str, ...], *_: object) -> str:
        assert callable(call)
        named.append(names)
        assert len(call()) == len(names)
        return ""

    class Load:
        def __init__(self, milliseconds: float) -> None:
            assert milliseconds >= 0

        def busy_share(self) -> float:
            return 1.0

    monkeypatch.setattr(bitwise, "repeat", repeat)
    monkeypatch.setattr(bitwise, "Load", Load)
    assert bitwise.repeat_shape(gradients.subject, SHAPE, bitwise.QUICK) == ([], 1.0)
    assert named == [("dq", "dk", "dv")] * (len(inputs.CLASSES) + 1)
    assert not torch.equal(gradients.fed[0][0], gradients.fed[1][0])


def test_bitwise_computes_rows_again_in_the_ways_of_the_subject() -> None:
    gradients = Gradients()

    def ways(subject: Subject, given: Inputs, stranger: Inputs, is_causal: bool) -> list[Way]:
        assert len(given) == len(stranger) == 6
        whole = subject.attend(given, is_causal)
        return [
            Way("again", lambda: subject.attend(given, is_causal), whole),
            Way("of a stranger", lambda: subject.attend(stranger, is_causal), whole),
        ]

    found = rows_of_shape(replace(gradients.subject, ways=ways), SHAPE, "normal", "large", seed=1, device="cpu")
    assert found.ways == 2 and [line.partition(":")[0] for line in found.differing] == ["of a stranger"]
