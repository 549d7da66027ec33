"""Which attention a program runs: a policy over every call of scaled_dot_product_attention, for unmodified models.

    with dhp_safe_fa.policy("secure"):        # in this thread, inside the block
        model(tokens)
    dhp_safe_fa.set_policy("hybrid")          # in every thread, until set again

A policy is a torch function mode. Modes stack, and a call that one lets pass reaches the next one outside, so nesting
adds up: nothing inside weakens a policy outside.
"""

from __future__ import annotations

import inspect
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dhp_safe_fa import _recognized
from dhp_safe_fa._active_policies import (
    default,
    default_multi_head,
    entered,
    entries,
    set_default,
    uncompiled,
)
from dhp_safe_fa._recognized import (
    FLEX,
    FUSED,
    KERNELS,
    OURS,
    SDPA,
    find_foreign_attention,
    is_foreign_attention,
    runs_functions_unseen,
    torch_multi_head,
)
from dhp_safe_fa._report import Call, choice_of_torch, describe, table
from dhp_safe_fa._sdpa import serve, why_not

Name = Literal["secure", "hybrid", "audit"]

FLEX_REASON = (
    "flex_attention computes attention in kernels that torch.compile makes of Python functions; "
    "supported: scaled_dot_product_attention"
)
FUSED_REASON = (
    "torch's fused encoder layer has attention of its own; "
    "switch it off by torch.backends.mha.set_fastpath_enabled(False)"
)
NEED_WEIGHTS_REASON = (
    "need_weights: True in torch.nn.MultiheadAttention, which then computes attention without "
    "scaled_dot_product_attention; pass need_weights=False"
)



