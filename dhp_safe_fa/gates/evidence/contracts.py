"""What README.md may say of the contracts, given the evidence: the states in its table, and what stands above it.

README's sentences are written by people; the last cell of each gated contract's row, and what stands between the
two markers, are written here (``gates status --write README.md``) and checked by a test.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping

from dhp_safe_fa.evidence import NONE, NOT_RUN, STALE, Evidence, Status, compare

from ..registry import BINDING, GATES, NAMES

# Contract: the gate whose verdicts it rests on.
GATE_OF = {contract: gate.name for gate in GATES for contract in gate.contracts}
# Contract: the families that it is about, where it is not about all.
FAMILIES_OF = {"C10": ("backward", "bounds", "delta", "dq_out")}
Now = Mapping[str, "str | None"]
BEGIN, END = "<!-- evidence -->", "<!-- /evidence -->"
_ROW = re.compile(r"^(\| (C\d+) \|.*\|)[^|\n]*\|$", re.MULTILINE)
_SUMMARY = re.compile(rf"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})", re.DOTALL)


def states(evidence: Evidence | None, kernels: Mapping[str, str], now: Now) -> dict[str, str]:
    """The state of each gated contract, for kernels given by name and SHA-256: what the gates said, and of how many.
    now: digests of what takes part (``provenance.here()``)."""
    gated = {
        contract: _state(evidence, _kernels_of(contract, evidence, kernels), now, (gate,))
        for contract, gate in GATE_OF.items()
    }
    return {**gated, BINDING: _state(evidence, kernels, now, tuple(gate.name for gate in GATES))}


def _kernels_of(contract: str, evidence: Evidence | None, kernels: Mapping[str, str]) -> Mapping[str, str]:
    """Those that the contract is about; one of which no family is known may be."""
    families, known = FAMILIES_OF.get(contract), evidence.kernels if evidence else {}
    if families is None:
        return kernels
    of = {name: known.get(name, {}).get("family", families[0]) for name in kernels}
    return {name: sha256 for name, sha256 in kernels.items() if of[name] in families}


def _state(evidence: Evidence | None, kernels: Mapping[str, str], now: Now, gates: tuple[str, ...]) -> str:
    """What one gate said; of several, whether what they said is bound to these kernels."""
    if evidence is None or not kernels:
        return "no evidence"
    counts = Counter(_of_kernel(evidence, name, sha256, now, gates) for name, sha256 in kernels.items())
    return ", ".join(f"{what} ({n} of {len(kernels)})" for what, n in sorted(counts.items()))


def _of_kernel(evidence: Evidence, name: str, sha256: str, now: Now, gates: tuple[str, ...]) -> str:
    if evidence.kernels.get(name, {}).get("cubin_sha256") != sha256:
        return STALE if name in evidence.kernels else "not run"
    verdicts = [evidence.verdict(name, gate) for gate in gates]
    if any(evidence.outdated(name, gate, now) for gate in gates):
        return STALE
    if NOT_RUN in verdicts:
        return "not run"
    return "bound" if len(gates) > 1 else verdicts[0]


def summary(evidence: Evidence | None, kernels: Mapping[str, str], now: Now) -> str:
    """In Markdown: fresh, stale, and by what, or none; and where it was measured."""
    status = compare(evidence, kernels, now) if evidence else Status(NONE)
    if evidence is None or status.state == NONE:
        return "Evidence: **none** is stored yet."
    where = _listed("`audits/evidence.json`:", evidence.places())
    if status.state == STALE:
        others = Counter(_in_short(reason) for reason in status.reasons if reason not in status.common)
        said = ", ".join(f"{what} ({n})" for what, n in sorted(others.items()))
        single = [f"about single kernels: {said}; `gates status` lists all"] if others else []
        return f"{_listed('Evidence: **stale**:', [*status.common, *single])}\n\n{where}"
    return f"Evidence: **fresh** for kernels built with the same nvcc. {where}"


def _in_short(reason: str) -> str:
    """Of a reason about one kernel: the gate and its verdict, or that it is about other bytes, or none."""
    what = reason.partition(": ")[2]
    return what if what.partition(":")[0] in NAMES else "not of this machine code"


def _listed(title: str, entries: Iterable[str]) -> str:
    """A list under its title."""
    return "\n".join([title, "", *(f"- {entry}" for entry in entries)])


def rewrite(readme: str, evidence: Evidence | None, kernels: Mapping[str, str], now: Now) -> str:
    """README's text with these states. ValueError if it lacks the markers or the row of a contract."""
    if not _SUMMARY.search(readme):
        raise ValueError(f"there are no lines {BEGIN} and {END}")
    known = states(evidence, kernels, now)
    missing = set(known) - {match[2] for match in _ROW.finditer(readme)}
    if missing:
        raise ValueError(f"the table has no row for {', '.join(sorted(missing))}")
    readme = _SUMMARY.sub(lambda _: summary(evidence, kernels, now) + "\n", readme)
    return _ROW.sub(lambda row: f"{row[1]} {known[row[2]]} |" if row[2] in known else row[0], readme)
