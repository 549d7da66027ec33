"""Made-up runs of the gates, as `gates all --json` writes them, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from dhp_safe_fa.gates import provenance, registry
from dhp_safe_fa.gates.evidence import writer as evidence_writer

# Each of a family of its own.
FAMILIES = {"abc": "forward", "def": "backward"}
KERNELS = [
    {"name": name, "family": family, "cubin_sha256": name[0] * 64, "registers": 168, "spill_bytes": 0}
    for name, family in FAMILIES.items()
]
HELD = {str(kernel["name"]): str(kernel["cubin_sha256"]) for kernel in KERNELS}
# What takes part in verdicts, by the names of provenance.py.
OF_BUILD = [part for name, family in FAMILIES.items() for part in (f"launch {family}", f"kernels {name}")]
NAMES = (*OF_BUILD, "controls", "policy", *provenance.of_gates())
NOW: dict[str, str | None] = {name: f"digest of {name}" for name in NAMES}
LISTINGS = {name: sha256[::-1] for name, sha256 in HELD.items()}


def gate_result(gate: str, subject: str, verdict: str = "PASS", **figures: Any) -> dict[str, Any]:
    """One GateResult as JSON, with one right control."""
    problems = [] if verdict == "PASS" else [f"{gate} found something"]
    control = {"name": "branch_on_value", "expects": "caught", "seen": "a difference", "problem": ""}
    return {"gate": gate, "subject": subject, "verdict": verdict, "figures": {"runs": 7, **figures},
            "problems": problems, "controls": [control]}  # fmt: skip


def sass_report(kernel: str, verdict: str = "PASS") -> dict[str, Any]:
    return {"kernel": kernel, "cubin_sha256": HELD[kernel], "instructions": 100, "registers": 168, "spill_bytes": 0,
            "predicated_branches": 0, "indirect_branches": 3, "secret_findings": [], "unknown_opcodes": [],
            "verdict": verdict}  # fmt: skip


def some_run(names: tuple[str, ...] = ("abc", "def"), **environment: Any) -> dict[str, Any]:
    """A run in which every gate passes."""
    known = {
        "gpu": "NVIDIA H100",
        "device": "NVIDIA H100",
        "driver": "580.1",
        "nvidia_smi": {"driver_version": "580.1"},
        "cuda": "13.0",
        "torch": "2.11.0",
        "cudnn": 91900,
        "nvcc": "13.0.88",
        "commit": "0123456789",
        "date": "2026-01-02T03:04",
        "kernels": HELD,
    }
    gates = {gate: [gate_result(gate, name) for name in names] for gate in registry.EXECUTING}
    how = {
        "subjects": "shipped kernels",
        "kernels": list(names),
        "gates": list(registry.NAMES),
        "quick": [],
        "sources": {"built": "s", "here": "s"},
        "digests": dict(NOW),
    }
    return {"environment": {**known, **environment}, "how": how, "sass": [sass_report(name) for name in names], **gates}


def some_content() -> dict[str, Any]:
    """An evidence file in which every gate passes."""
    return evidence_writer.assemble([some_run()], KERNELS, LISTINGS, NOW)
