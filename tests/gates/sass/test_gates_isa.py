"""The opcode table, family by family: what is written, what flows, what must be public, what is not known."""

from __future__ import annotations

import pytest

from dhp_safe_fa.gates.sass.isa import Effects, effects
from dhp_safe_fa.gates.sass.isa.operands import UnknownInstruction, location_name, parse, split


def parts(text: str) -> tuple[str, str, str]:
    guard, _, rest = text.rpartition("@")[2].partition(" ") if text.startswith("@") else ("", "", text)
    opcode, _, operands = rest.partition(" ")
    return opcode, operands, guard


def of(text: str) -> Effects:
    return effects(*parts(text))


def names(locations: tuple[int, ...]) -> str:
    return " ".join(location_name(location) for location in locations)


@pytest.mark.parametrize(
    ("text", "writes", "flows"),
    [
        # float, half, double
        ("FFMA R10, R9, UR32, -R16.reuse", "R10", "R9 UR32 R16"),
        ("FMNMX R7, R24, |R25|, !PT", "R7", "R24 R25"),
        ("FSEL R25, R25, -INF , P2", "R25", "R25 P2"),
        ("FSETP.GT.AND P1, PT, R5.reuse, -R6, PT", "P1", "R5 R6"),
        ("MUFU.EX2 R152, R152", "R152", "R152"),
        ("HFMA2.MMA R0, -RZ, RZ, 0, 0", "R0", ""),
        ("HSETP2.GT.AND P0, PT, R6.H0_H0, R8.H1_H1, PT", "P0", "R6 R8"),
        ("HADD2.F32 R0, -RZ, R6.reuse.H0_H0", "R0", "R6"),
        ("DFMA R10, -R6, R2, 1", "R10 R11", "R6 R7 R2 R3"),
        ("DSETP.MIN.AND P0, P1, R22, R4, PT", "P0 P1", "R22 R23 R4 R5"),
        ("FCHK P0, R0, 7", "P0", "R0"),
        # conversions: the 64-bit side is a pair
        ("F2F.F32.F64 R6, R8", "R6", "R8 R9"),
        ("F2F.F64.F32 R8, R2", "R8 R9", "R2"),
        ("F2F.BF16.F64 R8, R2", "R8", "R2 R3"),
        ("F2I.S64.F64.TRUNC R14, R16", "R14 R15", "R16 R17"),
        ("F2I.FTZ.U32.TRUNC.NTZ R3, R2", "R3", "R2"),
        ("I2F.F64.S64 R6, R8", "R6 R7", "R8 R9"),
        ("I2F.RP R4, R5", "R4", "R5"),
        ("FRND.F64.FLOOR R22, R24", "R22 R23", "R24 R25"),
        ("F2FP.F16.F32.PACK_AB R152, R11, R152", "R152", "R11 R152"),
        # integer
        ("IMAD.WIDE.U32 R4, R5, UR4, R2", "R4 R5", "R5 UR4 R2 R3"),
        ("IMAD.WIDE.U32 R4, P0, R5, R6, R2", "R4 R5 P0", "R5 R6 R2 R3"),
        ("IMAD.HI.U32 R3, R3, R11, R12", "R3", "R3 R11 R12 R13"),
        ("IMAD.X R7, RZ, RZ, UR4, P0", "R7", "UR4 P0"),
        ("IADD3 R3, P2, P3, R6, R12, RZ", "R3 P2 P3", "R6 R12"),
        ("IADD3.X R12, R7, UR4, RZ, P2, !PT", "R12", "R7 UR4 P2"),
        ("LEA.HI.X R11, R4, UR5, R5, 0x2, P0", "R11", "R4 UR5 R5 P0"),
        ("LOP3.LUT P1, R13, R13, 0x80000000, RZ, 0xc0, !PT", "P1 R13", "R13"),
        ("ISETP.NE.AND P1, PT, R0, RZ, P3", "P1", "R0 P3"),
        ("SEL R10, RZ, 0x1, !P0", "R10", "P0"),
        ("PRMT R6, R6, 0x5410, R8", "R6", "R6 R8"),
        ("SHF.R.U64 R0, R1, R2, R3", "R0", "R1 R2 R3"),
        ("VIADDMNMX R0, R0, 0x80, R3, PT", "R0", "R0 R3"),
        ("IDP.4A.S8.S8 R5, R4, R12, R4", "R5", "R4 R12 R4"),
        ("PLOP3.LUT P0, PT, P1, P2, PT, 0x80, 0x0", "P0", "P1 P2"),
        ("P2R R3, PR, RZ, 0x5", "R3", "P0 P2"),
        ("R2P PR, R3, 0x6", "P1 P2", "R3"),
        # uniform
        ("UIADD3 UR4, UP0, UR4, UR6, URZ", "UR4 UP0", "UR4 UR6"),
        ("UIADD3.64 UR4, UR8, UR6, URZ", "UR4 UR5", "UR8 UR9 UR6 UR7"),
        ("UIMAD.WIDE UR4, UR21, 0x4, UR28", "UR4 UR5", "UR21 UR28 UR29"),
        ("ULOP3.LUT UP0, UR4, UR5, 0x3, URZ, 0xc0, !UPT", "UP0 UR4", "UR5"),
        ("UISETP.GE.OR UP0, UPT, UR6, UR15, UP1", "UP0", "UR6 UR15 UP1"),
        ("USEL UR4, URZ, 0x1, !UP0", "UR4", "UP0"),
        ("UP2UR UR4, UPR, URZ, 0x3", "UR4", "UP0 UP1"),
        ("R2UR UR9, R8", "UR9", "R8"),
        ("REDUX.SUM UR5, R6", "UR5", "R6"),
        # votes, lanes, barrier results
        ("VOTE.ANY R5, P2, P0", "R5 P2", "P0"),
        ("VOTE.ALL P1, P0", "P1", "P0"),
        ("VOTEU.ALL UP1, P0", "UP1", "P0"),
        ("MATCH.ANY R8, R7", "R8", "R7"),
        ("MATCH.ANY.U64 R8, R6", "R8", "R6 R7"),
        ("MATCH.ALL.U64 P1, R8, R6", "P1 R8", "R6 R7"),
        ("VIMNMX3.U32 R7, R14, UR13, R15, !PT", "R7", "R14 UR13 R15"),
        ("VIMNMX3.U16x2 R7, R14, R13, R15, !PT", "R7", "R14 R13 R15"),
        ("HADD2.F32 R0, -RZ, |c[0x0] [0x188].H0_H0|", "R0", ""),
        ("ELECT P1, URZ, PT", "P1", ""),
        ("BAR.RED.OR.DEFER_BLOCKING 0x0, P0", "barrier result", "P0"),
        ("B2R.RESULT RZ, P1", "P1", "barrier result"),
        # matrices
        ("HMMA.16816.F32 R12, R20, R24, RZ", "R12 R13 R14 R15", "R20 R21 R22 R23 R24 R25"),
        ("HMMA.16816.F16 R12, R20, R24, R12", "R12 R13", "R20 R21 R22 R23 R24 R25 R12 R13"),
        ("HMMA.1688.F32.TF32 R0, R4, R8, R0", "R0 R1 R2 R3", "R4 R5 R6 R7 R8 R9 R0 R1 R2 R3"),
        ("DMMA.884 R4, R2, R6, R4", "R4 R5 R6 R7", "R2 R3 R6 R7 R4 R5 R6 R7"),
        ("DMMA.8x8x4 R4, R2, R6, R4", "R4 R5 R6 R7", "R2 R3 R6 R7 R4 R5 R6 R7"),
        ("HMMA.SP.16832.F16 R2, R8, R16, R2, R4, 0x0", "R2 R3", "R8 R9 R10 R11 R16 R17 R18 R19 R2 R3 R4"),
        ("IMMA.16832.S4.S4 R0, R4.ROW, R6.COL, R8", "R0 R1 R2 R3", "R4 R5 R6 R8 R9 R10 R11"),
        # public sources
        ("S2R R7, SR_CTAID.X", "R7", ""),
        ("CS2R R68, SRZ", "R68 R69", ""),
        ("LDC.64 R2, c[0x0][0x208]", "R2 R3", ""),
        ("ULDC UR4, c[0x2][UR6]", "UR4", "UR6"),
        ("LEPC R20", "R20 R21", ""),
    ],
)
def test_arithmetic(text: str, writes: str, flows: str) -> None:
    result = of(text)
    assert (names(result.writes), names(result.flows), result.secret) == (writes, flows, "")


