"""Where the analysis starts, and what is never analysed: entries behind their functions, unreached code."""

from __future__ import annotations

from snippets import LOAD, in_sections

from dhp_safe_fa.gates.sass.cfg import build_graph
from dhp_safe_fa.gates.sass.taint import UNRESOLVED, analyse

SET = (
    "LDC.64 R2, c[0x0][0x210]\nULDC.64 UR4, c[0x0][0x208]\nS2R R0, SR_TID.X\nMOV R21, RZ\n"  # what the code below uses
)
CALLS = f"{SET}{LOAD}MOV R20, 32@lo((kernel + .L_1@srel))\nCALL.ABS.NOINC `(f)\n.L_1:\nSTS [R4], R0\nEXIT"


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


TWICE = f"""{SET}MOV R20, 32@lo((kernel + .L_1@srel))
CALL.ABS.NOINC `(load)
.L_1:
MOV R4, RZ
{{move}}
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


INDEX = """LDC R6, c[0x0][0x220]
LOP3.LUT R6, R6, 0x4, RZ, 0xc0, !PT
ISETP.EQ.AND P0, PT, R6, RZ, PT
@P0 MOV R9, 0x1
ISETP.EQ.AND P1, PT, R6, 0x4, PT
@P1 MOV R9, 0x2
"""


def stale(code: str) -> bool:
    """Whether the address in R9 may be what an earlier kernel left in a register."""
    listing = in_sections(kernel=f"{SET}{code}\nSTS [R9], R0\nEXIT")
    found = [f for f in analyse(listing, "kernel").findings if f.kind == "address"]
    assert [f.source for f in found] in ([], ["a register that was never written"])
    return bool(found)


def test_a_register_that_was_never_written_is_secret() -> None:
    assert stale("NOP")
    assert stale("MOV R9, R8")
    assert stale("@P0 MOV R9, RZ")
    assert stale("BRA.U UP1, `(.L_1)\nMOV R9, RZ\n.L_1:")
    assert stale("IMAD R9, R0, 0x4, R8")
    assert not stale("IMAD R9, R0, 0x4, RZ")
    assert not stale("ISETP.EQ.AND P0, PT, R0, RZ, PT\n@P0 MOV R9, RZ\n@!P0 MOV R9, R0")


def test_a_register_that_is_written_in_every_case() -> None:
    assert not stale(INDEX)
    assert stale(INDEX.replace("0x4, RZ, 0xc0", "0xc, RZ, 0xc0"))  # there are more cases
    assert stale(INDEX.replace("ISETP.EQ.AND P1", "MOV R6, R0\nISETP.EQ.AND P1"))  # of another number
    assert stale(INDEX.replace("@P1", "@!P1"))


def test_votes_over_the_same_predicate_are_one_condition() -> None:
    code = "ISETP.EQ.AND P1, PT, R0, RZ, PT\nVOTEU.ANY UP1, P1\n@UP1 UMOV UR9, UR4\n{between}VOTEU.ANY UP2, P1\n"
    use = "UMOV UR8, UR4\n@UP2 LDS R9, [UR9]"

    def finds(between: str) -> bool:
        listing = in_sections(kernel=f"{SET}{code.format(between=between)}{use}\nEXIT")
        return any(f.kind == "address" for f in analyse(listing, "kernel").findings)

    assert not finds("")
    assert not finds("UISETP.GT.AND UP1, UPT, UR4, URZ, UPT\n")
    assert finds("ISETP.GT.AND P1, PT, R0, RZ, PT\n")
