"""Cases of serving: steps of decoding, sequences of any lengths that are packed, and caches that lie in pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from dhp_safe_fa._operator.schema import PAGE_SIZES
from dhp_safe_fa.bench import reference
from dhp_safe_fa.bench.cases import QUICK_STRIDE, Case, CaseSet, Inputs, parse_case
from dhp_safe_fa.bench.serving.peers import Paged, sdpa_each
from dhp_safe_fa.bench.serving.reference import PackedJudge, packed_sample

if TYPE_CHECKING:
    from typing_extensions import Self

# Few queries over long caches; on CUDA the rows of the anchors.
DECODE_SHAPES = {
    "cuda": (
        *("1,32/8,1/8192,128", "1,32/8,1/65536,128", "8,32/8,1/8192,128", "32,32/8,1/4096,128"),
        *("128,32/8,1/2048,128", "8,32/4,1/16384,64", "1,8/1,1/32768,128", "16,64/8,1/1500,128"),
        *("4,32/8,16/8192,128", "1,32/8,128/32768,128"),
    ),
    "cpu": (
        *("1,8/2,1/512,64", "8,32/8,1/1024,128", "1,32/8,16/2048,128"),
        *("1,32/8,1/8192,128", "1,8/1,1/32768,128"),
    ),
}

# Lengths mixed as in a server's queue, many short ones, and equal ones.
VARLEN_SHAPES = {
    "cuda": (
        *("64,32/8,16-8192,128:causal", "64,16,16-8192,64:causal", "64,32/8,16-8192,128"),
        *("256,32/8,16-512,128:causal", "16,32/8,2048,128:causal"),
    ),
    "cpu": ("8,8/2,16-512,64:causal", "8,8/2,16-512,64", "3,8/2,700+1+90,128:causal", "4,8,256,64:causal"),
}

# Decoding from caches, in pages of the smallest and the largest size.
PAGED_SHAPES = {
    "cuda": ("1,32/8,1/8192,128", "8,32/8,1/8192,128", "32,32/8,1/4096,128", "16,64/8,1/1500,128"),
    "cpu": ("8,32/8,1/1024,128", "4,8/2,1/1500,64", "1,32/8,1/8192,128"),
}
PAGED_SIZES = (PAGE_SIZES[0], PAGE_SIZES[-1])

# The fractional parts of its multiples are spread evenly over 0 to 1, in no order, however many there are.
GOLDEN_RATIO = (5**0.5 - 1) / 2

_RANGE = re.compile(r"(?P<low>[1-9]\d*)-(?P<high>[1-9]\d*)", re.ASCII)
_LIST = re.compile(r"[1-9]\d*(\+[1-9]\d*)*", re.ASCII)
_PAGES = re.compile(r"page(?P<size>\d+)", re.ASCII)


class DecodeCase(Case):
    """Few queries of each sequence, over all keys of its cache."""

    direction: ClassVar[str] = "decode"
    serving: ClassVar[bool] = True


@dataclass(frozen=True)
class VarlenCase(Case):
    """``batch`` sequences, packed one behind the other, each attending to itself. None is longer than ``seqlen``.

    lengths: of all of them, ``100+7+50``; or of a range, ``16-8192``, in which they are spread by a fixed rule, evenly
    in their logarithm. None where all are seqlen long.

    Raises:
        ValueError: as Case; or lengths are no such text, not of ``batch`` sequences, or their longest is not seqlen.
    """

    lengths: str | None = None

    direction: ClassVar[str] = "varlen"
    serving: ClassVar[bool] = True
    may_be_refused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.lengths == f"{self.seqlen}":
            object.__setattr__(self, "lengths", None)
        super().__post_init__()
        if self.key_seqlen:
            raise ValueError(f"shape '{self.sizes}': {self.key_seqlen} keys; expected as many as queries of a sequence")
        if self.lengths and not (_RANGE.fullmatch(self.lengths) or _LIST.fullmatch(self.lengths)):
            raise ValueError(f"shape '{self.sizes}': lengths '{self.lengths}'; expected S, LOW-HIGH or S1+S2+...")
        if len(self.seqlens) != self.batch:
            raise ValueError(f"shape '{self.sizes}': {len(self.seqlens)} lengths of {self.batch} sequences")
        if max(map(int, re.split(r"[-+]", self.lengths or f"{self.seqlen}"))) != self.seqlen:
            raise ValueError(f"shape '{self.sizes}': the longest of {self.lengths} is not {self.seqlen}")

    @classmethod
    def parse(cls, text: str, default_dtype: str) -> Self:
        """``B,H[/Hk],LENGTHS,D[:full|:causal][:dtype]``."""
        sizes, *words = text.split(":")
        parts = sizes.split(",")
        if len(parts) != 4 or not (_RANGE.fullmatch(parts[2]) or _LIST.fullmatch(parts[2])):
            raise ValueError(
                f"shape '{text}': '{sizes}' is not B,H[/Hk],LENGTHS,D with LENGTHS as in 512 or 16-8192 or 100+7+50"
            )
        lengths, longest = parts[2], max(re.split(r"[-+]", parts[2]), key=int)
        case = parse_case(":".join([",".join([*parts[:2], longest, parts[3]]), *words]), default_dtype)
        return cls(**vars(case), lengths=lengths)

    @property
    def seqlens(self) -> list[int]:
        """The length of every sequence, in their order."""
        if self.lengths is None:
            return [self.seqlen] * self.batch
        between = _RANGE.fullmatch(self.lengths)
        if not between:
            return [int(length) for length in self.lengths.split("+")]
        low, high = int(between["low"]), int(between["high"])
        return [round(low * (high / low) ** (i * GOLDEN_RATIO % 1)) for i in range(self.batch)]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of q and out, as of one sequence."""
        return 1, self.heads, sum(self.seqlens), self.head_dim

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Of k and v, as of one sequence."""
        return 1, self.key_heads or self.heads, sum(self.seqlens), self.head_dim

    @property
    def sizes(self) -> str:
        """B,H,LENGTHS,D, with /Hk behind H."""
        batch, heads, seqlen, head_dim = super().sizes.split(",")
        return ",".join([batch, heads, self.lengths or seqlen, head_dim])

    @property
    def scores(self) -> int:
        return self.heads * sum(seqlen**2 for seqlen in self.seqlens)

    @property
    def in_sweep(self) -> bool:
        return False

    def check_served(self) -> None:
        """Nothing: the call itself says so."""

    def draw(self, device: str, generator: torch.Generator, layout: str) -> Inputs:
        """q, k, v, [tokens, H, D], and where sequences begin and the last one ends, int32 [B + 1]."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in super().draw(device, generator, layout))
        starts = torch.tensor([0, *accumulate(self.seqlens)], dtype=torch.int32, device=device)
        return q, k, v, starts

    def bind(self, attend: Callable[..., Tensor], inputs: Inputs) -> Callable[[], Any]:
        """attend: serving.peers.PackedAttend."""
        q, k, v, starts = inputs
        seqlens = self.seqlens
        return lambda: attend(q, k, v, starts, seqlens, self.causal)

    def judge(self, inputs: Inputs, generator: torch.Generator) -> reference.Judge:
        q, k, v, starts = inputs
        true = packed_sample(q, k, v, self.seqlens, self.causal, generator)
        return PackedJudge(
            self.dtype, true, lambda: sdpa_each(q, k, v, starts, self.seqlens, self.causal).transpose(0, 1)
        )


