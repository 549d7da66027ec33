"""Ways to attention that torch function modes do not see: refused where a secure policy is at work.

A mode sees Python's calls of torch's functions. TorchScript, packages compiled ahead of time and autograd's engine call
operators from C++, and threads that torch starts have no mode. Each has an entry in Python, which is closed here while
there are policies that refuse, and open to threads that are under none.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dhp_safe_fa._recognized import attention_in_backward, attention_in_script

Question = Callable[..., "str | None"]
Refuse = Callable[[Callable[[], "str | None"]], None]


def _of_script(function: Any, *_args: Any, **_kwargs: Any) -> str | None:
    found = attention_in_script(function.inlined_graph)
    if found is None:
        return None
    return (
        f"TorchScript: the graph of {function.name!r} calls {found}, which runs outside of Python and cannot be "
        "replaced; call the function that was traced or scripted, or trace one that calls dhp_safe_fa.attention"
    )


def _of_machine_code(model: Any, *_args: Any, **_kwargs: Any) -> str:
    return (
        f"{type(model).__name__}: a program compiled ahead of time, into which nobody can look; "
        "supported: torch.compile, and programs of torch.export"
    )


def _of_backward(roots: Any, *_args: Any, **_kwargs: Any) -> str | None:
    found = attention_in_backward(roots)
    return found and f"gradients: the backward pass runs {found}, of attention that ran outside of this policy"


def _of_threads(modules: Any, *_args: Any, **_kwargs: Any) -> str | None:
    if len(modules) < 2:
        return None
    return (
        "parallel_apply (torch.nn.DataParallel) runs modules in threads of its own, which a policy's block does not "
        "reach; supported: dhp_safe_fa.set_policy, or one process for each device"
    )


class Entries:
    """The entries, closed while at least one policy wants them closed.

    Args:
        refuse: called with a question about a call, which it asks if this thread is under a policy that refuses; raises
            for an answer.
        refuse_in_block: the same, except that a policy for the whole process does not count: it is in every thread.
    """

    def __init__(self, refuse: Refuse, refuse_in_block: Refuse) -> None:
        self._refuse, self._refuse_in_block = refuse, refuse_in_block
        self._closed = 0
        self._lock = threading.Lock()
        self._originals: list[tuple[Any, str, Any]] = []

    def close(self) -> None:
        with self._lock:
            self._closed += 1
            if self._closed == 1:
                for owner, name, question, refuse in self._doors():
                    original = _get(owner, name)
                    self._originals.append((owner, name, original))
                    _set(owner, name, _guarded(original, question, refuse))

    def open(self) -> None:
        with self._lock:
            self._closed -= 1
            if self._closed == 0:
                while self._originals:
                    _set(*self._originals.pop())

    def _doors(self) -> Iterator[tuple[Any, str, Question, Refuse]]:
        """Where the entry is, its name there, what to ask about a call, and who asks it."""
        for script in (torch._C.ScriptFunction, torch._C.ScriptMethod):
            yield script, "__call__", _of_script, self._refuse
        for name in ("forward", "run_method"):
            yield torch._C.LiteScriptModule, name, _of_machine_code, self._refuse
        for module in (torch._C, torch._C._aoti):
            for owner in list(vars(module).values()):
                if isinstance(owner, type) and owner.__name__.startswith(("AOTIModelContainer", "AOTIModelPackage")):
                    for name in ("run", "boxed_run"):
                        if hasattr(owner, name):
                            yield owner, name, _of_machine_code, self._refuse
        for module in (torch.autograd, torch.autograd.graph):
            yield module, "_engine_run_backward", _of_backward, self._refuse
        yield torch.nn.parallel, "parallel_apply", _of_threads, self._refuse_in_block
        yield torch.nn.parallel.data_parallel.__globals__, "parallel_apply", _of_threads, self._refuse_in_block


def _get(owner: Any, name: str) -> Any:
    return owner[name] if isinstance(owner, dict) else getattr(owner, name)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    else:
        setattr(owner, name, value)


def _guarded(original: Callable[..., Any], question: Question, refuse: Refuse) -> Callable[..., Any]:
    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        refuse(lambda: question(*args, **kwargs))
        return original(*args, **kwargs)

    return guarded
