"""mbarrier words, tensor maps, constants: what other writes may touch is a finding, what they cannot is none."""

from __future__ import annotations

import pytest
from snippets import findings, leaks, program

from dhp_safe_fa.gates.sass.taint import analyse

SHARED = "S2R R20, SR_CgaCtaId\nMOV R21, 0x400\nLEA R20, R20, R21, 0x18\nS2R R22, SR_TID.X\n"
INIT = "S2UR UR8, SR_CgaCtaId\nUMOV UR9, 0x1400\nULEA UR9, UR8, UR9, 0x18\nSYNCS.EXCH.64 URZ, [UR9], UR14\n"


@pytest.mark.parametrize(
    "store",
    [
        "STS [R2], R4",  # an address that says nothing
        "STS [R20+0x1000], R4",
        "STS.64 [R20+0xffc], R4",
        "LEA R23, R22, R20, 0x3\nSTS [R23], R4",  # 1024 threads, 8 bytes apart
        "ATOMS.ADD RZ, [R20+0x1004], R4",
        "STSM.16.M88.4 [R20+0x1000], R4",
        "LDGSTS.E [R20+0x1000], desc[UR4][R2.64]",
        "ST.E desc[UR4][R2.64], R4",
        "S2R R21, SR_SWINHI\nST.E [R20+0x1000], R4",
        "MOV R24, R20\nIADD3 R24, R24, 0x1004, RZ\nMOV R25, R20\nSTAS [R24.64], R4",
        "UMOV UR6, 0x1000\nUMOV UR7, 0x1400\nUMOV UR10, 0x41\nUBLKCP.S.G [UR6], [UR4], UR10",
        "UMOV UR6, 0x1000\nUMOV UR7, 0x1400\nUBLKCP.S.G [UR6], [UR4], UR11",  # of unknown size
        "UMOV UR6, 0x1000\nUMOV UR7, 0x1400\nUMOV UR10, 0x41\nUBLKCP.S.G [UR6], [UR4], UR10, desc[UR12]",
        "UMOV UR6, 0x1000\nUMOV UR7, 0x1400\nUMOV UR10, 0x1\nUBLKCP.S.G.MULTICAST [UR6], [UR4], UR10",
    ],
)
def test_a_store_that_may_touch_an_mbarrier(store: str) -> None:
    assert ("mbarrier", store.rpartition("\n")[2].split()[0]) in findings(SHARED + INIT + store)
    if not store.rpartition("\n")[2].startswith(("STAS", "UBLKCP")):  # which name an mbarrier themselves
        assert "mbarrier" not in {kind for kind, _ in findings(SHARED + store)}


@pytest.mark.parametrize(
    "store",
    [
        "STS [R20+0xffc], R4",
        "STS [R20+0x1008], R4",
        "LEA R23, R22, R20, 0x2\nSTS [R23], R4",
        "LOP3.LUT R23, R22, 0x7f, RZ, 0xc0, !PT\nLEA R23, R23, R20, 0x3\nSTS.64 [R23], R4",
        "LDC.64 R2, c[0x0][0x218]\nIMAD.WIDE.U32 R2, R22, 0x4, R2\nST.E desc[UR4][R2.64], R4",
        "S2R R21, SR_SWINHI\nST.E [R20], R4",
        "UMOV UR6, 0x1000\nUMOV UR7, 0x1400\nUMOV UR10, 0x40\nUBLKCP.S.G [UR6], [UR4], UR10",
    ],
)
def test_a_store_that_cannot(store: str) -> None:
    assert findings(SHARED + INIT + store) == set()


@pytest.mark.parametrize(
    ("opcode", "meets"),
    [("VIMNMX", False), ("VIMNMX.U32", False), ("VIMNMX.RELU", True), ("VIMNMX.U16x2", True), ("VIMNMX.S16x2", True)],
)
def test_a_maximum_of_whole_words_is_one_of_the_two(opcode: str, meets: bool) -> None:
    index = f"LOP3.LUT R23, R22, 0x7f, RZ, 0xc0, !PT\n{opcode} R24, R23, 0x40, !PT\nIADD3 R24, R24, R20, RZ\n"
    assert bool(findings(SHARED + INIT + index + "STS [R24+0xf00], R4")) is meets


def test_an_address_in_another_block_that_is_no_shared_one() -> None:
    window = "MOV R24, c[0x0][0x198]\nIADD3 R24, R24, 0x10, RZ\nLEA R24, R22, R24, 0x18\nPRMT R24, R22, 0x654, R24\n"
    assert findings(SHARED + INIT + window + "STS [R24], R4")


