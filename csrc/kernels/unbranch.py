"""Rewrite every conditional branch of a PTX file into an indirect one, so that SASS has no predicated control transfer.

A loop end or a role, `@p bra L`, becomes: index = p ? 1 : 0, then `brx.idx` over the table {next instruction, L}. ptxas
turns that into BRX or BRXU, an unpredicated indirect branch. The predicate must be public: the step would hide a
secret-dependent branch from a literal search, which is why the SASS gate follows indirect branches.

PTX ISA 9.0, sections 9.7.12.2 (bra), 9.7.12.3 (brx.idx).
"""

from __future__ import annotations

import re

BRANCH = re.compile(r"\s*@(?P<negated>!?)(?P<predicate>%p\d+)\s+bra(\.uni)?\s+(?P<label>\$\w+);")
OTHER_CONTROL = re.compile(r"\s*@!?%p\d+\s+(bra|brx|call|ret|exit|trap)\b.*")


def unbranch(ptx: str) -> tuple[str, int]:
    """The rewritten text and how many branches were rewritten. ValueError names a predicated control transfer of
    another kind, which has no unpredicated form."""
    out: list[str] = []
    count = 0
    for line in ptx.split("\n"):
        match = BRANCH.match(line)
        if match:
            count += 1
            taken, fallen = ("0", "1") if match["negated"] else ("1", "0")
            out += [
                f"\t{{.reg .u32 %branch{count};",
                f"\tselp.u32 %branch{count}, {taken}, {fallen}, {match['predicate']};",
                f"Targets{count}: .branchtargets Next{count}, {match['label']};",
                f"\tbrx.idx %branch{count}, Targets{count};",
                "\t}",
                f"Next{count}:",
            ]
        elif OTHER_CONTROL.match(line):
            raise ValueError(f"cannot make this unconditional: {line.strip()}")
        else:
            out.append(line)
    return "\n".join(out), count
