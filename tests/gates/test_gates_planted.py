"""Subjects and planted kernels: what there is without a GPU, and that they run on one."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from harness import needs_kernels

import dhp_safe_fa
from dhp_safe_fa import _inspect
from dhp_safe_fa.gates import controls, inputs, subjects, tools
from dhp_safe_fa.gates import planted as launching
from dhp_safe_fa.gates.bitwise.forms import FORMS
from dhp_safe_fa.gates.families import decode, fold, forward, packed, windowed


def pretend(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")


@pytest.mark.parametrize("start", [subjects.choose, lambda: launching.Planted(controls.Controls({}, []))])
def test_not_run_without_a_gpu_or_on_another(start: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(tools.NotRun, match="no CUDA GPU"):
        start()
    pretend(monkeypatch, (8, 0))
    with pytest.raises(tools.NotRun, match=r"Some GPU has compute capability 8\.0; 9\.0 \(Hopper\) is needed"):
        start()


def test_not_run_without_a_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, (9, 0))

    def cannot(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(launching.ctypes, "CDLL", cannot)
    with pytest.raises(tools.NotRun, match=r"libcuda\.so\.1"):
        launching.Planted(controls.Controls({}, []))


FORWARD = [kernel for kernel in _inspect.kernels() if (kernel["family"], kernel["part"]) == ("forward", "out")]
WINDOWED = [kernel for kernel in _inspect.kernels() if kernel["part"] == "window out"]
DECODE = [kernel for kernel in _inspect.kernels() if kernel["family"] == "decode"]
FOLD = [kernel for kernel in _inspect.kernels() if kernel["family"] == "fold"]


@pytest.mark.parametrize("kernel", FORWARD, ids=lambda kernel: str(kernel["name"]))
def test_shapes_launch_the_kernel(kernel: dict[str, object]) -> None:
    shapes = forward.shapes_of(kernel)
    assert {shape.is_causal for shape in shapes} == {True, False}
    assert any(shape.heads_q > shape.heads_k for shape in shapes)
    assert any(shape.seqlen_k % 2 for shape in shapes)
    tiles = [shape.seqlen_k // int(str(kernel["tile_k"])) for shape in shapes if not shape.is_causal]
    assert tiles and min(tiles) >= forward.LEAST_TILES, "what happens from tile to tile is not under test"
    if not kernel["is_short"]:
        assert max(tiles) > int(str(kernel["segment_tiles"])), "nor what happens from segment to segment"
    for shape in shapes:
        plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal)
        assert plan and plan["kernel"] == kernel["name"]


LONG = [kernel for kernel in FORWARD if not kernel["is_short"] and int(str(kernel["warpgroups"])) > 1]


@pytest.mark.parametrize("kernel", LONG, ids=lambda kernel: str(kernel["name"]))
def test_shapes_are_dealt_in_every_way(kernel: dict[str, object]) -> None:
    """In order and from the list; keys of several segments by one CTA; heads that share keys are not all of them."""
    shapes = forward.shapes_of(kernel)
    plans = [_inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal) for shape in shapes]
    assert all(plan and plan["splits"] == 1 for plan in plans)
    assert all(shape.heads_k > 1 for shape in shapes)
    of_both = [
        0 < plan["listed_groups"] < shape.batch * shape.heads_q // plan["heads_per_tile"]
        for plan, shape in zip(plans, shapes, strict=True)
        if plan and plan["mirrored"]
    ]
    assert any(of_both) and not all(of_both)


@pytest.mark.parametrize("kernel", WINDOWED, ids=lambda kernel: str(kernel["name"]))
def test_shapes_launch_the_kernel_of_windows(kernel: dict[str, object]) -> None:
    shapes = windowed.shapes_of(kernel)
    assert {shape.is_causal for shape in shapes} == {True, False}
    assert any(shape.heads_q > shape.heads_k for shape in shapes) and any(shape.seqlen_k % 2 for shape in shapes)
    for shape in shapes:
        plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal, 0, *windowed.WINDOW)
        assert plan and plan["kernel"] == kernel["name"]
        assert shape.seqlen_q > windowed.WINDOW[0] + int(str(kernel["tile_k"])), "no key tile is hidden on the left"


@pytest.mark.parametrize("kernel", DECODE, ids=lambda kernel: str(kernel["name"]))
def test_shapes_launch_the_decode_kernel(kernel: dict[str, object]) -> None:
    shapes = decode.shapes_of(kernel)
    assert any(shape.heads_q > shape.heads_k for shape in shapes) and any(shape.seqlen_k % 2 for shape in shapes)
    assert {shape.seqlen_q for shape in shapes} == {1, 3}
    for shape in shapes:
        plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal)
        assert plan and plan["kernel"] == kernel["name"]


@pytest.mark.parametrize("kernel", FOLD, ids=lambda kernel: str(kernel["name"]))
def test_shapes_launch_the_fold_kernel(kernel: dict[str, object]) -> None:
    """Of parts that a kernel of its own dtype and head_dim has made."""
    by_name = {one["name"]: one for one in _inspect.kernels()}
    shapes = fold.shapes_of(kernel)
    assert any(shape.heads_q > shape.heads_k for shape in shapes) and any(shape.seqlen_k % 2 for shape in shapes)
    assert {shape.seqlen_q for shape in shapes} == {1, 3}
    for shape in shapes:
        plan = _inspect.plan(shape.q, shape.k, shape.dtype, shape.is_causal)
        assert plan and plan["splits"] > 1
        made_by = by_name[plan["kernel"]]
        assert (made_by["dtype"], made_by["head_dim"]) == (kernel["dtype"], kernel["head_dim"])


def test_a_fold_that_no_shape_reaches_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inspect, "plan", lambda *_: None)
    with pytest.raises(tools.NotRun, match="fold_64: no shape was found whose plan chooses this kernel"):
        fold.shapes_of({"name": "fold_64", "head_dim": 64, "dtype": "float16"})


@needs_kernels
def test_rows_of_every_forward_are_computed_in_every_form() -> None:
    of_forward = ("forward", "decode", "fold", "tiles")
    forwards = [kernel for kernel in _inspect.kernels() if kernel["family"] in of_forward]
    assert {str(kernel["part"]) for kernel in forwards} >= {"out", "window out", *packed.ASKED}
    for kernel in forwards:
        (subject,) = subjects.shipped([str(kernel["name"])])
        assert set(subject.call().forms) == set(FORMS), kernel["name"]


@pytest.mark.parametrize(
    "shape",
    [
        inputs.Shape(2, 4, 4, 50, 70, 64, "float16", True),
        inputs.Shape(2, 4, 1, 64, 96, 56, "bfloat16", False),
        inputs.Shape(1, 4, 2, 33, 45, 64, "float16", True),
    ],
    ids=str,
)
def test_packed_inputs_are_views(shape: inputs.Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied in a call that is counted or timed; grouped heads have keys in pages, if these are full."""
    given = packed.make("normal", shape, 1, "cpu")
    called: list[tuple[Any, dict[str, Any]]] = []
    run = dhp_safe_fa.attention_varlen_lse
    monkeypatch.setattr(dhp_safe_fa, "attention_varlen_lse", lambda *a, **o: (called.append((a, o)), run(*a, **o))[1])
    got = packed.attend(given, shape.is_causal)
    ((tensors, options),) = called
    assert [t.data_ptr() for t in tensors[:3]] == [t.data_ptr() for t in given]
    assert (options["page_table"] is not None) == (shape.heads_k == 1)
    for found, want in zip(got, dhp_safe_fa.attention_lse(*given, is_causal=shape.is_causal), strict=True):
        assert torch.equal(found, want)
    for contents in (packed.matched(shape, 1, "cpu"), packed.power(shape, 1, "cpu")):
        for q, k, v in contents.values():
            assert all(t.clone().transpose(1, 2).is_contiguous() for t in (q, k, v))


