"""What is measured: a case says its sizes, makes its inputs, counts its work and knows what is right; and the sets of
cases, with how a user names them.

``Case`` is the forward. Another direction is a subclass that overrides what differs, and a ``Direction`` in
directions.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from dhp_safe_fa import _inspect
from dhp_safe_fa.bench import peers, reference

if TYPE_CHECKING:
    from typing_extensions import Self

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
MASKS = {"full": False, "causal": True}

# How tensors of shape [B, H, S, D] lie in memory. BSHD: as models have them, whose projections write [B, S, H·D].
LAYOUTS = ("BSHD", "BHSD")

# (B, H, S, D) that the project began from.
START_SHAPES = ((1, 8, 512, 64), (1, 16, 1024, 64), (4, 16, 1024, 64))

# A GPU also gets four times the largest of them, which is too much for a small CPU.
CUDA_START_SHAPES = (*START_SHAPES, (16, 16, 1024, 64))

# The sweep keeps the number of tokens (B·S) and the hidden size (H·D), so every row reads and writes equally much.
SWEEP_TOKENS = 16384
SWEEP_HIDDEN = 2048
SWEEP_SEQLENS: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384)
SWEEP_HEAD_DIMS = (64, 128, 256)

# bfloat16 runs on the same units as float16: a few lengths show that.
SWEEP_BFLOAT16_SEQLENS = (2048, 8192)
QUICK_SEQLENS = (1024, 4096, 16384)

# A second or more at a time takes long: of the sweep's long lengths the shortest and the longest, and one short causal
# shape that keeps the GPU as busy.
SUSTAINED_SEQLENS = (4096, 16384)
SUSTAINED_SHORT = "16,16,1024,128:causal"

# Lengths that no tile divides, and grouped-query attention, by device; full and causal.
ODD_SHAPES = {
    "cuda": (
        *("4,16,900,128", "2,16,5001,128", "4,8,2500,256", "4,8,900,256", "1,8,5001,256"),
        *("4,32,900,64", "2,32,2500,64", "1,32,5001,64", "16,16,300,128"),
        *("4,32/4,2500,64", "4,32/4,900,64", "1,32/8,2500,128", "1,32/4,1000,128"),
        *("8,32/4,600,128", "2,64/8,2500,128", "2,16/2,1111,256"),
    ),
    "cpu": ("1,8/2,333,64", "1,8,333,64"),
}

# More keys than queries, down to the one query of a decoding step; full only.
CROSS_SHAPES = {
    "cuda": (
        *("4,16,777/3000,128", "2,32/8,128/8192,128"),
        *("32,32/8,1/8192,128", "32,32/4,1/4096,64", "8,32/4,1/16384,64", "1,32/8,1/8192,128"),
    ),
    "cpu": ("1,8/2,1/333,64", "1,8,100/333,64", "1,8,1/512,64", "1,32,1/8192,128", "1,32/8,1/8192,128"),
}

# With quick, every third of these.
QUICK_STRIDE = 3

_SIZES = re.compile(r"(?P<B>\d+),(?P<H>\d+)(/(?P<Hk>\d+))?,(?P<S>\d+)(/(?P<Sk>\d+))?,(?P<D>\d+)", re.ASCII)


Inputs: TypeAlias = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case:
    """Attention of q [batch, heads, seqlen, head_dim] to k and v [batch, key_heads, key_seqlen, head_dim].

    key_heads and key_seqlen become None where they are q's: equal cases are equal.

    Class attributes:
        direction: its name in stored results.
        products: matrix products of q's rows, k's rows and head_dim that it takes, two operations a multiply-add.
        repeats: how often a call is repeated to see if it gives the same bits; 0 is not asked.
        serving: its table has a row for everybody, with bytes over time, in place of a row of ours alone.
        may_be_refused: where the library says that CUDA does not serve it yet, that is the outcome, and the peers are
            timed.

    Raises:
        ValueError: key_heads does not divide heads, or a causal mask for different lengths; one sentence.
    """

    batch: int
    heads: int
    seqlen: int
    head_dim: int
    causal: bool
    dtype: str
    key_heads: int | None = None
    key_seqlen: int | None = None

    direction: ClassVar[str] = "forward"
    products: ClassVar[int] = 2
    repeats: ClassVar[int] = 0
    serving: ClassVar[bool] = False
    may_be_refused: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.key_heads == self.heads:
            object.__setattr__(self, "key_heads", None)
        if self.key_seqlen == self.seqlen:
            object.__setattr__(self, "key_seqlen", None)
        if self.key_heads and self.heads % self.key_heads:
            raise ValueError(f"shape '{self.sizes}': {self.heads} heads are no multiple of {self.key_heads} key heads")
        if self.key_seqlen and self.causal:
            raise ValueError(
                f"shape '{self.sizes}:causal': "
                f"causal with {self.seqlen} queries and {self.key_seqlen} keys; only full is "
                "compared there, because implementations align the diagonal with different corners"
            )

    @classmethod
    def like(cls, case: Case) -> Self:
        """The same sizes in this direction; a case of it stays what it is."""
        return case if type(case) is cls else cls(*(getattr(case, field.name) for field in fields(Case)))

    @classmethod
    def parse(cls, text: str, default_dtype: str) -> Self:
        """A case as the command line takes it, by default ``parse_case`` in this direction. Raises what that does."""
        return cls.like(parse_case(text, default_dtype))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of q and out."""
        return self.batch, self.heads, self.seqlen, self.head_dim

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        """Of k and v."""
        return self.batch, self.key_heads or self.heads, self.key_seqlen or self.seqlen, self.head_dim

    @property
    def mask(self) -> str:
        return "causal" if self.causal else "full"

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def sizes(self) -> str:
        """B,H,S,D, with /Hk and /Sk behind H and S where there are other numbers of keys."""
        heads = f"{self.heads}/{self.key_heads}" if self.key_heads else f"{self.heads}"
        seqlen = f"{self.seqlen}/{self.key_seqlen}" if self.key_seqlen else f"{self.seqlen}"
        return f"{self.batch},{heads},{seqlen},{self.head_dim}"

    @property
    def label(self) -> str:
        """sizes:mask:dtype, as the command line takes it, and the direction where that is not the forward."""
        direction = "" if self.direction == Case.direction else f":{self.direction}"
        return f"{self.sizes}:{self.mask}:{self.dtype}{direction}"

    @property
    def scores(self) -> int:
        """Elements of q kᵀ, which an unfused implementation stores."""
        return self.batch * self.heads * self.seqlen * self.key_shape[2]

    @property
    def flops(self) -> float:
        """2·B·H·Sq·Sk·D for each product, halved for causal: the convention of the FlashAttention papers."""
        return 2.0 * self.products * self.scores * self.head_dim / (2 if self.causal else 1)

    @property
    def input_bytes(self) -> int:
        """q, k and v."""
        return (math.prod(self.shape) + 2 * math.prod(self.key_shape)) * self.torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        """q, k, v and out, each moved once: the least traffic there can be."""
        return self.input_bytes + math.prod(self.shape) * self.torch_dtype.itemsize

    @property
    def in_sweep(self) -> bool:
        tokens, hidden = self.batch * self.seqlen, self.heads * self.head_dim
        return (tokens, hidden, self.key_shape) == (SWEEP_TOKENS, SWEEP_HIDDEN, self.shape)

    def check_served(self) -> None:
        """ValueError with the library's own sentence if no GPU kernel that was built serves the case."""
        _inspect.plan(self.shape, self.key_shape, self.dtype, self.causal)

    def draw(self, device: str, generator: torch.Generator, layout: str) -> Inputs:
        """q, k and v of standard normal numbers, stored as the layout says (one of LAYOUTS)."""

        q, k, v = (
            self.normal(shape, device, generator, layout) for shape in (self.shape, self.key_shape, self.key_shape)
        )
        return q, k, v

    def normal(self, shape: tuple[int, int, int, int], device: str, generator: torch.Generator, layout: str) -> Tensor:
        """Standard normal numbers in the shape [B, H, S, D]."""
        b, h, s, d = shape
        stored = (b, s, h, d) if layout == "BSHD" else shape
        drawn = torch.randn(stored, generator=generator, device=device).to(self.torch_dtype)
        return drawn.transpose(1, 2) if layout == "BSHD" else drawn

    def bind(self, attend: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
        """The call that is timed, on inputs that ``draw`` made; ``judge`` knows its output.

        attend: peers.Attend, or what a candidate of this direction is.
        """
        q, k, v = inputs
        return lambda: attend(q, k, v, self.causal)

    def judge(self, inputs: Inputs, generator: torch.Generator) -> reference.Judge:
        """What is right for these inputs."""
        q, k, v = inputs
        true = reference.sample(q, k, v, self.causal, generator)
        return reference.OutputJudge(self.dtype, true, lambda: peers.sdpa(q, k, v, self.causal))


def parse_case(text: str, default_dtype: str) -> Case:
    """``B,H[/Hk],S[/Sk],D[:full|:causal][:dtype]`` to a Case.

    Raises:
        ValueError: one sentence that says what was given and what is expected.
    """
    sizes, *words = text.split(":")
    match = _SIZES.fullmatch(sizes)
    numbers = {name: int(n) for name, n in match.groupdict().items() if n} if match else {}
    if not numbers or not all(0 < n < 2**31 for n in numbers.values()):
        raise ValueError(f"shape '{text}': '{sizes}' is not four positive numbers B,H[/Hk],S[/Sk],D below 2^31")
    mask, dtype = "full", default_dtype
    for word in words:
        if word in MASKS:
            mask = word
        elif word in DTYPES:
            dtype = word
        else:
            raise ValueError(
                f"shape '{text}': '{word}' is neither a mask ({_or(MASKS)}) nor a dtype ({_or(DTYPES)}); "
                "--forms also takes windowKEYS, softcapCAP and sinks, --paged pageSIZE"
            )
    batch, heads, seqlen, head_dim = (numbers[name] for name in "BHSD")
    return Case(batch, heads, seqlen, head_dim, MASKS[mask], dtype, numbers.get("Hk"), numbers.get("Sk"))


def default_dtypes(device: str) -> list[str]:
    """The device's main dtype, then the one that is measured at a few shapes only."""
    return ["float32", "bfloat16"] if device == "cpu" else ["float16", "bfloat16"]


def start_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """The start shapes, full and causal; without dtypes in the main one, on a CPU also one shape in bfloat16."""
    main, extra = default_dtypes(device)
    shapes = START_SHAPES if device == "cpu" else CUDA_START_SHAPES
    cases = [Case(*shape, causal, d) for d, causal, shape in product(dtypes or [main], MASKS.values(), shapes)]
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


def odd_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """Odd lengths, grouped-query attention, more keys than queries; without dtypes in the main one."""
    main, _ = default_dtypes(device)
    stride = QUICK_STRIDE if quick else 1
    shapes = [*product(MASKS, ODD_SHAPES[device][::stride]), *product(["full"], CROSS_SHAPES[device][::stride])]
    return [parse_case(f"{sizes}:{mask}", dtype) for dtype in dtypes or [main] for mask, sizes in shapes]


def anchor_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """The rows of the anchors: the whole sweep, without dtypes in bfloat16."""
    return sweep_cases(dtypes or ["bfloat16"], device, quick)


def sustained_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """What is run for a second or more at a time; without dtypes in bfloat16."""
    chosen = dtypes or ["bfloat16"]
    short = [parse_case(SUSTAINED_SHORT, dtype) for dtype in chosen]
    return short + [case for case in sweep_cases(chosen, device, quick) if case.seqlen in SUSTAINED_SEQLENS]


CaseSet: TypeAlias = Callable[["list[str] | None", str, bool], "list[Case]"]
SETS: Mapping[str, CaseSet] = {
    "start": start_cases,
    "sweep": sweep_cases,
    "odd": odd_cases,
    "anchors": anchor_cases,
    "sustained": sustained_cases,
}


def select(
    shapes: Iterable[str],
    dtypes: list[str] | None,
    device: str,
    quick: bool,
    sets: Mapping[str, CaseSet] = SETS,
    kind: type[Case] = Case,
) -> list[Case]:
    """The cases that ``--shapes``, ``--dtype`` and ``--quick`` ask for, each once, in a fixed order.

    Args:
        shapes: words as the command line takes them: set names joined by commas, or explicit shapes.
        dtypes: dtypes of the sets; None chooses the set's own.
        sets: what the names mean.
        kind: of the cases.

    Raises:
        ValueError: one sentence about the word that cannot be read.
    """
    found: list[Case] = []
    for word in shapes:
        if word[:1].isdigit():
            found += [kind.parse(word, dtype) for dtype in dtypes or default_dtypes(device)[:1]]
            continue
        for name in word.split(","):
            if name not in sets:
                raise ValueError(f"shapes '{word}': '{name}' is neither {_or(sets)} nor a shape B,H,S,D[:mask][:dtype]")
            found += [kind.like(case) for case in sets[name](dtypes, device, quick)]
    return list(dict.fromkeys(found))


def _or(words: Iterable[str]) -> str:
    return " or ".join(words)
