"""The benchmark of gradients: what is counted, what is right, who is called, and what is stored of it."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_samples import BENCHMARKS, TINY, rendered, some_report, times

import dhp_safe_fa
import dhp_safe_fa.bench.__main__ as command
from dhp_safe_fa.bench import Candidate, Case, Settings, WrongResult, anchors, measure
from dhp_safe_fa.bench.directions import BACKWARD, FORWARD, TRAINING
from dhp_safe_fa.bench.gradients import peers
from dhp_safe_fa.bench.gradients.cases import BackwardCase, TrainingCase
from dhp_safe_fa.bench.gradients.reference import NAMES, GradientJudge, errors, gradients, gradients_and_those_of
from dhp_safe_fa.bench.peers import sdpa
from dhp_safe_fa.bench.results import Outcome, Result, from_json, load, to_json

QUICK = Settings(rounds=2, sample_ms=0.5)
ANCHORS = BENCHMARKS / "anchors_h100_backward.csv"
SIZES = (1, 4, 40, 16, True, "float32", 2)


def drawn(case: Case, seed: int = 3, layout: str = "BSHD") -> tuple[torch.Tensor, ...]:
    return case.draw("cpu", torch.Generator().manual_seed(seed), layout)


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_work_is_two_and_a_half_times_the_forwards() -> None:
    forward, backward, training = (kind(2, 4, 100, 32, True, "bfloat16") for kind in (Case, BackwardCase, TrainingCase))
    assert backward.flops == 2.5 * forward.flops and training.flops == 3.5 * forward.flops
    assert forward != backward and len({forward, backward, training, BackwardCase.like(forward)}) == 3


def test_bytes_are_of_what_is_drawn() -> None:
    case = BackwardCase(*SIZES)
    inputs = drawn(case)
    assert case.input_bytes == sum(tensor.nbytes for tensor in inputs)
    assert case.bytes == case.input_bytes + sum(tensor.nbytes for tensor in inputs[:3])
    q, k, v, grad_out = drawn(training := TrainingCase(*SIZES))
    assert training.input_bytes == sum(tensor.nbytes for tensor in (q, k, v, grad_out)) and q.requires_grad


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_out_and_lse_are_the_forwards(layout: str) -> None:
    case = BackwardCase(*SIZES)
    q, k, v, out, lse, grad_out = drawn(case, layout=layout)
    assert grad_out.shape == q.shape and grad_out.stride() == q.stride()
    torch.testing.assert_close(out, sdpa(q, k, v, True), rtol=1e-5, atol=1e-5)
    scores = q @ k.repeat_interleave(2, dim=1).mT / 4
    assert lse[0, 0, 0] == pytest.approx(float(scores[0, 0, 0, 0]), rel=1e-5) and lse.dtype == torch.float32


# ---- what is right ---------------------------------------------------------------------------------------------------


def expected(case: Case, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in inputs[:3])
    return torch.autograd.grad(sdpa(q, k, v, case.causal), (q, k, v), inputs[-1].double())


@pytest.mark.parametrize("chunk", [2**26, 100, 1])
@pytest.mark.parametrize("sizes", [SIZES, (2, 3, 25, 8, False, "float16", None, 31), (1, 6, 17, 8, True, "float32", 1)])
def test_the_reference_is_autograds(sizes: tuple[Any, ...], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dhp_safe_fa.bench.gradients.reference.CHUNK_ELEMENTS", chunk)
    case = BackwardCase(*sizes)
    inputs = drawn(case)
    found = gradients(*inputs[:3], inputs[5], case.causal)
    for mine, theirs in zip(found, expected(case, inputs), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def judge(case: BackwardCase) -> tuple[GradientJudge, tuple[torch.Tensor, ...]]:
    inputs = drawn(case)
    right = expected(case, inputs)
    true = (right[0], right[1], right[2])
    return GradientJudge(case.dtype, true, true), right


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 2e-6), ("float16", 3.3e-4), ("bfloat16", 2.6e-3)])
@pytest.mark.parametrize("at", range(3))
def test_each_gradient_has_its_limit(at: int, dtype: str, limit: float) -> None:
    case = dataclasses.replace(BackwardCase(2, 8, 64, 16, False, "float32"), dtype=dtype)
    one, right = judge(case)
    for factor, is_right in ((0.98, True), (1.02, False)):
        found = [gradient * (1 + factor * limit * (name == at)) for name, gradient in enumerate(right)]
        verdict = one.ours(found)
        assert (verdict.wrong is None) == is_right and verdict.relative_error == pytest.approx(factor * limit, rel=1e-3)
        assert is_right or f"of {NAMES[at]} against float64" in str(verdict.wrong)
        assert one.peer(found).wrong is None
    assert one.peer([gradient * (1 + 11 * limit) for gradient in right]).wrong


def test_one_wrong_row_and_nan_are_wrong() -> None:
    one, right = judge(BackwardCase(2, 8, 64, 16, True, "float32"))
    assert one.ours(right).wrong is None, "the first row of a causal dq is 0"
    wrong = [gradient.clone() for gradient in right]
    wrong[1][1, 3, 17] *= 1 + 2e-5
    assert "of one row of dk" in str(one.ours(wrong).wrong)
    wrong[1][1, 3, 17] = torch.nan
    assert "nan" in str(one.ours(wrong).wrong) and errors(right[1], wrong[1])[0] != errors(right[1], wrong[1])[0]


def test_rows_are_judged_by_the_rounded_out_that_was_given() -> None:
    """A row with one likely key has dP - delta near 0 there, so its dq is mostly what rounding did to out."""
    case = BackwardCase(1, 8, 512, 64, True, "bfloat16")
    q, k, v, _, _, grad_out = drawn(case)
    q = 2 * q  # one likely key in most rows
    out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=True)
    true, of_out = gradients_and_those_of(out, q, k, v, grad_out, True)
    found = torch.ops.dhp.attention_backward(grad_out, q, k, v, out, lse, True)
    assert errors(true[0], found[0])[1] > 4 * errors(of_out[0], found[0])[1]
    assert case.judge((q, k, v, out, lse, grad_out), torch.Generator()).ours(found).wrong is None
    found[0][0, 3, 400] *= 1.03
    assert "of one row of dq" in str(case.judge((q, k, v, out, lse, grad_out), torch.Generator()).ours(found).wrong)


# ---- who is called ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", [BACKWARD, TRAINING], ids=lambda one: str(one.case.direction))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_everybody_on_the_cpu_is_right_and_repeats(direction: Any, dtype: str) -> None:
    """On inputs that are always the same: of so few rows, one that sees few keys may have most of the error."""
    case = direction.case(1, 4, 70, 32, True, dtype)
    result = measure(case, direction.candidates("cpu")[0], QUICK, generator=torch.Generator().manual_seed(3))
    assert [outcome.name for outcome in result.outcomes][:3] == ["ours", "flash", "math"]
    for outcome in result.outcomes:
        assert outcome.us and outcome.repeats_equal == case.repeats and set(outcome.errors or ()) == set(NAMES)
        assert outcome.relative_error == max((outcome.errors or {}).values())


def test_what_a_candidate_refuses_is_a_reason() -> None:
    """A call is prepared when it is first made, where what it raises is caught."""

    def refuse(*_: object) -> object:
        raise RuntimeError("no such shape")

    ours, *_ = BACKWARD.candidates("cpu")[0]
    result = measure(BackwardCase(*SIZES), [ours, Candidate("peer", refuse)], QUICK)
    assert result.outcomes[1].reason == "no such shape"
    with pytest.raises(WrongResult, match="ours failed: no such shape"):
        measure(BackwardCase(*SIZES), [Candidate("ours", refuse)], QUICK)


def test_repeats_that_differ_are_counted() -> None:
    calls = itertools.count()  # the faster the machine, the more of them

    def unsteady(*given: Any) -> Any:
        dq, dk, dv = peers.our_gradients(*given)
        return (dq, dk, dv * (1 + 2**-23 * (next(calls) % 2)))

    ours, *_ = BACKWARD.candidates("cpu")[0]
    result = measure(BackwardCase(*SIZES), [ours, Candidate("peer", peers.direct(unsteady))], QUICK)
    assert [outcome.repeats_equal for outcome in result.outcomes] == [10, 5]
    shown = rendered(some_report(result))
    assert "1 of 1" in shown and "0 of 1" in shown


@pytest.mark.parametrize(("name", "deterministic"), peers.FLASH_ATTENTION_3.items())
def test_flash_attention_3_is_called_by_name(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    def attention(q: Any, k: Any, v: Any, causal: bool, deterministic: bool) -> Any:
        asked.append(deterministic)
        return sdpa(*(tensor.transpose(1, 2) for tensor in (q, k, v)), causal).transpose(1, 2), None

    asked: list[bool] = []
    monkeypatch.setitem(__import__("sys").modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=attention))
    found, notes = BACKWARD.candidates("cuda")
    candidate = next(one for one in found if one.name == name)
    ours, *_ = BACKWARD.candidates("cpu")[0]
    result = measure(BackwardCase(*SIZES), [ours, candidate], QUICK)
    assert result.outcomes[1].us and asked == [deterministic] and not notes
    assert name in [one.name for one in TRAINING.candidates("cuda")[0]]


def test_the_operators_of_torch_take_what_they_are_given() -> None:
    """Without a GPU: their shapes alone, by their registration for tensors without data."""
    q, k, v, out, _, grad_out = (torch.empty(1, 2, 40, 64, device="meta", dtype=torch.float16) for _ in range(6))
    lse = torch.empty(1, 2, 40, device="meta")
    given = (q, k, v, out, lse, grad_out, True)
    for prepare, operator in peers.OPERATORS.values():
        for found in (prepare(*given)(), operator(*given)):
            assert [tuple(one.shape) for one in found] == [(1, 2, 40, 64)] * 3


# ---- files and the command -------------------------------------------------------------------------------------------


def test_anchors_of_the_backward() -> None:
    assert anchors.of_checkout("backward") == ANCHORS
    fastest = anchors.load(ANCHORS, BackwardCase)
    deterministic = anchors.load(ANCHORS, BackwardCase, "fa3_deterministic_tflops")
    assert len(fastest) == 30
    assert {BackwardCase.like(case) for case in BACKWARD.sets["anchors"](None, "cuda", False)} == set(fastest)
    assert set(deterministic) == {case for case in fastest if case.head_dim < 256}
    assert fastest[BackwardCase(2, 16, 8192, 128, True, "bfloat16")] == pytest.approx(515 / 606)
    assert all(isinstance(case, BackwardCase) for case in fastest)


def gradients_result(case: Case) -> Result:
    found = {"errors": {"dq": 1e-3, "dk": 2e-3, "dv": 3e-3}, "repeats_equal": 10}
    outcomes = [Outcome(name, 3e-3, times(us), **found) for name, us in (("ours", 10), ("cudnn", 8))]  # type: ignore[arg-type]
    return Result(case, tuple(outcomes))


def test_results_are_stored_with_direction_errors_and_repeats() -> None:
    result = gradients_result(BackwardCase(2, 16, 8192, 128, True, "bfloat16"))
    stored = to_json(some_report(result))
    assert stored["results"][0]["case"]["direction"] == "backward" and from_json(stored).results == [result]
    readme = (BENCHMARKS / "README.md").read_text()
    assert all(f"`{key}`" in readme for key in ("errors", "repeats_equal", "backward", "training", *NAMES))
    shown = rendered(some_report(result))
    assert "3.00e-03" in shown and "1 of 1" in shown


@pytest.mark.usefixtures("a_gpu")
def test_estimates_of_both_modes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "measure", lambda case, *_: gradients_result(case))
    path = tmp_path / "run.json"
    assert command.main(["--backward", "--seed", "1", "--json", str(path)]) == 0
    report = load(path)
    assert len(report.results) == 30 and report.peers() == ["cudnn", "fa3~", "fa3-det~"]
    ratios = dict(report.ratios("fa3-det~"))
    assert len(ratios) == 20
    assert ratios[BackwardCase(2, 16, 8192, 128, True, "bfloat16")] == pytest.approx(0.8 * 515 / 482)
    again = tmp_path / "again.json"
    assert command.main(["--from", str(path), "--anchors", str(ANCHORS), "--json", str(again)]) == 0
    assert load(again).results == report.results


@pytest.mark.parametrize("option", ["--backward", "--training"])
def test_the_command_measures_gradients(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.json"
    assert command.main([option, "--device", "cpu", "--quick", "--shapes", TINY, "--json", str(path)]) == 0
    (result,) = load(path).results
    assert result.case.direction == option[2:] and result.case.dtype == "float32"
    assert "equal in all repeats" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        command.main(["--backward", "--training"])
    assert command.main(["--from", str(path), option]) == 2


def test_directions_have_their_own_defaults() -> None:
    for direction in (BACKWARD, TRAINING):
        assert direction.default_sets["cuda"] == ["anchors"] and direction.dtypes["cuda"] == ["bfloat16"]
        assert all(isinstance(case, direction.case) for case in direction.host_case.values())
    assert not FORWARD.dtypes


@pytest.mark.parametrize("heads_behind", [True, False])
def test_the_memory_efficient_kernels_are_given_out_as_they_store_it(
    heads_behind: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They step from row to row by all heads, so that any other layout would have them read other memory. Copies are
    made before the call, which is timed: each call is given the same tensors."""
    given: list[tuple[torch.Tensor, torch.Tensor]] = []

    def operator(*arguments: Any) -> Any:
        given.append((arguments[5], arguments[6]))
        return (*arguments[:3], None)

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention_backward", operator)
    stored = torch.randn(2, 5, 3, 8).transpose(1, 2)
    out = stored if heads_behind else stored.contiguous()
    arguments = (out, out, out, out, torch.zeros(2, 3, 5), out, False)
    (prepare,) = (one.attend for one in BACKWARD.candidates("cuda")[0] if one.name == "efficient")
    call = prepare(*arguments)
    assert not given
    for differentiate in (call, call, lambda: peers.OPERATORS["efficient"][1](*arguments)):
        differentiate()
        read, lse = given[-1]
        assert read.stride() == (5 * 3 * 8, 8, 3 * 8, 1) and torch.equal(read, stored)
        assert lse.shape == (2, 3, 32) and bool((lse[..., 5:] == torch.inf).all())
    assert given[0][0] is given[1][0] and given[0][1] is given[1][1]
