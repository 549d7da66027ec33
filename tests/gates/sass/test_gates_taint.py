"""Information flow on hand-written code: what becomes secret, what becomes public again, where it shows."""

from __future__ import annotations

import pytest
from snippets import LOAD, analysis, findings, leaks, program

from dhp_safe_fa.gates.sass.taint import analyse

INIT = "SYNCS.EXCH.64 URZ, [UR12], UR14\n"  # of the mbarrier that the snippets arrive at


@pytest.mark.parametrize(
    "code",
    [
        "IADD3 R9, R4, 0x1, RZ",
        "SEL R9, RZ, 0x1, P0\nISETP.GT.AND P0, PT, R4, RZ, PT\nSEL R9, RZ, 0x1, P0",
        "SHFL.BFLY PT, R9, R4, 0x1, 0x1f",
        "R2UR UR6, R4\nIMAD.U32 R9, RZ, RZ, UR6",
        "R2UR UR6, R4\nUISETP.GE.AND UP1, UPT, UR6, URZ, UPT\nUSEL UR7, URZ, 0x1, UP1\nMOV R9, UR7",
        "ISETP.GT.AND P0, PT, R4, RZ, PT\nVOTE.ANY R9, PT, P0",
        "ISETP.GT.AND P0, PT, R4, RZ, PT\nVOTEU.ANY UR6, UPT, P0\nMOV R9, UR6",
        "ISETP.GT.AND P0, PT, R4, RZ, PT\nP2R R9, PR, RZ, 0x1",
        "R2P PR, R4, 0x2\nSEL R9, RZ, 0x1, P1",
        "ISETP.GT.AND P0, PT, R4, RZ, PT\nBAR.RED.OR.DEFER_BLOCKING 0x0, P0\nB2R.RESULT R9",
        "MATCH.ANY R9, R4",
        "REDUX.SUM UR6, R4\nMOV R9, UR6",
        "IMAD.WIDE R8, R4, 0x4, R6",  # the upper half of a pair
        "DADD R8, R6, R4",
        "MOV R3, RZ\nDADD R8, R6, R4",
        "LDS.64 R8, [R0]",
        "LDSM.16.M88.2 R8, [R0]",
        "HGMMA.64x8x16.F32 R8, gdesc[UR8], RZ, !UPT",
        "ATOMS.ADD R9, [R0], R1",
        "ISETP.NE.AND P0, PT, R0, RZ, PT\n@P0 MOV R9, R4",  # written on a public condition
        "MOV R9, R4\nISETP.NE.AND P0, PT, R0, RZ, PT\n@P0 MOV R9, RZ",  # cleared on a public condition only
    ],
)
def test_flows(code: str) -> None:
    assert leaks(code)


@pytest.mark.parametrize(
    "code",
    [
        "MOV R9, R4\nMOV R9, 0x80",  # overwritten
        "MOV R9, R4\nLDC R9, c[0x0][0x210]",
        "MOV R9, R4\nS2R R9, SR_TID.X",
        "IMAD.WIDE R6, R4, 0x4, R6\nMOV R9, R8",  # R6 and R7 only
        "HGMMA.64x16x16.F32 R10, gdesc[UR8], RZ, !UPT",  # begins behind R9
        "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R0], R1\nSEL R9, RZ, 0x1, P0",  # a barrier's state
        "MOV R9, R4\nSYNCS.ARRIVE.TRANS64.A1T0 R8, [R0], RZ",  # both words of an arrival's state
        "SHFL.UP P0, R5, R4, 0x1, RZ\nSEL R9, RZ, 0x1, P0",  # whether the lane is in range
        "ELECT P1, URZ, PT\nSEL R9, RZ, 0x1, P1",
        "R2P PR, R4, 0x2\nSEL R9, RZ, 0x1, P0",  # another predicate
        "MOV R9, R4\n@P0 MOV R9, RZ\n@!P0 MOV R9, 0x1",  # overwritten either way
    ],
)
def test_stays_public(code: str) -> None:
    assert not leaks(code)