@pytest.mark.parametrize(("opcode", "meets"), [("PRMT", False), ("PRMT.F4E", True), ("PRMT.RC8", True)])
def test_an_address_in_another_block_of_the_cluster(opcode: str, meets: bool) -> None:
    assert bool(findings(f"{SHARED}{INIT}{opcode} R24, R22, 0x654, R20\nSTS [R24], R4")) is meets


@pytest.mark.parametrize(("threads", "meets"), [({}, True), ({"snippet": 513}, True), ({"snippet": 512}, False)])
def test_launch_bounds_say_how_far_a_thread_number_reaches(threads: dict[str, int], meets: bool) -> None:
    code = program(f"{SHARED}{INIT}LEA R23, R22, R20, 0x3\nSTS.64 [R23], R4")
    code.threads = threads
    assert bool(analyse(code, "snippet").findings) is meets


def test_a_guarded_address_is_known_under_its_guard() -> None:
    address = "VOTEU.ANY UP1, P1\n@UP1 UMOV UR12, 0x1400\nISETP.GT.AND P0, PT, R3, RZ, PT\nVOTEU.ANY UP2, P1\n"
    code = f"ISETP.EQ.AND P1, PT, R22, RZ, PT\nUMOV UR12, UR30\n{address}"
    assert findings(f"{SHARED}{INIT}{code}@UP2 SYNCS.ARRIVE.TRANS64 RZ, [UR12], R3\nSTS [R20], R4") == set()
    changed = code.replace("VOTEU.ANY UP2", "ISETP.EQ.AND P1, PT, R3, RZ, PT\nVOTEU.ANY UP2")
    text = f"{SHARED}{INIT}{changed}@UP2 SYNCS.ARRIVE.TRANS64 RZ, [UR12], R3\nSTS [R20], R4"
    assert findings(text) == {("mbarrier", "STS")}


def test_a_copy_of_a_guarded_address_is_known_under_the_same_guard() -> None:
    """UR12 holds the address where a lane's P1 holds, and who knows what where none does; UR13 holds what UR12 does."""
    condition = "UMOV UR12, UR30\nISETP.EQ.AND P1, PT, R22, RZ, PT\nVOTEU.ANY UP1, P1\n"
    guarded = f"{condition}@UP1 UMOV UR12, 0x1400\nUMOV UR13, UR12\n"
    used = "VOTEU.ANY UP2, P1\n@UP2 SYNCS.ARRIVE.TRANS64 RZ, [UR13], R3\nSTS [R20], R4"
    assert findings(f"{SHARED}{INIT}{guarded}{used}") == set()
    overwritten = "ISETP.EQ.AND P1, PT, R3, RZ, PT\n"
    assert findings(f"{SHARED}{INIT}{guarded}{overwritten}{used}")
    assert findings(f"{SHARED}{INIT}{guarded}{used.replace('@UP2', '@!UP2')}")


def test_a_place_in_a_ring() -> None:
    """Tiles of 1 KB below the barrier; with a ring of five, the last would lie over it."""
    ring = """MOV R30, RZ
    .L_1:
    LEA R31, R30, R20, 0xa
    STS [R31], R4
    VIADD R30, R30, 0x1
    ISETP.NE.AND P1, PT, R30, 0x4, PT
    SEL R30, R30, RZ, P1
    ISETP.LT.AND P0, PT, R33, c[0x0][0x220], PT
    @P0 BRA `(.L_1)"""
    assert findings(SHARED + INIT + ring) == set()
    assert findings(SHARED + INIT + ring.replace("0x4, PT", "0x5, PT")) == {("mbarrier", "STS")}


def test_an_mbarrier_that_was_never_initialised() -> None:
    assert findings("UMOV UR9, 0x1400\nSYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R1") == {
        ("mbarrier", "SYNCS.PHASECHK.TRANS64.TRYWAIT")
    }
    other = f"{INIT}UMOV UR9, 0x1500\nSYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR9], R1"
    assert findings(other) == {("mbarrier", "SYNCS.PHASECHK.TRANS64.TRYWAIT")}


COPY = "UMOV UR16, 0x8000\nUMOV UR17, 0x1400\n"


