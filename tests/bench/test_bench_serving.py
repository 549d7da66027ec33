"""The benchmark of serving: decoding, packed sequences, caches in pages; what is counted, right, refused and stored."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_samples import BENCHMARKS, rendered, some_report, times
from harness import needs_hopper
from reference import reference

import dhp_safe_fa
import dhp_safe_fa.bench.__main__ as command
from dhp_safe_fa.bench import Candidate, Case, Settings, WrongResult, anchors, candidates, measure
from dhp_safe_fa.bench.directions import DECODE, PAGED, VARLEN, Direction, parse
from dhp_safe_fa.bench.results import Outcome, Result, from_json, load, to_json
from dhp_safe_fa.bench.serving import peers
from dhp_safe_fa.bench.serving.cases import DecodeCase, PagedCase, VarlenCase
from dhp_safe_fa.bench.serving.reference import packed_sample

QUICK = Settings(rounds=2, sample_ms=0.1)
ANCHORS = BENCHMARKS / "anchors_h100_decode.csv"
REFUSAL = "dhp::attention_varlen: cu_seqlens_q: packed sequences; supported on CUDA: none, but a call for each length"

DECODING = DecodeCase.parse("2,4/2,1/70,16", "float32")
PACKED = VarlenCase.parse("3,4/2,40+1+17,16:causal", "float32")
PAGES = PagedCase.parse("2,4/2,3/70,16:page16", "float32")
SERVING = [(DECODE, DECODING), (VARLEN, PACKED), (PAGED, PAGES)]


def drawn(case: Case, layout: str = "BSHD") -> tuple[torch.Tensor, ...]:
    return case.draw("cpu", torch.Generator().manual_seed(3), layout)


# ---- cases -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        *(DECODING, PACKED, PAGES),
        VarlenCase.parse("64,32/8,16-8192,128", "bfloat16"),
        VarlenCase.parse("4,8,256,64", "float16"),
        PagedCase.parse("1,2,8,16:causal:page256", "float16"),
    ],
    ids=lambda case: str(case.label),
)
def test_labels_are_read_back(case: Case) -> None:
    assert parse(case.label) == case and case.label.endswith(f":{case.direction}")


def test_lengths() -> None:
    assert PACKED.seqlens == [40, 1, 17] and PACKED.seqlen == 40
    equal = VarlenCase.parse("2,4,30,16", "float32")
    assert equal.seqlens == [30, 30] and equal == VarlenCase.like(Case(2, 4, 30, 16, False, "float32"))
    assert equal == VarlenCase(2, 4, 30, 16, False, "float32", lengths="30")


def test_lengths_of_a_range_are_spread_by_a_rule() -> None:
    """As many in each octave, in no order, and the same in every run."""
    lengths = VarlenCase.parse("64,32/8,16-8192,128", "bfloat16").seqlens
    assert len(lengths) == 64 and min(lengths) == 16 and max(lengths) <= 8192
    octaves = [sum(16 * 2**i <= length < 32 * 2**i for length in lengths) for i in range(9)]
    assert sum(octaves) == 64 and all(6 <= count <= 9 for count in octaves)
    assert lengths[:6] == [16, 756, 70, 3297, 304, 28]


@pytest.mark.parametrize(
    ("kind", "text", "sentence"),
    [
        (VarlenCase, "3,4,8+9,16", "shape '3,4,8+9,16': 2 lengths of 3 sequences"),
        (VarlenCase, "3,4,8/9,16", "is not B,H[/Hk],LENGTHS,D with LENGTHS as in 512 or 16-8192 or 100+7+50"),
        (VarlenCase, "3,4,8+0+1,16", "is not B,H[/Hk],LENGTHS,D"),
        (VarlenCase, "3,4/3,8,16", "4 heads are no multiple of 3 key heads"),
        (VarlenCase, "3,4,8,16:half", "'half' is neither a mask"),
        (PagedCase, "1,2,8,16:page17", "pages of 17 keys; supported: 16, 32, 64, 128, 256"),
        (PagedCase, "1,2,8,16:page16:page32", "2 sizes of pages; expected one"),
        (PagedCase, "1,2,4/8,16:causal", "causal with 4 queries and 8 keys"),
    ],
)
def test_shapes_that_make_no_sense(kind: type[Case], text: str, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind.parse(text, "float32")
    assert sentence in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"key_seqlen": 9}, "9 keys; expected as many as queries"),
        ({"lengths": "8-"}, "lengths '8-'; expected S, LOW-HIGH or S1"),
        ({"lengths": "7+6"}, "the longest of 7.6 is not 8"),
    ],
)
def test_lengths_in_a_file_that_do_not_fit(sizes: dict[str, Any], sentence: str) -> None:
    result = Result(VarlenCase(2, 4, 8, 16, False, "float32"), (Outcome("ours", 0.0, None, times(1)),))
    data = to_json(some_report(result))
    data["results"][0]["case"] |= sizes
    with pytest.raises(ValueError, match=sentence):
        from_json(data)


def test_work_of_packed_sequences_is_that_of_each() -> None:
    each = [Case(1, 4, seqlen, 16, True, "float32", key_heads=2) for seqlen in PACKED.seqlens]
    assert PACKED.flops == sum(case.flops for case in each)
    assert PACKED.bytes == sum(case.bytes for case in each)
    assert PACKED.input_bytes == sum(tensor.nbytes for tensor in drawn(PACKED)[:3])
    as_the_sweep = VarlenCase.parse("8,32,2048,64:causal", "float32")
    assert Case.like(Case(8, 32, 2048, 64, True, "float32")).in_sweep and not as_the_sweep.in_sweep


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
@pytest.mark.parametrize("size", [16, 256])
def test_pages_hold_the_same_keys_in_another_order(size: int, layout: str) -> None:
    case = PagedCase.parse(f"2,4/2,3/270,16:page{size}", "float32")
    given = peers.Paged(*drawn(case, layout))
    pages = given.table.flatten().tolist()
    assert sorted(pages) == list(range(2 * -(-270 // size))) and (size == 256 or pages != sorted(pages))
    for keys, cache in ((given.k, given.cache_k), (given.v, given.cache_v)):
        for b in range(2):
            rows = [cache[given.table[b, j // size], j % size] for j in range(270)]
            assert torch.equal(torch.stack(rows, dim=1), keys[b])
    assert torch.equal(given.out(given.rows), given.q)


# ---- what is right ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_reference_of_packed_sequences_is_that_of_each(rng: torch.Generator, is_causal: bool) -> None:
    lengths = [70, 1, 33]
    q = torch.randn(sum(lengths), 4, 8, generator=rng, dtype=torch.float64)
    k, v = (torch.randn(sum(lengths), 2, 8, generator=rng, dtype=torch.float64) for _ in range(2))
    one_each = [[tensor.transpose(0, 1)[None] for tensor in each]
                for each in zip(*(t.split(lengths) for t in (q, k, v)), strict=True)]  # fmt: skip
    expected = torch.cat([reference(*each, is_causal).out[0] for each in one_each], dim=1)
    true = packed_sample(q, k, v, lengths, is_causal, rng)
    assert true.errors(expected)[1] <= 1e-13
    assert all(((true.rows >= first) & (true.rows < first + n)).any() for first, n in ((0, 70), (70, 1), (71, 33)))
    expected[1, 70] *= 1.01  # the one row of the second sequence
    assert true.errors(expected)[1] == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(("direction", "case"), SERVING, ids=["decode", "varlen", "paged"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_everybody_on_the_cpu_is_right(direction: Direction, case: Case, dtype: str, layout: str) -> None:
    settings = dataclasses.replace(QUICK, layout=layout)
    result = measure(dataclasses.replace(case, dtype=dtype), direction.candidates("cpu")[0], settings)
    assert len(result.outcomes) > 1 and all(outcome.us for outcome in result.outcomes)
    for outcome in result.outcomes:
        assert result.tb_per_s(outcome.name) == pytest.approx(result.case.bytes / outcome.us.median * 1e6 / 1e12)  # type: ignore[union-attr]


def test_rows_that_look_into_another_sequence_are_wrong() -> None:
    def one_sequence(q: Any, k: Any, v: Any, starts: Any, lengths: Any, is_causal: bool) -> torch.Tensor:
        return peers.sdpa_each(q, k, v, starts, [sum(lengths)], is_causal)

    with pytest.raises(WrongResult, match="ours is wrong: relative error"):
        measure(PACKED, [Candidate("ours", one_sequence)], QUICK)
    result = measure(PACKED, [Candidate("ours", peers.ours_packed), Candidate("peer", one_sequence)], QUICK)
    assert str(result.outcomes[1].reason).startswith("wrong: relative error")


def test_pages_in_the_wrong_order_are_wrong() -> None:
    def in_order(given: peers.Paged, is_causal: bool) -> torch.Tensor:
        table = torch.arange(given.table.numel(), dtype=torch.int32).view_as(given.table)
        return peers.ours_paged(given._replace(table=table), is_causal)

    with pytest.raises(WrongResult, match="ours is wrong: relative error"):
        measure(PagedCase.parse("2,4/2,1/270,16", "float32"), [Candidate("ours", in_order)], QUICK)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refuses(sentence: str) -> Candidate:
    def attend(*_: object) -> object:
        raise RuntimeError(sentence)

    return Candidate("ours", attend)


@pytest.mark.parametrize(("direction", "case"), SERVING[1:], ids=["varlen", "paged"])
def test_what_cuda_does_not_serve_is_said_and_the_peers_are_timed(direction: Direction, case: Case) -> None:
    _, *others = direction.candidates("cpu")[0]
    result = measure(case, [refuses(REFUSAL), *others], QUICK)
    ours, *timed = result.outcomes
    assert ours.us is None and ours.reason == REFUSAL and all(outcome.us for outcome in timed)
    report = some_report(result)
    assert not report.wrong and from_json(to_json(report)).results == [result]
    text = rendered(report)
    (line,) = (line for line in text.splitlines() if " ours " in line and case.sizes in line)
    assert "refused" in line and f"· ours: {REFUSAL} (1 of 1 cases)" in text
    for outcome in timed:
        (shown,) = re.findall(rf"│ +{outcome.name} │ +([0-9.]+) │", text)
        assert outcome.us and float(shown) == pytest.approx(outcome.us.median, rel=0.005), "three digits or more"
    assert "Peer's time / our time" not in text, "there is none"


def test_other_errors_of_ours_are_failures() -> None:
    for case, sentence in [
        (PACKED, "dhp::attention_varlen: out of memory"),
        (PACKED, "somebody: supported on CUDA: none"),
        (DECODING, REFUSAL),
    ]:
        with pytest.raises(WrongResult, match="ours failed"):
            measure(case, [refuses(sentence)], QUICK)


@needs_hopper
@pytest.mark.parametrize(("direction", "case"), SERVING, ids=["decode", "varlen", "paged"])
def test_on_a_gpu_ours_is_timed_or_says_why_not(direction: Direction, case: Case) -> None:
    half = dataclasses.replace(case, dtype="bfloat16")
    ours, *others = measure(half, direction.candidates("cuda")[0], QUICK, "cuda").outcomes
    assert ours.graph_us or "supported on CUDA: " in str(ours.reason)
    assert any(outcome.graph_us for outcome in others)


# ---- who is called ---------------------------------------------------------------------------------------------------


def flash_varlen(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, max_q: int, max_k: int, causal: bool) -> Any:
    """As FlashAttention's packages have it; some versions return the lse, too."""
    out = dhp_safe_fa.attention_varlen(q, k, v, starts_q, starts_k, max_q, max_k, is_causal=causal)
    return out, None


