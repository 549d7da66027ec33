"""mbarriers before their initialisation, and declared memory before its launch: what comes too early is a finding."""

from __future__ import annotations

import pytest
from snippets import findings, program

from dhp_safe_fa.gates.sass.taint import analyse

ADDRESS = "S2UR UR8, SR_CgaCtaId\nUMOV UR9, 0x1400\nULEA UR9, UR8, UR9, 0x18\n"
FIRST = "S2R R22, SR_TID.X\nISETP.EQ.AND P0, PT, R22, RZ, PT\n"
INIT = "SYNCS.EXCH.64 URZ, [UR9], UR14\n"
MEETING = "BAR.SYNC.DEFER_BLOCKING 0x0\n"
USE = "SYNCS.ARRIVE.TRANS64 RZ, [UR9], R0\n"


@pytest.mark.parametrize(
    "code",
    [
        FIRST + "@P0 " + INIT + MEETING + USE,
        INIT + USE,  # each thread has initialised it
        FIRST + "@P0 " + INIT + "@P0 " + USE + MEETING + USE,  # who has
        FIRST + "@P0 " + INIT + "UCGABAR_ARV\nUCGABAR_WAIT\n" + USE,
        FIRST + "@!P0 BRA `(meet)\n" + INIT + "meet:\n" + MEETING + USE,
        "S2R R22, SR_LANEID\nISETP.EQ.AND P0, PT, R22, RZ, PT\n@P0 " + INIT + MEETING + USE,
    ],
)
def test_an_initialised_mbarrier(code: str) -> None:
    assert findings(ADDRESS + code) - {("branch", "BRA")} == set()


@pytest.mark.parametrize(
    "code",
    [
        FIRST + "@P0 " + INIT + USE + MEETING,
        FIRST + "@P0 " + INIT + "BAR.SYNC.DEFER_BLOCKING R5, 0x60\n" + USE,  # some threads meet
        FIRST + "@P0 " + INIT + "@P0 " + MEETING + USE,
        FIRST + "@P0 " + INIT + "BAR.ARV 0x0, 0x60\n" + USE,
        FIRST + "@!P0 BRA `(use)\n" + INIT + "use:\n" + USE,  # not all come by it
        USE + INIT + MEETING,
        MEETING + FIRST + "@P0 " + INIT + USE,  # nobody meets after it
        MEETING + INIT + USE,
        "UMOV UR10, 0x1500\nULEA UR10, UR8, UR10, 0x18\nSYNCS.EXCH.64 URZ, [UR10], UR14\n" + USE,  # another one
        "UMOV UR10, 0x1500\nULEA UR10, UR8, UR10, 0x18\nSYNCS.EXCH.64 URZ, [UR10], UR14\n" + MEETING + USE,
    ],
)
def test_one_that_may_not_be(code: str) -> None:
    assert ("mbarrier", "SYNCS.ARRIVE.TRANS64") in findings(ADDRESS + code)


OTHERS = "S2R R22, SR_TID.X\nISETP.GE.AND P1, PT, R22, 0x20, PT\n"


@pytest.mark.parametrize(
    "code",
    [
        FIRST + "UCGABAR_ARV\n@P0 " + INIT + "UCGABAR_WAIT\n" + USE,
        OTHERS + "@!P1 BAR.ARV 0x0, 0x100\n" + FIRST + "@P0 " + INIT + MEETING + USE,
        OTHERS + "@!P1 BAR.ARV R5, 0x100\n" + FIRST + "@P0 " + INIT + MEETING + USE,
        OTHERS + "@!P1 " + MEETING + FIRST + "@P0 " + INIT + MEETING + USE,
        # meets and uses it where a path leads around that, to the initialisation
        OTHERS + "@P1 BRA `(start)\n" + MEETING + USE + "start:\n" + FIRST + "@P0 " + INIT + MEETING + USE,
    ],
)
def test_one_that_is_initialised_when_others_may_have_met(code: str) -> None:
    assert ("mbarrier", "SYNCS.EXCH.64") in findings(ADDRESS + code)


def test_a_meeting_in_a_loop_behind_its_initialisation() -> None:
    loop = "loop:\n" + MEETING + USE + "ISETP.GE.AND P1, PT, R22, 0x20, PT\n@P1 BRA `(loop)\n"
    assert findings(ADDRESS + FIRST + "@P0 " + INIT + loop) == set()


