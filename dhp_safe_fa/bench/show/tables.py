"""The tables: our times, serving, the ratios to the peers, small shapes alone, sustained runs, what a call costs the
host, and notes on gaps."""

from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from dhp_safe_fa.bench.cases import Case
from dhp_safe_fa.bench.results import BEST, Report, Result, Stats
from dhp_safe_fa.bench.show.summary import summary

# The widest table fits; a narrower terminal wraps its lines, and no figure is cut off.
MIN_WIDTH = 140


def make_console() -> Console:
    console = Console(highlight=False)
    return Console(highlight=False, width=max(console.width, MIN_WIDTH))


def show(report: Report, console: Console) -> None:
    parts: list[tuple[str, Table]] = []
    if "sustained_s" in report.settings:
        parts.append(("Sustained: each by itself, with the clock and the power it settles at", sustained_table(report)))
    else:
        if ours := [r for r in report.results if not r.case.serving]:
            parts.append(("Ours: median time, ±% from quartile to quartile, accuracy", times_table(ours)))
        if served := [r for r in report.results if r.case.serving]:
            parts.append(
                (
                    "Everybody: median time, ±% from quartile to quartile, q, k, v and out over time",
                    serving_table(served),
                )
            )
    if any(report.ratios(name) for name in report.peers()):
        parts.append(("Peer's time / our time: above 1 ours is faster", ratios_table(report)))
    if any(o.errors for r in report.results for o in r.outcomes):
        title = "Gradients: relative errors against float64, the largest of all cases; repeats that give the same bits"
        parts.append((title, gradients_table(report)))
    if small := [r for r in report.results if any(o.alone_us for o in r.outcomes)]:
        limit = report.settings["alone_below_us"]
        title = f"Below {limit:g} µs: µs a call, back to back and alone, which is between other kernels"
        parts.append((title, alone_table(report, small)))
    if report.host_us:
        parts.append(("Time of the calling thread for one eager call of a small shape", host_table(report)))
    console.print(headline(report), soft_wrap=True)
    for title, table in parts:
        console.print(f"\n[bold]{title}[/]", table, sep="\n")
    console.print()
    for line in summary(report):
        console.print(line, soft_wrap=True, markup=False)
    for note in [*reasons(report), *report.notes]:
        console.print(f"· {note}", soft_wrap=True, markup=False)


def headline(report: Report) -> str:
    """One line: what ran where."""
    env, settings = report.environment, report.settings
    parts = [env["device"], f"torch {env['torch']}"]
    if env.get("cuda"):
        parts += [f"CUDA {env['cuda']}", f"cuDNN {env['cudnn']}", f"driver {env['nvidia_smi']['driver_version']}"]
        parts.append("inputs rotate beyond L2" if settings.get("cold") else "inputs stay in place (L2 is warm)")
    if env.get("threads"):
        parts.append(f"{env['threads']} threads")
    parts.append(f"inputs stored \\[{', '.join(report.layout)}]")  # rich would take a bare [ for markup
    commit = f"commit {env['commit'][:12]}{' + changes' if env['dirty'] else ''}" if env["commit"] else "no commit"
    if "sustained_s" in settings:
        rounds = f"{settings['rounds']} turns of {settings['sustained_s']:g} s"
    else:
        rounds = f"{settings['rounds']} rounds of {settings['sample_ms']:g} ms"
    return " · ".join([f"dhp_safe_fa {env['dhp_safe_fa']} ({commit})", *parts, rounds])


def times_table(results: list[Result]) -> Table:
    """Our own times and accuracy, a row per case."""
    graphs = any(o.graph_us for r in results for o in r.outcomes)
    heads = [*(["graph µs", "±%"] if graphs else []), "eager µs", "±%", "µs/head", "TFLOP/s", "GB/s", "rel. error"]
    table = _case_table([*heads, "max |Δ SDPA|"])
    for result, last in _sections(results):
        ours = result.outcome("ours")
        if ours is None or ours.us is None:
            table.add_row(*_case_cells(result.case), "[bold red]FAIL[/]", end_section=last)
            continue
        us = ours.us.median
        table.add_row(
            *_case_cells(result.case),
            *(_time_cells(ours.graph_us) if graphs else ()),
            *_time_cells(ours.eager_us),
            _number(us / (result.case.batch * result.case.heads)),
            _number(result.case.flops / us / 1e6),
            _number(result.case.bytes / us / 1e3),
            f"{ours.relative_error:.2e}",
            "-" if result.max_abs_diff_sdpa is None else f"{result.max_abs_diff_sdpa:.1e}",
            end_section=last,
        )
    return table


