"""The benchmark: its arithmetic on known numbers, its files, its options, and a small run of the command."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from pathlib import Path

import pytest
import torch
from reference import reference
from rich.console import Console

from dhp_safe_fa.bench import Candidate, Case, Settings, WrongResult, anchors, candidates, measure, plot, tables
from dhp_safe_fa.bench.__main__ import main
from dhp_safe_fa.bench.cases import CUDA_START_SHAPES, START_SHAPES, parse_case, select
from dhp_safe_fa.bench.peers import ours, sdpa, unfused
from dhp_safe_fa.bench.reference import sample
from dhp_safe_fa.bench.results import Outcome, Report, Result, Stats, from_json, load, save, to_json

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ANCHORS = BENCHMARKS / "anchors_h100_forward.csv"
TINY = "1,2,40,16"
QUICK = Settings(rounds=2, sample_ms=0.1)


def times(*values: float) -> Stats:
    return Stats.of(list(values))


def some_result(case: Case | None = None) -> Result:
    """Ours 10 µs by graph; flash 20, cudnn 8; efficient without a graph; math not there."""
    return Result(
        case or Case(1, 8, 512, 64, False, "float16"),
        (
            Outcome("ours", 2.5e-4, times(9, 10, 11), times(30, 40, 50)),
            Outcome("flash", 2.5e-4, times(20, 20, 20), times(25, 25, 25)),
            Outcome("cudnn", 2.6e-4, times(8, 8, 8), times(30, 30, 30)),
            Outcome("efficient", 2.6e-4, None, times(60, 60, 60), "no CUDA graph, eager times compared: oops"),
            Outcome("math", reason="not run above 5e+08 stored scores"),
        ),
        max_abs_diff_sdpa=5e-4,
    )


def some_report(*results: Result) -> Report:
    environment = {"device": "GPU", "torch": "2", "dhp_safe_fa": "1", "commit": "0123456789abcdef", "dirty": True}
    settings = {"device": "cuda", "seed": 3, "rounds": 3, "sample_ms": 20, "cold": False}
    return Report(environment, settings, list(results), {"ours": times(5), "flash": times(6)}, ["a note"])


def rendered(report: Report) -> str:
    text = io.StringIO()
    tables.show(report, Console(file=text, width=tables.MIN_WIDTH))
    return text.getvalue()


# ---- arithmetic -----------------------------------------------------------------------------------------------------


def test_flops_and_bytes() -> None:
    full = Case(2, 3, 5, 7, False, "float16")
    assert full.flops == 4 * 2 * 3 * 5 * 5 * 7
    assert dataclasses.replace(full, causal=True).flops == full.flops / 2
    assert full.bytes == 4 * (2 * 3 * 5 * 7) * 2
    assert dataclasses.replace(full, dtype="float32").bytes == 2 * full.bytes


def test_flops_and_bytes_of_other_keys() -> None:
    case = Case(2, 6, 5, 7, False, "float16", key_heads=3, key_seqlen=11)
    assert case.shape == (2, 6, 5, 7) and case.key_shape == (2, 3, 11, 7)
    assert case.scores == 2 * 6 * 5 * 11
    assert case.flops == 4 * 2 * 6 * 5 * 11 * 7
    q, k = 2 * 6 * 5 * 7, 2 * 3 * 11 * 7
    assert case.input_bytes == 2 * (q + k + k)
    assert case.bytes == 2 * (q + k + k + q)
    grouped = Case(2, 6, 5, 7, True, "float32", key_heads=3)
    assert grouped.flops == 4 * 2 * 6 * 5 * 5 * 7 / 2
    assert grouped.bytes == 4 * 2 * (6 + 3 + 3 + 6) * 5 * 7


def test_statistics() -> None:
    stats = Stats.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert stats == Stats(median=3, q1=2, q3=4, low=1, high=5, samples=5)
    assert stats.spread == pytest.approx(200 / 3)
    assert stats.scaled(2) == Stats(median=6, q1=4, q3=8, low=2, high=10, samples=5)
    assert Stats.of([7.0]) == Stats(7, 7, 7, 7, 7, 1)
    with pytest.raises(ValueError, match="no samples"):
        Stats.of([])


def test_ratios() -> None:
    result = some_result()
    assert result.ratio("flash") == 2 and result.ratio("cudnn") == 0.8
    assert result.ratio("efficient") == 1.5, "without a graph eager is compared with eager"
    assert result.ratio("math") is None and result.ratio("nobody") is None
    assert result.best_peer() == ("cudnn", 0.8)
    assert result.tflops("ours") == pytest.approx(4 * 8 * 512 * 512 * 64 / 10e-6 / 1e12)


def test_geometric_mean() -> None:
    other = Result(some_result().case, (Outcome("ours", 0, times(10)), Outcome("flash", 0, times(5))))
    wrong = Result(some_result().case, wrong="wrong")
    report = some_report(some_result(), other, wrong)
    assert report.geomean("flash") == pytest.approx(math.sqrt(2 * 0.5))
    assert report.geomean("best") == pytest.approx(math.sqrt(0.8 * 0.5))
    assert report.geomean("math") is None
    assert report.peers() == ["flash", "cudnn", "efficient", "math"]
    assert report.wrong and not some_report(some_result()).wrong


# ---- cases ----------------------------------------------------------------------------------------------------------


def test_explicit_shapes() -> None:
    assert parse_case("1,2,3,8", "float16") == Case(1, 2, 3, 8, False, "float16")
    assert parse_case("1,2,3,8:causal:bfloat16", "float16") == Case(1, 2, 3, 8, True, "bfloat16")
    assert parse_case("4,32/4,25,64:causal", "float16") == Case(4, 32, 25, 64, True, "float16", key_heads=4)
    assert parse_case("1,2,3/5,8", "float16") == Case(1, 2, 3, 8, False, "float16", key_seqlen=5)


@pytest.mark.parametrize("sizes", ["4,16,1024,64", "4,32/4,2500,64", "4,16,777/3000,128", "32,32/8,1/8192,128"])
def test_labels_are_read_back(sizes: str) -> None:
    case = parse_case(sizes, "float16")
    assert case.sizes == sizes and case.label == f"{sizes}:full:float16"
    assert parse_case(case.label, "float32") == case


def test_equal_cases_are_equal() -> None:
    """However the keys' numbers are said: cases are keys of dictionaries, and labels are stored."""
    case = Case(4, 32, 25, 64, False, "float16")
    for same in (parse_case("4,32/32,25/25,64", "float16"), Case(4, 32, 25, 64, False, "float16", 32, 25)):
        assert same == case and {case: 1}[same] == 1 and same.label == "4,32,25,64:full:float16"
    others = {parse_case(text, "float16") for text in ("4,32/8,25,64", "4,32/4,25,64", "4,32,25/7,64")}
    assert len(others | {case}) == 4


