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
from types import FunctionType
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dhp_safe_fa._sdpa import serve, why_not

Name = Literal["secure", "hybrid", "audit"]

_torch_sdpa = F.scaled_dot_product_attention
_torch_multi_head = F.multi_head_attention_forward


def _named(namespace: Any, *names: str) -> tuple[Callable[..., Any], ...]:
    """Both objects by which each operator may be called."""
    packets = [getattr(namespace, name) for name in names]
    return (*packets, *(packet.default for packet in packets))


_SDPA = (_torch_sdpa, *_named(torch.ops.aten, "scaled_dot_product_attention"))
_OURS = _named(torch.ops.dhp, "attention", "attention_lse")
# Attention fused with the layer around it. Eager code does not choose these under a mode, compiled code does.
_FUSED = (
    torch._transformer_encoder_layer_fwd,
    torch._native_multi_head_attention,
    *_named(torch.ops.aten, "_transformer_encoder_layer_fwd", "_native_multi_head_attention"),
)
# What SDPA calls; a program that was compiled elsewhere may call these by itself.
_KERNELS = _named(
    torch.ops.aten,
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
)

# A mode is off while it handles a function, so torch's multi-head attention would call SDPA unseen. This is torch's own
# code, except that it does not hand itself to the mode a second time.
_multi_head = FunctionType(
    _torch_multi_head.__code__,
    {**vars(F), "has_torch_function": lambda _: False},
    argdefs=_torch_multi_head.__defaults__,
)
_NEED_WEIGHTS = list(inspect.signature(_torch_multi_head).parameters).index("need_weights")

_lock = threading.Lock()


class Call(NamedTuple):
    """One kind of attention call, as the ``calls`` of a policy count them."""

    query: tuple[Any, ...]  #: shape [..., Hq, Sq, D]; a size that was symbolic when it was compiled is a string
    key: tuple[Any, ...]  #: shape [..., Hk, Sk, D]
    dtype: str  #: of the query, for example "float16"
    device: str  #: of the query, for example "cuda:0"
    backend: str  #: "dhp", or torch's choice, for example "CUDNN_ATTENTION"
    reason: str | None  #: why dhp does not serve it; None if it does