def serving_table(results: list[Result]) -> Table:
    """A row per case and candidate that was timed, ours also where it was refused; a wrong case has one row."""
    table = _case_table(["", "µs", "±%", "TB/s", "TFLOP/s", "rel. error", "time / ours"])
    for result in results:
        if result.wrong:
            table.add_row(*_case_cells(result.case), "[bold red]FAIL[/]", end_section=True)
            continue
        shown = [o for o in result.outcomes if o.us or o.name == "ours"]
        for outcome in shown:
            table.add_row(
                *(_case_cells(result.case) if outcome is shown[0] else ("", "", "")),
                outcome.name,
                *(_time_cells(outcome.us) if outcome.us else ("[red]refused[/]", "-")),
                _known(result.tb_per_s(outcome.name)),
                _known(result.tflops(outcome.name)),
                "-" if outcome.relative_error is None else f"{outcome.relative_error:.2e}",
                "" if outcome.name == "ours" else _ratio(result.ratio(outcome.name)),
                end_section=outcome is shown[-1],
            )
    return table


def ratios_table(report: Report) -> Table:
    """Peer time by our time, a row per case and the geometric mean last. The best peer is one that was measured."""
    peers = report.peers()
    table = _case_table([*peers, "best measured", ""])
    for result, last in _sections([r for r in report.results if not r.wrong]):
        best = result.best_peer()
        table.add_row(
            *_case_cells(result.case),
            *(_ratio(result.ratio(name), "" if _by_graph(result, name) else "e") for name in peers),
            _ratio(best[1] if best else None),
            best[0] if best else "",
            end_section=last,
        )
    means = [_ratio(report.geomean(name)) for name in [*peers, BEST]]
    table.add_row("geometric mean", "", "", *means, "", style="bold")
    return table


def gradients_table(report: Report) -> Table:
    """A row per candidate that was right at least once."""
    found = {
        name: [o for r in report.results if (o := r.outcome(name)) and o.errors] for name in ["ours", *report.peers()]
    }
    names = list(dict.fromkeys(name for outcomes in found.values() for o in outcomes for name in o.errors or ()))
    table = Table()
    for column in ("", *names, "cases", "equal in all repeats"):
        table.add_column(column, justify="right" if column else "left")
    for candidate, outcomes in found.items():
        if not outcomes:
            continue
        largest = (max((o.errors or {})[name] for o in outcomes) for name in names)
        repeated = [o for o in outcomes if o.repeats_equal is not None]
        equal = sum(o.repeats_equal == r.case.repeats for r in report.results if (o := r.outcome(candidate)))
        table.add_row(
            candidate, *(f"{error:.2e}" for error in largest), str(len(outcomes)), f"{equal} of {len(repeated)}"
        )
    return table


def alone_table(report: Report, small: list[Result]) -> Table:
    """Two rows per small case: times back to back and alone, and the ratio of the best that was measured."""
    names = ["ours", *report.peers()]
    table = _case_table(["", *names, "best measured"])
    for result in small:
        outcomes = [result.outcome(name) for name in names]
        measured = [o.name for o in result.outcomes if o.name != "ours" and not o.estimated]
        together = [o.graph_us if o else None for o in outcomes]
        alone = [o.alone_us if o else None for o in outcomes]
        best = min((r for name in measured if (r := result.ratio_alone(name)) is not None), default=None)
        together_best = result.best_peer()
        table.add_row(
            *_case_cells(result.case),
            "back to back",
            *(_us(stats) for stats in together),
            _ratio(together_best[1] if together_best else None),
        )
        table.add_row("", "", "", "alone", *(_us(stats) for stats in alone), _ratio(best), end_section=True)
    return table


