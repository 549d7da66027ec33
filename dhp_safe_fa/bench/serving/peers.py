"""Who decodes, who takes packed sequences, and who reads pages: this package, and what is at hand beside it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa.bench.peers import Candidate, candidates, flash_attention_3, imported, sdpa

# (q, k, v, starts, lengths, is_causal) -> out; q and out are [tokens, H, D], k and v [tokens, Hk, D], starts is int32
# [sequences + 1].
PackedAttend: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Sequence[int], bool], Tensor]

# FlashAttention's packages: our names, theirs, and what they call a page table.
PACKAGES = {"fa3": ("flash_attn_interface", "page_table"), "fa2": ("flash_attn", "block_table")}

# FlashAttention-3 itself chooses into how many parts the keys of few queries are split over CTAs.
CHOSEN_SPLITS = 0


class Paged(NamedTuple):
    """The same keys and values twice: by sequence, and in the pages of a cache."""

    q: Tensor  # [B, H, S, D]
    k: Tensor  # [B, Hk, Sk, D]
    v: Tensor
    cache_k: Tensor  # [pages, page_size, Hk, D]
    cache_v: Tensor
    table: Tensor  # int32 [B, pages of a sequence]
    starts: Tensor  # int32 [B + 1]; of q's rows as [B · S, H, D]
    used: Tensor  # int32 [B], all Sk

    @property
    def rows(self) -> Tensor:
        """q as [B · S, H, D]."""
        return self.q.transpose(1, 2).flatten(0, 1)

    def out(self, rows: Tensor) -> Tensor:
        """[B · S, H, D] as [B, H, S, D]."""
        b, h, s, d = self.q.shape
        return rows.view(b, s, h, d).transpose(1, 2)


# (q and the cache, is_causal) -> out, [B, H, S, D]
PagedAttend: TypeAlias = Callable[[Paged, bool], Tensor]


def decode_candidates(device: str) -> tuple[list[Candidate], list[str]]:
    """The forward's, FlashAttention-3 with as many splits as it chooses."""
    found, notes = candidates(device)
    fa3 = flash_attention_3(num_splits=CHOSEN_SPLITS)
    return [fa3 if c.name == "fa3" and isinstance(fa3, Candidate) else c for c in found], notes


# ---- packed sequences -----------------------------------------------------------------------------------------------


def ours_packed(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Sequence[int], is_causal: bool) -> Tensor:
    longest = max(lengths)
    return dhp_safe_fa.attention_varlen(q, k, v, starts, starts, longest, longest, is_causal=is_causal)


def sdpa_each(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Sequence[int], is_causal: bool) -> Tensor:
    """torch's SDPA, of whatever backend, a call for each sequence; and one that puts the outputs together."""
    heads_first = (tensor.transpose(0, 1)[None].split(list(lengths), dim=2) for tensor in (q, k, v))
    sequences = zip(*heads_first, strict=True)
    return torch.cat([sdpa(one_q, one_k, one_v, is_causal)[0].transpose(0, 1) for one_q, one_k, one_v in sequences])


def torch_packed(function: Callable[..., Any]) -> PackedAttend:
    """varlen_attn of torch, whose older versions say is_causal where newer ones say it by the window, and take fewer
    heads of keys without a word."""
    known = inspect.signature(function).parameters

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Sequence[int], is_causal: bool) -> Tensor:
        longest = max(lengths)
        options: dict[str, object] = {}
        if "enable_gqa" in known:
            options["enable_gqa"] = k.size(1) < q.size(1)
        if is_causal:
            options |= {"is_causal": True} if "is_causal" in known else {"window_size": (-1, 0)}
        out: Tensor = function(q, k, v, starts, starts, longest, longest, **options)
        return out

    return attend


def flash_packed(function: Callable[..., Any]) -> PackedAttend:
    """flash_attn_varlen_func of one of FlashAttention's packages."""

    def attend(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, lengths: Sequence[int], is_causal: bool) -> Tensor:
        longest = max(lengths)
        return _first(function(q, k, v, starts, starts, longest, longest, causal=is_causal))

    return attend


