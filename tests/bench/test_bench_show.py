"""What the benchmark shows: tables, the summary, pictures."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from bench_samples import rendered, some_report, some_result, times

from dhp_safe_fa.bench import Case
from dhp_safe_fa.bench.cases import select
from dhp_safe_fa.bench.results import Outcome, Report, Result
from dhp_safe_fa.bench.show import plot
from dhp_safe_fa.bench.show.summary import summary


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


def test_the_summary_keeps_estimates_apart() -> None:
    case = Case(2, 32, 8192, 64, False, "float16")
    estimated = dataclasses.replace(
        some_result(case), outcomes=(*some_result().outcomes, Outcome("fa3~", graph_us=times(5), basis="a ratio"))
    )
    measured, estimate, both = summary(some_report(estimated, some_result()))
    assert measured.startswith("Against the best of what was measured here (flash, cudnn, efficient, math)")
    assert "geometric mean 0.80 × over 2 cases, lowest 0.80 ×" in measured and "slower in 2" in measured
    assert estimate.startswith("Against FlashAttention-3, estimated and not measured: geometric mean 0.50 × over 1 ")
    assert "lowest 0.50 × (2,32,8192,64:full:float16)" in estimate
    assert both.startswith("Against the best of both, so in part an estimate (1 cases have none): geometric mean 0.63")
    for line in (measured, estimate, both):
        assert line in rendered(some_report(estimated, some_result()))
    assert len(summary(some_report(some_result()))) == 1


def test_a_real_peer_counts_as_measured() -> None:
    result = some_result()
    real = dataclasses.replace(result, outcomes=(*result.outcomes, Outcome("fa3", 1e-4, times(5), times(5))))
    (line,) = summary(some_report(real))
    assert "FlashAttention-3)" in line and "geometric mean 0.50 ×" in line and "estimate" not in line


def alone(result: Result) -> Result:
    """Each takes 1 µs more alone, where it has a graph."""
    outcomes = (
        dataclasses.replace(o, alone_us=times(o.graph_us.median + 1)) if o.graph_us else o for o in result.outcomes
    )
    return dataclasses.replace(result, outcomes=tuple(outcomes))


def test_small_shapes_are_shown_both_ways() -> None:
    text = rendered(some_report(alone(some_result()), some_result()))
    assert "Below 50 µs" in text
    rows = [line.replace("│", " ").split() for line in text[text.index("Below 50 µs") :].splitlines()]
    assert [row[3:] for row in rows if "back" in row[3:4]] == [
        ["back", "to", "back", "10.00", "20.00", "8.00", "-", "-", "0.80"]
    ], "a case that was not timed alone has no row"
    assert ["alone", "11.00", "21.00", "9.00", "-", "-", "0.82"] in rows
    assert "Below 50 µs" not in rendered(some_report(some_result()))


def test_every_peer_fits_into_the_table_of_small_shapes() -> None:
    longest = Case(16, 16, 1024, 64, True, "bfloat16", key_heads=4)
    names = ("ours", "flash", "cudnn", "efficient", "math", "unfused", "fa3~")
    outcomes = tuple(Outcome(name, 1e-4, times(4567.8), times(4567.8)) for name in names)
    text = rendered(some_report(alone(Result(longest, outcomes, 5e-4))))
    assert longest.sizes in text and "4568" in text and "…" not in text


def test_sustained_runs_are_shown_with_clock_and_power() -> None:
    case = Case(1, 16, 16384, 128, True, "bfloat16")
    mine = Outcome("ours", 2e-3, times(2000), clock_mhz=times(1500), power_w=times(699.6))
    result = Result(case, (mine, Outcome("cudnn", 2e-3, times(1900)), Outcome("fa3", reason="not today")), 1e-2)
    report = some_report(result, Result(case, wrong="relative error nan"))
    report.environment["multiprocessors"] = 132
    report.settings = {"device": "cuda", "seed": 3, "rounds": 3, "sustained_s": 1.0, "settle_s": 0.15, "layout": "BSHD"}
    text = rendered(report)
    line = next(part for part in text.splitlines() if "1500" in part)
    for figure in ("2000", "549.8", "1500", "700", f"{case.flops / (2000 * 1500 * 132):.0f}"):
        assert f" {figure} " in line, f"{figure} is missing: {line}"
    assert "0.95" in text and "FAIL" in text and "3 turns of 1 s" in text and "not today" in text
    assert "eager µs" not in text


# ---- pictures -------------------------------------------------------------------------------------------------------


def panels(monkeypatch: pytest.MonkeyPatch, draw: object, report: Report, path: Path) -> list[str]:
    """The titles of the panels of what is drawn."""
    assert callable(draw)
    figures = []
    savefig = plot.Figure.savefig

    def spy(figure: plot.Figure, *args: object, **options: object) -> None:
        figures.append(figure)
        savefig(figure, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(plot.Figure, "savefig", spy)
        draw(report, path)
    (figure,) = figures
    return [axes.get_title() for axes in figure.axes]


@pytest.mark.parametrize("words", [["sweep"], ["start"], ["odd"], ["start", "sweep", "odd", "anchors"], ["1,2,8,32"]])
def test_the_picture_has_at_most_four_panels(
    words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    report = some_report(*(some_result(case) for case in select(words, None, "cuda", quick=True)))
    path = tmp_path / "few.png"
    assert 1 <= len(panels(monkeypatch, plot.save, report, path)) <= 4
    assert path.read_bytes().startswith(b"\x89PNG")
    assert len(panels(monkeypatch, plot.save_all, report, tmp_path / "all.svg")) >= 1
    assert "<svg" in (tmp_path / "all.svg").read_text()


def test_what_the_picture_shows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The letters of the labels are as large as a telephone needs, and do not lie on each other."""
    report = some_report(*(some_result(case) for case in select(["sweep"], None, "cuda", quick=False)))
    titles = panels(monkeypatch, plot.save, report, tmp_path / "few.svg")
    assert titles == [f"head_dim {d}, {mask}" for mask in ("full", "causal") for d in (64, 128)]
    assert len(panels(monkeypatch, plot.save_all, report, tmp_path / "all.svg")) == 12
    figure = plot.Figure(figsize=plot.SMALL_SIZE)
    axes = figure.subplots()
    axes.set_ylim(0, 100)
    plot._label(axes, {"ours": 99, "fa3~": 99, "cudnn": 98, "flash": 20})
    figure.canvas.draw()
    boxes = sorted((text.get_window_extent() for text in axes.texts), key=lambda box: -box.y0)
    assert [text.get_text() for text in axes.texts] == ["ours", "FA3\nestimated", "cuDNN", "FA2"]
    assert all(upper.y0 >= lower.y1 for upper, lower in itertools.pairwise(boxes))
    pixels = plot.SMALL_FONT / 72 / plot.SMALL_SIZE[0] * 400
    assert pixels >= 11, "at the width of a telephone"


def test_nothing_to_plot(tmp_path: Path) -> None:
    for draw in (plot.save, plot.save_all):
        with pytest.raises(ValueError, match="nothing to plot"):
            draw(some_report(), tmp_path / "none.png")