def sustained_table(report: Report) -> Table:
    """A row per case and candidate; a case that was wrong has one row."""
    table = _case_table(["", "µs", "±%", "TFLOP/s", "MHz", "W", "FLOP/cycle/SM", "time / ours"])
    multiprocessors = report.environment["multiprocessors"]
    for result in report.results:
        if result.wrong:
            table.add_row(*_case_cells(result.case), "[bold red]FAIL[/]", end_section=True)
            continue
        timed = [o for o in result.outcomes if o.us]
        for outcome in timed:
            table.add_row(
                *(_case_cells(result.case) if outcome is timed[0] else ("", "", "")),
                outcome.name,
                *_time_cells(outcome.us),
                _known(result.tflops(outcome.name)),
                *(f"{stats.median:.0f}" if stats else "-" for stats in (outcome.clock_mhz, outcome.power_w)),
                _known(result.flops_per_cycle(outcome.name, multiprocessors)),
                "" if outcome.name == "ours" else _ratio(result.ratio(outcome.name)),
                end_section=outcome is timed[-1],
            )
    return table


def host_table(report: Report) -> Table:
    table = Table()
    table.add_column("")
    table.add_column("host µs", justify="right")
    table.add_column("±%", justify="right")
    for name, stats in report.host_us.items():
        table.add_row(name, *_time_cells(stats))
    return table


def reasons(report: Report) -> list[str]:
    """What failed, and why a peer lacks a figure: each reason once with the number of cases."""
    lines = [f"FAIL {r.case.label}: {r.wrong}" for r in report.results if r.wrong]
    counts = Counter((o.name, o.reason) for r in report.results for o in r.outcomes if o.reason)
    lines += [f"{name}: {reason} ({count} of {len(report.results)} cases)" for (name, reason), count in counts.items()]
    if any(not _by_graph(r, o.name) for r in report.results for o in r.outcomes):
        lines.append("e: eager against eager, because a CUDA graph was not possible")
    estimates = [(r, o) for r in report.results for o in r.outcomes if o.estimated]
    if any(o.basis for _, o in estimates):
        lines.append("~: estimated, not measured: cuDNN's time in this run by their ratio in bfloat16 in the anchors")
    if any(o.basis and r.case.dtype != "bfloat16" for r, o in estimates):
        lines.append("~: float16 is estimated by the ratio in bfloat16 as well")
    if any(not o.basis for _, o in estimates):
        lines.append("~: estimated, not measured: by a ratio to cuDNN in an older file of anchors")
    return lines


def _case_table(columns: list[str]) -> Table:
    table = Table()
    for column in ("B,H,S,D", "mask", "dtype"):
        table.add_column(column, no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _sections(results: list[Result]) -> list[tuple[Result, bool]]:
    """Each result, and whether a rule belongs under it: where head_dim, mask or dtype change, and at the end."""
    keys = [(r.case.head_dim, r.case.mask, r.case.dtype) for r in results]
    return [(r, keys[i] != keys[i + 1] if i + 1 < len(keys) else True) for i, r in enumerate(results)]


def _case_cells(case: Case) -> tuple[str, str, str]:
    return case.sizes, case.mask, case.dtype


def _time_cells(stats: Stats | None) -> tuple[str, str]:
    return (_number(stats.median), f"{stats.spread:.1f}") if stats else ("-", "-")


def _by_graph(result: Result, name: str) -> bool:
    """False if ours or the peer's graph is missing while the other has one."""
    ours, peer = result.outcome("ours"), result.outcome(name)
    if ours is None or peer is None or ours.us is None or peer.us is None:
        return True
    return (ours.graph_us is None) == (peer.graph_us is None)


def _ratio(value: float | None, marker: str = "") -> str:
    if value is None:
        return "-"
    return f"[{'green' if value >= 1 else 'red'}]{value:.2f}{marker}[/]"


def _us(stats: Stats | None) -> str:
    return _number(stats.median) if stats else "-"


def _known(value: float | None) -> str:
    return "-" if value is None else _number(value)


def _number(value: float) -> str:
    """At least three significant digits down to 0.1 and two down to 0.001, without an exponent."""
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}"
