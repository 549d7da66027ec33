"""Listings, basic blocks, post-dominators, and the literal count."""

from __future__ import annotations

import pytest
from snippets import program

from dhp_safe_fa.gates.sass.cfg import build_graph, is_indirect, is_predicated
from dhp_safe_fa.gates.sass.listing import ListingError, parse_listing

LISTING = """
        .target sm_90a
//--------------------- .text.second --------------------------
        .section        .text.second,"ax",@progbits
        .other          second,@"STO_CUDA_ENTRY STV_DEFAULT"
second:
.text.second:
        //## File "/src/a.cu", line 7 inlined at "/src/a.cu", line 3
        //## File "/src/a.cu", line 3
        /*0000*/              @!P0 BRA `(.L_x_1) ;
        /*0010*/                   BRXU UR4 -0x20                 (*"BRANCH_TARGETS .L_x_1,.L_x_2"*);
.L_x_1:
        //## File "/src/a.cu", line 9
        /*0020*/                   NOP;
.L_x_2:
        /*0030*/                   EXIT ;
"""


def test_listing() -> None:
    parsed = parse_listing(LISTING)
    assert (parsed.kernels, parsed.target) == (["second"], "sm_90a")
    branch, table, nop, leave = parsed.code
    assert (branch.guard, branch.opcode, branch.operands) == ("!P0", "BRA", "`(.L_x_1)")
    assert table.targets == (".L_x_1", ".L_x_2")
    assert [i.source for i in (branch, nop)] == ["/src/a.cu:7", "/src/a.cu:9"]
    assert (leave.address, parsed.labels[".L_x_2"]) == (0x30, 3)


@pytest.mark.parametrize("line", ["/*0000*/ ?? R1 ;", "what is this", "/*0020*/ NOP ;"])
def test_unreadable_listing(line: str) -> None:
    with pytest.raises(ListingError):
        parse_listing(line)


def graph_of(text: str) -> tuple[list[tuple[int, int]], list[list[int]], list[int]]:
    graph = build_graph(program(text), "snippet")
    return graph.blocks, graph.successors, graph.post_dominator


def test_diamond() -> None:
    blocks, successors, post = graph_of("@P0 BRA `(.L_1)\nNOP\nBRA `(.L_2)\n.L_1:\nNOP\n.L_2:\nEXIT")
    assert blocks == [(0, 0), (1, 2), (3, 3), (4, 4)]
    assert successors == [[1, 2], [3], [3], []]
    assert post == [3, 3, 3, -1]


def test_loop_and_predicated_exit() -> None:
    blocks, successors, post = graph_of(".L_1:\n@P0 EXIT\n@P1 BRA `(.L_1)\nEXIT")
    assert blocks == [(0, 0), (1, 1), (2, 2)]
    assert successors == [[1], [0, 2], []]
    assert post == [-1, -1, -1]  # behind the branch lies the exit in the loop's head too


def test_endless_loop_has_post_dominators() -> None:
    _, successors, post = graph_of("@P0 BRA `(.L_2)\n.L_1:\nBRA `(.L_1)\n.L_2:\nEXIT")
    assert successors == [[1, 2], [1], []]
    assert post[0] == -1


def test_indirect_branch_follows_its_table() -> None:
    _, successors, _ = graph_of('BRXU UR4 -0x10 (*"BRANCH_TARGETS .L_1,.L_2"*)\n.L_1:\nNOP\n.L_2:\nEXIT')
    assert successors == [[1, 2], [2], []]


def test_bsync_goes_on_where_its_bssy_says() -> None:
    near = graph_of("BSSY B0, `(.L_1)\nBSYNC B0\n.L_1:\nEXIT")
    assert near[1] == [[]]
    far = graph_of("BSSY B0, `(.L_1)\nBSYNC B0\nNOP\n.L_1:\nEXIT")
    assert far[1] == [[1, 2], [2], []]


def test_return_leads_only_to_callers_of_its_function() -> None:
    text = """CALL.REL.NOINC `(f)
    CALL.REL.NOINC `(g)
    EXIT
    f:
    RET.REL.NODEC R20 `(snippet)
    g:
    RET.REL.NODEC R22 `(snippet)"""
    blocks, successors, _ = graph_of(text)
    first = {block: number for number, (block, _) in enumerate(blocks)}
    assert successors[first[3]] == [first[1]]
    assert successors[first[4]] == [first[2]]


@pytest.mark.parametrize(
    ("text", "predicated"),
    [
        ("@P0 BRA `(.L_1)", True), ("@!UP0 BRA `(.L_1)", True), ("BRA.U UP0, `(.L_1)", True),
        ("BRA.U !UP1, `(.L_1)", True), ("BRA P1, `(.L_1)", True), ("BRA.DIV UR4, `(.L_1)", True),
        ("@P0 BRX R4 -0x10", True), ("@UP0 BRXU UR4 -0x10", True), ("@P0 JMP `(.L_1)", True),
        ("@P0 JMX R4 -0x10", True), ("@P0 CALL.REL.NOINC `(.L_1)", True), ("@P0 RET.REL.NODEC R20 `(snippet)", True),
        ("@P0 BREAK B0", True), ("@P0 EXIT", True), ("@P0 BSYNC B0", True),
        ("BRA `(.L_1)", False), ("BRA UPT, `(.L_1)", False), ("@PT BRA `(.L_1)", False), ("BRXU UR4 -0x10", False),
        ("EXIT", False), ("@P0 FADD R1, R2, R3", False), ("@P0 STG.E [R2.64], R4", False), ("BSSY B0, `(.L_1)", False),
    ],
)  # fmt: skip
def test_literal_count(text: str, predicated: bool) -> None:
    assert is_predicated(program(f"{text}\n.L_1:\nEXIT").code[0]) is predicated


@pytest.mark.parametrize(
    ("text", "indirect"),
    [("BRX R4 -0x10", True), ("BRXU UR4 -0x10", True), ("CALL.ABS.NOINC R10", True), ("CALL.REL.NOINC `(.L_1)", False),
     ("BRA `(.L_1)", False), ("RET.REL.NODEC R20 `(snippet)", False)],
)  # fmt: skip
def test_indirect_count(text: str, indirect: bool) -> None:
    assert is_indirect(program(f"{text}\n.L_1:\nEXIT").code[0]) is indirect
