"""The machine code that a peer's call executes: found by the names of the kernels that were seen to run.

A library such as libtorch_cuda.so carries hundreds of attention kernels (dtype × head_dim × mask × dropout × …). Those
that a call launches are known by name from a profile of the call; the gate `sass` then looks at these alone.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

from .. import targets
from ..sass.elf import register_counts
from ..sass.gate import KernelReport, audit
from ..sass.policy import Policy
from ..tools import NotRun
from ..verdict import worst


@cache
def _cxa() -> ctypes.CDLL:
    return ctypes.CDLL("libstdc++.so.6")


def demangle(name: str) -> str:
    """The C++ name as torch's profiler prints it (Itanium C++ ABI, __cxa_demangle); unchanged if it is none."""
    function = _cxa().__cxa_demangle
    function.restype = ctypes.c_void_p
    status = ctypes.c_int()
    text = function(name.encode(), None, None, ctypes.byref(status))
    if not text or status.value != 0:
        return name
    try:
        return ctypes.string_at(text).decode()
    finally:
        ctypes.CDLL(None).free(ctypes.c_void_p(text))


def matching(names: Iterable[str], seen: Collection[str]) -> dict[str, str]:
    """Of the mangled names in a cubin those that were seen to run, by mangled or demangled name: mangled to shown."""
    shown = {name: demangle(name) for name in names}
    return {name: text for name, text in shown.items() if name in seen or text in seen}


def audit_peer(peer: str, seen: Collection[str], policy: Policy) -> dict[str, Any]:
    """Verdict and one object for each kernel of the peer that ran.

    Args:
        peer: a name in targets.PEERS.
        seen: names of all kernels that its calls launched.
        policy: what is known to be public in it.

    Raises:
        NotRun: its machine code cannot be had, or none of the kernels seen is in it.
    """
    reports = []
    for cubin in targets.from_peer(peer):
        wanted = matching(register_counts(cubin.data), seen)
        if wanted:
            for report in audit(cubin, policy, wanted):
                reports.append(summary(report, wanted.get(report.kernel, report.kernel), cubin.origin))
    if not reports:
        raise NotRun(f"{peer}: none of the kernels seen to run is in its library (seen: {', '.join(seen) or 'none'})")
    return {"verdict": worst(report["verdict"] for report in reports), "kernels": reports}


def summary(report: KernelReport, shown: str, origin: str) -> dict[str, Any]:
    """A kernel's report with its findings counted, and the shortest way from a secret to each kind."""
    findings = report.secret_findings
    kinds = Counter(finding["kind"] for finding in findings)
    guarded = Counter(_opcode(f["instruction"]) for f in findings if f["kind"] == "guarded-arithmetic")
    shortest = {kind: min((f for f in findings if f["kind"] == kind), key=lambda f: len(f["chain"])) for kind in kinds}
    return {
        "kernel": shown,
        "cubin": origin,
        "cubin_sha256": report.cubin_sha256,
        "instructions": report.instructions,
        "registers": report.registers,
        "spill_bytes": report.spill_bytes,
        "predicated_branches": report.predicated_branches,
        "indirect_branches": report.indirect_branches,
        "findings": dict(sorted(kinds.items())),
        "guarded_opcodes": dict(guarded.most_common(_OPCODES)),
        "examples": {kind: [s["instruction"] for s in f["chain"]][-_STEPS:] for kind, f in sorted(shortest.items())},
        "unknown_opcodes": report.unknown_opcodes,
        "verdict": report.verdict,
    }


_OPCODES = 3  # the most frequent ones say what is guarded
_STEPS = 6  # of an example's chain, counted from the place where the secret shows


def _opcode(instruction: str) -> str:
    """MUFU.EX2 of "@P0 MUFU.EX2 R4, R5"."""
    words = instruction.split()
    return words[1] if words[0].startswith("@") else words[0]