class Policy(TorchFunctionMode):
    """A policy at work, made by :func:`policy` and :func:`set_policy`; threads may share it, and enter it repeatedly.

    Attributes:
        name: "secure", "hybrid" or "audit".
        calls: how often each :class:`Call` came by. Equal calls in a compiled function count once, when it is compiled.
    """

    name: ClassVar[str]
    serves: ClassVar[bool]  # dhp runs what it supports
    refuses: ClassVar[bool]  # the rest is an error
    # torch.compile tells modes apart by their type, hence a class each: a graph is never reused under another policy.

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Call] = Counter()

    def __str__(self) -> str:
        """The calls as a table."""
        from dhp_safe_fa._report import table

        return table(self.name, self.calls)

    def __enter__(self) -> Policy:
        if not torch.compiler.is_dynamo_compiling():
            _entered().append(self)
            self._begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if not torch.compiler.is_dynamo_compiling():
            self._end()
            _entered().remove(self)

    def _begin(self) -> None:
        """What the process has to know while a policy is at work; here nothing."""

    def _end(self) -> None:
        """Undoes one _begin, in whatever thread."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SDPA:
            return self._attend(func, *args, **kwargs)
        if func is _torch_multi_head or func is _default_multi_head:
            return self._attend_with_heads(*args, **kwargs)
        if func in _FUSED:
            reason = (
                "torch's fused encoder layer has attention of its own; "
                "switch it off by torch.backends.mha.set_fastpath_enabled(False)"
            )
            self._refuse_or_note(args[0], args[0], reason)
        if self.refuses and func in _KERNELS:
            self._refuse_or_note(args[0], args[1], f"{func}: called directly; supported: scaled_dot_product_attention")
        if func is Tensor.unflatten:
            # torch.compile cannot trace this method under a mode, but it can trace the function.
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)

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
        if self.serves and reason is None:
            return serve(query, key, value, is_causal, scale)
        return torch_sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    def _attend_with_heads(self, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
        """F.multi_head_attention_forward, which nn.MultiheadAttention and nn.TransformerEncoderLayer call."""
        position = _NEED_WEIGHTS - 2
        if args[position] if len(args) > position else kwargs.get("need_weights", True):
            reason = (
                "need_weights: True in torch.nn.MultiheadAttention, which then computes attention without "
                "scaled_dot_product_attention; pass need_weights=False"
            )
            self._refuse_or_note(query, key, reason)
        with self:
            return _multi_head(query, key, *args, **kwargs)

    def _refuse_or_note(self, query: Tensor, key: Tensor, reason: str | None, *others: Any) -> None:
        if self.refuses and reason is not None:
            raise RuntimeError(f"dhp_safe_fa.policy({self.name!r}): {reason}")
        if torch.compiler.is_dynamo_compiling():
            torch._dynamo.comptime.comptime(_note_traced)
        else:
            self._note(query, key, reason, others)

    def _note(
        self, query: Tensor, key: Tensor, reason: str | None, others: tuple[Any, ...], traced: bool = False
    ) -> None:
        backend = "dhp" if self.serves and reason is None else _choice_of_torch(query, key, others)
        self._count(_call(query, key, backend, reason), traced)

    def _count(self, call: Call, traced: bool = False) -> None:
        """A trace says nothing about how often: the compiler may start it over, and the graph run many times."""
        with _lock:
            if not traced or call not in self.calls:
                self.calls[call] += 1


class _Secure(Policy):
    name, serves, refuses = "secure", True, True


class _Hybrid(Policy):
    name, serves, refuses = "hybrid", True, False

    def _count(self, call: Call, traced: bool = False) -> None:
        news = call.reason is not None and all(call.reason != known.reason for known in tuple(self.calls))
        super()._count(call, traced)
        if news:
            warnings.warn(f"dhp_safe_fa.policy('hybrid'): torch's own attention runs: {call.reason}", stacklevel=2)


class _Audit(Policy):
    name, serves, refuses = "audit", False, False
    # While an audit is open anywhere, compiled functions run uncompiled: a graph would hide its calls.
    _audits = 0
    _stance: Any = None

    def _begin(self) -> None:
        with _lock:
            if _Audit._audits == 0:
                _Audit._stance = torch.compiler.set_stance("force_eager")
                _Audit._stance.__enter__()
            _Audit._audits += 1

    def _end(self) -> None:
        with _lock:
            _Audit._audits -= 1
            if _Audit._audits == 0:
                _Audit._stance.__exit__(None, None, None)

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _OURS:
            self._count(_call(args[0], args[1], "dhp", None))
        return super().__torch_function__(func, types, args, kwargs)


_POLICIES: dict[str, type[Policy]] = {kind.name: kind for kind in (_Secure, _Hybrid, _Audit)}


# ---- what is noted about a call -------------------------------------------------------------------------------------


_threads = threading.local()


def _entered() -> list[Policy]:
    """The policies that this thread is inside of, innermost last."""
    if not hasattr(_threads, "entered"):
        _threads.entered = []
    entered: list[Policy] = _threads.entered
    return entered


def _note_traced(context: Any) -> None:
    """Runs while torch.compile traces Policy._refuse_or_note, with its local variables."""
    kind = context.get_local("self").python_type()
    policies = [policy for policy in (_default, *_entered()) if policy is not None and type(policy) is kind]
    query, key = (context.get_local(name).as_fake() for name in ("query", "key"))
    (policies or [kind()])[-1]._note(query, key, context.get_local("reason").as_python_constant(), (), traced=True)


def _call(query: Tensor, key: Tensor, backend: str, reason: str | None) -> Call:
    dtype = str(query.dtype).removeprefix("torch.")
    return Call(_sizes(query), _sizes(key), dtype, str(query.device), backend, reason)


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)


def _choice_of_torch(query: Tensor, key: Tensor, others: tuple[Any, ...]) -> str:
    """The backend that SDPA would choose; others are its remaining arguments, where they are known."""
    from torch.nn.attention import SDPBackend

    if not others:
        return "torch"
    value, attn_mask, dropout_p, is_causal, scale, enable_gqa = others
    device = query.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        query, key, value = (t.to(dtype) if t.is_floating_point() else t for t in (query, key, value))
    try:
        choice = torch._fused_sdp_choice(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    except RuntimeError:
        return "none"  # what SDPA will say itself
    return str(SDPBackend(choice).name)


# ---- choosing -------------------------------------------------------------------------------------------------------


def policy(name: Name) -> Policy:
    """A policy for calls of ``torch.nn.functional.scaled_dot_product_attention``, as a context manager.

    Inside the block, in the thread that entered it, unmodified models run under it, eagerly or compiled:

    - ``"secure"``: every call runs through dhp, or raises the reason why it cannot.
    - ``"hybrid"``: a call that dhp supports runs through it, the others through torch; each reason is warned of once.
    - ``"audit"``: nothing changes. The policy lists every call: shapes, dtype, the backend of torch's choice, and why
      dhp would not serve it. Compiled functions run uncompiled meanwhile, in every thread.

    Policies nest: a call has to pass all of them, so an inner one cannot allow what an outer one refuses. Not seen is
    attention that a model computes without scaled_dot_product_attention.

    Args:
        name: "secure", "hybrid" or "audit".

    Returns:
        The :class:`Policy`: ``with policy(...) as p``, then ``p.calls`` counts and ``print(p)`` shows a table.

    Raises:
        ValueError: another name.
    """
    if name not in _POLICIES:
        raise ValueError(f"name: {name!r}; supported: 'secure', 'hybrid', 'audit'")
    return _POLICIES[name]()


_default: Policy | None = None


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

    global _default
    before, _default = _default, None if name is None else policy(name)
    if before is not None:
        before._end()
    if _default is not None:
        _default._begin()
    replacements = {id(_torch_sdpa): _default_sdpa, id(_torch_multi_head): _default_multi_head}
    if _default is None:
        replacements = {id(_default_sdpa): _torch_sdpa, id(_default_multi_head): _torch_multi_head}
    _replace_everywhere(replacements)
    torch.backends.mha.set_fastpath_enabled(_default is None)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    return _default


def _default_sdpa(*args: Any, **kwargs: Any) -> Any:
    default = _default
    if default is None:
        return _torch_sdpa(*args, **kwargs)
    with default:
        return _torch_sdpa(*args, **kwargs)


def _default_multi_head(*args: Any, **kwargs: Any) -> Any:
    default = _default
    if default is None:
        return _torch_multi_head(*args, **kwargs)
    with default:
        return _torch_multi_head(*args, **kwargs)


def _replace_everywhere(replacements: dict[int, Any]) -> None:
    """In torch.nn.functional and in every module outside of torch and of this package."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "dhp_safe_fa") and module is not F:
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in replacements:
                setattr(module, attribute, replacements[id(value)])