class TestGuardedValues:
    """A register that was written under a guard, and is read under the same one."""

    def test_same_guard(self) -> None:
        code = f"{INIT}{LOAD}@P2 MOV R4, 0x8000\n@P2 SYNCS.ARRIVE.TRANS64 RZ, [UR12], R4"
        assert findings(code) == set()

    def test_other_polarity(self) -> None:
        code = f"{INIT}{LOAD}@P2 MOV R4, 0x8000\n@!P2 SYNCS.ARRIVE.TRANS64 RZ, [UR12], R4"
        assert findings(code) == {("barrier-operand", "SYNCS.ARRIVE.TRANS64")}

    def test_guard_changed_in_between(self) -> None:
        change = "ISETP.GT.AND P2, PT, R0, RZ, PT"
        code = f"{INIT}{LOAD}@P2 MOV R4, 0x8000\n{change}\n@P2 SYNCS.ARRIVE.TRANS64 RZ, [UR12], R4"
        assert findings(code) == {("barrier-operand", "SYNCS.ARRIVE.TRANS64")}

    def test_guard_changed_by_the_same_instruction(self) -> None:
        code = f"{INIT}{LOAD}@P2 LOP3.LUT P2, R4, R0, 0x1, RZ, 0xc0, !PT\n@P2 SYNCS.ARRIVE.TRANS64 RZ, [UR12], R4"
        assert findings(code) == {("barrier-operand", "SYNCS.ARRIVE.TRANS64")}

    def test_overwritten_without_guard(self) -> None:
        code = f"{INIT}@P2 MOV R4, 0x8000\n{LOAD}@P2 SYNCS.ARRIVE.TRANS64 RZ, [UR12], R4"
        assert findings(code) == {("barrier-operand", "SYNCS.ARRIVE.TRANS64")}

    def test_other_lanes_are_not_guarded(self) -> None:
        code = f"{LOAD}@P2 MOV R4, 0x8000\n@P2 SHFL.IDX PT, R5, R4, 0x1, 0x1f\nSTS [R5], R0"
        assert findings(code) == {("address", "STS")}

    def test_only_guarded_lanes_reach_a_uniform_register(self) -> None:
        code = f"{LOAD}@P2 MOV R4, 0x8000\n@P2 R2UR UR6, R4\n@P2 STS [UR6], R0"
        assert findings(code) == set()

    def test_one_path_only(self) -> None:
        code = f"""{INIT}{LOAD}BRA.U UP1, `(.L_1)
        @P2 MOV R4, 0x8000
        .L_1:
        @P2 SYNCS.ARRIVE.TRANS64 RZ, [UR12], R4"""
        assert findings(code) == {("barrier-operand", "SYNCS.ARRIVE.TRANS64")}


