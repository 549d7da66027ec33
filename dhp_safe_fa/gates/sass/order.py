"""What has come before: instructions that no path from a kernel's entry reaches without another one."""

from __future__ import annotations

from collections.abc import Callable

from .cfg import Graph
from .listing import Instruction, Program


def reached_without(
    program: Program, graph: Graph, is_it: Callable[[Instruction], bool], others: frozenset[int] = frozenset()
) -> set[int]:
    """The positions that a path from the entry reaches before any instruction of which is_it holds, or at one of the
    other positions."""
    found: set[int] = set()
    seen = {graph.entry}
    todo = [graph.entry]
    while todo:
        block = todo.pop()
        first, last = graph.blocks[block]
        for position in range(first, last + 1):
            if position in others or is_it(program.code[position]):
                break
            found.add(position)
        else:
            new = set(graph.successors[block]) - seen
            seen |= new
            todo += new
    return found


def may_come_after(program: Program, graph: Graph, is_it: Callable[[Instruction], bool], position: int) -> bool:
    """Whether a path leads from the entry to an instruction of which is_it holds, and from there to the position, which
    it has not come by before."""
    before = reached_without(program, graph, lambda _: False, frozenset({position}))
    ends = {p for p in before if is_it(program.code[p])}
    holds = [[end for end in ends if first <= end <= last] for first, last in graph.blocks]
    of_position = next(b for b, (first, last) in enumerate(graph.blocks) if first <= position <= last)
    if any(end < position for end in holds[of_position]):
        return True
    seen: set[int] = set()
    todo = {block for block, some in enumerate(holds) if some}
    while todo:
        todo = {successor for block in todo for successor in graph.successors[block]} - seen
        seen |= todo
    return of_position in seen


def may_end_a_meeting(instruction: Instruction) -> bool:
    """Others may go on when a thread has come here, so that what it does later is not there for them: every meeting,
    the first half of one of the cluster, and arrivals at barrier 0, or at one that a register names."""
    name = instruction.operands.split(",")[0].strip()
    is_of_block = instruction.base == "BAR" and (name == "0x0" or not name.startswith(("0x", "gsb")))
    return is_of_block or instruction.base in ("UCGABAR_ARV", "UCGABAR_WAIT")


def meets_all(instruction: Instruction) -> bool:
    """All threads of the block, or of the cluster, meet: __syncthreads(), barrier.cluster.wait (PTX ISA, 9.7.13.1 and
    9.7.13.4). A barrier of a number of threads has a second operand."""
    is_sync = instruction.base == "BAR" and "SYNC" in instruction.modifiers
    is_of_all = is_sync and instruction.operands.strip() == "0x0"
    return not instruction.guard and (is_of_all or instruction.base == "UCGABAR_WAIT")


def awaits_launches(instruction: Instruction) -> bool:
    """griddepcontrol.wait: what launches before this one have written is there (PTX ISA, 9.7.13.13)."""
    return not instruction.guard and instruction.base == "ACQBULK"
