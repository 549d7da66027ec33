"""Windows, soft caps and sinks under the gate `bitwise`: every way to compute a row again, and faults that it finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from harness import needs_kernels
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa.gates import inputs, sinks
from dhp_safe_fa.gates.bitwise.rows import Rows, rows_of_shape
from dhp_safe_fa.gates.bitwise.window_rows import WINDOWS
from dhp_safe_fa.gates.inputs import Shape
from dhp_safe_fa.gates.subjects import Subject, shipped
from dhp_safe_fa.gates.timing import inputs as timing_inputs

KERNELS = [f"fwd_bfloat16_d64_k128_w3_listed{form}" for form in ("", "_sinks", "_softcap")]
SHAPE = Shape(2, 4, 2, 150, 220, 32, "bfloat16", True)

Packed = Callable[..., tuple[Tensor, Tensor]]


def subject(name: str) -> Subject:
    (found,) = shipped([name])
    return found


def rows(name: str, own: str = "normal", shape: Shape = SHAPE) -> Rows:
    return rows_of_shape(subject(name), shape, own, inputs.ROW_CLASSES[own], 1, "cpu")


@needs_kernels
@pytest.mark.parametrize("own", inputs.ROW_CLASSES)
@pytest.mark.parametrize("name", KERNELS)
def test_rows_are_the_same_in_every_way(name: str, own: str) -> None:
    for shape in (SHAPE, replace(SHAPE, seqlen_k=150, is_causal=False), replace(SHAPE, seqlen_q=160, seqlen_k=160)):
        found = rows(name, own, shape)
        assert found.differing == found.refused == []


def a_key_too_many(run: Packed, *given: Any, window: tuple[int, int] = (-1, -1), **options: Any) -> Any:
    return run(*given, window=window if window[0] < 0 else (window[0] + 1, window[1]), **options)


def one_sink_for_all(run: Packed, *given: Any, sinks: Tensor | None = None, **options: Any) -> Any:
    return run(*given, sinks=None if sinks is None else sinks[:1].expand_as(sinks).contiguous(), **options)


def uncapped_in_pages(run: Packed, *given: Any, softcap: float | None = None, **options: Any) -> Any:
    return run(*given, softcap=None if options.get("page_table") is not None else softcap, **options)


@needs_kernels
def test_faults_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of packed calls; those of attention are right."""
    run = dhp_safe_fa.attention_varlen_lse

    def faulty(wrong: Any) -> None:
        monkeypatch.setattr(
            dhp_safe_fa, "attention_varlen_lse", lambda *given, **options: wrong(run, *given, **options)
        )

    faulty(one_sink_for_all)
    assert any(line.startswith("as a call of attention") for line in rows(KERNELS[1]).differing)
    assert rows(KERNELS[0]).differing == []
    faulty(uncapped_in_pages)
    found = rows(KERNELS[2], shape=replace(SHAPE, heads_k=4)).differing
    ways = {line.rpartition("as ")[2].partition(":")[0] for line in found}
    assert ways == {"pages of 16 keys", "pages of 256 keys"}
    faulty(a_key_too_many)
    found = rows(KERNELS[0], shape=replace(SHAPE, seqlen_q=260)).differing
    assert {line.partition(": ")[0] for line in found} == {f"window {window}" for window in WINDOWS}


@needs_kernels
@pytest.mark.parametrize("name", KERNELS[1:])
def test_sinks_are_secrets(name: str) -> None:
    """They differ from class to class, and are matched where the gate `timing` compares."""
    one = subject(name)
    seen = {kind: sinks.of(one.make(kind, SHAPE, 1, "cpu")) for kind in one.classes}
    assert all(found is not None and found.shape == (4,) and found.dtype == torch.float32 for found in seen.values())
    assert not any(seen["zeros"]) and seen["NaN rows"].isnan().any() and seen["large"].abs().max() > 20
    matched = {kind: sinks.of(given) for kind, given in one.matched(SHAPE, 1, "cpu").items()}
    reference = matched[timing_inputs.REFERENCE]
    assert set(one.tested) == set(matched) - {timing_inputs.REFERENCE, *timing_inputs.SAME}
    for kind, found in matched.items():
        assert torch.equal(found.abs().sort().values, reference.abs().sort().values), kind
    assert not torch.equal(matched[sinks.ORDER], reference)
    given = one.make("normal", SHAPE, 1, "cpu")
    assert sinks.of(given).data_ptr() == given[3].data_ptr(), "a copy would be a launch"