@pytest.mark.parametrize(
    "condition",
    [
        "S2R R5, SR_CTAID.Y\n",
        "S2R R5, SR_VIRTID\n",
        "S2R R5, SR_SMEMSZ\n",
        "MOV R5, c[0x0][0xc]\n",
        "MOV R5, c[0x0][0x144]\n",
        "MOV R5, c[0x0][0x11b8]\n",
        "SYNCS.ARRIVE.TRANS64 R4, [UR9+0x8], R0\n",
        "MOV R5, c[0x0][0x218]\n",
        "LDC R5, c[0x0][R22]\n",
        "LDC R5, c[0x3][0x8]\n",
        "LDG.E R5, desc[UR4][R2.64]\n",
        "S2R R6, SR_CTAID.X\nIADD3 R5, R6, R22, RZ\n",
    ],
)
def test_one_that_is_in_some_blocks_or_launches(condition: str) -> None:
    chosen = FIRST + condition + "ISETP.EQ.AND P1, PT, R5, 0x7, PT\n"
    guarded = chosen + "@P1 " + INIT + MEETING + USE
    branched = chosen + "@P1 BRA `(meet)\n" + INIT + "meet:\n" + MEETING + USE
    assert ("mbarrier", "SYNCS.EXCH.64") in findings(ADDRESS + guarded)
    assert ("mbarrier", "SYNCS.EXCH.64") in findings(ADDRESS + branched)


# Parameters begin at 0x210: out at 8, the declared table at 16, lengths at 24.
POINTERS = "LDC.64 R10, c[0x0][0x218]\nLDC.64 R12, c[0x0][0x220]\nLDC.64 R14, c[0x0][0x228]\nS2R R22, SR_TID.X\n"
READ = "LDG.E R5, desc[UR4][R12.64]\n"
STEER = "IMAD.WIDE R18, R5, 0x4, R14\nLDG.E.U8 R8, desc[UR4][R18.64]\n"


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("ACQBULK\n" + READ, False),
        (READ, True),
        (READ + "ACQBULK\n", True),
        ("ISETP.GT.AND P0, PT, R22, RZ, PT\n@P0 ACQBULK\n" + READ, True),
        ("ISETP.GT.AND P0, PT, R22, RZ, PT\n@P0 BRA `(read)\nACQBULK\nread:\n" + READ, True),
    ],
)
def test_what_another_launch_writes_is_read_after_it(code: str, is_found: bool) -> None:
    def found(*made: int) -> set[str]:
        return {f.kind for f in analyse(program(POINTERS + code + STEER), "snippet", public=(16,), made=made).findings}

    assert ("address" in found(16)) is is_found
    assert "address" not in found()  # written by the host, before
    assert "address" not in found(24)


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("LDG.E R5, desc[UR4][R12.64]\nSTG.E desc[UR4][R10.64], R5", False),
        ("STG.E desc[UR4][R10.64], R22", False),
        ("LDG.E R5, desc[UR4][R14.64]\nSTG.E desc[UR4][R10.64], R5", True),
        ("LDG.E R5, desc[UR4][R14.64]\nLOP3.LUT R5, R5, R22, RZ, 0xc0, !PT\nSTG.E.64 desc[UR4][R10.64], R4", True),
        ("LDG.E R5, desc[UR4][R14.64]\nREDG.E.ADD desc[UR4][R10.64], R5", True),
        ("LDS R5, [R22]\nST.E desc[UR4][R10.64], R5", True),
        ("UMOV UR10, 0x1\nULDC.64 UR6, c[0x0][0x218]\nUBLKCP.G.S [UR6], [UR8], UR10", True),
        ("CCTL.E.RML2 [R10]", True),
    ],
)
def test_a_kernel_that_makes_public_memory_stores_nothing_secret(code: str, is_found: bool) -> None:
    def found(is_maker: bool) -> set[str]:
        text = program(POINTERS + "MOV R4, RZ\n" + code)
        return {finding.kind for finding in analyse(text, "snippet", public=(16,), is_maker=is_maker).findings}

    assert ("declared-memory" in found(True)) is is_found
    assert "declared-memory" not in found(False)
