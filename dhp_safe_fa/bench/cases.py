"""What is measured: shapes, masks and dtypes, and how a user names them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

import torch

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
MASKS = {"full": False, "causal": True}

# (B, H, S, D) that the project began from.
START_SHAPES = ((1, 8, 512, 64), (1, 16, 1024, 64), (4, 16, 1024, 64))

# The sweep keeps the number of tokens (B·S) and the hidden size (H·D), so every row reads and writes equally much.
SWEEP_TOKENS = 16384
SWEEP_HIDDEN = 2048
SWEEP_SEQLENS: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
SWEEP_HEAD_DIMS = (64, 128, 256)

# bfloat16 runs on the same units as float16: a few lengths show that.
SWEEP_BFLOAT16_SEQLENS = (2048, 8192)
QUICK_SEQLENS = (1024, 4096, 16384)


@dataclass(frozen=True)
class Case:
    """Self-attention of q, k and v, each [batch, heads, seqlen, head_dim]."""

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.seqlen, self.head_dim

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def label(self) -> str:
        """B,H,S,D:mask:dtype, as the command line takes it."""
        return f"{','.join(map(str, self.shape))}:{self.mask}:{self.dtype}"

    @property
    def scores(self) -> int:
        """Elements of q kᵀ, which an unfused implementation stores."""
        return self.batch * self.heads * self.seqlen**2

    @property
    def flops(self) -> float:
        """4·B·H·Sq·Sk·D (two matrix products), halved for causal: the convention of the FlashAttention papers."""
        return 4.0 * self.scores * self.head_dim / (2 if self.causal else 1)

    @property
    def input_bytes(self) -> int:
        """q, k and v."""
        return 3 * self.batch * self.heads * self.seqlen * self.head_dim * self.torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        """q, k, v and out, each moved once: the least traffic there can be."""
        return self.input_bytes * 4 // 3

    @property
    def in_sweep(self) -> bool:
        return self.batch * self.seqlen == SWEEP_TOKENS and self.heads * self.head_dim == SWEEP_HIDDEN


def parse_case(text: str, default_dtype: str) -> Case:
    """``B,H,S,D[:full|:causal][:dtype]`` to a Case.

    Raises:
        ValueError: one sentence that says what was given and what is expected.
    """
    sizes, *words = text.split(":")
    numbers = sizes.split(",")
    if len(numbers) != 4 or not all(n.isascii() and n.isdigit() and 0 < int(n) < 2**31 for n in numbers):
        raise ValueError(f"shape '{text}': '{sizes}' is not four positive numbers B,H,S,D below 2^31")
    mask, dtype = "full", default_dtype
    for word in words:
        if word in MASKS:
            mask = word
        elif word in DTYPES:
            dtype = word
        else:
            raise ValueError(f"shape '{text}': '{word}' is neither a mask ({_or(MASKS)}) nor a dtype ({_or(DTYPES)})")
    batch, heads, seqlen, head_dim = map(int, numbers)
    return Case(batch, heads, seqlen, head_dim, MASKS[mask], dtype)


def default_dtypes(device: str) -> list[str]:
    """The device's main dtype, then the one that is measured at a few shapes only."""
    return ["float32", "bfloat16"] if device == "cpu" else ["float16", "bfloat16"]


def start_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """The start shapes, full and causal; without dtypes in the main one, on a CPU also one shape in bfloat16."""
    main, extra = default_dtypes(device)
    cases = [Case(*shape, causal, d) for d, causal, shape in product(dtypes or [main], MASKS.values(), START_SHAPES)]
    if dtypes is None and device == "cpu" and not quick:
        cases += [Case(*START_SHAPES[0], causal, extra) for causal in MASKS.values()]
    return cases


def sweep_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """16k tokens, hidden size 2048, full and causal; without dtypes in the main one, and bfloat16 at two lengths."""
    main, extra = default_dtypes(device)
    lengths = [(dtype, QUICK_SEQLENS if quick else SWEEP_SEQLENS) for dtype in dtypes or [main]]
    if dtypes is None and not quick:
        lengths.append((extra, SWEEP_BFLOAT16_SEQLENS))
    return [
        Case(SWEEP_TOKENS // seqlen, SWEEP_HIDDEN // head_dim, seqlen, head_dim, causal, dtype)
        for dtype, seqlens in lengths
        for head_dim, causal, seqlen in product(SWEEP_HEAD_DIMS, MASKS.values(), seqlens)
    ]


SETS = {"start": start_cases, "sweep": sweep_cases}


def select(shapes: Iterable[str], dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """The cases that ``--shapes``, ``--dtype`` and ``--quick`` ask for, each once, in a fixed order.

    Args:
        shapes: words as the command line takes them: set names joined by commas, or explicit shapes.
        dtypes: dtypes of the sets; None chooses the device's own (see ``default_dtypes``).

    Raises:
        ValueError: one sentence about the word that cannot be read.
    """
    found: list[Case] = []
    for word in shapes:
        if word[:1].isdigit():
            found += [parse_case(word, dtype) for dtype in dtypes or default_dtypes(device)[:1]]
            continue
        for name in word.split(","):
            if name not in SETS:
                raise ValueError(f"shapes '{word}': '{name}' is neither {_or(SETS)} nor a shape B,H,S,D[:mask][:dtype]")
            found += SETS[name](dtypes, device, quick)
    return list(dict.fromkeys(found))


def _or(words: Iterable[str]) -> str:
    return " or ".join(words)
