"""The calls that a policy has counted, as a table to print."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dhp_safe_fa._policy import Call

WIDTH = 160  # columns; reasons wrap


def table(policy: str, calls: Mapping[Call, int]) -> str:
    """One line for each kind of call, the most frequent first, and how many dhp serves."""
    from rich.console import Console
    from rich.table import Table

    served = sum(count for call, count in calls.items() if call.reason is None)
    verb = "would serve" if policy == "audit" else "serves"
    rows = Table(title=f"{policy}: dhp {verb} {served} of {sum(calls.values())} calls", title_justify="left", box=None)
    for column in ("calls", "query", "key", "dtype", "device", "backend", "served", "why not"):
        rows.add_column(column, justify="right" if column == "calls" else "left")
    for call, count in sorted(calls.items(), key=lambda item: -item[1]):
        shapes = ["x".join(map(str, shape)) for shape in (call.query, call.key)]
        answer = "yes" if call.reason is None else "no"
        rows.add_row(str(count), *shapes, call.dtype, call.device, call.backend, answer, call.reason or "")
    console = Console(width=WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(rows)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
