"""What a policy takes for attention: functions and operators by identity or name, in TorchScript, in a backward."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from dhp_safe_fa._operator.gradients import NODES
from dhp_safe_fa._operator.schema import BACKWARDS, OPERATORS, VARLEN

torch_sdpa = F.scaled_dot_product_attention
torch_multi_head = F.multi_head_attention_forward


def _named(namespace: Any, *names: str) -> tuple[Callable[..., Any], ...]:
    """Every object by which these operators may be called, of those that this torch has."""
    packets = [getattr(namespace, name) for name in names if hasattr(namespace, name)]
    overloads = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    functions = [getattr(place, name, None) for name in names for place in (torch, torch._C._nn)]
    return (*packets, *overloads, *(function for function in functions if function is not None))


SDPA = (torch_sdpa, *_named(torch.ops.aten, "scaled_dot_product_attention"))
OURS = _named(torch.ops.dhp, *OPERATORS, VARLEN)
OUR_BACKWARD = _named(torch.ops.dhp, *BACKWARDS)
# Attention fused with the layer around it. Eager code does not choose these under a mode, compiled code does.
_NATIVE_HEADS = _named(torch.ops.aten, "_native_multi_head_attention", "_triton_multi_head_attention")
FUSED = (*_named(torch.ops.aten, "_transformer_encoder_layer_fwd"), *_NATIVE_HEADS)
# What SDPA and its backward call; a program that was compiled elsewhere may call these by itself.
_KERNEL_NAMES = [
    f"_scaled_dot_product_{name}"
    for name in (
        "flash_attention",
        "flash_attention_for_cpu",
        "efficient_attention",
        "cudnn_attention",
        "fused_attention_overrideable",
        "attention_math",
        "attention_math_for_mps",
    )
] + [f"_{name}_attention_forward" for name in ("flash", "efficient", "cudnn")]
KERNELS = _named(
    torch.ops.aten,
    *_KERNEL_NAMES,
    *(name.removesuffix("_forward") + "_backward" for name in _KERNEL_NAMES),
    "_flash_attention_forward_no_dropout_inplace",
    "_triton_scaled_dot_attention",
)
FLEX = tuple(getattr(torch.ops.higher_order, name) for name in ("flex_attention", "flex_attention_backward"))

# What the functions compute that these are given, a mode does not see: it is off while it handles the operator.
_RUNNING_FUNCTIONS = (
    "autograd_function_apply",
    "cond",
    "invoke_subgraph",
    "tag_activation_checkpoint",
    "while_loop",
    "while_loop_stack_output",
    "scan",
    "associative_scan",
    "map_impl",
    "strict_mode",
    "wrap_with_autocast",
    "wrap_with_set_grad_enabled",
)

# In names of operators anybody may have registered, and of the nodes that autograd makes of them.
_ATTENTION = re.compile(r"attention|attn|scaled_?dot_?product|transformer_encoder_layer|(^|[_:])mha", re.I)


def runs_functions_unseen(func: object) -> bool:
    """A higher-order operator that runs functions it is given."""
    return isinstance(func, HigherOrderOperator) and func.__name__ in _RUNNING_FUNCTIONS


FOREIGN: tuple[Any, ...] = ()  # for torch.compile, which cannot look into names: found by find_foreign_attention
_names_looked_at: set[str] = set()
_state_looked_at = 0, 0, 0


def find_foreign_attention() -> None:
    """Looks through what has been registered since the last time."""
    global FOREIGN, _state_looked_at
    # Whatever registers operators is imported, loaded or defined in Python; listing them takes torch milliseconds.
    state = len(sys.modules), len(torch.ops.loaded_libraries), len(torch.library._defs)
    if state == _state_looked_at:
        return
    _state_looked_at = state
    new = set(torch._C._dispatch_get_all_op_names()) - _names_looked_at
    _names_looked_at.update(new)
    for name in sorted({name.split(".")[0] for name in new if _ATTENTION.search(name)}):
        space, base = name.split("::")
        packet = getattr(getattr(torch.ops, space), base)
        if is_foreign_attention(packet) and packet not in (*KERNELS, *FUSED):
            FOREIGN += (packet, *(getattr(packet, overload) for overload in packet.overloads()))


@cache
def is_foreign_attention(func: object) -> bool:
    """An operator whose name says attention, and that is neither ours nor SDPA: other libraries', varlen_attn's."""
    if isinstance(func, OpOverload):
        name = func.name()
    elif isinstance(func, OpOverloadPacket):
        name = func._qualified_op_name
    else:
        return False
    return func not in (*OURS, *OUR_BACKWARD, *SDPA) and _ATTENTION.search(name) is not None


def attention_in_script(graph: object) -> str | None:
    """The first operator in a TorchScript graph, subgraphs included, that computes attention or may do so."""
    for name in re.findall(r"\b([a-zA-Z_]\w*::\w+)", str(graph)):
        if name == "prim::CallMethod":  # what could not be inlined: a method of whatever implements an interface
            return str(name)
        ours = (*OPERATORS, VARLEN, *BACKWARDS)
        if _ATTENTION.search(name) and name.removeprefix("dhp::") not in ours:
            return str(name)
    return None


def attention_in_backward(roots: Iterable[Any]) -> str | None:
    """The first node of an autograd graph that differentiates another's attention; roots are tensors or edges."""
    todo = [getattr(root, "grad_fn", None) or getattr(root, "node", None) for root in roots]
    seen = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _ATTENTION.search(node.name()) and not node.name().startswith(NODES):
            return str(node.name())
        todo += [following for following, _ in node.next_functions]
    return None
