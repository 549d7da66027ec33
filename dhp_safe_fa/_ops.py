"""The operators: schemas, fake kernels, autocast rules, and the Python functions over them.

The kernels themselves are registered by csrc/torch/ops.cpp when its library is loaded. Schemas are defined here because
the stable ABI of torch 2.10 cannot set tags from C++.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

# The options of a call as schemas spell them; their order is that of the struct in csrc/torch/ops.cpp.
OPTIONS = "bool is_causal=False, float? scale=None, int causal_offset=0"
# Every operator and what it returns. Autocast, vmap, policies and DTensor's rules go by this list.
OPERATORS = {"attention": "Tensor", "attention_lse": "(Tensor out, Tensor lse)"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CPU_MAX_HEAD_DIM = 256  # as in csrc/attention.c
OLDEST_TORCH = (2, 10)  # its stable ABI is what libdhp_torch.so was built for

_library = torch.library.Library("dhp", "DEF")
for _name, _returns in OPERATORS.items():
    _schema = f"{_name}(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> {_returns}"
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    # No autograd kernel in between: the kernels, real and fake, refuse inputs that require grad themselves.
    _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")

_DEFAULTS = {each.name: each.default_value for each in torch.ops.dhp.attention.default._schema.arguments[3:]}


def _refuse(sentence: str) -> NoReturn:
    raise RuntimeError(f"dhp::attention: {sentence}")


def _refuse_gradient(name: str) -> NoReturn:
    _refuse(f"{name} requires grad, and there is no backward yet: call it under torch.no_grad() or detach {name}")


def _load() -> None:
    path = Path(__file__).with_name("libdhp_torch.so")
    if not path.exists():
        raise ImportError(
            f"{path} is missing: the package is not built. Run `pip install .`, or `make build` in a checkout."
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:  # would end in an undefined symbol
        raise ImportError(f"torch {torch.__version__}; supported: 2.10 and newer. Run `pip install 'torch>=2.10'`.")
    torch.ops.load_library(str(path))


_load()


# ---- fake kernels: shapes and strides without data --------------------------------------------------------------


def _check(q: Tensor, k: Tensor, v: Tensor, *given: Any, **named: Any) -> None:
    """What csrc/torch/ops.cpp and the C core check, in their order and words, as far as it is known without data."""
    options = _DEFAULTS | dict(zip(_DEFAULTS, given, strict=False)) | named
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        if tensor is None:  # the schema's Tensor lets it through
            _refuse(f"{name}: None; expected a tensor [B, H, S, D]")
        if tensor.requires_grad and torch.is_grad_enabled():
            _refuse_gradient(name)
    for name, tensor in tensors.items():
        if tensor.device != q.device:
            _refuse(f"{name}: on another device than q; q, k and v must be on the same device")
    for name, tensor in tensors.items():
        if tensor.dim() != 4:
            _refuse(f"{name}: rank {tensor.dim()}; expected 4 dimensions [B, H, S, D]")
        if tensor.dtype not in DTYPES:
            _refuse(f"{name}: dtype {_dtype(tensor)}; supported: float32 (CPU only), float16, bfloat16")
    for name, tensor in tensors.items():
        if tensor.dtype != q.dtype:
            _refuse(f"{name}: dtype {_dtype(tensor)} differs from q's {_dtype(q)}; q, k and v must agree")
    shapes = f"(k {list(k.shape)}, q {list(q.shape)})"
    for dim in range(4):
        if k.size(dim) != v.size(dim):
            _refuse(f"v: shape {list(v.shape)} differs from k's {list(k.shape)}; they must be equal")
    if k.size(0) != q.size(0):
        _refuse(f"k: batch {k.size(0)} differs from q's batch {q.size(0)} {shapes}")
    if k.size(3) != q.size(3):
        _refuse(f"k: head_dim {k.size(3)} differs from q's head_dim {q.size(3)} {shapes}")
    if q.size(3) < 1:
        _refuse(f"q: head_dim 0 in shape {list(q.shape)}; supported: 1 to {CPU_MAX_HEAD_DIM}")
    if k.size(1) < 1 or q.size(1) % k.size(1) != 0:
        _refuse(
            f"k: {k.size(1)} key heads for {q.size(1)} query heads; "
            "the number of query heads must be a multiple of it"
        )
    if options["scale"] is not None and not 0 <= options["scale"] < math.inf:
        _refuse(f"scale: {options['scale']:g}; supported: finite and not negative")
    if not options["is_causal"] and options["causal_offset"] != 0:
        _refuse(
            f"causal_offset: {options['causal_offset']} without is_causal; supported: 0, or is_causal=True with it"
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


@torch.library.register_fake("dhp::attention", lib=_library)  # type: ignore[untyped-decorator]
def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *options: object, **named: object) -> Tensor:
    _check(q, k, v, *options, **named)
    return torch.empty_like(q)


@torch.library.register_fake("dhp::attention_lse", lib=_library)  # type: ignore[untyped-decorator]
def _attention_lse_fake(q: Tensor, k: Tensor, v: Tensor, *options: object, **named: object) -> tuple[Tensor, Tensor]:
    _check(q, k, v, *options, **named)
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)


# ---- autocast: the policy of torch's own attention, everything in the autocast dtype ----------------------------


def _autocast_rule(name: str, device_type: str) -> Callable[..., object]:
    operator = getattr(torch.ops.dhp, name)

    def rule(q: Tensor, k: Tensor, v: Tensor, *arguments: object, **keywords: object) -> object:
        dtype = torch.get_autocast_dtype(device_type)

        def cast(tensor: Tensor) -> Tensor:
            eligible = tensor.device.type == device_type and tensor.dtype in DTYPES
            return tensor.to(dtype) if eligible else tensor

        with torch.autocast(device_type, enabled=False):
            return operator(cast(q), cast(k), cast(v), *arguments, **keywords)

    return rule


for _name in OPERATORS:
    for _device_type, _key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library.impl(_name, _autocast_rule(_name, _device_type), _key)


# ---- torch.func: vmap becomes more batches, what differentiates is refused ----------------------------------------


def _transform_rule(name: str) -> Callable[..., object]:
    operator = getattr(torch.ops.dhp, name)

    def rule(q: Tensor, k: Tensor, v: Tensor, *arguments: object, **keywords: object) -> object:
        from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

        transform = retrieve_current_functorch_interpreter()
        if not isinstance(transform, VmapInterpreter):
            # The operators have no autograd kernel: differentiated, they would pass for constants.
            _refuse("torch.func.grad and jvp are not supported, there is no backward yet; vmap is")
        level, size = transform.level(), transform.batch_size()
        unwrapped = [torch._C._functorch._unwrap_batched(tensor, level) for tensor in (q, k, v)]
        with transform.lower():
            if all(dim is None for _, dim in unwrapped):
                return operator(q, k, v, *arguments, **keywords)

            def mapped(tensor: Tensor, dim: int | None) -> Tensor:
                """[N, B, ...], N being what vmap maps over."""
                tensor = tensor.expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
                if tensor.dim() != 5:
                    _refuse(f"rank {tensor.dim() - 1} inside of vmap; expected 4 dimensions [B, H, S, D]")
                return tensor

            tensors = [mapped(*each) for each in unwrapped]
            result = operator(*(tensor.flatten(0, 1) for tensor in tensors), *arguments, **keywords)
            outputs = (result,) if isinstance(result, Tensor) else result
            outputs = tuple(output.unflatten(0, tensors[0].shape[:2]) for output in outputs)
        outputs = tuple(torch._C._functorch._add_batch_dim(output, 0, level) for output in outputs)
        return outputs[0] if isinstance(result, Tensor) else outputs

    return rule


for _name in OPERATORS:
    _library.impl(_name, _transform_rule(_name), "FuncTorchDynamicLayerFrontMode")


# ---- what people call -------------------------------------------------------------------------------------------

# Bound once: looking them up and choosing the overload would cost every call some microseconds.
_attention = torch.ops.dhp.attention.default
_attention_lse = torch.ops.dhp.attention_lse.default
_DEFAULT_OPTIONS = tuple(_DEFAULTS.values())


def _refuse_gradients(**tensors: object) -> None:
    """Of subclasses, and below a dispatch mode, the operators cannot see that autograd keeps a record."""
    with torch._C.DisableTorchFunction():  # whoever looks on is to see the operator alone
        for name, tensor in tensors.items():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                _refuse_gradient(name)


def _somebody_looks_on() -> bool:
    """Something that sees or transforms the calls: it must see the operator alone, and with grad mode as it is."""
    return (
        forward_ad._current_level >= 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._is_torch_function_mode_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _run(operator: torch._ops.OpOverload[..., Any], q: Tensor, k: Tensor, v: Tensor, *options: object) -> Any:
    """A call of the operator, a tenth to a half faster where it is eager and small.

    Defaults are left out, and what an overload does on top of its C function: each takes torch some 1 µs. The operators
    refuse what takes part in differentiation. While gradients are recorded they ask torch eight times, some 10 µs;
    where it can be seen here that there is nothing to refuse, they need not ask.
    """
    if torch.compiler.is_compiling():
        return operator(q, k, v, *options)
    count = len(options)
    while count and options[count - 1] is _DEFAULT_OPTIONS[count - 1]:  # not ==, which of a symbol makes a guard
        count -= 1
    need_not_ask = False
    if torch.is_grad_enabled():
        need_not_ask = not _somebody_looks_on() and type(q) is type(k) is type(v) is Tensor
        if not need_not_ask and torch._C._functorch.peek_interpreter_stack() is None:  # transforms have a rule
            _refuse_gradients(q=q, k=k, v=v)
        need_not_ask = need_not_ask and not (q.requires_grad or k.requires_grad or v.requires_grad)
    if need_not_ask:
        torch._C._set_grad_enabled(False)
    try:
        return operator._op(q, k, v, *options[:count])  # the one line for both: torch.jit.trace compares it
    except Exception:
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if not isinstance(tensor, Tensor):  # torch says so of some types, and of None nothing that helps
                _refuse(f"{name}: {type(tensor).__name__}; expected a tensor [B, H, S, D]")
        raise
    finally:
        if need_not_ask:
            torch._C._set_grad_enabled(True)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int = 0,
) -> Tensor:
    """softmax(scale · q kᵀ) v, FlashAttention's algorithm (Dao et al., 2022), constant-time in the content of q, k, v.

    Args:
        q: queries, [B, Hq, Sq, D]; float32 (CPU only), float16 or bfloat16. Any strides; a layout that cannot be read
            in place (last dimension not contiguous; on CUDA also rows that are not 16-byte aligned) is copied.
        k: keys, [B, Hk, Sk, D]; Hk divides Hq, query head h reads key head h // (Hq // Hk).
        v: values, [B, Hk, Sk, D].
        is_causal: query i sees key j only if j <= i + causal_offset.
        scale: factor of the scores, finite and >= 0; 1/sqrt(D) by default.
        causal_offset: 0 is the alignment of torch's SDPA, Sk - Sq that of FlashAttention (and of cached decoding). Only
            with is_causal.

    Returns:
        [B, Hq, Sq, D], q's dtype, strides as torch.empty_like(q). A row that sees no key is 0.

    Raises:
        RuntimeError: names the argument, what was given and what is supported. head_dim: 1 to 256 on CPU; on CUDA (a
            Hopper GPU) multiples of 8 up to ``dhp_safe_fa._inspect.build_info()["max_head_dim_cuda"]``. Also if an
            input requires grad while gradients are recorded: there is no backward yet.
    """
    return _run(_attention, q, k, v, is_causal, scale, causal_offset)  # type: ignore[no-any-return]


def attention_lse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """:func:`attention` and, per query row, the natural logarithm of the sum of exp(scaled scores).

    Args:
        q, k, v, is_causal, scale, causal_offset: as for :func:`attention`.

    Returns:
        out as :func:`attention`; lse, float32 [B, Hq, Sq], -inf where a row sees no key.

    Raises:
        RuntimeError: as :func:`attention`.
    """
    return _run(_attention_lse, q, k, v, is_causal, scale, causal_offset)  # type: ignore[no-any-return]
