"""Memory that is declared public by the parameter that points to it: what comes from there steers, and nothing else."""

from __future__ import annotations

import pytest
from snippets import program

from dhp_safe_fa.gates.sass.taint import analyse

# Parameters begin at 0x210: out at 8, the declared table at 16, another pointer at 24.
POINTERS = "LDC.64 R10, c[0x0][0x218]\nLDC.64 R12, c[0x0][0x220]\nLDC.64 R14, c[0x0][0x228]\n"
THREAD = "S2R R22, SR_TID.X\n"
SECRET = "LDG.E R4, desc[UR4][R14.64]\n"


def findings(*code: str, public: tuple[int, ...] = (16,)) -> set[tuple[str, str]]:
    snippet = program(POINTERS + THREAD + SECRET + "\n".join(code))
    result = analyse(snippet, "snippet", public=public)
    assert result.unknown == []
    return {(finding.kind, snippet.code[finding.position].opcode) for finding in result.findings}


@pytest.mark.parametrize(
    "load",
    [
        "LDG.E R5, desc[UR4][R12.64]",
        "LDG.E R5, desc[UR4][R12.64+0x80]",
        "IMAD.WIDE R12, R22, 0x4, R12\nLDG.E.CONSTANT R5, desc[UR4][R12.64]",
        "IADD3 R16, P0, R22, R12, RZ\nIADD3.X R17, RZ, R13, RZ, P0, !PT\nLDG.E R5, desc[UR4][R16.64]",
        "LEA R16, P0, R22, c[0x0][0x220], 0x2\nLEA.HI.X R17, R22, c[0x0][0x224], RZ, 0x2, P0\n"
        "LDG.E R5, desc[UR4][R16.64]",
        "ULDC.64 UR6, c[0x0][0x220]\nLDG.E R5, desc[UR4][R22.U32+UR6]",
        "LDG.E.64 R6, desc[UR4][R12.64]\nMOV R5, R7",
        "IADD3 R16, P0, R22, R12, RZ\nIMAD.X R17, R13, 0x1, RZ, P0\nLDG.E R5, desc[UR4][R16.64]",
        "SHFL.IDX PT, R16, R12, RZ, 0x1f\nSHFL.IDX PT, R17, R13, RZ, 0x1f\nLDG.E R5, desc[UR4][R16.64]",
    ],
)
def test_what_comes_from_declared_memory_steers(load: str) -> None:
    use = "IMAD.WIDE R18, R5, 0x4, R14\nLDG.E R8, desc[UR4][R18.64]"
    assert findings(load, use) == set()
    assert ("address", "LDG.E") in findings(load, use, public=())
    assert ("address", "LDG.E") in findings(load, use, public=(24,))


@pytest.mark.parametrize(
    "load",
    [
        "IMAD.WIDE R12, R4, 0x4, R12\nLDG.E R5, desc[UR4][R12.64]",  # where a secret says
        "LDG.E R5, desc[UR4][R10.64]",  # from another pointer
        "MOV R12, R10\nLDG.E R5, desc[UR4][R12.64]",  # with the lower word of another
        "MOV R13, R11\nLDG.E R5, desc[UR4][R12.64]",
        "IADD3 R12, R12, R10, RZ\nLDG.E R5, desc[UR4][R12.64]",
        "LDG.E R5, desc[UR4][R12.64]\nSTS [R22], R5\nLDS R5, [R22]",  # by way of shared memory
        "LDG.E R5, desc[UR4][R12.64]\nIADD3 R5, R5, R4, RZ",
        "ISETP.GT.AND P0, PT, R4, RZ, PT\nMOV R5, RZ\n@P0 LDG.E R5, desc[UR4][R12.64]",
        "ATOMG.E.ADD PT, R5, desc[UR4][R12.64], R22",
        "IMAD R12, R12, -0x1, R12\nIADD3 R12, R12, R22, RZ\nLDG.E R5, desc[UR4][R12.64]",  # minus itself
        "LEA R12, P0, -R12, R12, 0x0\nLDG.E R5, desc[UR4][R12.64]",
        "IADD3.X R13, R13, R13, RZ, !PT, !PT\nLDG.E R5, desc[UR4][R12.64]",  # twice the upper word
        "IADD3.X R12, RZ, ~c[0x0][0x220], RZ, !PT, !PT\nLDG.E R5, desc[UR4][R12.64]",
        "IMAD.WIDE.U32 R16, P0, R22, R12, R10\nLDG.E R5, desc[UR4][R16.64]",  # a carry moves the operands on
        "ISETP.GT.AND P0, PT, R22, 0x5, PT\nMOV R16, R10\n@P0 MOV R16, R12\n"  # from a lane that the guard excludes
        "@P0 SHFL.IDX PT, R16, R16, RZ, 0x1f\nMOV R12, R16\n@P0 LDG.E R5, desc[UR4][R12.64]",
    ],
)
def test_what_does_not_is_secret(load: str) -> None:
    use = "IMAD.WIDE R18, R5, 0x4, R14\nLDG.E.U8 R8, desc[UR4][R18.64]"
    assert ("address", "LDG.E.U8") in findings(load, use)


