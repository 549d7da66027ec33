"""Whether the stored evidence is about this build: its machine code, what launches it, and the gates that judged it.

``make evidence`` runs the gates on a Hopper GPU, on all kernels or on some at a time, and stores what they said in
audits/evidence.json, kernel by kernel, with the SHA-256 of each cubin, and with the machine and the SHA-256 of
everything else that took part (gates/provenance.py) of the run in which each gate said it. A wheel carries the file
inside the package. Nothing is measured here, only compared.

    from dhp_safe_fa import evidence
    print(evidence.status().line())
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dhp_safe_fa.gates import provenance, registry

FRESH, STALE, NONE = "fresh", "stale", "none"
SCHEMA = "dhp_safe_fa.evidence/3"
_OLDER = ("dhp_safe_fa.evidence/1", "dhp_safe_fa.evidence/2")
GATES = registry.NAMES
NOT_RUN = "NOT RUN"
# In what way a part of gates/provenance.py is called to people; what they do not name is called as it is there.
_WORDS = {
    "launch": "launch path",
    "family": "how it is put under test",
    "kernels": "kernels whose bits are compared",
    "shared": "what all gates share",
}

_PACKAGE = Path(__file__).resolve().parent
CHECKOUT = _PACKAGE.parent / "audits" / "evidence.json"
# setup.py copies it there for a wheel; a checkout has no such folder, so that the two cannot differ.
PACKAGED = _PACKAGE / "audits" / "evidence.json"


def _words(part: str) -> str:
    return _WORDS.get(part.partition(" ")[0], part)


@dataclass(frozen=True)
class Status:
    """What can be said of this build.

    Attributes:
        state: fresh: every kernel of this build has evidence for its exact bytes, passed every gate, and nothing that
            took part in that has changed. stale: there is evidence, but at least one kernel's bytes are others, are
            missing in it, or did not pass, or something that took part has changed since. none: there is no evidence,
            or no kernel for it to be about.
        reasons: why it is not fresh; one sentence for each part that changed, with the gates and the number of kernels,
            one for what was not run, and one for each other kernel and gate.
        common: those of them that are about several kernels at once.
        summary: if fresh, one sentence that says where and when it was measured.
        not_compared: parts that the evidence has a digest of, and this installation nothing to compare it with.
    """

    state: str
    reasons: tuple[str, ...] = ()
    common: tuple[str, ...] = ()
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
        runs: of the gates: environment (GPU, driver, versions, commit, date: dhp_safe_fa.bench.environment), quick
            (gates that were run with fewer repeats) and digests of what took part, by the names of gates/provenance.py.
        kernels: by name: family, cubin_sha256, listing_sha256, registers, spill_bytes, and gates: of each that was run
            verdict, figures, and the place of its run among runs.
        failed: by cubin_sha256 and gate, of each time that the gate has failed on these bytes the digests of what took
            part. Nothing is ever taken out, be the kernel in this build or not.
    """

    runs: list[dict[str, Any]]
    kernels: dict[str, dict[str, Any]] = field(default_factory=dict)
    failed: dict[str, dict[str, list[dict[str, str | None]]]] = field(default_factory=dict)

    def verdict(self, kernel: str, gate: str) -> str:
        """PASS, FAIL, INVALID or NOT RUN; a gate that the file does not name was not run."""
        return str(self.kernels[kernel]["gates"].get(gate, {}).get("verdict", NOT_RUN))

    def outdated(self, kernel: str, gate: str, now: Mapping[str, str | None]) -> list[str]:
        """What took part in this gate's verdict on the kernel and is another now: words for people. Empty if all is as
        it was, or if the gate was not run: what was never said cannot be out of date."""
        entry = self.kernels[kernel]
        if self.verdict(kernel, gate) == NOT_RUN:
            return []
        then = self.runs[entry["gates"][gate]["run"]]["digests"]
        took_part = registry.gate(gate).took_part(kernel, entry["family"])
        changed = [part for part in took_part if part not in now or now[part] not in (None, then.get(part))]
        return [f"{_words(part)} changed since" for part in changed]

    def runs_of(self, gate: str) -> list[dict[str, Any]]:
        """The runs in which the gate said what is stored, be it of one kernel."""
        said = (entry for name, entry in self.kernels.items() if self.verdict(name, gate) != NOT_RUN)
        used = {entry["gates"][gate]["run"] for entry in said}
        return [self.runs[index] for index in sorted(used)]

    def places(self) -> list[str]:
        """Of the runs GPU, driver, day and commit in a few words, each with the gates that ran there, and if quick."""
        gates_at: dict[str, list[str]] = {}
        for gate in GATES:
            for place in dict.fromkeys(_place(run, gate) for run in self.runs_of(gate)):
                gates_at.setdefault(place, []).append(gate)
        return [f"{', '.join(gates)} on {place}" for place, gates in gates_at.items()]

    def where(self) -> str:
        """The places in one sentence."""
        return "; ".join(self.places())