@dataclass(frozen=True)
class PagedCase(Case):
    """The forward, its keys and values in pages of a cache, in random order.

    Raises:
        ValueError: as Case; or there are no pages of so many keys.
    """

    page_size: int = PAGED_SIZES[0]

    direction: ClassVar[str] = "paged"
    serving: ClassVar[bool] = True
    may_be_refused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_size not in PAGE_SIZES:
            raise ValueError(
                f"shape '{self.sizes}': pages of {self.page_size} keys; supported: {', '.join(map(str, PAGE_SIZES))}"
            )

    @classmethod
    def parse(cls, text: str, default_dtype: str) -> Self:
        """``B,H[/Hk],S[/Sk],D[:pageSIZE][:full|:causal][:dtype]``; without a page's size the smallest there is."""
        words = text.split(":")
        sizes = [int(pages["size"]) for word in words if (pages := _PAGES.fullmatch(word))]
        if len(sizes) > 1:
            raise ValueError(f"shape '{text}': {len(sizes)} sizes of pages; expected one")
        case = parse_case(":".join(word for word in words if not _PAGES.fullmatch(word)), default_dtype)
        return cls(**vars(case), page_size=sizes[0] if sizes else PAGED_SIZES[0])

    @property
    def sizes(self) -> str:
        """The forward's, and the size of a page."""
        return f"{super().sizes}:page{self.page_size}"

    def check_served(self) -> None:
        """Nothing: the call itself says so."""

    def draw(self, device: str, generator: torch.Generator, layout: str) -> Inputs:
        q, k, v = super().draw(device, generator, layout)
        sequences, _, keys, _ = self.key_shape
        pages = -(-keys // self.page_size)
        table = torch.randperm(sequences * pages, generator=generator, device=device).int().view(sequences, pages)
        return Paged(
            *(q, k, v, self._in_pages(k, table), self._in_pages(v, table), table),
            starts=torch.arange(sequences + 1, dtype=torch.int32, device=device) * self.seqlen,
            used=torch.full((sequences,), keys, dtype=torch.int32, device=device),
        )

    def _in_pages(self, keys: Tensor, table: Tensor) -> Tensor:
        """[B, Hk, Sk, D] as [pages, page_size, Hk, D], page j of sequence b at table[b, j]; 0 behind the last key."""
        missing = -keys.size(2) % self.page_size
        rows = F.pad(keys.transpose(1, 2), (0, 0, 0, 0, 0, missing))
        cache = torch.empty_like(pages := rows.reshape(table.numel(), self.page_size, *rows.shape[2:]))
        cache[table.flatten()] = pages
        return cache

    def bind(self, attend: Callable[..., Tensor], inputs: Inputs) -> Callable[[], Any]:
        """attend: serving.peers.PagedAttend."""
        given = Paged(*inputs)
        return lambda: attend(given, self.causal)

    def judge(self, inputs: Inputs, generator: torch.Generator) -> reference.Judge:
        given = Paged(*inputs)
        return super().judge((given.q, given.k, given.v), generator)


def _chosen(kind: type[Case], texts: tuple[str, ...], dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    stride = QUICK_STRIDE if quick else 1
    chosen = dtypes or ["float32" if device == "cpu" else "bfloat16"]
    return [kind.parse(text, dtype) for dtype in chosen for text in texts[::stride]]


def decode_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """Few queries over long caches; without dtypes in bfloat16, on a CPU in float32."""
    return _chosen(DecodeCase, DECODE_SHAPES[device], dtypes, device, quick)


def varlen_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """Mixes of lengths; without dtypes in bfloat16, on a CPU in float32."""
    return _chosen(VarlenCase, VARLEN_SHAPES[device], dtypes, device, quick)


def paged_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """Every cache in small and in large pages; without dtypes in bfloat16, on a CPU in float32."""
    stride = QUICK_STRIDE if quick else 1
    texts = tuple(f"{sizes}:page{size}" for sizes in PAGED_SHAPES[device][::stride] for size in PAGED_SIZES)
    return _chosen(PagedCase, texts, dtypes, device, quick=False)


DECODE_SETS: Mapping[str, CaseSet] = {"decode": decode_cases}
VARLEN_SETS: Mapping[str, CaseSet] = {"varlen": varlen_cases}
PAGED_SETS: Mapping[str, CaseSet] = {"paged": paged_cases}
