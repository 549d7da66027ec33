"""What evidence is missing, and how it is dealt into pieces: one gate on some kernels, in a process of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dhp_safe_fa.evidence import Evidence

from .. import registry
from ..verdict import PASS
from .writer import Findings, has_failed


@dataclass(frozen=True)
class Piece:
    """quick: with fewer repeats."""

    gate: str
    kernels: tuple[str, ...]
    quick: bool

    @property
    def needs_gpu(self) -> bool:
        return registry.gate(self.gate).executes

    def __str__(self) -> str:
        kernels = "1 kernel" if len(self.kernels) == 1 else f"{len(self.kernels)} kernels"
        return f"{self.gate}{' --quick' if self.quick else ''} on {kernels}"


def is_missing(
    evidence: Evidence | None,
    failed: Findings,
    kernel: Mapping[str, Any],
    gate: str,
    quick: bool,
    now: Mapping[str, str | None],
) -> bool:
    """Whether the gate has no verdict on the kernel that is about these bytes and all that takes part now, or one from
    fewer repeats than are asked for. A finding is one: no second look takes it back, whatever has been stored since.
    failed: ``writer.findings`` of the evidence."""
    if has_failed(failed, kernel, gate, now):
        return False
    if evidence is None or evidence.kernels.get(kernel["name"], {}).get("cubin_sha256") != kernel["cubin_sha256"]:
        return True
    if evidence.verdict(kernel["name"], gate) != PASS or evidence.outdated(kernel["name"], gate, now):
        return True
    run = evidence.runs[evidence.kernels[kernel["name"]]["gates"][gate]["run"]]
    return gate in run["quick"] and not quick


def deal(wanted: Mapping[str, Sequence[str]], quick: Collection[str], most: int | None = None) -> list[Piece]:
    """Gate to kernels, in pieces of as even a size as can be; most: the gate's own, if it is not given."""
    return [
        Piece(gate, some, gate in quick)
        for gate, names in wanted.items()
        for some in _evenly(names, most or registry.gate(gate).piece)
    ]


def _evenly(names: Sequence[str], most: int) -> Iterable[tuple[str, ...]]:
    """Neighbours stay together: kernels of one call are counted in one."""
    count = -(-len(names) // most)
    bounds = [len(names) * place // count for place in range(count + 1)] if count else []
    return [tuple(names[begin:end]) for begin, end in pairwise(bounds)]
