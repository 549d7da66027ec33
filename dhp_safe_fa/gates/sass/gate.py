"""The gate `sass`: machine code in, a verdict for each kernel out. No GPU is needed and nothing is executed.

Literal part: no predicated control transfer. Taint part: no secret reaches a sink. Unknown opcode: failed.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from .. import tools
from ..verdict import FAIL, PASS
from . import elf
from .cfg import is_predicated
from .isa import effects
from .isa.operands import UnknownInstruction
from .listing import ListingError, Program, parse_listing
from .policy import ACCEPTED, PUBLIC_RESULT, Policy
from .taint import Analysis, Finding, analyse, count_indirect


@dataclass(frozen=True)
class Cubin:
    """Machine code. name: what to report its only kernel by, or "" for the kernel's own name. origin: its file."""

    name: str
    data: bytes
    origin: str = ""

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class KernelReport:
    """The figures and findings of one kernel. spill_bytes: bytes that its STL instructions store, counted once each."""

    kernel: str
    cubin_sha256: str
    instructions: int
    registers: int
    spill_bytes: int
    predicated_branches: int
    indirect_branches: int
    secret_findings: list[dict[str, Any]] = field(default_factory=list)
    unknown_opcodes: list[str] = field(default_factory=list)
    public_memory: list[str] = field(default_factory=list)  # what it may read and be steered by, by name

    @property
    def is_clean(self) -> bool:
        """The taint part passes."""
        return not self.secret_findings and not self.unknown_opcodes

    @property
    def verdict(self) -> str:
        return PASS if self.is_clean and not self.predicated_branches else FAIL


def _place(program: Program, position: int) -> dict[str, str]:
    instruction = program.code[position]
    return {"address": f"{instruction.address:#06x}", "instruction": instruction.text, "source": instruction.source}


def _describe(program: Program, finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        **_place(program, finding.position),
        "secret": finding.source,
        "chain": [_place(program, position) for position in finding.chain],
    }


def _spill_bytes(program: Program, positions: list[int]) -> int:
    total = 0
    for position in positions:
        instruction = program.code[position]
        if instruction.base == "STL":
            try:
                frame = effects(instruction.opcode, instruction.operands, instruction.guard).frame
            except UnknownInstruction:
                continue  # listed among the unknown opcodes
            total += 4 * frame.words if frame else 0
    return total


def report_kernel(program: Program, kernel: str, cubin: Cubin, registers: int, policy: Policy) -> KernelReport:
    """Analyse one kernel of a disassembled cubin."""
    name = cubin.name if cubin.name and len(program.kernels) == 1 else kernel
    code = program.code
    declared = policy.declared(name)
    analysis: Analysis = analyse(
        program,
        kernel,
        lambda p: policy.allows(PUBLIC_RESULT, name, code[p]),
        declared,
        policy.made_before(name),
        policy.is_maker(name),
    )
    graph = analysis.graph
    positions = [p for first, last in graph.blocks for p in range(first, last + 1)]
    start, end = program.sections[code[program.labels[kernel]].section]
    return KernelReport(
        kernel=name,
        cubin_sha256=cubin.sha256,
        instructions=len(set(positions) | set(range(start, end))),
        registers=registers,
        spill_bytes=_spill_bytes(program, positions),
        predicated_branches=sum(is_predicated(code[p]) for p in positions),
        indirect_branches=count_indirect(program, graph),
        secret_findings=[
            _describe(program, f) for f in analysis.findings if not policy.allows(ACCEPTED, name, code[f.position])
        ],
        unknown_opcodes=analysis.unknown,
        public_memory=sorted(declared.values()),
    )


def _shipped_name(sha256: str) -> str:
    """Of the shipped kernel that is these bytes, wherever they were found; empty if none is."""
    try:
        inspect = importlib.import_module("dhp_safe_fa._inspect")
    except ImportError:
        return ""
    return next((str(kernel["name"]) for kernel in inspect.kernels() if kernel["cubin_sha256"] == sha256), "")


def audit(cubin: Cubin, policy: Policy, wanted: Collection[str] = ()) -> list[KernelReport]:
    """One report for each kernel of a cubin, or for those wanted. The shipped policy is for shipped kernels: others
    have no exception in it, whatever their names. NotRun if a tool is missing or this is no cubin that it can read."""
    registers = elf.register_counts(cubin.data)
    try:
        program = parse_listing(tools.disassemble(cubin.data))
    except ListingError as error:
        raise tools.NotRun(f"unreadable listing: {error}") from error
    program.threads = elf.thread_bounds(cubin.data)
    kernels = [kernel for kernel in program.kernels if not wanted or kernel in wanted]
    if not kernels:
        raise tools.NotRun("holds no kernel")
    if policy.is_shipped and not cubin.name:  # its patterns are names, which anybody may give a kernel
        cubin = replace(cubin, name=_shipped_name(cubin.sha256))
        policy = policy if cubin.name else Policy()
    return [report_kernel(program, kernel, cubin, registers.get(kernel, 0), policy) for kernel in kernels]