@pytest.mark.parametrize("text", ["1,2,3", "1,2,3,4,5", "1,2,x,4", "1,2,-3,4", "1,0,3,4", "1,2,3,9999999999", "1,,3,4",
                                  "1,2/,3,4", "1,2/0,3,4", "1,2/1/1,3,4", "1,2,/3,4", "1,2,3/9999999999,4", "1/1,2,3,4",
                                  "1,2,3,4/4"])  # fmt: skip
def test_shape_errors(text: str) -> None:
    with pytest.raises(ValueError, match="is not four positive numbers"):
        parse_case(text, "float16")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1,8/3,5,16", "shape '1,8/3,5,16': 8 heads are no multiple of 3 key heads"),
        ("1,8/16,5,16", "8 heads are no multiple of 16 key heads"),
        ("1,8/2,4/5,16:causal", "shape '1,8/2,4/5,16': causal with 4 queries and 5 keys; only full is compared there"),
        ("1,8,5/4,16:causal", "causal with 5 queries and 4 keys"),
    ],
)
def test_keys_that_do_not_fit(text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_case(text, "float16")
    assert sentence in str(caught.value) and len(str(caught.value).splitlines()) == 1


def test_sets() -> None:
    start = select(["start"], None, "cuda", quick=False)
    assert {c.shape for c in start} == set(CUDA_START_SHAPES) and {c.mask for c in start} == {"full", "causal"}
    assert {c.shape for c in select(["start"], None, "cpu", quick=False)} == set(START_SHAPES)
    assert {c.dtype for c in start} == {"float16"}
    sweep = select(["sweep"], None, "cuda", quick=False)
    assert all(c.in_sweep for c in sweep) and not any(c.in_sweep for c in start)
    measured = {(c.seqlen, c.head_dim) for c in sweep if c.dtype == "float16"}
    assert measured >= {(512, 64), (16384, 64), (512, 128), (16384, 128)}
    assert any(c.dtype == "bfloat16" for c in sweep)
    assert select(["start,sweep"], None, "cuda", quick=False) == start + sweep
    assert select(["start", "start"], None, "cuda", quick=False) == start
    assert {c.dtype for c in select(["start"], ["bfloat16"], "cuda", quick=False)} == {"bfloat16"}
    assert len(select(["sweep"], None, "cuda", quick=True)) < len(sweep)
    tokens_and_hidden_of_the_sweep = parse_case("4,32/8,4096,64", "float16")
    assert not tokens_and_hidden_of_the_sweep.in_sweep


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_odd_set(device: str) -> None:
    """Both masks wherever the lengths are equal; quick is a third of it that still has everything."""
    cases, quick = (select(["odd"], None, device, quick=quick) for quick in (False, True))
    assert set(quick) < set(cases)
    for chosen in (cases, quick):
        assert {c.dtype for c in chosen} == {"float16" if device == "cuda" else "float32"}
        full = [c for c in chosen if not c.causal]
        assert [c.sizes for c in chosen if c.causal] == [c.sizes for c in full if not c.key_seqlen]
        assert any(c.causal and c.key_heads for c in chosen), "grouped-query attention"
        assert any(c.key_seqlen and c.key_heads and c.seqlen == 1 for c in chosen), "decoding"
    assert {c.dtype for c in select(["odd"], ["bfloat16"], device, quick=True)} == {"bfloat16"}


def test_odd_set_on_a_gpu() -> None:
    cases, quick = (select(["odd"], None, "cuda", quick=quick) for quick in (False, True))
    assert len(cases) == 2 * 16 + 6 and len(quick) == 2 * 6 + 2
    assert [cases[i].label for i in (0, 9, 16, 32, -1)] == [
        "4,16,900,128:full:float16",
        "4,32/4,2500,64:full:float16",
        "4,16,900,128:causal:float16",
        "4,16,777/3000,128:full:float16",
        "1,32/8,1/8192,128:full:float16",
    ]


# ---- correctness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("seqlen", [1, 50, 700])
def test_sampled_reference_is_attention(rng: torch.Generator, seqlen: int, is_causal: bool) -> None:
    q, k, v = (torch.randn(2, 100, seqlen, 4, generator=rng, dtype=torch.float64) for _ in range(3))
    true = sample(q, k, v, is_causal, rng)
    assert true.rows.shape == (200, min(seqlen, 81)) and true.rows.max() < seqlen
    gaps = true.rows.diff(dim=1, prepend=torch.full((200, 1), -1), append=torch.full((200, 1), seqlen))
    assert gaps.min() >= 0 and gaps.max() <= 2 * math.ceil(seqlen / true.rows.size(1)), "rows from everywhere"
    for out in (sdpa(q, k, v, is_causal), unfused(q, k, v, is_causal)):
        relative, worst_row = true.errors(out)
        assert relative <= worst_row <= 1e-13


@pytest.mark.parametrize("sizes", ["2,6/2,40,8", "2,6/1,40,8:causal", "3,4,7/50,8", "3,4,50/7,8", "2,8/4,1/90,8"])
def test_keys_of_other_heads_and_lengths(rng: torch.Generator, monkeypatch: pytest.MonkeyPatch, sizes: str) -> None:
    """The sampled reference, five heads at a time, which no group divides; and the peers."""
    case = parse_case(sizes, "float32")
    q = torch.randn(case.shape, generator=rng, dtype=torch.float64)
    k, v = (torch.randn(case.key_shape, generator=rng, dtype=torch.float64) for _ in range(2))
    expected = reference(q, k, v, case.causal).out
    five_heads = 5 * max(case.seqlen, case.head_dim) * case.key_shape[2]
    monkeypatch.setattr("dhp_safe_fa.bench.reference.CHUNK_ELEMENTS", five_heads)
    _, worst_row = sample(q, k, v, case.causal, rng).errors(expected)
    assert worst_row <= 1e-13
    for attend in (sdpa, unfused):
        torch.testing.assert_close(attend(q, k, v, case.causal), expected, rtol=0, atol=1e-13)


def test_the_wrong_key_head_is_seen() -> None:
    def interleaved(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        """Head h of q sees head h % Hk of k."""
        group = q.size(1) // k.size(1)
        return sdpa(q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), is_causal)

    with pytest.raises(WrongResult, match="relative error"):
        measure(parse_case("1,4/2,40,16", "float32"), [Candidate("interleaved", interleaved)], QUICK)


def test_one_wrong_row_is_seen(rng: torch.Generator) -> None:
    q, k, v = (torch.randn(1, 2, 64, 8, generator=rng) for _ in range(3))
    out = sdpa(q, k, v, False)
    out[0, 1, 63] *= 1.01
    relative, worst_row = sample(q, k, v, False, rng).errors(out)
    assert worst_row == pytest.approx(0.01, rel=1e-3) and relative < worst_row


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (lambda out: out * 1.01, "relative error 1.0.e-02 against float64"),
        (lambda out: out.index_fill(2, torch.tensor([7]), torch.nan), "relative error nan"),
    ],
)
def test_wrong_output_is_not_timed(fault: object, message: str) -> None:
    assert callable(fault)
    bad = Candidate("bad", lambda q, k, v, c: fault(sdpa(q, k, v, c)))
    with pytest.raises(WrongResult, match=message):
        measure(parse_case(TINY, "float32"), [bad], QUICK)


