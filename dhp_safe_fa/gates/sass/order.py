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


def meets_all(instruction: Instruction) -> bool:
    """All threads of the block, or of the cluster, meet: __syncthreads(), barrier.cluster.wait (PTX ISA, 9.7.13.1 and
    9.7.13.4). A barrier of a number of threads has a second operand."""
    is_sync = instruction.base == "BAR" and "SYNC" in instruction.modifiers
    is_of_all = is_sync and instruction.operands.strip() == "0x0"
    return not instruction.guard and (is_of_all or instruction.base == "UCGABAR_WAIT")


def awaits_launches(instruction: Instruction) -> bool:
    """griddepcontrol.wait: what launches before this one have written is there (PTX ISA, 9.7.13.13)."""
    return not instruction.guard and instruction.base == "ACQBULK"