def _place(run: Mapping[str, Any], gate: str) -> str:
    known = run["environment"]
    commit = f"{str(known.get('date'))[:10]}, commit {str(known.get('commit') or 'unknown')[:7]}"
    versions = f"nvcc {known.get('nvcc')}"
    if not registry.gate(gate).executes:  # whatever GPU there was
        return f"machine code alone, {commit}, {versions}"
    driver = (known.get("nvidia_smi") or {}).get("driver_version")
    quick = " (--quick)" if gate in run["quick"] else ""
    return f"{known.get('device')}, driver {driver}, {commit}, {versions}, torch {known.get('torch')}{quick}"


def find() -> Path | None:
    """The evidence file that goes with this package: its own copy in a wheel, audits/evidence.json in a checkout."""
    return next((path for path in (PACKAGED, CHECKOUT) if path.is_file()), None)


def load(path: Path) -> Evidence:
    """Read an evidence file. OSError or ValueError, with one sentence, if it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] != SCHEMA:
            raise ValueError(f"its schema is {content['schema']!r}, not {SCHEMA!r}")
        runs = [_read_run(run) for run in content["runs"]]
        failed = {
            str(cubin): {str(gate): [dict(then) for then in findings] for gate, findings in gates.items()}
            for cubin, gates in content.get("failed", {}).items()
        }
        evidence = Evidence(runs, dict(content["kernels"]), failed)
        nothing: dict[str, str | None] = {}
        for name, kernel in evidence.kernels.items():
            if not isinstance(kernel["cubin_sha256"], str):
                raise ValueError(f"{name}: cubin_sha256 is no string")
            for gate in GATES:
                evidence.verdict(name, gate)
                evidence.outdated(name, gate, nothing)
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path.name} is no evidence file: {type(error).__name__}: {error}") from error
    return evidence


def is_older(path: Path) -> bool:
    """Whether it is an evidence file of a version before this one, which is not read any more."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("schema") in _OLDER


def _read_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """The run, with what is asked of it. KeyError or TypeError if it is none."""
    known = {"environment": dict(run["environment"]), "quick": list(run["quick"]), "digests": dict(run["digests"])}
    return {**run, **known}


def held() -> dict[str, str]:
    """Name to cubin SHA-256 of the kernels that this build holds; empty for a CPU-only build."""
    from dhp_safe_fa import _inspect

    return {str(kernel["name"]): str(kernel["cubin_sha256"]) for kernel in _inspect.kernels()}


def compare(evidence: Evidence, kernels: Mapping[str, str], now: Mapping[str, str | None]) -> Status:
    """What evidence says of these kernels, name to SHA-256. now: digests of what takes part (``provenance.here()``)."""
    if not kernels:
        return Status(NONE, ("this build holds no GPU kernel",))
    found: dict[str, dict[tuple[str, str], None]] = {}  # what was found to the kernels and gates of which it was
    single = []
    for name, sha256 in kernels.items():
        if name not in evidence.kernels:
            single.append(f"{name}: the evidence does not name this kernel")
        elif (measured := evidence.kernels[name]["cubin_sha256"]) != sha256:
            single.append(f"{name}: its machine code is {sha256[:12]}…, the evidence is about {measured[:12]}…")
        else:
            for gate in GATES:
                verdict = evidence.verdict(name, gate)
                for words in evidence.outdated(name, gate, now) or (["not run"] if verdict == NOT_RUN else []):
                    found.setdefault(words, {})[name, gate] = None
                if verdict not in ("PASS", NOT_RUN):
                    single.append(f"{name}: {gate}: {verdict}")
    common = tuple(f"{words} ({what})" for words, of in found.items() for what in _counted(of, len(kernels)))
    unknown = tuple(dict.fromkeys(_words(part) for part, digest in now.items() if digest is None))
    if common or single:
        return Status(STALE, (*common, *single), common, not_compared=unknown)
    how = f"all {len(kernels)} kernels of this build passed {evidence.where()}"
    return Status(FRESH, summary=how, not_compared=unknown)


def _counted(found: Iterable[tuple[str, str]], of: int) -> list[str]:
    """Kernels and gates in words: how many of the kernels; gates that are of the same ones together."""
    names: dict[str, set[str]] = {}
    for name, gate in found:
        names.setdefault(gate, set()).add(name)
    together: dict[frozenset[str], list[str]] = {}
    for gate in (gate for gate in GATES if gate in names):
        together.setdefault(frozenset(names[gate]), []).append(gate)
    return [f"{', '.join(gates)}; {len(kernels)} of {of} kernels" for kernels, gates in together.items()]


def status() -> Status:
    """What the evidence file that goes with this package says of the kernels in it."""
    path = find()
    if path is None:
        return Status(NONE, ("there is no evidence file; `make evidence` writes one on a Hopper GPU",))
    try:
        return compare(load(path), held(), provenance.here())
    except (OSError, ValueError) as error:
        return Status(NONE, (str(error),))