class TestLocalMemory:
    """Spill slots, by their offset from the stack pointer."""

    START = "LDC R1, c[0x0][0x28]\nVIADD R1, R1, 0xfffffff0\n" + LOAD

    def test_same_slot(self) -> None:
        code = f"{self.START}STL [R1+0x4], R4\nLDL R9, [R1+0x4]\nSTS [R9], R0"
        assert findings(code) == {("address", "STS")}

    def test_other_slot(self) -> None:
        code = f"{self.START}STL [R1], R0\nSTL [R1+0x4], R4\nLDL R9, [R1]\nSTS [R9], R0"
        assert findings(code) == set()

    def test_overwritten_slot(self) -> None:
        code = f"{self.START}STL [R1+0x4], R4\nSTL [R1+0x4], R0\nLDL R9, [R1+0x4]\nSTS [R9], R0"
        assert findings(code) == set()

    def test_half_overwritten_slot(self) -> None:
        code = f"{self.START}STL [R1+0x4], R4\nSTL.U16 [R1+0x4], R0\nLDL R9, [R1+0x4]\nSTS [R9], R0"
        assert findings(code) == {("address", "STS")}

    def test_wide_store(self) -> None:
        code = f"{self.START}STL.64 [R1], R4\nLDL R9, [R1+0x4]\nSTS [R9], R0"
        assert findings(code) == {("address", "STS")}

    def test_stack_pointer_moves(self) -> None:
        code = f"{self.START}STL [R1+0x4], R4\nVIADD R1, R1, 0x10\nLDL R9, [R1+-0xc]\nSTS [R9], R0"
        assert findings(code) == {("address", "STS")}

    @pytest.mark.parametrize("store", ["STL [R8], R4", "ST.E [R2.64], R4"])
    def test_unknown_address_reaches_every_slot(self, store: str) -> None:
        code = f"{self.START}STL [R1], R0\n{store}\nLDL R9, [R1]\nSTS [R9], R0"
        assert findings(code) == {("address", "STS")}

    @pytest.mark.parametrize(
        "load",
        [
            "LDL R9, [R1+0x4]",
            "STL [R1+0x4], R0\nLDL.64 R8, [R1+0x4]",  # half of it
            "STL.U16 [R1+0x4], R0\nLDL R9, [R1+0x4]",
            "@P1 STL [R1+0x4], R0\nLDL R9, [R1+0x4]",
            "BRA.U UP1, `(.L_1)\nSTL [R1+0x4], R0\n.L_1:\nLDL R9, [R1+0x4]",  # on one path
            "LOP3.LUT R8, R6, 0xc, RZ, 0xc0, !PT\nIADD3 R8, R1, R8, RZ\nSTL [R8], R0\nLDL R9, [R1+0x4]",
            "STL.64 [R1], R6\nLOP3.LUT R8, R6, 0xc, RZ, 0xc0, !PT\nIADD3 R8, R1, R8, RZ\nLDL R9, [R8]",
        ],
    )
    def test_what_was_never_written_is_secret(self, load: str) -> None:
        code = program(f"{self.START}{load}\nSTS [R9], R0")
        found = [f for f in analyse(code, "snippet").findings if f.kind == "address"]
        assert [f.source for f in found] == ["local memory that was never written"]

    @pytest.mark.parametrize(
        "load",
        [
            "STL.64 [R1], R6\nLDL R9, [R1+0x4]",
            "STL.U8 [R1+0x5], R0\nLDL.U8 R9, [R1+0x5]",
            "@P1 STL [R1+0x4], R0\n@!P1 STL [R1+0x4], R6\nLDL R9, [R1+0x4]",
            "MOV R9, RZ\n@P1 STL [R1+0x4], R0\n@P1 LDL R9, [R1+0x4]",
            "STL.128 [R1], R12\nLOP3.LUT R8, R6, 0xc, RZ, 0xc0, !PT\nIADD3 R8, R1, R8, RZ\nLDL R9, [R8]",
        ],
    )
    def test_what_was_written_is_not(self, load: str) -> None:
        assert findings(f"{self.START}{load}\nSTS [R9], R0") == set()

    def test_unknown_address_reads_every_slot(self) -> None:
        code = f"{self.START}STL [R1+0x4], R4\nLDL R9, [R8]\nSTS [R9], R0"
        assert findings(code) == {("address", "STS")}


class TestControlDependence:
    def test_what_a_branch_on_a_secret_decides_is_secret(self) -> None:
        code = f"""{LOAD}MOV R9, RZ
        ISETP.GT.AND P0, PT, R4, RZ, PT
        @P0 BRA `(.L_1)
        MOV R9, 0x1
        .L_1:
        STS [R9], R0"""
        assert findings(code) == {("branch", "BRA"), ("address", "STS")}

    def test_what_comes_behind_both_arms_is_not(self) -> None:
        code = f"""{LOAD}ISETP.GT.AND P0, PT, R4, RZ, PT
        @P0 BRA `(.L_1)
        MOV R8, 0x1
        .L_1:
        MOV R9, 0x1
        STS [R9], R0"""
        assert findings(code) == {("branch", "BRA")}

    def test_early_exit_decides_all_the_rest(self) -> None:
        code = f"{LOAD}ISETP.GT.AND P0, PT, R4, RZ, PT\n@P0 EXIT\nMOV R9, 0x1\nSTS [R9], R0\nEXIT"
        assert findings(code) == {("exit", "EXIT"), ("address", "STS")}

    def test_a_loop_count_is_secret_if_the_end_is(self) -> None:
        code = f"""{LOAD}MOV R9, RZ
        .L_1:
        IADD3 R9, R9, 0x1, RZ
        ISETP.LT.AND P0, PT, R9, R4, PT
        @P0 BRA `(.L_1)
        STS [R9], R0"""
        assert findings(code) == {("branch", "BRA"), ("address", "STS")}

    def test_a_public_loop(self) -> None:
        code = f"""MOV R9, RZ
        .L_1:
        {LOAD}FADD R5, R5, R4
        IADD3 R9, R9, 0x1, RZ
        ISETP.LT.AND P0, PT, R9, c[0x0][0x210], PT
        @P0 BRA `(.L_1)
        STS [R9], R5"""
        assert findings(code) == set()

    def test_secret_on_the_second_round(self) -> None:
        code = f"""MOV R9, RZ
        .L_1:
        STS [R9], R5
        {LOAD}MOV R9, R4
        ISETP.LT.AND P0, PT, R8, c[0x0][0x210], PT
        @P0 BRA `(.L_1)"""
        assert findings(code) == {("address", "STS")}

    def test_slow_path(self) -> None:
        code = f"""{LOAD}ISETP.GT.AND P0, PT, R4, RZ, PT
        @P0 BRA `(.L_1)
        MOV R20, 0x50
        CALL.REL.NOINC `(slow)
        .L_1:
        EXIT
        slow:
        RET.REL.NODEC R20 `(snippet)"""
        assert ("call", "CALL.REL.NOINC") in findings(code)

    def test_a_select_is_no_leak(self) -> None:
        code = f"{LOAD}FSETP.GT.AND P0, PT, R4, RZ, PT\nFSEL R5, R4, RZ, P0\nSTG.E [R2.64], R5"
        assert findings(code) == set()

    def test_predicated_arithmetic_is(self) -> None:
        code = f"{LOAD}FSETP.GT.AND P0, PT, R4, RZ, PT\n@P0 FADD R4, R4, R4\nSTG.E [R2.64], R4"
        assert findings(code) == {("guarded-arithmetic", "FADD")}


