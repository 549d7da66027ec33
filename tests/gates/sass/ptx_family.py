"""A family of PTX instructions, written as templates, and kernels that hold every one of them.

A template is a line of PTX in which ``(a|b)`` stands for alternatives and ``(T=a|b)`` names the one that was chosen.
``<d T>`` is a destination of that type, ``<s T>`` a source; ``<s T*4>`` a vector of four; ``<g>``, ``<h>`` and ``<l>``
addresses in global, shared and local memory, ``<x>`` a generic one; ``<c N/2>`` is a vector of N/2 registers of 32 bits
that is source and destination. ``@90a`` in front: only for targets that
can do that; ``@8x``: before sm_90.
Sources are loaded from memory (or, "uniform", are parameters of the kernel) and destinations are stored, so that the
compiler can neither compute ahead nor drop the instruction.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from pathlib import Path

TEMPLATES = Path(__file__).with_name("ptx_family.txt")
# Targets, each of which can do what those before it can, but for what is marked @8x.
_MARKS = ["80", "86", "89", "90", "90a"]
TARGETS = {target: {*_MARKS[: place + 1], *(["8x"] if target < "90" else [])} for place, target in enumerate(_MARKS)}
PER_KERNEL = 12  # templates in one kernel: so few that no register spills, so many that kernels cost little
_BITS = {"pred": 1, "b8": 8, "u8": 8, "s8": 8}
_ALTERNATIVES = re.compile(r"\((?:(\w)=)?([^()<>]*\|[^()<>]*)\)")
_OPERAND = re.compile(r"<([dsghlxc])(?: ([\w]+)(?:[*/](\d+))?)?>")


def bits(kind: str) -> int:
    """Bits of a register that holds a value of this type: ``f16x2`` 32, ``e4m3x2`` 16, ``u8`` 16 as PTX has it."""
    if kind in _BITS:
        return max(16, _BITS[kind]) if kind != "pred" else 1
    match = re.fullmatch(r"(?:b|u|s|f|bf|tf)(\d+)(?:x(\d+))?", kind)
    if match:
        return max(16, int(match[1]) * int(match[2] or 1))
    if kind in ("e4m3x2", "e5m2x2"):
        return 16
    raise ValueError(f"type {kind}")


def expand(template: str) -> list[str]:
    """All choices of a template's alternatives; <d T> gets the type that was chosen for T."""
    match = _ALTERNATIVES.search(template)
    if match is None:
        return [template]
    found = []
    for choice in match[2].split("|"):
        line = template[: match.start()] + choice + template[match.end() :]
        if match[1]:
            line = re.sub(rf"<([dsc]) {match[1]}([*/]\d+)?>", rf"<\1 {choice}\2>", line)
            line = line.replace(f"(={match[1]})", choice)
        found += expand(line)
    return found


@dataclass
class _Kernel:
    name: str
    uniform: bool
    lines: list[str] = field(default_factory=list)
    parameters: list[str] = field(default_factory=list)
    registers: int = 0

    def register(self, kind: str) -> str:
        self.registers += 1
        self.lines.append(f".reg .{'pred' if kind == 'pred' else f'b{bits(kind)}'} %v{self.registers};")
        return f"%v{self.registers}"

    def source(self, kind: str) -> str:
        if kind == "pred":
            plain, register = self.source("b32"), self.register("pred")
            self.lines.append(f"setp.ne.b32 {register}, {plain}, 0;")
            return register
        register = self.register(kind)
        if bits(kind) == 128:
            low, high = self.source("b64"), self.source("b64")
            self.lines.append(f"mov.b128 {register}, {{{low}, {high}}};")
        elif self.uniform:
            self.parameters.append(f".param .b{bits(kind)} {self.name}_p{self.registers}")
            self.lines.append(f"ld.param.b{bits(kind)} {register}, [{self.name}_p{self.registers}];")
        else:
            self.lines.append(f"ld.volatile.global.b{bits(kind)} {register}, [%in+{16 * self.registers}];")
        return register

    def result(self, kind: str, register: str) -> None:
        if kind == "pred":
            plain = self.register("b32")
            self.lines.append(f"selp.b32 {plain}, 1, 0, {register};")
            self.result("b32", plain)
        elif bits(kind) == 128:
            low, high = self.register("b64"), self.register("b64")
            self.lines.append(f"mov.b128 {{{low}, {high}}}, {register};")
            self.result("b64", low)
            self.result("b64", high)
        else:
            self.lines.append(f"st.volatile.global.b{bits(kind)} [%out+{16 * self.registers}], {register};")

    def add(self, template: str) -> None:
        results: list[tuple[str, str]] = []

        def operand(match: re.Match[str]) -> str:
            role, kind, count = match[1], match[2], int(match[3] or 0)
            if role in "ghlx":
                return {"g": "%out", "h": "%shared", "l": "%local", "x": "%any"}[role]
            made = []
            if role == "c":
                made = [self.source("b32") for _ in range(int(kind) // count)]
                results.extend(("b32", register) for register in made)
            for _ in range(max(1, count) if role in "ds" else 0):
                made.append(self.source(kind) if role == "s" else self.register(kind))
                if role == "d":
                    results.append((kind, made[-1]))
            return f"{{{', '.join(made)}}}" if count else made[0]

        line = _OPERAND.sub(operand, template)
        self.lines.append(line if line.startswith("{") else f"{line};")
        for kind, register in results:
            self.result(kind, register)

    def text(self) -> str:
        parameters = ",\n".join([f".param .b64 {self.name}_in", f".param .b64 {self.name}_out", *self.parameters])
        body = "\n".join(self.lines)
        thread = "" if self.uniform else "mad.wide.u32 %in, %t, 4096, %in;\nmad.wide.u32 %out, %t, 4096, %out;"
        return f""".visible .entry {self.name}({parameters})
{{
.reg .b64 %in, %out, %local, %any;
.reg .b32 %t, %shared;
.local .align 16 .b8 frame_{self.name}[256];
mov.u32 %t, %tid.x;
ld.param.b64 %in, [{self.name}_in];
ld.param.b64 %out, [{self.name}_out];
{thread}
mov.b64 %any, %out;
mov.b32 %shared, memory;
{"" if self.uniform else "mad.lo.u32 %shared, %t, 256, %shared;"}
mov.b64 %local, frame_{self.name};
{body}
ret;
}}
"""


def templates() -> list[tuple[str, str]]:
    """(mark, line) of the family, alternatives expanded; the mark is "" or a target."""
    found = []
    for line in TEMPLATES.read_text().splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        mark = "80"
        if line.startswith("@"):
            head, _, line = line.partition(" ")
            mark = head[1:]
        found += [(mark, one) for one in expand(line)]
    return found


def module(target: str, lines: list[str] | None = None, per_kernel: int = PER_KERNEL) -> str:
    """PTX of all templates that a target has, each with sources in registers and, where it can, uniform ones."""
    chosen = [line for mark, line in templates() if mark in TARGETS[target]] if lines is None else lines
    kernels = []
    for uniform, start in itertools.product((False, True), range(0, len(chosen), per_kernel)):
        kernel = _Kernel(f"k{len(kernels)}", uniform)
        for line in chosen[start : start + per_kernel]:
            kernel.add(line)
        kernels.append(kernel)
    header = f""".version 9.0
.target sm_{target}
.address_size 64
.extern .shared .align 128 .b8 memory[];
.global .texref image;
.global .surfref surface;
.global .align 128 .b8 map[128];
.const .align 16 .b8 bank[256];
"""
    return header + "".join(kernel.text() for kernel in kernels)