def test_peers_that_fail_or_are_wrong_have_a_reason() -> None:
    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("not today\nsecond line")

    peers = [Candidate("failing", fails), Candidate("wrong", lambda q, k, v, c: v)]
    result = measure(parse_case(TINY, "float32"), [Candidate("ours", ours), *peers], QUICK)
    assert [o.name for o in result.outcomes] == ["ours", "failing", "wrong"]
    assert [o.us is None for o in result.outcomes] == [False, True, True]
    assert result.outcomes[1].reason == "not today"
    assert result.outcomes[2].reason is not None and result.outcomes[2].reason.startswith("wrong: relative error")


def test_large_scores_are_not_stored() -> None:
    unfused_candidate = next(c for c in candidates("cpu")[0] if c.name == "unfused")
    q = torch.empty(1, 1, 1, 8)
    reason = unfused_candidate.first_run(Case(1, 1, 2**20, 8, False, "float32"), q, q, q)
    assert isinstance(reason, str) and reason.startswith("not run above")


# ---- anchors --------------------------------------------------------------------------------------------------------


def test_anchors_of_the_project() -> None:
    factors = anchors.load(ANCHORS)
    assert factors[Case(8, 32, 2048, 64, False, "float16")] == pytest.approx(463 / 489)
    assert set(select(["start", "sweep"], None, "cuda", quick=False)) <= set(factors)


