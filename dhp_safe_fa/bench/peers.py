"""Who is measured: the operator of this package and the attention implementations at hand."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import dhp_safe_fa

# Implementations that store q kᵀ are left out beyond this many elements: with float32 copies of it that is some
# 10 GB on a GPU, and a second a call on a small CPU.
MAX_STORED_SCORES = {"cuda": 2**29, "cpu": 2**27}


T = TypeVar("T")

# (q, k, v, is_causal) -> out; q and out are [B, H, S, D], k and v [B, Hk, Sk, D], of any layout in memory.
Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Candidate:
    """An attention implementation.

    Attributes:
        name: short, for a table's head.
        attend: the function, of the forward an Attend; a case of its direction makes of it the call that is timed.
        context: entered around every use, outside what is timed.
        stores_scores: it keeps q kᵀ in memory, so it is left out where that is too large.
    """

    name: str
    attend: Callable[..., Any]
    context: Callable[[], AbstractContextManager[object]] = nullcontext
    stores_scores: bool = False

    def first_run(self, call: Callable[[], T], scores: int, device: str) -> T | str:
        """The output of a case's call, or one line that says why there is none. scores: elements of its q kᵀ."""
        limit = MAX_STORED_SCORES[device]
        if self.stores_scores and scores > limit:
            return f"not run above {limit:.2g} stored scores"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")  # torch tells through warnings why a backend does not serve a shape
            try:
                with self.context():
                    return call()
            except (RuntimeError, ValueError, TypeError) as error:
                return "; ".join(dict.fromkeys([one_line(error), *(one_line(w.message) for w in caught)]))


def one_line(error: object) -> str:
    """The first line of a message, without torch's pointer into its own sources."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].partition(" (Triggered internally")[0]


def refused_on_cuda(reason: str) -> bool:
    """Whether it is this library's sentence on what it does not serve on CUDA, and no failure."""
    return reason.startswith("dhp::") and "supported on CUDA: " in reason


def imported(module: str, name: str) -> Callable[..., Any] | str:
    """A function of a package that may be installed, else the reason why it is not there."""
    try:
        function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return one_line(error)
    return function


def ours(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return dhp_safe_fa.attention(q, k, v, is_causal=is_causal)


def sdpa(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=k.size(1) < q.size(1))


def unfused(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    """Matrix product, softmax, matrix product, each a kernel of its own; heads that share keys are one matrix."""
    b, hk, sk, d = k.shape
    scores = (q * d**-0.5).reshape(b, hk, -1, d) @ k.mT
    if is_causal:
        scores.view(*q.shape[:3], sk).masked_fill_(_hidden(sk, q.device), -torch.inf)
    return (torch.softmax(scores, dim=-1) @ v).view(q.shape)


@functools.lru_cache(maxsize=1)
def _hidden(seqlen: int, device: torch.device) -> Tensor:
    """[S, S], true above the diagonal; kept between calls, as a model would."""
    return torch.ones(seqlen, seqlen, dtype=torch.bool, device=device).triu(1)


def candidates(device: str) -> tuple[list[Candidate], list[str]]:
    """Ours first, then every peer that exists on the device; and notes on those that do not."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    if device == "cuda":
        backends |= {"cudnn": SDPBackend.CUDNN_ATTENTION, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    found = [Candidate("ours", ours)]
    for name in ("flash", "cudnn", "efficient", "math"):
        if name in backends:
            context = functools.partial(sdpa_kernel, backends[name])
            found.append(Candidate(name, sdpa, context, stores_scores=name == "math"))
    found.append(Candidate("unfused", unfused, stores_scores=True))
    if device != "cuda":
        return found, []
    fa3 = flash_attention_3()
    if isinstance(fa3, str):
        return found, [f"fa3: flash_attn_interface cannot be imported ({fa3})"]
    return [*found, fa3], []


def flash_attention_3(**options: object) -> Candidate | str:
    """FlashAttention-3 if its package is installed, else the reason. It works on [B, S, H, D], reached by views.

    options: of flash_attn_func, beside causal.
    """
    function = imported("flash_attn_interface", "flash_attn_func")
    if isinstance(function, str):
        return function

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        result = function(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), causal=is_causal, **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result  # some versions return (out, lse)
        return out.transpose(1, 2)

    return Candidate("fa3", attend)
