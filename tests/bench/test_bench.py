"""The benchmark: its arithmetic on known numbers, its cases, and what it takes for right."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from bench_samples import TINY, some_report, some_result, times
from reference import reference

from dhp_safe_fa.bench import Candidate, Case, Settings, WrongResult, candidates, measure
from dhp_safe_fa.bench.cases import CUDA_START_SHAPES, START_SHAPES, parse_case, select
from dhp_safe_fa.bench.directions import DIRECTIONS, FORWARD
from dhp_safe_fa.bench.peers import ours, sdpa, unfused
from dhp_safe_fa.bench.reference import sample
from dhp_safe_fa.bench.results import Outcome, Result, Stats, from_json, to_json

QUICK = Settings(rounds=2, sample_ms=0.1)


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


def test_an_estimate_is_no_best_peer() -> None:
    """Of 10 µs: cudnn 8 was measured, and fa3~ 5 was not."""
    result = some_result()
    estimated = dataclasses.replace(result, outcomes=(*result.outcomes, Outcome("fa3~", graph_us=times(5))))
    assert estimated.best_peer() == ("cudnn", 0.8) and estimated.best_peer(estimates=True) == ("fa3~", 0.5)
    report = some_report(estimated, result)
    assert report.geomean("best") == pytest.approx(0.8)
    assert report.geomean("best~") == pytest.approx(math.sqrt(0.5 * 0.8))
    assert report.geomean("fa3~") == pytest.approx(0.5)


def test_work_per_cycle_and_ratios_alone() -> None:
    case = Case(1, 8, 512, 64, False, "float16")
    mine = Outcome("ours", 0, times(10), alone_us=times(12), clock_mhz=times(1500))
    peer = Outcome("cudnn", 0, times(8), alone_us=times(18))
    result = Result(case, (mine, peer))
    cycles = 10e-6 * 1500e6
    assert result.flops_per_cycle("ours", 132) == pytest.approx(case.flops / cycles / 132)
    assert result.flops_per_cycle("cudnn", 132) is None, "no clock was measured"
    assert result.ratio("cudnn") == 0.8 and result.ratio_alone("cudnn") == 1.5
    assert some_result().ratio_alone("cudnn") is None


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
        ("1,8/2,4/5,16:causal", "'1,8/2,4/5,16:causal': causal with 4 queries and 5 keys; only full is compared there"),
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
    sustained = select(["sustained"], None, "cuda", quick=False)
    assert {c.dtype for c in sustained} == {"bfloat16"} and len(sustained) == 13
    assert sum(c.seqlen < 4096 for c in sustained) == 1 and sustained[0].label == "16,16,1024,128:causal:bfloat16"
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
    case = Case(1, 1, 2**20, 8, False, "float32")
    reason = unfused_candidate.first_run(lambda: pytest.fail("it ran"), case.scores, "cpu")
    assert isinstance(reason, str) and reason.startswith("not run above")


# ---- directions and layouts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ["2,6/3,5/9,8", "2,6,5,8:causal"])
def test_layouts(rng: torch.Generator, sizes: str) -> None:
    """The shapes are the same; BSHD is stored as the projections of a model write it."""
    case = parse_case(sizes, "float32")
    for tensor, shape in zip(case.draw("cpu", rng, "BSHD"), (case.shape, case.key_shape, case.key_shape), strict=True):
        assert tensor.shape == shape and tensor.transpose(1, 2).is_contiguous() and not tensor.is_contiguous()
        assert abs(float(tensor.mean())) < 1, "standard normal"
    for tensor in case.draw("cpu", rng, "BHSD"):
        assert tensor.is_contiguous()


@pytest.mark.parametrize("layout", ["BSHD", "BHSD"])
def test_the_layout_reaches_every_candidate(layout: str) -> None:
    seen = []

    def looks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> torch.Tensor:
        seen.append([t.is_contiguous() for t in (q, k, v)])
        return sdpa(q, k, v, is_causal)

    settings = dataclasses.replace(QUICK, layout=layout)
    result = measure(parse_case(TINY, "float32"), [Candidate("ours", ours), Candidate("looks", looks)], settings)
    assert result.outcomes[1].us and seen and all(all(q) == (layout == "BHSD") for q in seen)
    assert Settings().layout == "BSHD"


def test_a_direction_is_added_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subclass that overrides what differs, and an entry: measured, counted and stored without an edit elsewhere."""

    @dataclasses.dataclass(frozen=True)
    class Doubled(Case):
        """Twice the output, of three inputs and a factor."""

        direction = "doubled"
        products = 3

        def draw(self, device: str, generator: torch.Generator, layout: str) -> tuple[torch.Tensor, ...]:
            return (*super().draw(device, generator, layout), torch.tensor(2.0))

        def bind(self, attend: object, inputs: tuple[torch.Tensor, ...]) -> object:
            assert callable(attend)
            q, k, v, factor = inputs
            return lambda: attend(q, k, v, self.causal) * factor

        def judge(self, inputs: tuple[torch.Tensor, ...], generator: torch.Generator) -> object:
            q, k, v, factor = inputs
            return super().judge((q, k, v * factor), generator)

    monkeypatch.setitem(DIRECTIONS, "doubled", dataclasses.replace(FORWARD, case=Doubled))
    case = Doubled(1, 2, 40, 16, False, "float32")
    assert case.flops == 1.5 * Case(1, 2, 40, 16, False, "float32").flops
    result = measure(case, candidates("cpu")[0], QUICK)
    assert all(outcome.us for outcome in result.outcomes)
    with pytest.raises(WrongResult, match="relative error"):
        measure(case, [Candidate("half", lambda q, k, v, c: sdpa(q, k, v, c) / 2)], QUICK)
    stored = to_json(some_report(result))
    assert from_json(stored).results[0] == result
    stored["results"][0]["case"]["direction"] = "sideways"
    with pytest.raises(ValueError, match=r"direction 'sideways'; known: forward, .*, doubled"):
        from_json(stored)


def test_shapes_without_a_kernel_have_the_librarys_sentence() -> None:
    with pytest.raises(ValueError, match=r"head_dim|kernel"):
        Case(1, 1, 8, 12, False, "float16").check_served()
