"""Which policies are active: in this thread, inside of whose blocks it is, and for the whole process."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F

from dhp_safe_fa._recognized import torch_multi_head, torch_sdpa
from dhp_safe_fa._unseen import Entries


class AtWork(Protocol):
    """A policy, as far as this module has to know it."""

    refuses: ClassVar[bool]

    def refuse(self, reason: str) -> None:
        """Raises."""

    def __enter__(self) -> Any: ...

    def __exit__(self, *exception: object) -> None: ...


_threads = threading.local()


def entered() -> list[Any]:
    """The policies that this thread is inside of, innermost last."""
    if not hasattr(_threads, "entered"):
        _threads.entered = []
    policies: list[Any] = _threads.entered
    return policies


# ---- for the whole process ------------------------------------------------------------------------------------------

_default: AtWork | None = None


def default() -> Any:
    """The policy of the process, or None."""
    return _default


def set_default(policy: AtWork | None) -> None:
    """Puts functions that enter the policy in the place of torch's, or torch's back for None."""
    from torch.nn.attention.flex_attention import flex_attention as torch_flex

    global _default, _torch_flex
    _default, _torch_flex = policy, _torch_flex or torch_flex
    pairs = (
        (torch_sdpa, default_sdpa),
        (torch_multi_head, default_multi_head),
        (_torch_flex, default_flex),
    )
    _replace_everywhere(
        {id(ours if policy is None else torchs): torchs if policy is None else ours for torchs, ours in pairs}
    )


# One function each, because torch.compile takes functions apart by their names.
_torch_flex: Any = None


def default_sdpa(*args: Any, **kwargs: Any) -> Any:
    policy = _default
    if policy is None:
        return torch_sdpa(*args, **kwargs)
    with policy:
        return torch_sdpa(*args, **kwargs)


def default_multi_head(*args: Any, **kwargs: Any) -> Any:
    policy = _default
    if policy is None:
        return torch_multi_head(*args, **kwargs)
    with policy:
        return torch_multi_head(*args, **kwargs)


def default_flex(*args: Any, **kwargs: Any) -> Any:
    policy = _default
    if policy is None:
        return _torch_flex(*args, **kwargs)
    with policy:
        return _torch_flex(*args, **kwargs)


def _replace_everywhere(replacements: dict[int, Any]) -> None:
    """In the modules that define them and in every module outside of torch and of this package."""
    own = (F, sys.modules["torch.nn.attention.flex_attention"])
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "dhp_safe_fa") and module not in own:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replacements:
                setattr(module, attribute, replacements[id(value)])


# ---- what modes do not see ------------------------------------------------------------------------------------------


def _refuse_in_block(question: Callable[[], str | None]) -> None:
    """In this thread; autograd's threads have the modes of the one that they work for, and nothing else of it."""
    policies = (*entered(), *torch.overrides._get_current_function_mode_stack())
    refusing = [policy for policy in policies if getattr(policy, "refuses", False)]
    _ask(refusing[-1] if refusing else None, question)


def _refuse_anywhere(question: Callable[[], str | None]) -> None:
    if _default is not None and _default.refuses:
        _ask(_default, question)
    else:
        _refuse_in_block(question)


def _ask(policy: Any, question: Callable[[], str | None]) -> None:
    reason = None if policy is None else question()
    if reason is not None:
        policy.refuse(reason)


entries = Entries(_refuse_anywhere, _refuse_in_block)


class Uncompiled:
    """While a policy wants it, compiled functions run uncompiled, in every thread: a graph would hide their calls."""

    def __init__(self) -> None:
        self._wanted = 0
        self._stance: Any = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            if self._wanted == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                self._stance.__enter__()
            self._wanted += 1

    def end(self) -> None:
        with self._lock:
            self._wanted -= 1
            if self._wanted == 0:
                self._stance.__exit__(None, None, None)


uncompiled = Uncompiled()