def test_estimate_scales_cudnn() -> None:
    result = some_result()
    estimated = anchors.with_estimate(result, {result.case: 0.5})
    assert estimated.outcomes[:-1] == result.outcomes
    assert estimated.ratio("fa3~") == pytest.approx(0.4) and estimated.best_peer() == ("fa3~", pytest.approx(0.4))
    assert "estimated, not measured" in rendered(some_report(estimated))
    assert anchors.with_estimate(result, {}) == result
    real = dataclasses.replace(result, outcomes=(*result.outcomes, Outcome("fa3", 1e-4, times(1), times(1))))
    assert anchors.with_estimate(real, {result.case: 0.5}) == real


@pytest.mark.parametrize(
    "line", ["float16,1,2", "float16,1,2,3,4,full,x,5", "float16,1,2,3,4,half,4,5", "float16,1,2,3,4,full,4,0"]
)
def test_anchors_errors(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"dtype,batch,heads,seqlen,head_dim,mask,sdpa_cudnn_tflops,fa3_tflops\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        anchors.load(path)


# ---- files and tables -----------------------------------------------------------------------------------------------


def test_json_round_trip(tmp_path: Path) -> None:
    report = some_report(some_result(), Result(Case(1, 1, 8, 8, True, "bfloat16"), wrong="it is wrong"))
    path = tmp_path / "run.json"
    save(report, path)
    assert load(path) == report
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]
    data = json.loads(path.read_text())
    assert data["geometric_mean_ratio"]["flash"] == 2
    assert data["results"][0]["outcomes"][1]["ratio"] == 2


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "results").glob("*.json")), ids=lambda path: path.name)
def test_stored_results_are_read(path: Path) -> None:
    """Labels are stored beside them, in the log of iterations: they stay what they were."""
    rows = json.loads(path.read_text())["results"]
    for row, result in zip(rows, load(path).results, strict=True):
        case = row["case"]
        if not case.get("key_heads") and not case.get("key_seqlen"):
            sizes = f"{case['batch']},{case['heads']},{case['seqlen']},{case['head_dim']}"
            assert result.case.label == f"{sizes}:{'causal' if case['causal'] else 'full'}:{case['dtype']}"
        assert parse_case(result.case.label, "") == result.case


