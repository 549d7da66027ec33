"""What is wrong with the arguments of a call that torch has refused for their types, in this package's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dhp_safe_fa._operator.scalars import in_words, is_number, is_too_large, shown, wrong_flag
from dhp_safe_fa._operator.schema import VARLEN, refuse

_END = 2**63  # of the integers that the schemas take
_SHAPES = {
    "attention": dict.fromkeys("qkv", "[B, H, S, D]"),
    VARLEN: {
        "q": "[tokens, H, D]",
        **dict.fromkeys("kv", "[tokens, H, D] or [pages, page_size, H, D]"),
        "cu_seqlens_q": "[sequences + 1]",
    },
}


def refuse_wrong_types(operator: str, given: Sequence[object]) -> None:
    """Names the first argument of a type that the operator's schema does not take; nothing if there is none. given: all
    of a call, in the schema's order."""
    for name, kind, value in _arguments(operator, given):
        wrong = _wrong(kind, value, _SHAPES[operator].get(name, ""))
        if wrong:
            refuse(operator, f"{name}: {wrong}")


def _arguments(operator: str, given: Sequence[object]) -> Iterator[tuple[str, str, object]]:
    """Name, type and value of each; the sides of a window as the caller gave them, together."""
    schema = getattr(torch.ops.dhp, operator).default._schema
    pairs = zip(schema.arguments, given, strict=True)
    found = {argument.name: (str(argument.type), value) for argument, value in pairs}
    for name, (kind, value) in found.items():
        if name == "window_left":
            yield "window", kind, (value, found["window_right"][1])
        elif name != "window_right":
            yield name, kind, value


def _wrong(kind: str, value: object, shape: str) -> str:
    """What to say of it, or nothing."""
    if value is None and kind.startswith("Optional"):
        return ""
    or_none = ", or None" if kind.startswith("Optional") else ""
    if "Tensor" in kind:
        return _wrong_tensor(value, shape, or_none)
    if "float" in kind:
        if is_too_large(value):
            return f"{in_words(value)}; supported: 0 to 2^100"
        return "" if is_number(value) else f"{shown(value)}; expected a number{or_none}"
    if kind == "bool":
        return wrong_flag(value)
    numbers = value if isinstance(value, tuple) else (value,)
    if not all(hasattr(number, "__index__") for number in numbers):
        return f"{shown(value)}; expected whole numbers"
    if not all(-_END <= number < _END for number in numbers if isinstance(number, int)):
        return f"{shown(value)}; supported: integers of 64 bits"
    return ""


def _wrong_tensor(value: object, shape: str, or_none: str) -> str:
    if not isinstance(value, Tensor):
        given = "None" if value is None else type(value).__name__
        return f"{given}; expected a tensor{shape and f' {shape}'}{or_none}"
    if value.is_nested:
        return "a nested tensor; supported: strided tensors, one call for each length"
    if value.layout != torch.strided or value.is_quantized:
        kind = "quantized" if value.is_quantized else str(value.layout).removeprefix("torch.").replace("_", " ").strip()
        return f"a {kind} tensor; supported: strided tensors of floating-point numbers"
    return ""
