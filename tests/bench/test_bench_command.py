"""``python -m dhp_safe_fa.bench``: small runs of the command, and its errors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from bench_samples import ANCHORS, TINY

from dhp_safe_fa.bench import Candidate, candidates
from dhp_safe_fa.bench.__main__ import main
from dhp_safe_fa.bench.cases import parse_case
from dhp_safe_fa.bench.directions import FORWARD
from dhp_safe_fa.bench.results import load


def test_command_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "run.json", tmp_path / "run.png"
    arguments = ["--device", "cpu", "--quick", "--seed", "5", "--shapes", f"{TINY}:causal", f"{TINY}:bfloat16"]
    assert main([*arguments, "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    report = load(path)
    assert report.settings["seed"] == 5 and report.layout == "BSHD"
    assert report.environment["threads"] == torch.get_num_threads()
    assert [r.case.dtype for r in report.results] == ["float32", "bfloat16"]
    for result in report.results:
        assert [o.name for o in result.outcomes] == ["ours", "flash", "math", "unfused"]
        assert all(o.eager_us and o.eager_us.median > 0 and o.graph_us is None for o in result.outcomes)
    assert list(report.host_us) == ["ours", "flash", "math", "unfused"]
    assert "not run: everything on CUDA" in shown

    everything = tmp_path / "all.png"
    assert main(["--from", str(path), "--plot", str(picture), "--plot-all", str(everything)]) == 0
    assert capsys.readouterr().out == shown
    assert everything.read_bytes().startswith(b"\x89PNG")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_seed_that_no_generator_takes_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--seed", str(2**64)])
    assert f"argument --seed: {2**64}; supported: -2^63 to 2^64 - 1" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--seed", "x"])
    assert "argument --seed: 'x'; expected a whole number" in capsys.readouterr().err


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
    forward = dataclasses.replace(FORWARD, candidates=lambda device: ([wrong, *peers], []))
    monkeypatch.setattr("dhp_safe_fa.bench.__main__.FORWARD", forward)
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
        (["--shapes", "stop"], "'stop' is neither start or sweep or odd or anchors or sustained nor a shape"),
        (["--shapes", "1,8/3,5,16"], "8 heads are no multiple of 3 key heads"),
        (["--list", "--json", "some.json"], "--list: given with --json some.json; it measures nothing"),
        (["--shapes", "1,2,3"], "is not four positive numbers"),
        (["--shapes", "1,2,3,8:half"], "'half' is neither a mask"),
        (["--shapes", "1,2,3,8:window5"], "--forms also takes windowKEYS"),
        (["--shapes", "1,2,3,8:page16"], "--paged pageSIZE"),
        (["--device", "cpu", "--cold"], "--cold needs --device cuda"),
        (["--device", "cpu", "--anchors", str(ANCHORS)], "--anchors needs --device cuda"),
        (["--device", "cpu", "--sustained"], "--sustained needs --device cuda"),
        (["--sustained", "--anchors", str(ANCHORS)], "its ratios are of short samples"),
        (["--sustained", "--cold"], "--cold: --sustained measures with inputs in place"),
        (["--device", "cpu", "--peers", "nobody"], "--peers nobody: there is no such peer here; there are flash, math"),
        (["--plot-all", "run.xyz"], "unknown ending"),
        (["--json", "/nowhere/run.json"], "--json /nowhere/run.json: cannot write there"),
        (["--plot", "run.xyz"], "unknown ending"),
        (["--from", "/nowhere/run.json"], "--from: [Errno 2] No such file"),
        (["--from", str(ANCHORS)], f"--from: {ANCHORS}: no JSON"),
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


def test_only_the_peers_that_were_named(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    arguments = ["--device", "cpu", "--quick", "--shapes", TINY, "--peers", "math", "--layout", "BHSD"]
    assert main([*arguments, "--json", str(path)]) == 0
    report = load(path)
    assert [o.name for o in report.results[0].outcomes] == ["ours", "math"] and report.layout == "BHSD"