def test_keys_in_a_file_that_do_not_fit() -> None:
    data = to_json(some_report(some_result()))
    data["results"][0]["case"]["key_heads"] = 3
    with pytest.raises(ValueError, match="8 heads are no multiple of 3 key heads"):
        from_json(data)


def test_json_keys_are_documented() -> None:
    readme = (BENCHMARKS / "README.md").read_text()
    data = to_json(some_report(some_result()))
    result = data["results"][0]
    for part in (data, result, result["case"], result["outcomes"][0], result["outcomes"][0]["graph_us"]):
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


def test_tables() -> None:
    wrong = Result(Case(1, 1, 8, 8, True, "float16"), wrong="relative error nan")
    text = rendered(some_report(some_result(), wrong))
    line = next(part for part in text.splitlines() if "1,8,512,64" in part)
    for figure in ("10.00", "40.00", "1.25", "53.69", "209.7", "2.50e-04", "5.0e-04"):
        assert figure in line, f"{figure} is missing: {line}"
    for part in ("2.00", "0.80", "1.50e", "FAIL 1,1,8,8:causal:float16: relative error nan", "not run above", "a note"):
        assert part in text
    assert "…" not in text, "a cell was cut off"


def test_the_longest_case_fits_into_the_tables() -> None:
    longest = max(select(["odd"], ["bfloat16"], "cuda", quick=False), key=lambda case: len(case.sizes))
    unsteady = times(100, 400, 900)  # a spread of 100 % is a digit wider
    text = rendered(some_report(Result(longest, (Outcome("ours", 2.5e-4, unsteady, unsteady),), 5e-4)))
    assert f" {longest.sizes} " in text and "100.0" in text and "…" not in text


