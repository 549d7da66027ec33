"""What a gate puts into a kernel of the backward pass: q, k, v, out, lse, grad_out and grad_lse, in this order.

out and lse are those of the forward pass, computed on the device from q, k and v, so that probabilities are
probabilities. Every class of inputs.CLASSES comes with a normal grad_out and grad_lse. Then q, k and v stay normal and
grad_out or grad_lse is as unlike as it can be; and in one class out and lse are another call's.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Generator, Tensor

import dhp_safe_fa

from . import inputs
from .inputs import Inputs, Shape
from .timing import inputs as timing_inputs

_DIFFERENT = 1  # of the seed of what must not be drawn as q, k and v are


def complete(shape: Shape, qkv: Inputs, grads: Inputs) -> Inputs:
    """All that the backward pass reads, with the forward's out and lse."""
    q, k, v = qkv
    out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=shape.is_causal)
    return q, k, v, out, lse, *grads


def _as_q(name: str) -> Callable[[Shape, Generator], Tensor]:
    """grad_out, which has q's shape, as q is in that class."""
    return lambda shape, generator: inputs.CLASSES[name](shape, generator)[0]


def _one_hot(shape: Shape, generator: Generator) -> Tensor:
    """One element of each row is 1, all others 0."""
    chosen = torch.randint(0, shape.head_dim, (*shape.q[:3], 1), generator=generator, device=generator.device)
    grad_out = torch.zeros(shape.q, dtype=shape.torch_dtype, device=generator.device)
    return grad_out.scatter_(-1, chosen, 1.0)


def _grad_lse(shape: Shape, generator: Generator) -> Tensor:
    """Standard normal, float32, as lse."""
    return torch.randn(shape.q[:3], generator=generator, device=generator.device)


# Beside normal q, k and v, and a normal gradient of the other output.
GRAD_OUT: dict[str, Callable[[Shape, Generator], Tensor]] = {
    "grad_out zeros": _as_q("zeros"),
    "grad_out large": _as_q("large"),
    "grad_out one-hot": _one_hot,
    "grad_out max-finite": _as_q("max-finite"),
    "grad_out denormals": _as_q("denormals"),
    "grad_out NaN rows": _as_q("NaN rows"),
    "grad_out Inf rows": _as_q("Inf rows"),
}
GRAD_LSE: dict[str, Callable[[Tensor], Tensor]] = {
    "grad_lse max-finite": lambda normal: normal.sign() * torch.finfo(normal.dtype).max,
    "grad_lse NaN and Inf": lambda normal: normal.where(normal < 1, torch.nan).where(normal > -1, torch.inf),
}
# exp(score - lse) is no probability there: it may be anything up to Inf.
FOREIGN = "foreign out and lse"

# In the order in which they are run.
CLASSES = (*inputs.CLASSES, *GRAD_OUT, *GRAD_LSE, FOREIGN)

ROW_CLASSES = {
    **inputs.ROW_CLASSES,
    "grad_out large": "grad_out max-finite",
    "grad_out denormals": "grad_out large",
}


def make(name: str, shape: Shape, seed: int, device: str = "cuda") -> Inputs:
    """What the class called name is made of, contiguous; the same for the same seed on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()) ^ _DIFFERENT)
    grad_out = GRAD_OUT.get(name, _as_q("normal"))(shape, generator)
    grad_lse = _grad_lse(shape, generator)
    grads = grad_out, GRAD_LSE[name](grad_lse) if name in GRAD_LSE else grad_lse
    qkv = inputs.make(name if name in inputs.CLASSES else "normal", shape, seed, device)
    another = inputs.large(shape, generator) if name == FOREIGN else qkv
    return (*qkv, *complete(shape, another, grads)[3:])


# ---- for the gate `timing` -------------------------------------------------------------------------------------------

_SHUFFLED_QUERIES, _SHUFFLED_GRADS = "queries in other order", "grad_out and grad_lse in other order"
TESTED = (*timing_inputs.MATCHED, _SHUFFLED_QUERIES, _SHUFFLED_GRADS)


def matched(shape: Shape, seed: int, device: str = "cuda") -> dict[str, Inputs]:
    """The reference, its copies, and the matched classes: q, k, v, grad_out and grad_lse hold the same bits in other
    places.

    To the forward's classes come the same queries, with their rows of grad_out and grad_lse, in another order, and
    these two alone in another order. out and lse are the forward's for each of them.
    """
    generator = torch.Generator(device).manual_seed(seed ^ _DIFFERENT)
    grad_out, grad_lse = _as_q("normal")(shape, generator), _grad_lse(shape, generator)
    order = torch.randperm(shape.seqlen_q, generator=generator, device=device)
    of_forward = timing_inputs.matched(shape, seed, device)
    reference = complete(shape, of_forward[timing_inputs.REFERENCE], (grad_out, grad_lse))
    q, k, v = reference[:3]
    found = {timing_inputs.REFERENCE: reference}
    found |= {name: tuple(tensor.clone() for tensor in reference) for name in timing_inputs.SAME}
    for name in timing_inputs.MATCHED:
        is_permuted = name == timing_inputs.PERMUTED
        signs = timing_inputs.permute_signs(grad_out, generator) if is_permuted else grad_out
        found[name] = complete(shape, of_forward[name], (signs, grad_lse))
    in_order = grad_out[:, :, order], grad_lse[:, :, order]
    found[_SHUFFLED_QUERIES] = complete(shape, (q[:, :, order], k, v), in_order)
    found[_SHUFFLED_GRADS] = (*reference[:5], *in_order)
    return found


def power(shape: Shape, seed: int, device: str = "cuda") -> dict[str, Inputs]:
    """Classes that draw unlike power: q, k, v and grad_out normal, all bits 0, all ones, normal times 30. grad_lse is
    normal."""
    generator = torch.Generator(device).manual_seed(seed ^ _DIFFERENT)
    grad_out = {name: _as_q(name)(shape, generator) for name in ("normal", "zeros", "large")}
    grad_out["ones"] = torch.ones_like(grad_out["normal"])
    grad_lse = _grad_lse(shape, generator)
    of_forward = timing_inputs.power(shape, seed, device)
    return {name: complete(shape, qkv, (grad_out[name], grad_lse)) for name, qkv in of_forward.items()}