def varlen_candidates(device: str) -> tuple[list[Candidate], list[str]]:
    """Ours first, then every peer that exists on the device; and notes on those that do not."""
    installed: dict[str, Candidate | str] = {}
    if device == "cuda":
        installed["varlen_attn"] = _candidate("varlen_attn", _torch_varlen(), torch_packed)
        for name, (package, _) in PACKAGES.items():
            installed[name] = _candidate(name, imported(package, "flash_attn_varlen_func"), flash_packed)
    return _with_installed([Candidate("ours", ours_packed), Candidate("sdpa-each", sdpa_each)], installed)


# ---- caches in pages ------------------------------------------------------------------------------------------------


def ours_paged(given: Paged, is_causal: bool) -> Tensor:
    rows = dhp_safe_fa.attention_varlen(
        *(given.rows, given.cache_k, given.cache_v, given.starts, None, given.q.size(2), given.k.size(2)),
        is_causal=is_causal,
        seqused_k=given.used,
        page_table=given.table,
    )
    return given.out(rows)


def ours_unpaged(given: Paged, is_causal: bool) -> Tensor:
    return dhp_safe_fa.attention(given.q, given.k, given.v, is_causal=is_causal)


def gathered(given: Paged, is_causal: bool) -> Tensor:
    """The pages copied one behind the other, then torch's SDPA of whatever backend: what needs no kernel of its own."""
    keys, values = (
        cache[given.table].flatten(1, 2)[:, : given.k.size(2)].transpose(1, 2)
        for cache in (given.cache_k, given.cache_v)
    )
    return sdpa(given.q, keys, values, is_causal)


def torch_paged(function: Callable[..., Any]) -> PagedAttend:
    """varlen_attn of torch; older versions take no table, and say so."""

    def attend(given: Paged, is_causal: bool) -> Tensor:
        window = (-1, 0) if is_causal else (-1, -1)
        rows: Tensor = function(
            *(given.rows, given.cache_k, given.cache_v, given.starts, None, given.q.size(2), given.k.size(2)),
            window_size=window,
            enable_gqa=given.k.size(1) < given.q.size(1),
            seqused_k=given.used,
            block_table=given.table,
        )
        return given.out(rows)

    return attend


def flash_paged(function: Callable[..., Any], table: str) -> PagedAttend:
    """flash_attn_with_kvcache of one of FlashAttention's packages, which calls the page table so."""

    def attend(given: Paged, is_causal: bool) -> Tensor:
        options = {table: given.table, "cache_seqlens": given.used, "causal": is_causal}
        return _first(function(given.q.transpose(1, 2), given.cache_k, given.cache_v, **options)).transpose(1, 2)

    return attend


def paged_candidates(device: str) -> tuple[list[Candidate], list[str]]:
    """Ours first; ours on the same keys without pages; then every peer that exists on the device, and notes."""
    always = [Candidate("ours", ours_paged), Candidate("unpaged", ours_unpaged), Candidate("gathered", gathered)]
    installed: dict[str, Candidate | str] = {}
    if device == "cuda":
        installed["varlen_attn"] = _candidate("varlen_attn", _torch_varlen(), torch_paged)
        for name, (package, table) in PACKAGES.items():
            function = imported(package, "flash_attn_with_kvcache")
            installed[name] = _candidate(name, function, functools.partial(flash_paged, table=table))
    return _with_installed(always, installed)


# ---- what may be installed ------------------------------------------------------------------------------------------


def _torch_varlen() -> Callable[..., Any] | str:
    return imported("torch.nn.attention.varlen", "varlen_attn")


def _candidate(
    name: str, function: Callable[..., Any] | str, called: Callable[[Callable[..., Any]], Callable[..., Tensor]]
) -> Candidate | str:
    """A candidate of the function, called in our way; or the reason why it is not there."""
    return function if isinstance(function, str) else Candidate(name, called(function))


def _with_installed(
    always: list[Candidate], installed: Mapping[str, Candidate | str]
) -> tuple[list[Candidate], list[str]]:
    """All candidates, and notes on what is not installed."""
    found = [one for one in installed.values() if isinstance(one, Candidate)]
    absent = {name: why for name, why in installed.items() if isinstance(why, str)}
    return always + found, [f"{name}: cannot be imported ({why})" for name, why in absent.items()]


def _first(result: Any) -> Tensor:
    """out, where some versions return (out, lse)."""
    out: Tensor = result[0] if isinstance(result, tuple) else result
    return out
