"""One kernel of several timed alone: how a captured chain is linked anew, on a driver that is made of Python."""

from __future__ import annotations

import ctypes
from itertools import pairwise
from typing import Any

import pytest

from dhp_safe_fa.gates.timing import nodes
from dhp_safe_fa.gates.tools import NotRun

GRAPH = 77


class Driver:
    """A chain of nodes with these names, numbered from 1; an empty name is a copy of memory. The order in which it
    tells of nodes and edges is not the chain's."""

    def __init__(self, *names: str, early: int = 0) -> None:
        self.names = dict(enumerate(names, 1))
        order = list(self.names)
        self.edges = {pair: early for pair in pairwise(order)}

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        assert graph.value == GRAPH
        count._obj.value = len(self.names)
        for at, node in enumerate(reversed(self.names) if nodes is not None else ()):
            nodes[at] = node
        return 0

    def cuGraphGetEdges_v2(self, graph: Any, sources: Any, targets: Any, data: Any, count: Any) -> int:
        count._obj.value = len(self.edges)
        for at, ((a, b), early) in enumerate(sorted(self.edges.items(), reverse=True) if sources is not None else ()):
            sources[at], targets[at], data[at].type = a, b, early
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:
        kind._obj.value = 0 if self.names[node.value] else 1
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, parameters: Any) -> int:
        parameters._obj.function = node.value
        return 0

    def cuFuncGetName(self, text: Any, function: Any) -> int:
        text._obj.value = self.names[function.value].encode()
        return 0

    def cuGraphRemoveDependencies_v2(self, graph: Any, sources: Any, targets: Any, data: Any, count: Any) -> int:
        for a, b, edge in zip(sources, targets, data, strict=True):
            assert self.edges.pop((a, b)) == edge.type
        return 0

    def cuGraphAddDependencies(self, graph: Any, sources: Any, targets: Any, count: Any) -> int:
        self.edges |= {pair: 0 for pair in zip(sources[: count.value], targets[: count.value], strict=True)}
        return 0

    def order(self) -> list[str]:
        return [self.names[node] for node in nodes.chain(list(self.names), list(self.edges))]


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize(
    ("captured", "linked"),
    [
        (["stamp", "delta", "bwd", "stamp"], ["delta", "stamp", "bwd", "stamp"]),
        (["stamp", "bwd", "delta", "stamp"], ["stamp", "bwd", "stamp", "delta"]),
        (["stamp", "", "delta", "bwd", "dq", "stamp"], ["", "delta", "stamp", "bwd", "stamp", "dq"]),
        (["stamp", "bwd", "stamp"], ["stamp", "bwd", "stamp"]),
    ],
)
def test_stamps_are_moved_to_the_kernel(captured: list[str], linked: list[str], early: int) -> None:
    driver = Driver(*captured, early=early)
    nodes.close_around(driver, GRAPH, "bwd")
    assert driver.order() == linked and set(driver.edges.values()) == {0}


@pytest.mark.parametrize(
    ("captured", "cause"),
    [
        (["stamp", "delta", "stamp"], "launches bwd 0 times"),
        (["stamp", "bwd", "bwd", "stamp"], "launches bwd 2 times"),
    ],
)
def test_a_kernel_that_is_not_there_once_is_not_timed(captured: list[str], cause: str) -> None:
    with pytest.raises(NotRun, match=cause):
        nodes.close_around(Driver(*captured), GRAPH, "bwd")


def test_branches_are_no_chain() -> None:
    driver = Driver("stamp", "bwd", "other", "stamp")
    del driver.edges[(2, 3)]
    driver.edges[(1, 3)] = 0
    with pytest.raises(NotRun, match="no chain"):
        nodes.close_around(driver, GRAPH, "bwd")
    with pytest.raises(NotRun, match="no chain"):
        nodes.chain([1, 2, 3, 4], [(1, 2), (3, 4), (4, 3)])


def test_a_driver_that_refuses_is_not_run() -> None:
    driver = Driver("stamp", "bwd", "stamp")
    driver.cuGraphGetEdges_v2 = lambda *_: 801  # type: ignore[method-assign, assignment]
    with pytest.raises(NotRun, match="cuGraphGetEdges_v2 failed with CUDA error 801"):
        nodes.close_around(driver, GRAPH, "bwd")


def test_a_driver_without_the_functions_is_not_run() -> None:
    with pytest.raises(NotRun, match="the driver is too old"):
        nodes.close_around(object(), GRAPH, "bwd")


def test_structs_have_the_sizes_of_the_driver() -> None:
    assert ctypes.sizeof(nodes._Edge) == 8 and ctypes.sizeof(nodes._KernelNode) == 72
