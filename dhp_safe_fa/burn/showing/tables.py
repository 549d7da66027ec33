"""The log and its records as tables."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dhp_safe_fa.burn.families import FAMILIES
from dhp_safe_fa.burn.log import milestones
from dhp_safe_fa.burn.log.file import LogError
from dhp_safe_fa.burn.log.quoted import CASE, Quoted
from dhp_safe_fa.burn.log.records import OURS, Chip, Record, cases_in_common
from dhp_safe_fa.burn.measuring import chip
from dhp_safe_fa.burn.verdict import Verdict
from dhp_safe_fa.gates import registry

COLOURS = {"proceed": "green", "roll back": "red", "undecided": "yellow", None: "dim"}
_GATE_COLOURS = {"PASS": "green", "FAIL": "red", "INVALID": "yellow", "NOT RUN": "yellow"}
# The widest table fits; a narrower terminal wraps its lines, and no figure is cut off.
MIN_WIDTH = 140


def make_console() -> Console:
    return Console(highlight=False, width=max(Console().width, MIN_WIDTH))


def show_log(records: Sequence[Record], quoted: Sequence[Quoted], console: Console) -> None:
    """A row an iteration, the original project's quoted ones first."""
    table = Table(
        caption="TFLOP/s, × best peer: geometric means over the iteration's own shapes (compare: two, shape by shape)\n"
        f"gates: {', '.join(registry.NAMES)}; green passed, red failed, yellow gave no verdict, a dot was not run\n"
        "iteration: the name that its author gave it; `log NAME` says what was changed and why (not of orig. rows)\n"
        "stored-COMMIT: that commit's stored benchmark result, imported: it did not go through the loop\n"
        f"orig.: reported by {milestones.ORIGINAL},\n"
        f"at {CASE}; nothing of it was measured here, and `log --milestones` says what its numbers mean"
    )
    for column in ("iteration", "date", "commit"):
        table.add_column(column, no_wrap=True)
    for column in ("gates", "tensor %", "TFLOP/s", "× best peer", "× previous best", "decision"):
        table.add_column(column, justify="right")
    table.add_column("prediction; hypothesis", ratio=1)
    for row in quoted:
        text = f"{row.us_per_head:g} µs a head: {row.what}{' (wrong output)' if row.wrong else ''}"
        table.add_row(row.name, "quoted", "-", "-", "-", _number(row.tflops), "-", "-", "-", text, style="dim")
    for r in records:
        decision = r.decision or r.kind
        best = r.geomean_ratio("best") if r.kind != "baseline" else None
        ratio = r.verdict.ratio if r.verdict else None
        table.add_row(
            escape(r.name),
            r.date[:10],
            (r.commit or "-")[:8],
            _gates(r),
            _number(max(p.tensor_percent for p in r.profiles)) if r.profiles else "-",
            _number(r.geomean_tflops(OURS)),
            _number(best),
            f"{ratio.median:.3f} ({ratio.low:.3f}–{ratio.high:.3f})" if ratio else "-",
            f"[{COLOURS[r.decision]}]{decision}[/]",
            escape("; ".join(text for text in (r.prediction, r.hypothesis) if text)),
        )
    console.print(table)


def show_milestones(records: Sequence[Record], console: Console) -> None:
    table = Table(caption=f"milestones: those of {milestones.ORIGINAL};\nits kernels are not here")
    for column in ("milestone", "what", "answered by", "number"):
        table.add_column(column)
    for answer in milestones.answers(records):
        what = milestones.MILESTONES[answer.milestone]
        table.add_row(answer.milestone, what, escape(answer.record or "-"), escape(answer.text))
    console.print(table)


def show_record(record: Record, console: Console) -> None:
    """Everything about one iteration."""
    commit = record.commit or "not recorded"
    lines = [f"[bold]{escape(record.name)}[/] · {record.kind} · {record.family} · {record.date} · commit {commit}"]
    lines.append(escape(_chip_line(record.chip)) if record.chip else "nothing was run on a GPU")
    if record.source:
        lines.append(f"imported from the stored benchmark result of commit {record.source}")
    lines += [escape(f"{key}: {value}") for key, value in _words(record).items() if value]
    lines += [escape(f"gate {g.name}: {g.verdict} {g.detail}".rstrip()) for g in record.gates]
    console.print("\n".join(lines), soft_wrap=True)
    if record.kernels:
        console.print(_kernels(record))
    if record.profiles:
        console.print(_profiles(record))
    if record.shapes:
        console.print(_shapes(record))
    if record.verdict:
        show_verdict(record.verdict, console)


def show_verdict(found: Verdict, console: Console) -> None:
    console.print(f"[bold {COLOURS[found.decision]}]{found.decision}[/]")
    for reason in found.reasons:
        console.print(f"· {reason}", soft_wrap=True, markup=False)