class TestIndirectBranches:
    def test_index_from_a_secret(self) -> None:
        """The shape that the branch-removal step makes: select, table in constant bank 2, BRXU."""
        code = f"""{LOAD}ISETP.GT.AND P0, PT, R4, RZ, PT
        SEL R5, RZ, 0x4, P0
        LDC R6, c[0x2][R5]
        SHF.R.S32.HI R7, RZ, 0x1f, R6
        MOV R9, RZ
        BRX R6 -0x70 (*"BRANCH_TARGETS .L_1,.L_2"*)
        .L_1:
        MOV R9, 0x1
        .L_2:
        STS [R9], R0"""
        assert findings(code) == {("address", "LDC"), ("indirect-branch", "BRX"), ("address", "STS")}

    def test_public_index(self) -> None:
        code = f"""{LOAD}LDC R6, c[0x2][R5]
        BRX R6 -0x20 (*"BRANCH_TARGETS .L_1,.L_2"*)
        .L_1:
        MOV R9, R4
        .L_2:
        STS [R9], R0"""
        assert findings(code) == {("address", "STS")}  # followed into .L_1

    @pytest.mark.parametrize("note", ["", '(*"BRANCH_TARGETS .L_1,.L_missing"*)'])
    def test_unknown_targets_fail(self, note: str) -> None:
        code = f"LDC R6, c[0x2][R5]\nBRX R6 -0x20 {note}\n.L_1:\nEXIT"
        assert findings(code) == {("unresolved-control", "BRX")}


def test_calls_return_behind_their_call() -> None:
    code = f"""{LOAD}MOV R20, 0x30
    CALL.REL.NOINC `(f)
    STS [R9], R0
    EXIT
    f:
    MOV R9, R4
    RET.REL.NODEC R20 `(snippet)"""
    assert findings(code) == {("address", "STS")}


def test_pointer_call_fails() -> None:
    assert ("unresolved-control", "CALL.ABS.NOINC") in findings("CALL.ABS.NOINC R10")


def test_unreached_code_fails() -> None:
    assert findings("EXIT\nSTS [R9], R0\nEXIT") == {("unresolved-control", "STS")}


def test_padding_is_not_unreached() -> None:
    assert findings("EXIT\n.L_9:\nBRA `(.L_9)\nNOP") == set()


def test_chain_is_the_shortest() -> None:
    code = program(f"{LOAD}MOV R5, R4\nMOV R6, R5\nIADD3 R7, R6, R4, RZ\nSTS [R7], R0")
    (finding,) = analyse(code, "snippet").findings
    assert [code.code[p].opcode for p in finding.chain] == ["LDG.E", "IADD3", "STS"]
    assert finding.source == "global memory"


def test_declassified_load() -> None:
    code = program(f"{LOAD}STS [R4], R0")
    assert len(analyse(code, "snippet").findings) == 1
    assert analyse(code, "snippet", lambda position: position == 0).findings == []


def test_unknown_opcode_is_listed() -> None:
    assert analysis("FROBNICATE R1, R2").unknown == ["FROBNICATE"]
