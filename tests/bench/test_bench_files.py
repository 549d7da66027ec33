"""The files of the benchmark: anchors of FlashAttention-3 and stored results."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from bench_samples import ANCHORS, BENCHMARKS, rendered, some_report, some_result, times

from dhp_safe_fa._files import write_whole
from dhp_safe_fa.bench import Case, anchors
from dhp_safe_fa.bench.cases import parse_case, select
from dhp_safe_fa.bench.results import Outcome, Result, from_json, load, save, to_json

# ---- anchors --------------------------------------------------------------------------------------------------------


def test_anchors_of_the_project() -> None:
    """The rows are those that --shapes anchors measures."""
    factors = anchors.load(ANCHORS)
    assert factors[Case(8, 32, 2048, 64, False, "bfloat16")] == pytest.approx(456 / 474)
    assert set(select(["anchors"], None, "cuda", quick=False)) == set(factors) and len(factors) == 36
    assert anchors.of_checkout("forward") == ANCHORS and anchors.of_checkout("sideways") is None


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_estimate_scales_cudnn(dtype: str) -> None:
    """By bfloat16's ratio, also for float16, which the notes say."""
    result = some_result(Case(1, 8, 512, 64, False, dtype))
    factors = {Case(1, 8, 512, 64, False, "bfloat16"): 0.5}
    estimated = anchors.with_estimate(result, factors)
    assert estimated.outcomes[:-1] == result.outcomes
    assert estimated.ratio("fa3~") == pytest.approx(0.4) and estimated.best_peer() == ("cudnn", 0.8)
    basis = estimated.outcomes[-1].basis
    assert basis is not None and "0.500" in basis and "bfloat16" in basis
    text = rendered(some_report(estimated))
    assert "estimated, not measured" in text and ("float16 is estimated by the ratio in bfloat16" in text) == (
        dtype == "float16"
    )
    assert anchors.with_estimate(estimated, factors) == estimated, "in place of the earlier"
    assert anchors.with_estimate(result, {Case(1, 8, 1024, 64, False, "bfloat16"): 0.5}) == result
    assert anchors.with_estimate(estimated, {}) == estimated


def test_anchors_of_the_projects_history() -> None:
    """With a dtype of its own a row comes before bfloat16's ratio."""
    columns = "dtype,batch,heads,seqlen,head_dim,mask,sdpa_cudnn_tflops,fa3_tflops"
    factors = anchors.parse(f"{columns}\nfloat16,1,8,512,64,full,3,4\nbfloat16,1,8,512,64,full,1,2\n", "old")
    assert factors == {Case(1, 8, 512, 64, False, "float16"): 0.75, Case(1, 8, 512, 64, False, "bfloat16"): 0.5}
    assert anchors.with_estimate(some_result(), factors).ratio("fa3~") == pytest.approx(0.6)


def test_nothing_is_estimated_beside_the_real_one() -> None:
    result = some_result()
    factors = {Case(1, 8, 512, 64, False, "bfloat16"): 0.5}
    real = dataclasses.replace(result, outcomes=(*result.outcomes, Outcome("fa3", 1e-4, times(1), times(1))))
    assert anchors.with_estimate(real, factors) == real
    single = dataclasses.replace(result, case=Case(1, 8, 512, 64, False, "float32"))
    assert anchors.with_estimate(single, factors) == single


