"""A captured CUDA graph in which the first and the last kernel, the stamps, are moved to both sides of one kernel.

A call that launches several kernels is captured as a chain: stamp, kernels, stamp. The chain is linked anew as: kernels
before, stamp, the kernel, stamp, kernels behind. CUDA driver API, "Graph Management".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ..tools import NotRun

_KERNEL = 0  # CU_GRAPH_NODE_TYPE_KERNEL


class _Edge(ctypes.Structure):
    """CUgraphEdgeData: all zero is a full dependency; a launch that may begin early has another one."""

    _fields_ = [("ports", ctypes.c_ubyte * 2), ("type", ctypes.c_ubyte), ("reserved", ctypes.c_ubyte * 5)]


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid_block_shared", ctypes.c_uint * 7),
        ("parameters", ctypes.c_void_p),
        ("extra", ctypes.c_void_p),
        ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    ]


def chain(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[int]:
    """The nodes in their order. NotRun if they are no chain."""
    following = dict(edges)
    first = set(nodes) - set(following.values())
    order = sorted(first)[:1]
    while order and order[-1] in following and len(order) <= len(nodes):
        order.append(following[order[-1]])
    if len(edges) != len(nodes) - 1 or len(order) != len(nodes):
        raise NotRun("the kernels of a call are no chain, so that none of them can be timed alone")
    return order


def closed_around(order: Sequence[int], names: Sequence[str], entry: str) -> list[int]:
    """The order in which the first and the last node are beside the one whose name is entry. NotRun if there is no such
    node between them, or more than one.

    names: of the nodes; empty of one that is no kernel.
    """
    begin, *between, end = order
    found = [node for node, name in zip(between, names[1:-1], strict=True) if name == entry]
    if len(found) != 1:
        raise NotRun(f"the call launches {entry} {len(found)} times, not once")
    at = between.index(found[0])
    return [*between[:at], begin, found[0], end, *between[at + 1 :]]


class _Graph:
    """A CUgraph, by the driver's functions."""

    def __init__(self, cuda: Any, graph: int) -> None:
        self._cuda, self._graph = cuda, ctypes.c_void_p(graph)

    def _check(self, function: str, *arguments: object) -> None:
        status = int(getattr(self._cuda, function)(*arguments))
        if status:
            raise NotRun(f"a kernel cannot be timed alone: {function} failed with CUDA error {status}")

    def nodes(self) -> list[int]:
        count = ctypes.c_size_t()
        self._check("cuGraphGetNodes", self._graph, None, ctypes.byref(count))
        nodes = (ctypes.c_void_p * count.value)()
        self._check("cuGraphGetNodes", self._graph, nodes, ctypes.byref(count))
        return [int(node or 0) for node in nodes]

    def name(self, node: int) -> str:
        kind = ctypes.c_int()
        self._check("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
        if kind.value != _KERNEL:
            return ""
        parameters = _KernelNode()
        self._check("cuGraphKernelNodeGetParams_v2", ctypes.c_void_p(node), ctypes.byref(parameters))
        text = ctypes.c_char_p()
        if parameters.function:
            self._check("cuFuncGetName", ctypes.byref(text), ctypes.c_void_p(parameters.function))
        else:  # launched by a handle that belongs to no context
            self._check("cuKernelGetName", ctypes.byref(text), ctypes.c_void_p(parameters.kernel))
        return (text.value or b"").decode()

    def edges(self) -> tuple[list[tuple[int, int]], Any]:
        """Pairs of nodes, and what the driver needs to remove them: two arrays of nodes, their data, their count."""
        count = ctypes.c_size_t()
        self._check("cuGraphGetEdges_v2", self._graph, None, None, None, ctypes.byref(count))
        sources, targets = (ctypes.c_void_p * count.value)(), (ctypes.c_void_p * count.value)()
        data = (_Edge * count.value)()
        self._check("cuGraphGetEdges_v2", self._graph, sources, targets, data, ctypes.byref(count))
        pairs = [(int(a or 0), int(b or 0)) for a, b in zip(sources, targets, strict=True)]
        return pairs, (sources, targets, data, count)

    def link(self, order: Sequence[int], old: Any) -> None:
        """Removes the old edges and makes a chain of full dependencies."""
        self._check("cuGraphRemoveDependencies_v2", self._graph, *old)
        count = len(order) - 1
        sources, targets = (ctypes.c_void_p * count)(*order[:-1]), (ctypes.c_void_p * count)(*order[1:])
        self._check("cuGraphAddDependencies", self._graph, sources, targets, ctypes.c_size_t(count))


def close_around(cuda: Any, graph: int, entry: str) -> None:
    """Moves the first and the last kernel of a captured chain to both sides of the kernel called entry.

    Args:
        cuda: the driver, libcuda.so.1.
        graph: a CUgraph that is not instantiated yet.

    Raises:
        NotRun: there is no such chain, no such kernel, or the driver is older than CUDA 12.3.
    """
    try:
        captured = _Graph(cuda, graph)
        pairs, old = captured.edges()
        order = chain(captured.nodes(), pairs)
        captured.link(closed_around(order, [captured.name(node) for node in order], entry), old)
    except AttributeError as error:  # ctypes: the library has no such function
        raise NotRun(f"a kernel cannot be timed alone: the driver is too old ({error})") from error