def _not_handed_on(function: Any) -> FunctionType:
    """A mode is off while it handles a function, and what this one calls would go unseen. This is torch's own code,
    except that it does not hand itself to the mode, and so can be called with the mode on."""
    asked = dict.fromkeys(("has_torch_function", "has_torch_function_unary"), lambda _: False)
    names = {**function.__globals__, **asked}
    copy = FunctionType(function.__code__, names, argdefs=function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_multi_head = _not_handed_on(torch_multi_head)
# A backward pass may compute attention again, in checkpoints.
_BACKWARD_PASSES = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_MULTI_HEAD_ARGUMENTS = inspect.signature(torch_multi_head)
_NEED_WEIGHTS = list(_MULTI_HEAD_ARGUMENTS.parameters).index("need_weights")
_NUM_HEADS = list(_MULTI_HEAD_ARGUMENTS.parameters).index("num_heads")

_lock = threading.Lock()


class Policy(TorchFunctionMode):
    """A policy at work, made by :func:`policy` and :func:`set_policy`; threads may share it, and enter it repeatedly.

    Attributes:
        name: "secure", "hybrid" or "audit".
        calls: how often each :class:`Call` came by. Equal calls in compiled functions count once, however often these
            run, also if they were compiled earlier.
    """

    name: ClassVar[str]
    serves: ClassVar[bool]  # dhp runs what it supports
    refuses: ClassVar[bool]  # the rest is an error
    over_ranks: ClassVar[bool] = False  # what it serves it spreads over ranks: policies inside leave calls to it
    # torch.compile tells modes apart by their type, hence a class each: a graph is never reused under another policy.

    def __init__(self) -> None:
        super().__init__()
        self._eager: Counter[Call] = Counter()

    @property
    def calls(self) -> Counter[Call]:
        found = Counter(self._eager)
        for attribute in tuple(vars(self)):
            if attribute.startswith(_RAN):
                found[_traced[int(attribute.removeprefix(_RAN))]] += 1
        return found

    def __str__(self) -> str:
        """The calls as a table."""
        return table(self.name, self.calls)

    def __enter__(self) -> Policy:
        if not torch.compiler.is_dynamo_compiling():
            entered().append(self)
            self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_dynamo_compiling():
            self._end()
            entered().remove(self)

    def _begin(self) -> None:
        """What the process has to know while a policy is at work; here nothing."""

    def _end(self) -> None:
        """Undoes one _begin, in whatever thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in SDPA:
            return self._attend(func, *args, **kwargs)
        if func is torch_multi_head or func is default_multi_head:
            return self._attend_with_heads(*args, **kwargs)
        if func in _BACKWARD_PASSES:
            with self:
                return _not_handed_on(func)(*args, **kwargs)
        if func in FUSED:
            self._refuse_or_note(args[0], args[0], FUSED_REASON)
        if func in FLEX:
            self._refuse_or_note(args[0], args[1], FLEX_REASON)
        if self.refuses:
            self._refuse_unknown(func)
        if func is Tensor.unflatten:
            # torch.compile cannot trace this method under a mode, but it can trace the function.
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

    def _refuse_unknown(self, func: Any) -> None:
        if func in KERNELS:
            self.refuse(f"{func}: called directly; supported: scaled_dot_product_attention")
        if runs_functions_unseen(func):
            self.refuse(
                f"torch.ops.higher_order.{func.__name__} runs functions where their attention is not seen; supported: "
                "Python's own control flow, compiled functions without checkpoints, programs exported under the policy"
            )
        traced = torch.compiler.is_dynamo_compiling()
        if func in _recognized.FOREIGN if traced else is_foreign_attention(func):
            self.refuse(f"{func}: an operator that is called attention; supported: scaled_dot_product_attention")

    def refuse(self, reason: str) -> None:
        """Raises RuntimeError with the reason."""
        if torch.compiler.is_dynamo_compiling():
            # An exception of the traced program would be a reason to try the same without a graph.
            torch._dynamo.comptime.comptime(_refuse_traced)
        raise RuntimeError(f"dhp_safe_fa.policy({self.name!r}): {reason}")

    def _attend(
        self,
        torch_sdpa: Callable[..., Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        reason = why_not(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        self._refuse_or_note(query, key, reason, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if self.serves and reason is None and not any(policy.over_ranks for policy in _outside()):
            return self._serve(query, key, value, is_causal, scale)
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def _serve(self, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float | None) -> Tensor:
        return serve(query, key, value, is_causal, scale)

    def _attend_with_heads(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        """F.multi_head_attention_forward, which nn.MultiheadAttention and nn.TransformerEncoderLayer call."""
        position, heads = _NEED_WEIGHTS - 2, _NUM_HEADS - 2
        if args[position] if len(args) > position else kwargs.get("need_weights", True):
            count = args[heads] if len(args) > heads else kwargs["num_heads"]
            for policy in (*_outside(), self):  # the function is not handed on to them
                policy._refuse_or_note(_heads_of(query, count), _heads_of(key, count), NEED_WEIGHTS_REASON)
        with self:
            return _multi_head(query, key, *args, **kwargs)

    def _refuse_or_note(self, query: Tensor, key: Tensor, reason: str | None, *others: Any) -> None:
        if reason is not None:
            if self.refuses:
                self.refuse(reason)
            for policy in _outside() if self.serves else ():
                if policy.refuses:  # so that torch does not run, as this one would say
                    policy._refuse_or_note(query, key, reason, *others)
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.comptime.comptime(_note_traced)
            # Written by the graph each time that it runs, of whatever policy of this kind it then runs under; never
            # read in a trace, so that no graph depends on it.
            setattr(self, _attribute_of_traced(), True)
        else:
            self._note(query, key, reason, others)

    def _note(self, query: Tensor, key: Tensor, reason: str | None, others: tuple[Any, ...]) -> None:
        is_served = reason is None and any(policy.serves for policy in (self, *_outside()))
        backend = "dhp" if is_served else choice_of_torch(query, key, others)
        self._count(describe(query, key, backend, reason))

    def _count(self, call: Call) -> None:
        with _lock:
            self._eager[call] += 1
        if call.reason is not None:
            self._warn(call.reason)

    def _warn(self, reason: str) -> None:
        """A call was not served; here nothing."""


class Secure(Policy):
    name, serves, refuses = "secure", True, True

    def _begin(self) -> None:
        find_foreign_attention()
        entries.close()

    def _end(self) -> None:
        entries.open()


class _Hybrid(Policy):
    name, serves, refuses = "hybrid", True, False

    def __init__(self) -> None:
        super().__init__()
        self._warned: set[str] = set()

    def _warn(self, reason: str) -> None:
        with _lock:
            news = reason not in self._warned
            self._warned.add(reason)
        if news:
            sentence = f"dhp_safe_fa.policy('hybrid'): torch's own attention runs: {reason}"
            warnings.warn(sentence, stacklevel=_level_of_caller())


class _Audit(Policy):
    name, serves, refuses = "audit", False, False

    def _begin(self) -> None:
        uncompiled.begin()

    def _end(self) -> None:
        uncompiled.end()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in OURS:
            self._count(describe(args[0], args[1], "dhp", None))
        return super().__torch_function__(func, types, args, kwargs)


_POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (Secure, _Hybrid, _Audit)}


def _level_of_caller() -> int:
    """The stacklevel, for warnings.warn in the function that asks, of the first frame outside of torch and of here."""
    packages = (torch, sys.modules[__package__ or ""])
    own = (*(str(Path(package.__file__ or "").parent) for package in packages), "<eval_with_key>")  # graphs of torch.fx
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(own):
        level, frame = level + 1, frame.f_back
    return level


def _outside() -> list[Policy]:
    """The policies around the one that handles a call."""
    return [mode for mode in torch.overrides._get_current_function_mode_stack() if isinstance(mode, Policy)]


def _heads_of(tensor: Tensor, count: int) -> Tensor:
    """[..., H, S, D] of what multi-head attention is given, [S, ..., H * D]."""
    return tensor.reshape(*tensor.shape[:-1], count, -1).movedim(0, -2)


# ---- what is noted while torch.compile traces -----------------------------------------------------------------------

# Calls in compiled functions, in the order of their first compilation. By attributes _ran_0, _ran_1, ... a graph tells
# a policy that it ran the call of that number under it.
_traced: list[Call] = []
_RAN = "_ran_"
_threads = threading.local()  # the attribute of the call that is being traced


def _note_traced(context: Any) -> None:
    """Runs while torch.compile traces Policy._refuse_or_note, with its local variables."""
    torch.compiler.assume_constant_result(_attribute_of_traced)
    kind = context.get_local("self").python_type()
    query, key = (context.get_local(name).as_fake() for name in ("query", "key"))
    reason = context.get_local("reason").as_python_constant()
    backend = "dhp" if kind.serves and reason is None else "torch"
    call = describe(query, key, backend, reason)
    policies = [policy for policy in (default(), *entered()) if policy is not None and type(policy) is kind]
    if reason is not None:
        (policies or [kind()])[-1]._warn(reason)
    with _lock:
        if call not in _traced:
            _traced.append(call)
        _threads.attribute = f"{_RAN}{_traced.index(call)}"


def _refuse_traced(context: Any) -> None:
    """Ends the compilation that traces Policy.refuse."""
    kind, reason = context.get_local("self").python_type(), context.get_local("reason").as_python_constant()
    kind().refuse(reason)


def _attribute_of_traced() -> str:
    """For torch.compile a constant: what _note_traced has just noted."""
    attribute: str = _threads.attribute
    return attribute


# ---- choosing -------------------------------------------------------------------------------------------------------


def policy(name: Name) -> Policy:
    """A policy for calls of ``torch.nn.functional.scaled_dot_product_attention``, as a context manager.

    Inside the block, in the thread that entered it, unmodified models run under it, eagerly or compiled:

    - ``"secure"``: every call runs through dhp, or raises the reason why it cannot.
    - ``"hybrid"``: a call that dhp supports runs through it, the others through torch; each reason is warned of once.
    - ``"audit"``: nothing changes. The policy lists every call: shapes, dtype, the backend of torch's choice, and why
      dhp would not serve it. Compiled functions run uncompiled meanwhile, in every thread.

    Policies nest: a call has to pass all of them, so an inner one cannot allow what an outer one refuses.

    "secure" also refuses what computes attention another way and can be seen: flex_attention, torch's own kernels and
    other operators with attention in their names, TorchScript with attention in its graph, programs compiled ahead of
    time, backward passes of attention from outside, threads of DataParallel, and operators that run functions unseen
    (torch.cond; in compiled functions checkpoints). Not seen at all: products and softmax by hand, kernels of one's own
    (Triton, C++, CUDA), threads that others start, replayed CUDA graphs, and calls with torch functions disabled.

    Args:
        name: "secure", "hybrid" or "audit".

    Returns:
        The :class:`Policy`: ``with policy(...) as p``, then ``p.calls`` counts and ``print(p)`` shows a table.

    Raises:
        ValueError: another name.
    """
    if not isinstance(name, str) or name not in _POLICIES:
        raise ValueError(f"name: {name!r}; supported: 'secure', 'hybrid', 'audit'")
    return _POLICIES[name]()


def set_policy(name: Name | None) -> Policy | None:
    """A policy for the whole process: every thread, also those that run already, until the next call.

    Replaces ``torch.nn.functional.scaled_dot_product_attention`` and ``multi_head_attention_forward``, there and in
    every module that imported them by name, discards what torch.compile has compiled, and switches torch's fused
    encoder layers off, because they have attention of their own. A reference kept in an object or a closure is not
    replaced. Blocks of :func:`policy` nest inside.

    Args:
        name: as for :func:`policy`; None removes the policy.

    Returns:
        The :class:`Policy`, for its ``calls``; None for None.

    Raises:
        ValueError: another name.
    """
    # torch lists the functions that a mode can see once, by their names, and torch.compile goes by that list: it has to
    # be made while torch's own function stands behind its name.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch imports for that, and has deprecated
        torch.overrides.get_overridable_functions()

    before, after = default(), None if name is None else policy(name)
    if before is not None:
        before._end()
    if after is not None:
        after._begin()
    set_default(after)
    torch.backends.mha.set_fastpath_enabled(after is None)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    return after