def older_varlen_attn(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, max_q: int, max_k: int,
                      is_causal: bool = False) -> Any:  # fmt: skip
    return dhp_safe_fa.attention_varlen(q, k, v, starts_q, starts_k, max_q, max_k, is_causal=is_causal)


def varlen_attn(q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, max_q: int, max_k: int, *,
                window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False, seqused_k: Any = None,
                block_table: Any = None) -> Any:  # fmt: skip
    assert enable_gqa == (q.size(1) != k.size(-2))
    pages = {"seqused_k": seqused_k, "page_table": block_table}
    return dhp_safe_fa.attention_varlen(q, k, v, starts_q, starts_k, max_q, max_k, window=window_size, **pages)


def with_kvcache(table: str) -> Callable[..., Any]:
    """As FlashAttention's packages have it, which call the page table differently."""

    def attend(q: Any, cache_k: Any, cache_v: Any, *, cache_seqlens: Any, causal: bool, **pages: Any) -> Any:
        b, s, h, d = q.shape
        starts = torch.arange(b + 1, dtype=torch.int32) * s
        return dhp_safe_fa.attention_varlen(
            *(q.reshape(b * s, h, d), cache_k, cache_v, starts, None, s, int(cache_seqlens.max())),
            is_causal=causal,
            seqused_k=cache_seqlens,
            page_table=pages.pop(table),
            **pages,
        ).view(b, s, h, d)

    return attend


