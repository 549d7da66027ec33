"""What evidence is missing, and how it is dealt into pieces: one gate on some kernels, in a process of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dhp_safe_fa.evidence import Evidence

from .. import registry
from ..verdict import FAIL, PASS


@dataclass(frozen=True)
class Piece:
    """quick: with fewer repeats."""

    gate: str
    kernels: tuple[str, ...]
    quick: bool

    def __str__(self) -> str:
        kernels = "1 kernel" if len(self.kernels) == 1 else f"{len(self.kernels)} kernels"
        return f"{self.gate}{' --quick' if self.quick else ''} on {kernels}"


def is_missing(
    evidence: Evidence | None, kernel: Mapping[str, Any], gate: str, quick: bool, now: Mapping[str, str | None]
) -> bool:
    """Whether the gate has no verdict on the kernel that is about these bytes and all that takes part now, or one from
    fewer repeats than are asked for. A FAIL is one: a second look would not take it back."""
    if evidence is None or evidence.kernels.get(kernel["name"], {}).get("cubin_sha256") != kernel["cubin_sha256"]:
        return True
    verdict = evidence.verdict(kernel["name"], gate)
    if verdict not in (PASS, FAIL) or evidence.outdated(kernel["name"], gate, now):
        return True
    run = evidence.runs[evidence.kernels[kernel["name"]]["gates"][gate]["run"]]
    return verdict == PASS and gate in run["quick"] and not quick


def deal(wanted: Mapping[str, Sequence[str]], quick: Collection[str]) -> list[Piece]:
    """Gate to kernels, in pieces of as even a size as can be, at most the gate's own."""
    return [
        Piece(gate, some, gate in quick)
        for gate, names in wanted.items()
        for some in _evenly(names, registry.gate(gate).piece)
    ]


def _evenly(names: Sequence[str], most: int) -> Iterable[tuple[str, ...]]:
    """Neighbours stay together: kernels of one call are counted in one."""
    count = -(-len(names) // most)
    bounds = [len(names) * place // count for place in range(count + 1)] if count else []
    return [tuple(names[begin:end]) for begin, end in pairwise(bounds)]