@pytest.mark.parametrize(
    "line", ["1,2", "1,2,2,3,3,4,full,x,5", "1,2,2,3,3,4,half,4,5", "1,2,2,3,3,4,full,4,0", "1,3,2,3,3,4,full,4,5"]
)
def test_anchors_errors(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"batch,heads,key_heads,seqlen_q,seqlen_k,head_dim,mask,sdpa_cudnn_tflops,fa3_tflops\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        anchors.load(path)


# ---- files ---------------------------------------------------------------------------------------------------------


def test_json_round_trip(tmp_path: Path) -> None:
    report = some_report(some_result(), Result(Case(1, 1, 8, 8, True, "bfloat16"), wrong="it is wrong"))
    path = tmp_path / "run.json"
    save(report, path)
    assert load(path) == report
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    data = json.loads(path.read_text())
    assert data["geometric_mean_ratio"]["flash"] == 2
    assert data["results"][0]["outcomes"][1]["ratio"] == 2


SEVERAL_GPUS = sorted((BENCHMARKS / "results" / "context_parallel").glob("*.json"))


@pytest.mark.parametrize("path", SEVERAL_GPUS, ids=lambda path: path.name)
def test_stored_runs_of_several_gpus(path: Path) -> None:
    """Of benchmarks/context_parallel.py: they say where they are from, and no repeat differed from one GPU."""
    run = json.loads(path.read_text())
    assert run["schema"] == "dhp_safe_fa.context_parallel/1" and run["environment"]["commit"] and run["ranks"] > 1
    assert all(set(line["equal"].values()) == {line["repeats"]} for line in run["bits"])
    assert {line["who"] for line in run["times"]} >= {"one GPU", "heads_at_once=None"}


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.name)
def test_stored_results_are_read(path: Path) -> None:
    """Labels are stored beside them, in the log of iterations: they stay what they were."""
    rows = json.loads(path.read_text())["results"]
    for row, result in zip(rows, load(path).results, strict=True):
        case = row["case"]
        if not any(map(case.get, ("key_heads", "key_seqlen", "window", "softcap", "sinks"))):
            length = case.get("lengths") or case["seqlen"]  # of packed sequences all of them, or their range
            sizes = f"{case['batch']},{case['heads']},{length},{case['head_dim']}"
            direction = case.get("direction", "forward")
            said = "" if direction == "forward" else f":{direction}"
            assert result.case.label == f"{sizes}:{'causal' if case['causal'] else 'full'}:{case['dtype']}{said}"
        if type(result.case) is Case:  # what can be asked for by its label; a direction has an option of its own
            assert parse_case(result.case.label, "") == result.case


def test_what_older_files_do_not_say() -> None:
    """Inputs were contiguous; nothing was timed alone; the direction was the forward; estimates had no basis."""
    result = some_result()
    estimated = dataclasses.replace(result, outcomes=(*result.outcomes, Outcome("fa3~", graph_us=times(5))))
    data = to_json(some_report(estimated))
    del data["settings"]["layout"], data["settings"]["alone_below_us"], data["results"][0]["case"]["direction"]
    for outcome in data["results"][0]["outcomes"]:
        for name in ("alone_us", "clock_mhz", "power_w", "basis"):
            del outcome[name]
    report = from_json(data)
    assert report.layout == "BHSD"
    assert {r.case.direction for r in report.results} == {"forward"}
    assert all(o.alone_us is None and o.basis is None for r in report.results for o in r.outcomes)
    text = rendered(report)
    assert "inputs stored [B, H, S, D]" in text and "by a ratio to cuDNN in an older file of anchors" in text


def test_keys_in_a_file_that_do_not_fit() -> None:
    data = to_json(some_report(some_result()))
    data["results"][0]["case"]["key_heads"] = 3
    with pytest.raises(ValueError, match="8 heads are no multiple of 3 key heads"):
        from_json(data)


def test_json_keys_are_documented() -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    data = to_json(some_report(some_result()))
    result = data["results"][0]
    outcome = result["outcomes"][0]
    for part in (data, data["settings"], result, result["case"], outcome, outcome["graph_us"]):
        assert [key for key in part if f"`{key}`" not in readme] == []


def test_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    report = some_report(some_result())
    report.environment["device"] = object()
    with pytest.raises(TypeError):
        save(report, path)
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("data", [[], {}, {"schema": "other/1"}, {"schema": "dhp_safe_fa.bench/1", "environment": {}}])
def test_other_json_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="not a benchmark result"):
        from_json(data)


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    """As /dev/null, which root may replace."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole("words\n", pipe)
        assert os.read(reader, 100) == b"words\n" and pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]
    finally:
        os.close(reader)
