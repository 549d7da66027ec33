"""Whose gradients are measured: this package's, and those of the attention implementations at hand.

Where torch's autograd calls one operator for the whole backward pass, that operator is called, as ours is, so that no
autograd engine is timed. It is given this project's out and lse, which all of them define alike; what it needs in
another layout is copied before the call. What has no such operator goes through autograd, on a graph that is kept.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from dhp_safe_fa.bench.peers import Attend, Candidate, candidates, imported, ours, sdpa

Gradients: TypeAlias = tuple[Tensor, ...]

# (q, k, v, out, lse, grad_out, is_causal) -> (dq, dk, dv)
Differentiate: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Gradients]
# The same arguments -> the call that computes them: what comes before it is done once.
Prepare: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, bool], Callable[[], Gradients]]

NO_DROPOUT = 0.0
# The memory-efficient kernels read lse in rows of a multiple of so many elements; and out, whatever its strides are, by
# steps of all heads from row to row.
EFFICIENT_ALIGNMENT = 32


def our_gradients(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, is_causal: bool
) -> Gradients:
    found: Gradients = torch.ops.dhp.attention_backward(grad_out, q, k, v, out, lse, is_causal)
    return found


@functools.cache
def _no_seed(device: torch.device) -> Tensor:
    """Of dropout, which there is none of."""
    return torch.zeros((), dtype=torch.int64, device=device)


def flash(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, is_causal: bool) -> Gradients:
    seed = _no_seed(q.device)
    found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        grad_out, q, k, v, out, lse, None, None, q.size(2), k.size(2), NO_DROPOUT, is_causal, seed, seed
    )
    return found


def flash_on_cpu(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, is_causal: bool
) -> Gradients:
    found: Gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, NO_DROPOUT, is_causal
    )
    return found


def cudnn(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, is_causal: bool) -> Gradients:
    seed, rows = _no_seed(q.device), lse[..., None]
    found: Gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(grad_out, q, k, v, out, rows, seed, seed),
        *(None, None, None, q.size(2), k.size(2), NO_DROPOUT, is_causal),
    )
    return found


def efficient(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, is_causal: bool
) -> Callable[[], Gradients]:
    seed, missing = _no_seed(q.device), -lse.size(2) % EFFICIENT_ALIGNMENT
    rows = F.pad(lse, (0, missing), value=torch.inf) if missing else lse
    stored = out.transpose(1, 2).contiguous().transpose(1, 2)  # as its forward stores out: no copy if it is so

    def call() -> Gradients:
        *found, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            *(grad_out, q, k, v, None, stored, rows, seed, seed), NO_DROPOUT, [True, True, True, False], is_causal
        )
        return tuple(found)

    return call


def direct(differentiate: Differentiate) -> Prepare:
    """Nothing comes before the call."""
    return lambda *given: lambda: differentiate(*given)


@contextmanager
def _capturing(device: torch.device) -> Iterator[None]:
    """On the stream on which torch captures graphs."""
    if device.type != "cuda":
        yield
        return
    stream = torch.cuda.graph(torch.cuda.CUDAGraph()).capture_stream
    assert stream is not None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def through_autograd(attend: Attend) -> Prepare:
    """The backward pass of attend, whose forward pass is run once.

    On CUDA it is run on the stream on which torch captures graphs: autograd computes a gradient on the stream of the
    forward, and a graph cannot hold work of another stream.
    """

    def prepare(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, is_causal: bool
    ) -> Callable[[], Gradients]:
        leaves = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
        with _capturing(q.device):
            own = attend(leaves[0], leaves[1], leaves[2], is_causal)
        return lambda: torch.autograd.grad(own, leaves, grad_out, retain_graph=True)

    return prepare


def at_once(attend: Attend) -> Differentiate:
    """The forward pass of attend and, through autograd, its backward pass, in one call: all of it in the thread that
    calls, where the range of a profiler is."""

    def differentiate(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, grad_out: Tensor, is_causal: bool
    ) -> Gradients:
        leaves = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
        with torch.enable_grad():
            own = attend(leaves[0], leaves[1], leaves[2], is_causal)
        with torch.autograd.set_multithreading_enabled(False):
            return torch.autograd.grad(own, leaves, grad_out)

    return differentiate


# What autograd calls for torch's back ends on CUDA: as the benchmark prepares it, and in one call.
OPERATORS: dict[str, tuple[Prepare, Differentiate]] = {
    "flash": (direct(flash), flash),
    "cudnn": (direct(cudnn), cudnn),
    "efficient": (efficient, lambda *given: efficient(*given)()),
}


def flash_attention_3(deterministic: bool) -> Attend | str:
    """FlashAttention-3 if its package is installed, else the reason. It works on [B, S, H, D], reached by views."""
    function = imported("flash_attn_interface", "flash_attn_func")
    if isinstance(function, str):
        return function

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        heads_behind = (tensor.transpose(1, 2) for tensor in (q, k, v))
        result = function(*heads_behind, causal=is_causal, deterministic=deterministic)
        out: Tensor = result[0] if isinstance(result, tuple) else result  # some versions return (out, lse)
        return out.transpose(1, 2)

    return attend


FLASH_ATTENTION_3 = {"fa3": False, "fa3-det": True}


def backward_candidates(device: str) -> tuple[list[Candidate], list[str]]:
    """Ours first, then every peer that exists on the device; and notes on those that do not."""
    found = [Candidate("ours", direct(our_gradients))]
    if device == "cuda":
        found += [Candidate(name, prepare) for name, (prepare, _) in OPERATORS.items()]
    else:
        found.append(Candidate("flash", direct(flash_on_cpu)))
    math = functools.partial(sdpa_kernel, SDPBackend.MATH)
    found.append(Candidate("math", through_autograd(sdpa), math, stores_scores=True))
    notes = []
    for name, deterministic in FLASH_ATTENTION_3.items() if device == "cuda" else ():
        attend = flash_attention_3(deterministic)
        if isinstance(attend, str):
            notes.append(f"{name}: flash_attn_interface cannot be imported ({attend})")
        else:
            found.append(Candidate(name, through_autograd(attend)))
    return found, notes


def training_candidates(device: str) -> tuple[list[Candidate], list[str]]:
    """The forward's candidates, and FlashAttention-3 with deterministic gradients."""
    found, notes = candidates(device)
    deterministic = flash_attention_3(True) if device == "cuda" else ""
    if not isinstance(deterministic, str):
        found.append(Candidate("fa3-det", deterministic))
    assert found[0].attend is ours
    return found, notes