def show_comparison(a: Record, b: Record, console: Console) -> None:
    """Two records shape by shape. LogError if their times say nothing about each other."""
    if not a.shapes or not b.shapes:
        raise LogError(f"'{(b if a.shapes else a).name}' has no times: a gate failed, or its output was wrong")
    if a.family != b.family:
        raise LogError(f"'{a.name}' is about {a.family}, '{b.name}' about {b.family}: no comparison")
    for what in ("gpu", "driver", "torch"):
        one, other = (getattr(record.chip, what) for record in (a, b))
        if one != other:
            raise LogError(f"'{a.name}' was measured with {what} {one}, '{b.name}' with {other}: no comparison")
    cases = list(cases_in_common([a, b]))
    if not cases:
        raise LogError(f"'{a.name}' and '{b.name}' have no shape in common")
    table = Table(caption="× best peer: its time by ours in the same run; TFLOP/s of two runs differ by per cents")
    names = [escape(record.name) for record in (a, b)]
    heads = ["B,H,S,D", *(f"{n}\nTFLOP/s" for n in names), "second\nby first", *(f"{n}\n× best peer" for n in names)]
    for number, head in enumerate(heads):
        table.add_column(head, justify="right" if number else "left", no_wrap=True)
    by_case = [{shape.case: shape for shape in record.shapes} for record in (a, b)]
    for case in cases:
        one, other = (shapes[case].tflops(OURS) for shapes in by_case)
        best = [shapes[case].best_peer() for shapes in by_case]
        change = other / one if one and other else None
        ratios = [f"{_number(pair[1])} {pair[0]}" if pair and one and other else "-" for pair in best]
        table.add_row(case, _number(one), _number(other), _number(change), *ratios)
    console.print(table)


def show_roofline(record: Record, console: Console) -> None:
    """Measured time against the floors. LogError if the record has no times of ours."""
    shapes = [shape for shape in record.shapes if shape.median_us(OURS) is not None]
    if record.chip is None or not shapes:
        raise LogError(f"'{record.name}' has no times of ours to set against a floor")
    table = Table(title="µs; % of the highest floor that is reached")
    for column in ("B,H,S,D", "measured", "tensor", "memory", "exponentials", "highest", "%"):
        table.add_column(column, justify="left" if column == "B,H,S,D" else "right", no_wrap=True)
    for shape in shapes:
        us, floors = shape.median_us(OURS), FAMILIES[record.family].floors(shape.parsed, record.chip)
        assert us is not None
        values = (us, floors.tensor, floors.memory, floors.exponentials)
        table.add_row(shape.case, *map(_number, values), floors.name, f"{100 * floors.highest / us:.0f}")
    console.print(escape(_chip_line(record.chip)), table, sep="\n")
    console.print(
        f"· tensor: {chip.TENSOR_FLOPS} floating point operations a clock and multiprocessor; exponentials: "
        f"{chip.EXPONENTIALS}, one for each visible score; memory: q, k, v and out once",
        soft_wrap=True,
    )


# ---- parts -----------------------------------------------------------------------------------------------------------


def _chip_line(c: Chip) -> str:
    memory = f"{c.dram_gbs:.0f} GB/s" if c.dram_gbs else "bandwidth not recorded"
    where = f"{c.gpu} · {c.multiprocessors} multiprocessors at up to {c.clock_mhz} MHz · {memory} · {c.power_limit}"
    return f"{where} · driver {c.driver} · CUDA {c.cuda} · cuDNN {c.cudnn} · torch {c.torch}"


def _words(record: Record) -> dict[str, str | None]:
    parent = f"{record.parent.name} ({record.parent.sha256[:12]})" if record.parent else None
    return {
        "hypothesis": record.hypothesis,
        "prediction": record.prediction,
        "previous best": parent,
        "wrong": record.wrong,
        "milestones": ", ".join(record.milestones),
        "report": record.report,
    }


def _gates(record: Record) -> str:
    """A letter for each gate that had to pass: green passed, red failed, yellow no verdict; a dot: not come to."""
    by_name, required = {gate.name: gate for gate in record.gates}, record.required
    letters = [f"[{_GATE_COLOURS[by_name[g].verdict]}]{g[0]}[/]" if g in by_name else "·" for g in required]
    return "".join(letters) if record.gates else "-"


def _kernels(record: Record) -> Table:
    table = Table()
    for column in ("kernel", "SHA-256"):
        table.add_column(column, no_wrap=True)
    for column in ("registers", "spilled bytes", "shared bytes", "WGMMA", "TMA loads"):
        table.add_column(column, justify="right")
    for k in record.kernels:
        values = (k.registers, k.spill_bytes, k.shared_bytes, k.wgmma, k.tma)
        table.add_row(k.name, k.cubin_sha256[:16], *("-" if v is None else str(v) for v in values))
    return table


def _profiles(record: Record) -> Table:
    table = Table()
    for column in ("counters of one launch", "µs", "SM %", "tensor %", "DRAM MB", "issued", "executed"):
        table.add_column(column, justify="right", no_wrap=True)
    for p in record.profiles or []:
        numbers = (p.us, p.sm_percent, p.tensor_percent, p.dram_bytes / 1e6)
        table.add_row(p.case, *map(_number, numbers), f"{p.issued_instructions:,}", f"{p.executed_instructions:,}")
    return table


def _shapes(record: Record) -> Table:
    names = list(dict.fromkeys(name for shape in record.shapes for name in shape.us))
    others = [name for name in names if name != OURS]
    timed = OURS in names
    table = Table(caption="× another: its time by ours, above 1 ours is faster" if timed else "TFLOP/s")
    for column in ("B,H,S,D", *(("µs", "TFLOP/s") if timed else ()), *((f"× {n}" if timed else n) for n in others)):
        table.add_column(column, justify="right", no_wrap=True)
    for shape in record.shapes:
        if timed:
            values = [shape.median_us(OURS), shape.tflops(OURS), *map(shape.ratio, others)]
        else:
            values = [shape.tflops(name) for name in others]
        table.add_row(shape.case, *map(_number, values))
    return table


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    digits = 0 if value >= 1000 else 1 if value >= 100 else 2 if value >= 10 else 3
    return f"{value:.{digits}f}"
