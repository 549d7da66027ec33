"""Where the analysis starts, and what is never analysed: entries behind their functions, unreached code."""

from __future__ import annotations

from snippets import LOAD, in_sections

from dhp_safe_fa.gates.sass.cfg import build_graph
from dhp_safe_fa.gates.sass.taint import UNRESOLVED, analyse

CALLS = f"{LOAD}MOV R20, 32@lo((kernel + .L_1@srel))\nCALL.ABS.NOINC `(f)\n.L_1:\nSTS [R4], R0\nEXIT"


def kinds(**sections: str) -> set[tuple[str, str]]:
    code = in_sections(**sections)
    result = analyse(code, "kernel")
    assert result.unknown == []
    return {(finding.kind, code.code[finding.position].opcode) for finding in result.findings}


def test_a_function_in_front_of_the_kernel() -> None:
    assert kinds(f="RET.ABS.NODEC R20 0x0", kernel=CALLS) == {("address", "STS")}


def test_a_function_behind_the_kernel() -> None:
    assert kinds(kernel=CALLS, f="RET.ABS.NODEC R20 0x0") == {("address", "STS")}


def test_unreached_code_of_a_function_that_is_called() -> None:
    assert (UNRESOLVED, "STS") in kinds(f="RET.ABS.NODEC R20 0x0\nSTS [R2], R0", kernel=CALLS)


def test_a_function_that_is_never_called_is_none_of_the_kernel() -> None:
    assert kinds(f="STS [R2], R0\nRET.ABS.NODEC R20 0x0", kernel="MOV R2, R3\nEXIT") == set()


TWICE = """MOV R20, 32@lo((kernel + .L_1@srel))
CALL.ABS.NOINC `(load)
.L_1:
MOV R4, RZ
{move}
CALL.ABS.NOINC `(pass)
.L_2:
STS [R4], R0
EXIT"""
FUNCTIONS = {"load": "LDG.E R4, desc[UR4][R2.64]\nRET.ABS.NODEC R20 0x0", "pass": "MOV R4, R4\nRET.ABS.NODEC R20 0x0"}


def test_a_return_leads_where_its_own_calls_say() -> None:
    code = TWICE.format(move="MOV R20, 32@lo((kernel + .L_2@srel))")
    assert kinds(**FUNCTIONS, kernel=code) == set()


def test_a_return_whose_address_was_not_found_leads_to_all() -> None:
    """The second call's address may be any, so its return may lead behind the first call, too."""
    code = in_sections(**FUNCTIONS, kernel=TWICE.format(move="MOV R20, R30"))
    graph = build_graph(code, "kernel")
    block = {first: number for number, (first, _) in enumerate(graph.blocks)}
    last = block[code.labels["pass"]]
    assert graph.successors[last] == [block[code.labels[".L_1"]], block[code.labels[".L_2"]]]


def test_fences_behind_the_exit_are_dead() -> None:
    assert kinds(kernel="MOV R2, R3\nEXIT\nMEMBAR.SC.VC\nERRBAR\nEXIT") == set()