def install(monkeypatch: pytest.MonkeyPatch, module: str, **functions: object) -> None:
    monkeypatch.setitem(__import__("sys").modules, module, SimpleNamespace(**functions))


@pytest.mark.parametrize("torchs", [older_varlen_attn, varlen_attn])
@pytest.mark.parametrize("text", ["3,4/2,40+1+17,16:causal", "3,4,40+1+17,16", "2,4/2,20,16"])
def test_peers_with_packed_sequences(torchs: object, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=torchs)
    install(monkeypatch, "flash_attn_interface", flash_attn_varlen_func=flash_varlen)
    install(monkeypatch, "flash_attn", flash_attn_varlen_func=flash_varlen)
    found, notes = VARLEN.candidates("cuda")
    result = measure(VarlenCase.parse(text, "float32"), found, QUICK)
    timed = [outcome.name for outcome in result.outcomes if outcome.us]
    assert timed == ["ours", "sdpa-each", "varlen_attn", "fa3", "fa2"] and not notes


@pytest.mark.parametrize("text", ["2,4/2,3/70,16", "2,4,20,16:causal"])
def test_peers_that_read_pages(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen_attn)
    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=with_kvcache("page_table"))
    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=with_kvcache("block_table"))
    found, notes = PAGED.candidates("cuda")
    result = measure(PagedCase.parse(text, "float32"), found, QUICK)
    timed = [outcome.name for outcome in result.outcomes if outcome.us]
    assert timed == ["ours", "unpaged", "gathered", "varlen_attn", "fa3", "fa2"] and not notes
    install(monkeypatch, "torch.nn.attention.varlen", varlen_attn=older_varlen_attn)
    older = measure(PagedCase.parse(text, "float32"), PAGED.candidates("cuda")[0], QUICK).outcome("varlen_attn")
    assert older and "unexpected keyword argument" in str(older.reason)