@pytest.mark.parametrize(
    ("address", "is_parameter"),
    [
        ("ULDC.64 UR20, c[0x0][0x198]", True),
        ("ULDC.64 UR20, c[0x0][0x198]\nUIADD3 UR20, UP0, UR20, 0x70, URZ\nUIADD3.X UR21, URZ, UR21, URZ, UP0, !UPT",
         True),
        ("ULDC.64 UR22, c[0x0][0x198]\nUMOV UR24, 0x170\nUSEL UR24, UR24, 0xf0, UP4\nUMOV UR25, URZ\n"
         "UIADD3.64 UR20, UR22, UR24, URZ", True),
        ("LDC.64 R10, c[0x0][0x198]\nIADD3 R10, P0, R10, 0x40, RZ\nIMAD.X R11, RZ, RZ, R11, P0\n"
         "R2UR UR20, R10\nR2UR UR21, R11", True),
        ("ULDC.64 UR20, c[0x0][0x210]", False),  # a pointer
        ("ULDC.64 UR20, c[0x4][0x10]", False),  # a global variable
        ("ULDC.64 UR20, c[0x0][0xd0]", False),  # a constant
        ("ULDC.64 UR20, c[0x0][0x198]\nUIADD3 UR20, UR20, 0x70, URZ", False),  # without the carry
        ("ULDC.64 UR20, c[0x0][0x198]\nUIADD3 UR21, UR21, 0x1, URZ", False),
        ("ULDC.64 UR20, c[0x0][0x198]\nUIADD3 UR20, UP0, UR20, 0x8000, URZ\nUIADD3.X UR21, URZ, UR21, URZ, UP0, !UPT",
         False),  # behind all parameters
        ("ULDC.64 UR22, c[0x0][0x198]\nULDC.64 UR24, c[0x0][0x220]\nUIADD3.64 UR20, UR22, UR24, URZ", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("use", ["UTMALDG.2D [UR16], [UR20]", "UTMASTG.2D [UR16], [UR20]", "UTMACCTL.PF [UR20]"])
def test_tensor_maps_are_parameters(address: str, is_parameter: bool, use: str) -> None:
    kinds = {kind for kind, _ in findings(f"{INIT}{COPY}{address}\n{use}")}
    assert kinds == (set() if is_parameter else {"tensor-map"})


def test_a_tensor_copy_onto_an_mbarrier() -> None:
    code = f"{INIT}UMOV UR16, 0x1400\nUMOV UR17, 0x1400\nULDC.64 UR20, c[0x0][0x198]\nUTMALDG.2D [UR16], [UR20]"
    assert findings(code) == {("mbarrier", "UTMALDG.2D")}


ALIAS = "LDC.64 R10, c[0x0][0xd0]\n"  # where the driver says that constants lie


@pytest.mark.parametrize(
    "store", ["ST.E desc[UR4][R10.64], R4", "STG.E desc[UR4][R2.64], R4", "REDG.E.ADD desc[UR4][R10.64], R4"]
)
def test_a_kernel_that_may_write_constants(store: str) -> None:
    assert findings(ALIAS + store) == {("constant", store.split()[0])}


def test_a_kernel_that_only_reads_constants_by_their_address() -> None:
    stores = "LDC.64 R2, c[0x0][0x218]\nSTG.E desc[UR4][R2.64], R4\nLDC.64 R6, c[0x4][0x8]\nSTG.E desc[UR4][R6.64], R4"
    assert findings(f"{ALIAS}LD.E R4, desc[UR4][R10.64]\n{stores}") == set()


def test_a_kernel_that_writes_its_parameters() -> None:
    """Their generic address is for reading; what is stored there might come back as a public constant."""
    code = "LDC.64 R10, c[0x0][0x198]\nIADD3 R10, P0, R10, 0x8, RZ\nIMAD.X R11, RZ, RZ, R11, P0\n"
    assert findings(f"{code}ST.E desc[UR4][R10.64], R4") == {("constant", "ST.E")}
    assert findings(f"{code}LD.E R4, desc[UR4][R10.64]") == set()


WINDOW = "LDC.64 R10, c[0x0][0x198]\n"  # the generic address of the parameters


@pytest.mark.parametrize(
    "disguise",
    [
        # two carries out of one addition
        "MOV R7, 0x30\nIADD3 R10, P0, P1, R7, 0x30, R10\nIADD3.X R11, RZ, R11, RZ, P0, P1\n",
        "LDC R7, c[0x0][0x220]\nIADD3 R10, P0, R10, R7, RZ\nIADD3.X R11, RZ, R11, RZ, P0, !PT\n",
        "LDC R7, c[0x0][0x220]\nLOP3.LUT R11, R11, R7, RZ, 0xfc, !PT\n",
        "LDC R7, c[0x0][0x220]\nVIMNMX.U32 R11, R11, R7, !PT\n",
        "MOV R7, RZ\nPRMT R11, R11, 0x3210, R7\n",
        # the parameters' address or a pointer
        "LDC.64 R12, c[0x0][0x218]\nLDC R7, c[0x0][0x220]\nISETP.NE.AND P0, PT, R7, RZ, PT\n"
        "SEL R10, R10, R12, P0\nSEL R11, R11, R13, P0\n",
    ],
)
@pytest.mark.parametrize("store", ["STG.E desc[UR4][R10.64+0x30], R4", "ATOMG.E.EXCH PT, RZ, desc[UR4][R10.64], R4"])
def test_a_disguised_address_of_the_parameters(disguise: str, store: str) -> None:
    """What else may be read back as a public parameter, or by TMA as a map."""
    assert ("constant", store.split()[0]) in findings(WINDOW + disguise + store)
    plain = "LDC.64 R10, c[0x0][0x218]\nMOV R7, 0x30\nIADD3 R10, P0, R7, R10, RZ\nIADD3.X R11, RZ, R11, RZ, P0, !PT\n"
    assert findings(WINDOW + plain + store) == set()


def test_the_address_of_a_constant_among_the_constants() -> None:
    store = "STG.E desc[UR4][R10.64], R4"
    assert findings(f"LDC.64 R10, c[0x3][0x200]\n{store}") == {("constant", "STG.E")}
    assert findings(f"LDC R6, c[0x3][0x200]\nLDC.64 R10, c[0x0][0x218]\n{store}") == set()


def test_halves_that_are_added_by_themselves() -> None:
    """0xfff8 and 0x28 make 0x20 in the lower half, and carry nothing into the upper one."""
    index = "LOP3.LUT R5, R22, 0x1, RZ, 0xc0, !PT\nIMAD R5, R5, 0xfff8, RZ\n"
    store = "IADD3 R5, R5, R20, RZ\nSTS [R5+0xfe0], R4"
    assert ("mbarrier", "STS") in findings(f"{SHARED}{INIT}{index}VIADD.16x2 R5, R5, 0x28\n{store}")
    assert findings(f"{SHARED}{INIT}{index}VIADD R5, R5, 0x28\n{store}") == set()


def test_a_swizzle_stays_in_its_tile() -> None:
    """Eight rows of eight places of 16 bytes, the place XORed with the row: 1,024 bytes, below the mbarrier."""
    swizzle = (
        "LOP3.LUT R5, R22, 0x7, RZ, 0xc0, !PT\nSHF.R.U32.HI R6, RZ, 0x3, R22\nLOP3.LUT R6, R6, 0x7, RZ, 0xc0, !PT\n"
        "LOP3.LUT R5, R5, R6, RZ, 0x3c, !PT\nLEA R5, R6, R5, 0x3\nLEA R5, R5, R20, 0x4\n"
    )
    assert findings(f"{SHARED}{INIT}{swizzle}STS.128 [R5], R4") == set()
    assert ("mbarrier", "STS.128") in findings(f"{SHARED}{INIT}{swizzle}STS.128 [R5+0xc10], R4")


def test_what_other_warps_contribute_to_a_reduction() -> None:
    """The branch is on a public value; one side contributes a secret, the other reads the result."""
    assert leaks(
        "ISETP.NE.AND P1, PT, R0, RZ, PT", "BRA.U UP1, `(.L_1)", "BAR.RED.POPC.DEFER_BLOCKING 0x0, !PT",
        "B2R.RESULT R9", "BRA `(.L_2)", ".L_1:", "ISETP.GT.AND P0, PT, R4, RZ, PT",
        "BAR.RED.POPC.DEFER_BLOCKING 0x0, P0", "MOV R9, RZ", ".L_2:",
    )  # fmt: skip
    assert not leaks("BAR.RED.POPC.DEFER_BLOCKING 0x0, P0", "B2R.RESULT R9")


def test_what_lanes_of_a_split_warp_bring() -> None:
    code = """BRA.U UP1, `(.L_1)
    MOV R3, {mine}
    WARPSYNC.COLLECTIVE R2, `(.L_3)
    SHFL.BFLY P0, R9, R3, R6, R7
    ENDCOLLECTIVE
    .L_3:
    MOV R9, RZ
    BRA `(.L_2)
    .L_1:
    MOV R3, RZ
    WARPSYNC.COLLECTIVE R2, `(.L_2)
    SHFL.BFLY P0, R9, R3, R6, R7
    ENDCOLLECTIVE
    .L_2:"""
    assert leaks(code.format(mine="R4"))
    assert not leaks("MOV R4, RZ", code.format(mine="RZ"))