@pytest.mark.parametrize(
    ("text", "writes", "secret"),
    [
        ("LDG.E.128.CONSTANT R8, desc[UR6][R2.64]", "R8 R9 R10 R11", "global memory"),
        ("LDG.E.U8 R8, [R2.64]", "R8", "global memory"),
        ("LD.E.64 R8, [R2.64]", "R8 R9", "global memory"),
        ("LDS.64 R8, [R6+UR4]", "R8 R9", "shared memory"),
        ("LDSM.16.MT88.4 R12, [R0]", "R12 R13 R14 R15", "shared memory"),
        ("ATOMG.E.EXCH.64.STRONG.GPU PT, R6, desc[UR8][R6.64], R2", "R6 R7", "global memory"),
        ("ATOMS.CAST.SPIN P0, [R2], R4, R5", "P0", "shared memory"),
        ("ATOMG.E.ADD.F64.RN.STRONG.GPU PT, R4, desc[UR6][R2.64], R4", "R4 R5", "global memory"),
        ("ATOMG.E.ADD.F32x4.FTZ.RN.STRONG.GPU PT, R4, desc[UR6][R2.64], R8", "R4 R5 R6 R7", "global memory"),
        ("ATOMG.E.MAX.BF16x8.RN.STRONG.GPU PT, R4, desc[UR6][R2.64], R8", "R4 R5 R6 R7", "global memory"),
        ("ATOM.E.CAS.128.STRONG.GPU PT, R8, [R2], R8, R12", "R8 R9 R10 R11", "global memory"),
        ("LDGMC.E.ADD.F16x4.RN.STRONG.SYS R4, [R2.64+URZ]", "R4 R5", "global memory"),
        ("TEX.SCR.LL RZ, R4, R2, R6, 0x0, 0x58, 2D, 0x3", "R4 R5", "global memory"),
        ("HGMMA.64x16x16.F32 R24, gdesc[UR8], RZ, !UPT", " ".join(f"R{i}" for i in range(24, 32)), "shared memory"),
        ("HGMMA.64x16x16.F16 R24, gdesc[UR8], R24, gsb0", "R24 R25 R26 R27", "shared memory"),
        ("HGMMA.SP.64x8x32.F16 R24, R28, gdesc[UR4], R24, !UP0, R30, 0x1, gsb0", "R24 R25", "shared memory"),
        ("QGMMA.64x8x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24", "R24 R25 R26 R27", "shared memory"),
    ],
)
def test_loads_are_secret(text: str, writes: str, secret: str) -> None:
    result = of(text)
    assert (names(result.writes), result.secret) == (writes, secret)


