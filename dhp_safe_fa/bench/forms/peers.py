"""Who computes sliding windows, soft caps and sinks: this package, and what is at hand beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import dhp_safe_fa
from dhp_safe_fa.bench.peers import Candidate, imported, sdpa


class Form(NamedTuple):
    """What a call asks for. window: (left, right), -1 for no bound; without one (-1, -1)."""

    is_causal: bool
    window: tuple[int, int]
    softcap: float | None
    sinks: Tensor | None  # [H]

    @property
    def bounds(self) -> tuple[int, int]:
        """The window with the causal mask in it."""
        left, right = self.window
        return left, 0 if self.is_causal else right


# (q, k, v, form) -> out; q and out are [B, H, S, D], k and v [B, Hk, Sk, D].
FormAttend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Form], Tensor]


def ours(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    return dhp_safe_fa.attention(
        q, k, v, is_causal=form.is_causal, window=form.window, softcap=form.softcap, sinks=form.sinks
    )


@functools.lru_cache(maxsize=1)
def _seen(rows: int, keys: int, bounds: tuple[int, int], device: torch.device) -> Tensor:
    """[S, Sk], true where a key is seen; kept between calls, as a model would."""
    left, right = bounds
    ahead = torch.arange(keys, device=device) - torch.arange(rows, device=device)[:, None]
    return (ahead >= (-left if left != -1 else -rows)) & (ahead <= (right if right != -1 else keys))


def _refuse(form: Form, name: str, *, softcap: bool = False) -> None:
    """ValueError if somebody has no sinks, or (softcap) no soft caps either."""
    if form.sinks is not None or (softcap and form.softcap):
        raise ValueError(f"{name} has no sinks" + (", and no soft caps" if softcap else ""))


def masked(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    """torch's SDPA of whatever backend, a window as a mask in memory."""
    _refuse(form, "SDPA", softcap=True)
    if form.window == (-1, -1):
        return sdpa(q, k, v, form.is_causal)
    mask = _seen(q.size(2), k.size(2), form.bounds, q.device)
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=k.size(1) < q.size(1))


def unfused(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    """Matrix product, what models do to the scores between, matrix product."""
    b, hk, sk, d = k.shape
    scores = ((q * d**-0.5).reshape(b, hk, -1, d) @ k.mT).view(*q.shape[:3], sk)
    if form.softcap:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    if form.bounds != (-1, -1):
        scores.masked_fill_(~_seen(q.size(2), sk, form.bounds, q.device), -torch.inf)
    if form.sinks is not None:
        sinks = form.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    probabilities = torch.softmax(scores, dim=-1)[..., :sk].reshape(b, hk, -1, sk)
    return (probabilities @ v).view(q.shape)


# ---- what may be installed ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4)
def _starts(batch: int, length: int, device: torch.device) -> Tensor:
    """Of packed sequences of one length; kept between calls, as a server would."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * length


def torch_varlen(function: Callable[..., Any]) -> FormAttend:
    """varlen_attn of torch, the batch as packed sequences."""

    def attend(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
        _refuse(form, "varlen_attn", softcap=True)
        b, _, s, _ = q.shape
        rows = [t.transpose(1, 2).flatten(0, 1) for t in (q, k, v)]
        starts = [_starts(b, t.size(2), q.device) for t in (q, k)]
        gqa = {"enable_gqa": True} if k.size(1) < q.size(1) else {}
        out: Tensor = function(*rows, *starts, s, k.size(2), window_size=form.bounds, **gqa)
        return out.view(b, s, *out.shape[1:]).transpose(1, 2)

    return attend


def flash(function: Callable[..., Any]) -> FormAttend:
    """flash_attn_func of one of FlashAttention's packages."""

    def attend(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
        _refuse(form, "flash_attn_func")
        options = {"causal": form.is_causal, "window_size": form.window, "softcap": form.softcap or 0.0}
        result = function(*(t.transpose(1, 2) for t in (q, k, v)), **options)
        out: Tensor = result[0] if isinstance(result, tuple) else result  # some versions return (out, lse)
        return out.transpose(1, 2)

    return attend


# Each shape and form is compiled by itself; more than anybody asks for in one run.
FLEX_CASES = 256
# What SDPA may choose from where it must not store q kᵀ: those that take a mask, and those that do not.
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


@functools.lru_cache(maxsize=1)
def _block_mask(rows: int, keys: int, bounds: tuple[int, int], device: torch.device) -> Any:
    """flex_attention's, kept between calls."""
    from torch.nn.attention.flex_attention import create_block_mask

    left, right = bounds

    def seen(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key - row >= (-left if left != -1 else -rows)) & (key - row <= (right if right != -1 else keys))

    return create_block_mask(seen, None, None, rows, keys, device=device)


def flex(function: Callable[..., Any]) -> FormAttend:
    """flex_attention of torch, compiled: windows as a mask of blocks, soft caps as a function of scores. Sinks would be
    a change to its output, which is more than one kernel."""
    torch._dynamo.config.recompile_limit = FLEX_CASES  # beyond it torch runs it unfused, with a warning
    compiled = torch.compile(function, dynamic=False)

    def attend(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
        _refuse(form, "flex_attention")
        cap = form.softcap or 0.0

        def capped(score: Tensor, *_: Tensor) -> Tensor:
            return torch.tanh(score / cap) * cap

        mask = None if form.bounds == (-1, -1) else _block_mask(q.size(2), k.size(2), form.bounds, q.device)
        options = {"block_mask": mask, "enable_gqa": k.size(1) < q.size(1), "score_mod": capped if cap else None}
        out: Tensor = compiled(q, k, v, **options)
        return out

    return attend


# Our name of each that may be there: its module, its function, and how it is called.
INSTALLED: dict[str, tuple[str, str, Callable[[Callable[..., Any]], FormAttend]]] = {
    "flex": ("torch.nn.attention.flex_attention", "flex_attention", flex),
    "varlen_attn": ("torch.nn.attention.varlen", "varlen_attn", torch_varlen),
    "fa3": ("flash_attn_interface", "flash_attn_func", flash),
    "fa2": ("flash_attn", "flash_attn_func", flash),
}


def form_candidates(device: str) -> tuple[list[Candidate], list[str]]:
    """Ours first, then every peer that exists on the device; and notes on those that do not."""
    is_fused = device == "cuda"
    found = [
        Candidate("ours", ours),
        Candidate(
            "masked",
            masked,
            functools.partial(sdpa_kernel, FUSED) if is_fused else nullcontext,
            stores_scores=not is_fused,
        ),
        Candidate("unfused", unfused, stores_scores=True),
    ]
    notes = []
    for name, (module, function, called) in INSTALLED.items() if device == "cuda" else ():
        there = imported(module, function)
        if isinstance(there, str):
            notes.append(f"{name}: cannot be imported ({there})")
        else:
            found.append(Candidate(name, called(there)))
    return found, notes