@pytest.mark.parametrize(
    "store",
    [
        "STG.E desc[UR4][R12.64], R4",
        "ST.E desc[UR4][R12.64], R4",
        "REDG.E.ADD desc[UR4][R12.64], R22",
        "ATOMG.E.EXCH PT, RZ, desc[UR4][R12.64], R22",
        "UMOV UR10, 0x1\nULDC.64 UR6, c[0x0][0x220]\nUBLKRED.G.S.ADD [UR6], [UR8], UR10",
        "IMAD.WIDE R16, R22, 0x4, R12\nSTG.E desc[UR4][R16.64], R4",
        "MOV R10, R12\nSTG.E desc[UR4][R10.64], R4",  # the lower word suffices if both lie in the same 4 GB
        "MOV R11, R13\nSTG.E desc[UR4][R10.64], R4",
        "IADD3 R16, P0, R12, -R10, RZ\nIADD3 R10, P1, R10, R16, RZ\nSTG.E desc[UR4][R10.64], R4",  # out + (table - out)
        "LOP3.LUT R16, R12, R10, RZ, 0x3c, !PT\nLOP3.LUT R10, R16, R10, RZ, 0x3c, !PT\nSTG.E desc[UR4][R10.64], R4",
        "IMAD R16, R12, 0x1, RZ\nIADD3 R10, R10, R16, RZ\nSTG.E desc[UR4][R10.64], R4",
        "LDG.E.64 R16, desc[UR4][R14.64]\nSTG.E desc[UR4][R16.64], R4",  # a pointer out of memory
        "LDC.64 R16, c[0x0][R22+0x210]\nSTG.E desc[UR4][R16.64], R4",  # one of the parameters
        "LDC R16, c[0x0][0x222]\nIADD3 R10, R10, R16, RZ\nSTG.E desc[UR4][R10.64], R4",  # across its words
        "IADD3 R16, R12, -R10, RZ\nSHF.R.U32.HI R16, RZ, 0x2, R16\nLEA R10, P0, R16, R10, 0x2\n"
        "STG.E desc[UR4][R10.64], R4",  # out + ((table - out) >> 2 << 2)
        "IADD3 R16, R12, -R10, RZ\nLOP3.LUT R16, R16, 0xfffffff0, RZ, 0xc0, !PT\nIADD3 R10, R10, R16, RZ\n"
        "STG.E desc[UR4][R10.64], R4",
        "I2F.U64 R16, R12\nF2I.U64 R16, R16\nIMAD.SHL.U32 R16, R16, 0x4, RZ\nIADD3 R10, R10, R16, RZ\n"
        "STG.E desc[UR4][R10.64], R4",
        "IADD3.X R16, R10, ~R12, RZ, !PT, !PT\nIADD3 R10, R10, -R16, RZ\nSTG.E desc[UR4][R10.64], R4",
        "ISETP.GT.AND P0, PT, R22, 0x5, PT\nSEL R16, R12, R14, P0\nIADD3 R16, R16, -R10, RZ\n"
        "IMAD.SHL.U32 R16, R16, 0x4, RZ\nIADD3 R10, R10, R16, RZ\nSTG.E desc[UR4][R10.64], R4",
        "LDC R16, c[0x0][R22+0x210]\nIMAD.SHL.U32 R16, R16, 0x4, RZ\nIADD3 R10, R10, R16, RZ\n"
        "STG.E desc[UR4][R10.64], R4",  # one of the parameters, as a number
        "LDC.U8 R16, c[0x0][0x221]\nIMAD.SHL.U32 R16, R16, 0x100, RZ\nIADD3 R10, R10, R16, RZ\n"
        "STG.E desc[UR4][R10.64], R4",
        "IADD3 R16, R12, -R10, RZ\nSTL [R1], R16",  # to come back as a number
        "CCTL.E.RML2 [R12]",  # discards what is there
    ],
)
def test_a_store_that_may_reach_declared_memory(store: str) -> None:
    assert ("declared-memory", store.rpartition("\n")[2].split()[0]) in findings(store)
    assert "declared-memory" not in {kind for kind, _ in findings(store, public=())}


@pytest.mark.parametrize(
    "store",
    [
        "STG.E desc[UR4][R10.64], R4",
        "IMAD.WIDE R16, R22, 0x4, R10\nSTG.E desc[UR4][R16.64+0x10], R4",
        "LDG.E R5, desc[UR4][R12.64]\nIMAD.WIDE R16, R5, 0x80, R10\nSTG.E desc[UR4][R16.64], R4",  # by a page's number
        "LDC.64 R6, c[0x4][0x8]\nSTG.E desc[UR4][R6.64], R4",
        "S2R R21, SR_SWINHI\nMOV R20, R22\nST.E [R20], R4",
        "STS [R22], R4",
        "ULDC.64 UR6, c[0x0][0x218]\nSTG.E desc[UR4][R22.U32+UR6], R4",
    ],
)
def test_a_store_that_cannot(store: str) -> None:
    assert findings(store) == set()


def test_where_the_parameters_begin_is_known_of_sm_90_alone() -> None:
    snippet = program(
        POINTERS + THREAD + "LDG.E R5, desc[UR4][R12.64]\nIMAD.WIDE R18, R5, 0x4, R14\nLDG.E R8, desc[UR4][R18.64]"
    )
    assert analyse(snippet, "snippet", public=(16,)).findings == []
    snippet.target = "sm_80"
    assert [finding.kind for finding in analyse(snippet, "snippet", public=(16,)).findings] == ["address"]
