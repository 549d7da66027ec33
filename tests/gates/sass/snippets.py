"""Hand-written SASS: findings of a few lines, without a compiler or a disassembler."""

from __future__ import annotations

from dhp_safe_fa.gates.sass.listing import Program, parse_listing
from dhp_safe_fa.gates.sass.taint import Analysis, analyse


def program(text: str) -> Program:
    """A kernel of these lines; an EXIT is added if there is none."""
    lines = [line if line.endswith((":", ";")) else f"{line} ;" for line in map(str.strip, text.split("\n")) if line]
    return parse_listing("\n".join(lines if any("EXIT" in line for line in lines) else [*lines, "EXIT ;"]))


def analysis(text: str) -> Analysis:
    return analyse(program(text), "snippet")


def findings(text: str) -> set[tuple[str, str]]:
    """(kind, opcode) of every finding. Unknown opcodes are an error of the test."""
    code = program(text)
    result = analyse(code, "snippet")
    assert result.unknown == []
    return {(finding.kind, code.code[finding.position].opcode) for finding in result.findings}


# What the snippets of tests start from: R4 is secret, R2 and R3 are a public address.
LOAD = "LDG.E R4, desc[UR4][R2.64]\n"


def leaks(*code: str) -> bool:
    """Whether R9 is secret at the end: used as an address."""
    return ("address", "STS") in findings("\n".join([LOAD, *code, "STS [R9], R0"]))


def in_sections(**sections: str) -> Program:
    """Code of several sections in this order; the one called `kernel` is the kernel, the others are functions."""
    lines: list[str] = []
    for name, text in sections.items():
        lines += [f'.section .text.{name},"ax",@progbits', f"{name}:"]
        if name == "kernel":
            lines.insert(-1, '.other kernel,@"STO_CUDA_ENTRY STV_DEFAULT"')
        lines += [line if line.endswith(":") else f"{line} ;" for line in map(str.strip, text.split("\n")) if line]
    return parse_listing("\n".join(lines))