@pytest.mark.parametrize("direction", [VARLEN, PAGED], ids=["varlen", "paged"])
def test_what_is_not_installed_is_noted(direction: Direction, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("torch.nn.attention.varlen", "flash_attn_interface", "flash_attn"):
        install(monkeypatch, module)
    found, notes = direction.candidates("cuda")
    assert [one.name for one in found] == [one.name for one in direction.candidates("cpu")[0]]
    assert [note.partition(": cannot be imported (")[0] for note in notes] == ["varlen_attn", "fa3", "fa2"]


def test_flash_attention_3_splits_a_long_cache_as_it_sees_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def attention(q: Any, k: Any, v: Any, causal: bool, num_splits: int = 1) -> torch.Tensor:
        asked.append(num_splits)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return dhp_safe_fa.attention(q, k, v, is_causal=causal).transpose(1, 2)

    install(monkeypatch, "flash_attn_interface", flash_attn_func=attention)
    for found, splits in ((DECODE.candidates("cuda")[0], 0), (candidates("cuda")[0], 1)):
        ours, fa3 = found[0], next(one for one in found if one.name == "fa3")
        assert measure(DECODING, [ours, fa3], QUICK).outcomes[1].us and set(asked) == {splits}
        asked.clear()


# ---- files and the command -------------------------------------------------------------------------------------------


def test_anchors_of_decoding() -> None:
    """The rows are those that --decode measures; times, so that FlashAttention-3's by cuDNN's is the factor."""
    assert anchors.of_checkout("decode") == ANCHORS
    factors = anchors.load(ANCHORS, DecodeCase, "fa3_us")
    assert set(DECODE.sets["decode"](None, "cuda", False)) == set(factors) and len(factors) == 10
    assert factors[DecodeCase.parse("1,32/8,1/8192,128", "bfloat16")] == pytest.approx(15.5 / 11.7)
    assert factors[DecodeCase.parse("1,32/8,128/32768,128", "bfloat16")] == pytest.approx(103.6 / 412.6)


@pytest.mark.usefixtures("a_gpu")
def test_estimates_of_decoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def result(case: Case) -> Result:
        return Result(case, (Outcome("ours", 1e-3, times(20)), Outcome("cudnn", 1e-3, times(11.7))))

    monkeypatch.setattr(command, "measure", lambda case, *_: result(case))
    path = tmp_path / "run.json"
    assert command.main(["--decode", "--seed", "1", "--json", str(path)]) == 0
    report = load(path)
    assert len(report.results) == 10 and report.peers() == ["cudnn", "fa3~"]
    first = report.results[0]
    assert first.case.label == "1,32/8,1/8192,128:full:bfloat16:decode"
    assert first.ratio("fa3~") == pytest.approx(15.5 / 20) and first.best_peer() == ("cudnn", pytest.approx(11.7 / 20))
    assert first.tb_per_s("fa3~") == pytest.approx(2 * 128 * (2 * 32 + 2 * 8 * 8192) / 15.5e-6 / 1e12)


@pytest.mark.parametrize(
    ("option", "words", "cases"),
    [
        ("--decode", ["1,4/2,1/70,16"], ["1,4/2,1/70,16:full:float32:decode"]),
        ("--varlen", ["3,4/2,40+1+17,16:causal", "5,2,3-20,16"],
         ["3,4/2,40+1+17,16:causal:float32:varlen", "5,2,3-20,16:full:float32:varlen"]),
        ("--paged", ["2,4/2,1/70,16", "2,4/2,1/70,16:page32:bfloat16"],
         ["2,4/2,1/70,16:page16:full:float32:paged", "2,4/2,1/70,16:page32:full:bfloat16:paged"]),
    ],
)  # fmt: skip
def test_the_command_measures_serving(
    option: str, words: list[str], cases: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    assert command.main([option, "--device", "cpu", "--quick", "--shapes", *words, "--json", str(path)]) == 0
    shown = capsys.readouterr().out
    report = load(path)
    assert [result.case.label for result in report.results] == cases and "TB/s" in shown and "FAIL" not in shown
    assert from_json(to_json(report)) == report
    for result in report.results:
        assert f" {result.case.sizes} " in shown and len(result.outcomes) > 1
        assert all(outcome.us and outcome.relative_error for outcome in result.outcomes)
    assert set(report.host_us) == {outcome.name for outcome in report.results[0].outcomes}
    assert command.main(["--from", str(path)]) == 0
    assert capsys.readouterr().out == shown
    assert command.main(["--from", str(path), option]) == 2
    assert f"--from measures nothing: {option} cannot be given with it" in capsys.readouterr().err
    readme = (BENCHMARKS / "README.md").read_text()
    row = to_json(report)["results"][0]
    for part in (row["case"], row["outcomes"][0], {option[2:]: None}):
        assert [key for key in part if f"`{key}`" not in readme] == []


@pytest.mark.parametrize(
    ("option", "cases"),
    [
        ("--decode", ["1,32/8,1/8192,128:full:float32:decode", "1,8/1,1/32768,128:full:float32:decode"]),
        ("--varlen", ["8,8/2,16-512,64:causal:float32:varlen"]),
        ("--paged", ["1,32/8,1/8192,128:page16:full:float32:paged", "1,32/8,1/8192,128:page256:full:float32:paged"]),
    ],
)
def test_what_is_measured_if_nothing_is_said(option: str, cases: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([option, "--device", "cpu", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert set(cases) <= set(listed) and any(line.startswith("candidates: ours, ") for line in listed)


@pytest.mark.parametrize("direction", [DECODE, VARLEN, PAGED], ids=lambda one: str(one.case.direction))
def test_sets_of_serving(direction: Direction) -> None:
    """Every set has its direction's cases; quick is a part of it; on a GPU in bfloat16."""
    ((name, cases_of),) = direction.sets.items()
    assert direction.default_sets == {"cuda": [name], "cpu": [name]}
    for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32")):
        cases = cases_of(None, device, False)
        assert set(cases_of(None, device, True)) < set(cases) and len(set(cases)) == len(cases)
        assert {type(case) for case in cases} == {direction.case} and {case.dtype for case in cases} == {dtype}
        assert {case.dtype for case in cases_of(["float16"], device, False)} == {"float16"}
    if direction is PAGED:
        assert {case.page_size for case in cases_of(None, "cuda", True) if isinstance(case, PagedCase)} == {16, 256}


@pytest.mark.parametrize("other", ["--backward", "--training", "--decode", "--paged"])
def test_one_direction_at_a_time(other: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--varlen", other])
    assert "not allowed with argument" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--decode", "--sustained"], "--sustained: given with --decode; it is for the forward and gradients"),
        (["--varlen", "--shapes", "start"], "'start' is neither varlen nor a shape"),
        (["--varlen", "--shapes", "2,4,8+9+1,16"], "3 lengths of 2 sequences"),
        (["--paged", "--shapes", "2,4,8,16:page8"], "pages of 8 keys; supported: 16, 32, 64, 128, 256"),
        (["--paged", "--device", "cpu", "--peers", "math"], "no such peer here; there are unpaged, gathered"),
    ],
)
def test_command_line_errors(arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(arguments) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err and len(captured.err.splitlines()) == 1 and captured.out == ""


def test_command_reports_a_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = Candidate("ours", lambda given, is_causal: peers.ours_unpaged(given, is_causal) * 1.01)
    paged = dataclasses.replace(PAGED, candidates=lambda device: ([wrong, *PAGED.candidates(device)[0][1:]], []))
    monkeypatch.setitem(command.DIRECTIONS, "paged", paged)
    assert command.main(["--paged", "--device", "cpu", "--quick", "--shapes", "2,4/2,1/70,16"]) == 1
    captured = capsys.readouterr()
    assert "FAIL 2,4/2,1/70,16:page16:full:float32:paged: ours is wrong" in captured.err and "FAIL" in captured.out