@pytest.mark.parametrize(
    ("text", "kind", "locations"),
    [
        ("LDG.E R8, desc[UR6][R2.64]", "address", "R2 R3"),
        ("LDG.E R8, desc[UR6][R2.64]", "descriptor", "UR6 UR7"),
        ("LDG.E R8, desc[UR6][R2.U32+UR4]", "address", "R2 UR4 UR5"),
        ("STG.E [R2+0x4], R4", "address", "R2 R3"),
        ("ATOMG.E.CAS.STRONG.GPU PT, R5, [R2+0x4], R4, R5", "address", "R2 R3"),
        ("REDG.E.ADD.F32.FTZ.RN.STRONG.GPU desc[UR8][R4.64], R11", "address", "R4 R5"),
        ("STS.128 [R7+UR4], R4", "address", "R7 UR4"),
        ("STSM.16.M88.4 [R8], R12", "address", "R8"),
        ("LDL R2, [R15]", "address", "R15"),
        ("LDGSTS.E.BYPASS.128 [R7], desc[UR6][R2.64], P1", "guarded-memory", "P1"),
        ("LDGSTS.E.BYPASS.128 [R7], desc[UR6][R2.64], P1", "address", "R7"),
        ("LDC R4, c[0x3][R15+0x90]", "address", "R15"),
        ("LDC R4, c[R15+`((f.R7 + -0x8000))]", "address", "R15"),
        ("FADD R1, R2, c[0x3][R3]", "address", "R3"),
        ("TEX.SCR.LL RZ, R4, R2, R6, 0x0, 0x58, 2D, 0x3", "address", "R2 R3 R6"),
        ("HGMMA.64x8x16.F32 R24, gdesc[UR8], R24", "descriptor", "UR8 UR9 UR10 UR11"),
        ("HGMMA.64x8x16.F32 R24, R40, gdesc[UR4].tnspB, R24", "descriptor", "UR6 UR7"),
        ("UTMALDG.2D [UR24], [UR16]", "descriptor", "UR24 UR25 UR26 UR27 UR16 UR17"),
        ("UTMAPF.L2.2D [UR8], [UR20]", "descriptor", "UR8 UR9 UR20 UR21"),
        ("UTMASTG.2D [UR40], [UR4]", "descriptor", "UR40 UR41 UR42 UR4 UR5"),
        ("UBLKCP.S.G [UR4], [UR6], UR8", "descriptor", "UR4 UR5 UR6 UR7 UR8"),
        (
            "UTMALDG.2D.MULTICAST [UR8], [UR30], UR28, desc[UR18]",
            "descriptor",
            "UR8 UR9 UR10 UR11 UR30 UR31 UR28 UR18 UR19",
        ),
        ("SYNCS.ARRIVE.TRANS64 RZ, [UR24+0x28000], R0", "barrier-operand", "R0"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R16+URZ], R11", "address", "R16"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR16], R11", "barrier-operand", "R11"),  # the phase
        ("BAR.SYNC.DEFER_BLOCKING R2, 0x80", "barrier-operand", "R2"),
        ("BAR.RED.OR.DEFER_BLOCKING R2, P0", "barrier-operand", "R2"),
        ("WARPSYNC R4", "barrier-operand", "R4"),
        ("NANOSLEEP R12", "barrier-operand", "R12"),
        ("USETMAXREG.TRY_ALLOC.CTAPOOL UP0, UR4", "barrier-operand", "UR4"),
        ("SHFL.IDX PT, R0, R1, R2, R3", "shuffle-lane", "R2 R3"),
        ("MATCH.ANY R0, R1", "latency", "R1"),
        ("MATCH.ALL.U64 PT, R0, R2", "latency", "R2 R3"),
        ("BRA.U UP1, `(.L_1)", "branch", "UP1"),
        ("BRX R4 -0x9ce0", "indirect-branch", "R4 R5"),
        ("BRXU UR4 -0x810", "indirect-branch", "UR4 UR5"),
        ("RET.REL.NODEC R20 `(f)", "call", "R20 R21"),
        ("@P1 BRA `(.L_1)", "branch", "P1"),
        ("@!P1 EXIT", "exit", "P1"),
        ("@P1 CALL.REL.NOINC `(f)", "call", "P1"),
        ("@P1 BREAK B2", "guarded-barrier", "P1"),
        ("@P1 BAR.SYNC 0x0", "guarded-barrier", "P1"),
        ("@P1 SYNCS.ARRIVE.TRANS64 RZ, [R2], RZ", "guarded-barrier", "P1"),
        ("@P1 STG.E [R2.64], R4", "guarded-memory", "P1"),
        ("@UP1 UTMALDG.2D [UR24], [UR16]", "guarded-memory", "UP1"),
        ("@P1 FADD R1, R2, R3", "guarded-arithmetic", "P1"),
    ],
)
def test_sinks(text: str, kind: str, locations: str) -> None:
    assert (kind, locations) in {(k, names(found)) for k, found in of(text).sinks}