@pytest.mark.parametrize("gate", ["counters", "bitwise", "timing"])
def test_a_subject_without_shapes_is_not_run(gate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is run, nothing is found: that is no pass."""
    module = importlib.import_module(f"dhp_safe_fa.gates.{gate}.gate")
    for name, double in {"require_gpu": lambda: None, "GpuClock": lambda: None}.items():
        monkeypatch.setattr(module, name, double, raising=False)
    monkeypatch.setattr(controls, "load_controls", lambda *_: controls.Controls({"a": "branch"}, [], {}))
    empty = subjects.Subject("attn", lambda *_: (), nullcontext, ("attn",), ())
    with pytest.raises(tools.NotRun, match="attn: has no shape to be run on"):
        module.run([empty], True, lambda *_: None)


@needs_kernels
def test_a_kernel_that_no_shape_reaches_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = forward.planned
    first, second = FORWARD[:2]
    unreached = {second["name"]: "another"}
    monkeypatch.setattr(forward, "planned", lambda shape: unreached.get(planned(shape), planned(shape)))
    found = {subject.name: subject for subject in subjects.shipped()}
    assert found[first["name"]].shapes and not found[first["name"]].why_not
    assert "no shape was found" in found[second["name"]].why_not and not found[second["name"]].shapes


@needs_kernels
def test_a_kernel_of_a_family_that_the_gates_do_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inspect, "kernels", lambda: [{"name": "attn", "family": "new", "cubin_sha256": "0"}])
    (subject,) = subjects.shipped()
    assert "families.new" in subject.why_not


@needs_kernels
def test_every_family_is_under_test() -> None:
    assert not [subject.why_not for subject in subjects.shipped() if subject.why_not]


def test_shipped_names_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inspect, "kernels", lambda: [{"name": "attn"}])
    with pytest.raises(tools.NotRun, match="no such kernel; shipped are attn"):
        subjects.shipped(["attn", "other"])
    monkeypatch.setattr(_inspect, "kernels", list)
    with pytest.raises(tools.NotRun, match="built without nvcc"):
        subjects.shipped()


def test_peers_are_those_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subjects.peers, "flash_attention_3", lambda: "No module named flash_attn_interface")
    for name in ("sdpa-flash", "sdpa-cudnn", "sdpa-efficient"):
        assert subjects.peer(name).name == name
    with pytest.raises(tools.NotRun, match="flash_attn_interface"):
        subjects.peer("fa3")


def test_clean_twin_runs(gpu: None, planted: controls.Controls) -> None:
    launcher = launching.Planted(planted)
    secret, out = torch.randn(inputs.SECRETS, device="cuda"), torch.zeros(inputs.SECRETS, device="cuda")
    launcher.launch("uninitialised_workspace", "clean", secret, out)
    assert torch.equal(out[:128], secret[:128]) and not out[128:].any()
    with pytest.raises(KeyError, match="no_such_leak"):
        launcher.launch("no_such", "leak", secret, out)
    with pytest.raises(ValueError, match="secret: 8 elements"):
        launcher.launch("uninitialised_workspace", "clean", secret[:8], out)
    with pytest.raises(ValueError, match="out: contiguous float32"):
        launcher.launch("uninitialised_workspace", "clean", secret, out.cpu())
