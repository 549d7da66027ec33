"""Control-flow graph of one kernel: reachable code, basic blocks, indirect branches, calls, post-dominators."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .isa import CONTROL, effects
from .isa.operands import UnknownInstruction, location_name
from .listing import Instruction, Program

_TRANSFERS = CONTROL - {"BSSY", "YIELD", "WARPSYNC"}
_EXITS = {"EXIT", "KILL", "RTT"}
_DEAD = {"NOP", "MEMBAR", "ERRBAR", "CGAERRBAR", "EXIT"}  # show nothing, even if control did come there
_LABEL = re.compile(r"[`(]\(?([.$\w]+)")
_PREDICATE = re.compile(r"(?:^|, *)!?U?P[0-6](?:,|$)")
_REGISTER = re.compile(r"(?:^|, *)U?R\d+")


def is_predicated(instruction: Instruction) -> bool:
    """A control transfer that may or may not happen: guarded, with a predicate operand, or BRA.DIV / BRA.CONV, which
    ask the hardware whether the warp has diverged."""
    if instruction.base not in _TRANSFERS:
        return False
    return (
        instruction.guard not in ("", "PT", "UPT")
        or bool(_PREDICATE.search(instruction.operands))
        or bool({"DIV", "CONV"} & set(instruction.modifiers))
    )


def is_indirect(instruction: Instruction) -> bool:
    """The target is in a register: BRX, BRXU, JMX, JMXU, and calls through a function pointer."""
    if instruction.base == "CALL":
        return bool(_REGISTER.search(instruction.operands))
    return instruction.base in ("BRX", "BRXU", "JMX", "JMXU")


@dataclass
class Graph:
    """Basic blocks as (first, last) positions, in the order of the listing; successors by block number.

    entry: the block that the kernel starts with, which need not be the first: functions that it calls may lie before
    it. exits: blocks that control may leave the kernel from. unresolved: positions whose targets are not known.
    unreached: code of the sections entered, the kernel's own and those of functions that it calls, that no known path
    reaches, so a path may be missing.
    post_dominator[b]: the nearest block that every path from b to an exit passes, or -1 for the exit itself.
    """

    blocks: list[tuple[int, int]] = field(default_factory=list)
    entry: int = 0
    successors: list[list[int]] = field(default_factory=list)
    exits: set[int] = field(default_factory=set)
    unresolved: list[int] = field(default_factory=list)
    unreached: list[int] = field(default_factory=list)
    post_dominator: list[int] = field(default_factory=list)

    def region(self, block: int) -> set[int]:
        """Blocks whose execution depends on where `block` goes: between it and its post-dominator, exclusive."""
        stop = self.post_dominator[block]
        seen: set[int] = set()
        todo = [s for s in self.successors[block] if s != stop]
        while todo:
            current = todo.pop()
            if current not in seen:
                seen.add(current)
                todo += [s for s in self.successors[current] if s != stop]
        return seen


class _Builder:
    def __init__(self, program: Program, entry: int) -> None:
        self.program = program
        self.entry = entry
        self.unresolved: set[int] = set()
        self.returns: dict[int, list[int]] = {}

    def label(self, text: str) -> int | None:
        """Position that a label operand names; addresses inside the section are allowed too."""
        match = _LABEL.search(text)
        return self.program.labels.get(match[1]) if match else None

    def all_labels(self, position: int) -> list[int]:
        start, end = self.program.sections[self.program.code[position].section]
        return sorted({p for p in self.program.labels.values() if start <= p < end})

    def targets(self, position: int) -> list[int]:
        """Where a direct or indirect branch may lead, apart from falling through. Unresolved: every label."""
        instruction = self.program.code[position]
        if is_indirect(instruction):
            found = [self.program.labels.get(label) for label in instruction.targets]
        else:
            found = [self.label(instruction.operands)]
        known = [f for f in found if f is not None]
        if known and len(known) == len(found):
            return known
        self.unresolved.add(position)
        return [] if instruction.base == "CALL" else self.all_labels(position)

    def successors(self, position: int, enter_calls: bool) -> list[int]:
        """Next positions. enter_calls False: a call is stepped over, and a return ends the walk."""
        instruction = self.program.code[position]
        base, after = instruction.base, position + 1
        falls = [after] if after < self.program.sections[instruction.section][1] else []
        if base in _EXITS:
            return falls if is_predicated(instruction) else []
        if base == "RET":
            return [*self.returns.get(position, []), *(falls if is_predicated(instruction) else [])]
        if base == "CALL":
            callees = self.targets(position)
            if not enter_calls or not callees:
                return falls
            return [*callees, *(falls if is_predicated(instruction) else [])]
        if base in ("BRA", "BRX", "BRXU", "JMP", "JMX", "JMXU"):
            return [*self.targets(position), *(falls if is_predicated(instruction) else [])]
        if base == "WARPSYNC" and "`" in instruction.operands:
            return [*falls, *self.targets(position)]
        if base == "BSYNC":
            return self.convergence(position) or falls
        return falls

    def convergence(self, position: int) -> list[int]:
        """BSYNC goes on at the label of the BSSY that set its barrier, normally the next instruction."""
        program = self.program
        section = program.code[position].section
        start, end = program.sections[section]
        register = program.code[position].operands
        labels = {
            self.label(i.operands)
            for i in program.code[start:end]
            if i.base == "BSSY" and i.operands.split(",")[0] == register
        }
        if position + 1 in labels:
            return [position + 1]
        return sorted({position + 1} | {label for label in labels if label is not None and label < end})

    def walk(self, start: int, enter_calls: bool) -> set[int]:
        seen: set[int] = set()
        todo = [start]
        while todo:
            position = todo.pop()
            if position not in seen:
                seen.add(position)
                todo += self.successors(position, enter_calls)
        return seen

    def link_returns(self) -> None:
        """A return leads where the calls of a function that contains it say: the return address is a constant that is
        moved into the return's register in front of the call. Where that move is not found, the return leads behind
        the call and to every address that is moved into its register anywhere."""
        code = self.program.code
        entered: set[int] = set()
        reached: set[int] = set()
        pending = [self.entry]
        callers: dict[int, set[int]] = {}
        while pending:
            start = pending.pop()
            if start in entered:
                continue
            entered.add(start)
            body = self.walk(start, enter_calls=False)
            reached |= body
            for position in body:
                if code[position].base == "CALL":
                    for callee in self.targets(position):
                        callers.setdefault(callee, set()).add(position)
                        pending.append(callee)
        sites_of: dict[int, set[int]] = {}
        for callee, sites in callers.items():
            for position in self.walk(callee, enter_calls=False):
                if code[position].base == "RET":
                    sites_of.setdefault(position, set()).update(sites)
        moved = self.return_addresses(reached)
        for position in reached:
            if code[position].base == "RET":
                register = code[position].operands.split()[0].rstrip(",") if code[position].operands else ""
                found: set[int] = set() if sites_of.get(position) else set(moved.get(register, {}).values())
                for site in sites_of.get(position, ()):
                    said = self.moved_before(site, register, moved.get(register, {}))
                    found |= {said} if said is not None else {site + 1, *moved.get(register, {}).values()}
                self.returns[position] = sorted(found)
                if not found:
                    self.unresolved.add(position)

    def return_addresses(self, reached: set[int]) -> dict[str, dict[int, int]]:
        """Register name to {position of a move: position whose address it moves into the register as a constant}."""
        found: dict[str, dict[int, int]] = {}
        for position in reached:
            instruction = self.program.code[position]
            if instruction.opcode not in ("MOV", "IMAD.MOV.U32"):
                continue
            register, value = instruction.operands.split(",")[0], instruction.operands.rpartition(",")[2].strip()
            if re.fullmatch(r"0x[0-9a-f]+", value):
                target = self.program.position(instruction.section, int(value, 16))
            elif "@" in value:
                labels = [self.program.labels.get(name) for name in re.findall(r"[.$]\w[\w$.]*", value)]
                target = next((label for label in labels if label is not None), None)
            else:
                target = None
            if target is not None and target != self.program.sections[instruction.section][0]:
                found.setdefault(register, {})[position] = target
        return found

    def moved_before(self, site: int, register: str, moves: dict[int, int]) -> int | None:
        """The address that is in the register at a call, if it is moved there in straight code in front of it."""
        labels = set(self.program.labels.values())
        for position in range(site - 1, self.program.sections[self.program.code[site].section][0] - 1, -1):
            instruction = self.program.code[position]
            if position + 1 in labels or instruction.base in CONTROL:
                return None
            if position in moves:
                return None if instruction.guard else moves[position]
            try:
                written = effects(instruction.opcode, instruction.operands, instruction.guard).writes
            except UnknownInstruction:
                return None
            if any(location_name(location) == register for location in written):
                return None
        return None

    def is_padding(self, position: int) -> bool:
        """What compilers leave behind the last exit: NOPs, a branch to itself, and fences in front of another exit."""
        instruction = self.program.code[position]
        itself = instruction.base == "BRA" and self.label(instruction.operands) == position
        return instruction.base in _DEAD or itself

    def build(self) -> Graph:
        self.link_returns()
        reached = sorted(self.walk(self.entry, enter_calls=True))
        edges = {position: sorted(set(self.successors(position, enter_calls=True))) for position in reached}
        leaders = {self.entry}
        for position, following in edges.items():
            if following != [position + 1] or self.program.code[position].base in _EXITS:
                leaders.update(following)
                leaders.add(position + 1)
        graph = Graph()
        for position in reached:
            if position in leaders or not graph.blocks or graph.blocks[-1][1] != position - 1:
                graph.blocks.append((position, position))
            else:
                graph.blocks[-1] = (graph.blocks[-1][0], position)
        number = {first: block for block, (first, _) in enumerate(graph.blocks)}
        graph.entry = number[self.entry]
        graph.successors = [[number[p] for p in edges[last]] for _, last in graph.blocks]
        code = self.program.code
        for block, (_, last) in enumerate(graph.blocks):
            if not edges[last] or code[last].base in _EXITS:
                graph.exits.add(block)
        graph.unresolved = sorted(self.unresolved)
        seen = set(reached)
        entered = sorted({self.program.sections[code[position].section] for position in reached})
        graph.unreached = [p for span in entered for p in range(*span) if p not in seen and not self.is_padding(p)]
        graph.post_dominator = _post_dominators(graph)
        return graph


def _post_dominators(graph: Graph) -> list[int]:
    """Immediate post-dominators (Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm), -1 for the exit. A loop
    that never ends is given an edge to the exit, so that each block has a path there."""
    count = len(graph.blocks)
    exit_node = count
    following = [list(s) for s in graph.successors] + [[]]
    before: list[list[int]] = [[] for _ in range(count + 1)]
    for block, successors in enumerate(graph.successors):
        for successor in successors:
            before[successor].append(block)
    for block in graph.exits:
        following[block].append(exit_node)
        before[exit_node].append(block)

    order: list[int] = []
    seen: set[int] = set()

    def visit(root: int) -> None:
        stack = [(root, iter(before[root]))]
        seen.add(root)
        while stack:
            node, rest = stack[-1]
            child = next((c for c in rest if c not in seen), None)
            if child is None:
                order.append(node)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(before[child])))

    endless: list[int] = []
    while True:  # connect one block of each endless loop
        order.clear()
        seen.clear()
        visit(exit_node)
        missing = next((b for b in reversed(range(count)) if b not in seen), None)
        if missing is None:
            break
        endless.append(missing)
        following[missing].append(exit_node)
        before[exit_node].append(missing)

    rank = {node: position for position, node in enumerate(order)}
    dominator: dict[int, int] = {exit_node: exit_node}
    changed = True
    while changed:
        changed = False
        for node in reversed(order):
            if node == exit_node:
                continue
            candidates = [s for s in following[node] if s in dominator]
            if not candidates:
                continue
            best = candidates[0]
            for other in candidates[1:]:
                while best != other:
                    while rank[best] < rank[other]:
                        best = dominator[best]
                    while rank[other] < rank[best]:
                        other = dominator[other]
            if dominator.get(node) != best:
                dominator[node] = best
                changed = True
    return [-1 if dominator[b] == exit_node else dominator[b] for b in range(count)]


def build_graph(program: Program, kernel: str) -> Graph:
    """The graph of the kernel (or function) that starts at the label `kernel`."""
    return _Builder(program, program.labels[kernel]).build()