def test_plots(tmp_path: Path) -> None:
    sweep = [some_result(c) for c in select(["sweep"], None, "cuda", quick=True)]
    plot.save(some_report(some_result()), tmp_path / "bars.png")
    plot.save(some_report(*sweep, some_result()), tmp_path / "lines.svg")
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "lines.svg").read_text()
    with pytest.raises(ValueError, match="nothing to plot"):
        plot.save(some_report(), tmp_path / "none.png")


# ---- the command ----------------------------------------------------------------------------------------------------


def test_command_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "run.json", tmp_path / "run.png"
    arguments = ["--device", "cpu", "--quick", "--seed", "5", "--shapes", f"{TINY}:causal", f"{TINY}:bfloat16"]
    assert main([*arguments, "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    report = load(path)
    assert report.settings["seed"] == 5 and report.environment["threads"] == torch.get_num_threads()
    assert [r.case.dtype for r in report.results] == ["float32", "bfloat16"]
    for result in report.results:
        assert [o.name for o in result.outcomes] == ["ours", "flash", "math", "unfused"]
        assert all(o.eager_us and o.eager_us.median > 0 and o.graph_us is None for o in result.outcomes)
    assert list(report.host_us) == ["ours", "flash", "math", "unfused"]
    assert "not run: everything on CUDA" in shown

    assert main(["--from", str(path), "--plot", str(picture)]) == 0
    assert capsys.readouterr().out == shown
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_command_on_other_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, words = tmp_path / "run.json", ["1,4/2,33,16:causal", "1,4,5/70,16"]
    assert main(["--device", "cpu", "--quick", "--shapes", *words, "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    report = load(path)
    assert [r.case for r in report.results] == [parse_case(word, "float32") for word in words]
    for result in report.results:
        assert [o.name for o in result.outcomes if o.us] == ["ours", "flash", "math", "unfused"]
        assert f" {result.case.sizes} " in shown
    assert main(["--from", str(path)]) == 0
    assert capsys.readouterr().out == shown


def test_command_reports_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    peers = candidates("cpu")[0][1:]
    wrong = Candidate("ours", lambda q, k, v, c: v * 1.01)
    monkeypatch.setattr("dhp_safe_fa.bench.__main__.candidates", lambda device: ([wrong, *peers], []))
    assert main(["--device", "cpu", "--quick", "--shapes", TINY]) == 1
    captured = capsys.readouterr()
    assert f"FAIL {TINY}:full:float32: ours is wrong" in captured.err and "FAIL" in captured.out


def test_command_lists_without_measuring(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4,16,1024,64:causal:float32" in lines and "candidates: ours, flash, math, unfused" in lines


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--shapes", "stop"], "'stop' is neither start or sweep or odd nor a shape"),
        (["--shapes", "1,8/3,5,16"], "8 heads are no multiple of 3 key heads"),
        (["--shapes", "1,2,3"], "is not four positive numbers"),
        (["--shapes", "1,2,3,8:half"], "'half' is neither a mask"),
        (["--device", "cpu", "--cold"], "--cold needs --device cuda"),
        (["--device", "cpu", "--anchors", str(ANCHORS)], "--anchors needs --device cuda"),
        (["--json", "/nowhere/run.json"], "--json /nowhere/run.json: cannot write there"),
        (["--plot", "run.xyz"], "unknown ending"),
        (["--from", "/nowhere/run.json"], "No such file"),
        (["--from", str(ANCHORS)], "Expecting value"),
    ],
)
def test_command_line_errors(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and len(captured.err.splitlines()) == 1 and captured.out == ""


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--device", "cuda"]) == 2
    assert "--device cuda: torch sees no GPU" in capsys.readouterr().err