@pytest.mark.parametrize("register", ["SR_CLOCKLO", "SR_CLOCKHI", "SR_GLOBALTIMERLO"])
@pytest.mark.parametrize("opcode", ["S2R R2", "CS2R R2", "S2UR UR2"])
def test_clocks_are_forbidden(opcode: str, register: str) -> None:
    assert of(f"{opcode}, {register}").forbidden == "clock"


@pytest.mark.parametrize(
    "text",
    [
        "NOP",
        "MEMBAR.ALL.CTA",
        "MEMBAR.SC.VC",
        "FENCE.VIEW.ASYNC.S",
        "WARPGROUP.DEPBAR.LE gsb0, 0x1",
        "YIELD",
        "DEPBAR.LE SB0, 0x0",
        "UTMACMDFLUSH",
        "CCTL.IVALL",
        "UCGABAR_ARV",
        "BSYNC B0",
    ],
)
def test_inert(text: str) -> None:
    assert not of(text).writes
    assert not any(locations for _, locations in of(text).sinks)


@pytest.mark.parametrize(
    "text",
    [
        "FROBNICATE R1, R2",  # no such opcode
        "S2R R2, SR_NEVER_SEEN",  # a special register of unknown content
        "HMMA.16999.F32 R4, R8, R12, R4",  # an unknown matrix shape
        "FADD P0, R1, R2, R3",  # a destination that the table does not have
        "FADD R1, P0, R2, R3",  # a predicate where a second destination might stand
        "ISETP.GE.AND R1, R2, R3, PT",  # a destination is missing
        "UTMALDG [UR24], [UR16]",  # no rank
        "HGMMA.64x8x16.F32 R24, R40, R44, R24",  # no descriptor
        "LDG.E R4, tmem[R2]",  # an unknown memory space
        "FADD R1, R2, @R3",  # an unknown operand
        "FADD.F64 R1, R2, R3",  # a modifier that might mean pairs
        "LDG.E.256 R4, [R2.64]",
        "ATOMG.E.ADD.F32x8.RN.STRONG.GPU PT, R4, [R2.64], R8",
        "ATOMG.E.ADD.F64.S32 PT, R4, [R2.64], R8",  # two types
        "SHFL.IDX.64 PT, R0, R1, R2, R3",
        "FADD R1, R2.F64, R3",  # a suffix
        "IADD3 R1, R2.64, R3, RZ",
        "LDG.E R4, [R2.64+UR4*8]",
        "LDL R4, [R1+`(f)]",  # a slot that the linker chooses
        "HMMA.16816.F32 R12, R20, R24, R4, R5",  # a source without a width
        "STG.E [R2.64], R4, R6",  # two data operands
        "LDG.E R4, R5, [R2.64]",  # two results
        "HGMMA.64x8x16.F32.F16 R24, gdesc[UR8], R24",  # two accumulators
        "TEX.SCR.LL RZ, R4, R2, R6, 0x0, 0x58, 4D, 0x3",
        "SUST.D.BA.2D.4D.STRONG.SM [R8], R4, UR5",
        "LDC R4, R5",
        "STL R4, R5",
        "P2R R3, PR, RZ, R4",
    ],
)
def test_unknown_forms_are_named_not_guessed(text: str) -> None:
    with pytest.raises(UnknownInstruction) as caught:
        of(text)
    assert str(caught.value)


def test_never_executed() -> None:
    assert of("@!PT LDS RZ, [RZ]") == Effects()


def test_operands() -> None:
    assert split("R4 -0x9ce0") == ["R4", "-0x9ce0"]
    assert split("R25, -INF , P2") == ["R25", "-INF", "P2"]
    assert split("desc[UR4][R2.64+0x10], R3") == ["desc[UR4][R2.64+0x10]", "R3"]
    assert parse("[R1+-0x10]").offset == -0x10
    assert parse("!P0").negated
    assert parse("-|R4|").register == parse("R4").register
