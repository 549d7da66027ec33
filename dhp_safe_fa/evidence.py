"""Whether the stored evidence is about this build: its machine code, what launches it, and the gates that judged it.

``make evidence`` runs every gate on a Hopper GPU and stores what they said in audits/evidence.json, kernel by kernel,
with the SHA-256 of each cubin and of everything else that took part (gates/provenance.py). A wheel carries the file
inside the package. Nothing is measured here, only compared.

    from dhp_safe_fa import evidence
    print(evidence.status().line())
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dhp_safe_fa.gates import provenance, registry

FRESH, STALE, NONE = "fresh", "stale", "none"
SCHEMA = "dhp_safe_fa.evidence/2"
# Files of this one say nothing of what took part: they can be read, and are stale.
_WITHOUT_DIGESTS = "dhp_safe_fa.evidence/1"
GATES = registry.NAMES
_NO_DIGESTS = "made before digests were stored of what took part"
_WORDS = {"launch": "launch path", "shared": "what all gates share"}

_PACKAGE = Path(__file__).resolve().parent
CHECKOUT = _PACKAGE.parent / "audits" / "evidence.json"
# setup.py copies it there for a wheel; a checkout has no such folder, so that the two cannot differ.
PACKAGED = _PACKAGE / "audits" / "evidence.json"


@dataclass(frozen=True)
class Status:
    """What can be said of this build.

    Attributes:
        state: fresh: every kernel of this build has evidence for its exact bytes, passed every gate, and nothing that
            took part in that has changed. stale: there is evidence, but at least one kernel's bytes are others, are
            missing in it, or did not pass, or something that took part has changed since. none: there is no evidence,
            or no kernel for it to be about.
        reasons: why it is not fresh; one sentence for each part that changed, and for each kernel and gate.
        summary: if fresh, one sentence that says where and when it was measured.
        not_compared: parts that the evidence has a digest of, and this installation nothing to compare it with.
    """

    state: str
    reasons: tuple[str, ...] = ()
    summary: str = ""
    not_compared: tuple[str, ...] = ()

    def line(self) -> str:
        """One line for a table's foot: the state, and the first reason."""
        more = f" (and {len(self.reasons) - 1} more reasons)" if len(self.reasons) > 1 else ""
        unknown = f"; not compared here: {', '.join(self.not_compared)}" if self.not_compared else ""
        return f"stored evidence: {self.state}: {self.summary or self.reasons[0]}{more}{unknown}"


@dataclass(frozen=True)
class Evidence:
    """The content of audits/evidence.json.

    Attributes:
        environment: where it was measured: GPU, driver, versions, commit, date (dhp_safe_fa.bench.environment).
        kernels: by name: cubin_sha256, listing_sha256, registers, spill_bytes, and gates: verdict and figures of each.
        quick: gates that were run with fewer repeats.
        digests: of what took part in the verdicts, by the names of gates/provenance.py; None in a file that was made
            before they were stored.
    """

    environment: dict[str, Any]
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    quick: tuple[str, ...] = ()
    digests: dict[str, str] | None = None

    def verdict(self, kernel: str, gate: str) -> str:
        """PASS, FAIL, INVALID or NOT RUN; a gate that the file does not name was not run."""
        return str(self.kernels[kernel]["gates"].get(gate, {}).get("verdict", "NOT RUN"))

    def outdated(self, gate: str, now: Mapping[str, str | None]) -> list[str]:
        """What took part in this gate's verdicts and is another now: words for people. Empty if all is as it was."""
        if self.digests is None:
            return [_NO_DIGESTS]
        took_part = (*registry.gate(gate).needs, "shared", f"gate {gate}")
        changed = [part for part in took_part if now[part] not in (None, self.digests.get(part))]
        return [f"{_WORDS.get(part, part)} changed since" for part in changed]

    def changes(self, now: Mapping[str, str | None]) -> list[str]:
        """What is another now than it was, each with the gates in whose verdicts it took part."""
        gates_of: dict[str, list[str]] = {}
        for gate in GATES:
            for change in self.outdated(gate, now):
                gates_of.setdefault(change, []).append(gate)
        return [f"{change} ({', '.join(gates)})" for change, gates in gates_of.items()]

    def where(self) -> str:
        """GPU, driver, day and commit in a few words, and which gates were quick."""
        known = self.environment
        driver = (known.get("nvidia_smi") or {}).get("driver_version")
        commit = str(known.get("commit") or "unknown")[:7]
        quick = f" ({', '.join(self.quick)}: --quick)" if self.quick else ""
        return f"{known.get('device')}, driver {driver}, {str(known.get('date'))[:10]}, commit {commit}{quick}"


def find() -> Path | None:
    """The evidence file that goes with this package: its own copy in a wheel, audits/evidence.json in a checkout."""
    return next((path for path in (PACKAGED, CHECKOUT) if path.is_file()), None)


def load(path: Path) -> Evidence:
    """Read an evidence file. OSError or ValueError, with one sentence, if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] not in (SCHEMA, _WITHOUT_DIGESTS):
            raise ValueError(f"its schema is {content['schema']!r}, not {SCHEMA!r}")
        quick = tuple(map(str, content.get("quick", [])))
        digests = None if content["schema"] == _WITHOUT_DIGESTS else dict(content["digests"])
        evidence = Evidence(dict(content["environment"]), dict(content["kernels"]), quick, digests)
        for name, kernel in evidence.kernels.items():
            if not isinstance(kernel["cubin_sha256"], str):
                raise ValueError(f"{name}: cubin_sha256 is no string")
            for gate in GATES:
                evidence.verdict(name, gate)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is no evidence file: {type(error).__name__}: {error}") from error
    return evidence


def held() -> dict[str, str]:
    """Name to cubin SHA-256 of the kernels that this build holds; empty for a CPU-only build."""
    from dhp_safe_fa import _inspect

    return {str(kernel["name"]): str(kernel["cubin_sha256"]) for kernel in _inspect.kernels()}


def compare(evidence: Evidence, kernels: Mapping[str, str], now: Mapping[str, str | None]) -> Status:
    """What evidence says of these kernels, name to SHA-256. now: digests of what takes part (``provenance.here()``)."""
    if not kernels:
        return Status(NONE, ("this build holds no GPU kernel",))
    reasons = evidence.changes(now)
    for name, sha256 in kernels.items():
        if name not in evidence.kernels:
            reasons.append(f"{name}: the evidence does not name this kernel")
        elif (measured := evidence.kernels[name]["cubin_sha256"]) != sha256:
            reasons.append(f"{name}: its machine code is {sha256[:12]}…, the evidence is about {measured[:12]}…")
        else:
            verdicts = {gate: evidence.verdict(name, gate) for gate in GATES}
            reasons += [f"{name}: {gate}: {verdict}" for gate, verdict in verdicts.items() if verdict != "PASS"]
    unknown = tuple(_WORDS.get(part, part) for part, digest in now.items() if digest is None)
    if reasons:
        return Status(STALE, tuple(reasons), not_compared=unknown)
    how = f"all {len(kernels)} kernels of this build passed {', '.join(GATES)} on {evidence.where()}"
    return Status(FRESH, summary=how, not_compared=unknown)


def status() -> Status:
    """What the evidence file that goes with this package says of the kernels in it."""
    path = find()
    if path is None:
        return Status(NONE, ("there is no evidence file; `make evidence` writes one on a Hopper GPU",))
    try:
        return compare(load(path), held(), provenance.here())
    except (OSError, ValueError) as error:
        return Status(NONE, (str(error),))
