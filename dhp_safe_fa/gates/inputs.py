"""The data that a gate puts into a kernel: classes as unlike each other as attention's inputs can be.

Each class is a function of a shape and a random generator, and makes q, k and v on the generator's device. The classes
reach every place where a kernel might treat values differently: the running maximum, small and zero probabilities,
denormal and overflowing scores, NaN and Inf.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

# All tensors that a call reads, in the order in which it takes them: q, k and v of the forward pass, which is what the
# classes here make.
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Shape:
    """What is public about a call. heads_q is a multiple of heads_k."""

    batch: int
    heads_q: int
    heads_k: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    dtype: str
    is_causal: bool

    @property
    def q(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads_q, self.seqlen_q, self.head_dim

    @property
    def k(self) -> tuple[int, int, int, int]:
        """Also v's."""
        return self.batch, self.heads_k, self.seqlen_k, self.head_dim

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def __str__(self) -> str:
        heads = f"{self.heads_q}" if self.heads_q == self.heads_k else f"{self.heads_q}/{self.heads_k}"
        seqlen = f"{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"{self.seqlen_q}/{self.seqlen_k}"
        mask = "causal" if self.is_causal else "full"
        return f"{self.batch},{heads},{seqlen},{self.head_dim}:{mask}:{self.dtype}"


def _randn(size: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randn(size, generator=generator, device=generator.device)


def zeros(shape: Shape, generator: Generator) -> Inputs:
    """All bits 0: every score is 0, every probability the same."""
    q, k = (torch.zeros(size, dtype=shape.torch_dtype, device=generator.device) for size in (shape.q, shape.k))
    return q, k, k.clone()


def normal(shape: Shape, generator: Generator) -> Inputs:
    """Standard normal: what benchmarks use."""
    q, k, v = (_randn(size, generator).to(shape.torch_dtype) for size in (shape.q, shape.k, shape.k))
    return q, k, v


def large(shape: Shape, generator: Generator) -> Inputs:
    """Normal times 30: scores in the thousands, so that most probabilities are 0 or denormal before flushing."""
    q, k, v = normal(shape, generator)
    return q * 30, k * 30, v * 30


# Nats by which the score grows from the first key to the last: e^-64 is 0 beside 1, and halfway is not.
_RAMP_NATS = 64.0


def ascending(shape: Shape, generator: Generator) -> Inputs:
    """Scores grow with the key's position, in every row: the running maximum grows in each tile of keys."""
    direction = torch.randint(0, 2, (shape.head_dim,), generator=generator, device=generator.device) * 2.0 - 1
    strength = 0.5 + torch.rand((*shape.q[:3], 1), generator=generator, device=generator.device)
    # a score is strength · ramp · D / sqrt(D), where sqrt(D) is the default scale
    top = _RAMP_NATS / shape.head_dim**0.5
    ramp = torch.linspace(0, top, shape.seqlen_k, device=generator.device)[:, None]
    k = (ramp * direction).expand(shape.k)
    v = _randn(shape.k, generator)
    return (strength * direction).to(shape.torch_dtype), k.to(shape.torch_dtype).clone(), v.to(shape.torch_dtype)


def descending(shape: Shape, generator: Generator) -> Inputs:
    """The first key has the largest score of every row: the running maximum never grows again."""
    q, k, v = ascending(shape, generator)
    return q, k.flip(2), v


def one_hot(shape: Shape, generator: Generator) -> Inputs:
    """Every row is a copy of one key times 10: that key has probability 1, the others 0 or nearly so."""
    _, k, v = normal(shape, generator)
    chosen = torch.randint(0, shape.seqlen_k, (shape.seqlen_q,), generator=generator, device=generator.device)
    q = k.repeat_interleave(shape.heads_q // shape.heads_k, dim=1)[:, :, chosen] * 10
    return q, k, v


def max_finite(shape: Shape, generator: Generator) -> Inputs:
    """Plus or minus the largest finite number: scores that overflow float32 in bfloat16, huge ones in float16."""
    most = torch.finfo(shape.torch_dtype).max
    q, k, v = (_randn(size, generator).sign().mul(most).to(shape.torch_dtype) for size in (shape.q, shape.k, shape.k))
    return q, k, v


def denormals(shape: Shape, generator: Generator) -> Inputs:
    """Random subnormal numbers of the dtype, both signs."""
    # float16 has 10 bits of fraction, bfloat16 7; with exponent bits 0 these are the subnormal ones, 1 the smallest
    fractions = {torch.float16: 2**10, torch.bfloat16: 2**7}[shape.torch_dtype]

    def make(size: tuple[int, ...]) -> Tensor:
        bits = torch.randint(1, fractions, size, generator=generator, device=generator.device, dtype=torch.int16)
        sign = torch.randint(0, 2, size, generator=generator, device=generator.device, dtype=torch.int16)
        return (bits | sign * -(2**15)).view(shape.torch_dtype)

    return make(shape.q), make(shape.k), make(shape.k)


def _spoil(inputs: Inputs, values: Tensor, generator: Generator) -> Inputs:
    """Replace whole rows of q, k and v, about one in eight of each, by values taken in turn."""
    for tensor in inputs:
        rows = torch.rand(tensor.shape[:3], generator=generator, device=generator.device) < 0.125
        rows[0, 0, 0] = True  # also the smallest shape has one
        count = int(rows.sum())
        tensor[rows] = values.repeat(count)[:count, None].to(tensor.dtype)
    return inputs


def nan_rows(shape: Shape, generator: Generator) -> Inputs:
    """Normal, but some queries, keys and values are NaN throughout."""
    return _spoil(normal(shape, generator), torch.tensor([torch.nan], device=generator.device), generator)


def inf_rows(shape: Shape, generator: Generator) -> Inputs:
    """Normal, but some queries, keys and values are +Inf or -Inf throughout."""
    return _spoil(normal(shape, generator), torch.tensor([torch.inf, -torch.inf], device=generator.device), generator)


# In the order in which they are run. "normal" comes with two seeds: other values, same statistics.
CLASSES: dict[str, Callable[[Shape, Generator], Inputs]] = {
    "zeros": zeros,
    "normal": normal,
    "normal again": normal,
    "large": large,
    "ascending": ascending,
    "descending": descending,
    "one-hot": one_hot,
    "max-finite": max_finite,
    "denormals": denormals,
    "NaN rows": nan_rows,
    "Inf rows": inf_rows,
}

# Classes of inputs whose rows are computed again, and the class that is beside them: where probabilities are 0 or
# denormal, where the running maximum changes in every tile of keys, where scores overflow. Not NaN or Inf, of which the
# contract has an exception (docs/gates-bitwise.md).
ROW_CLASSES = {
    "normal": "large",
    "large": "normal",
    "ascending": "max-finite",
    "max-finite": "normal",
    "denormals": "large",
}


def make(name: str, shape: Shape, seed: int, device: str = "cuda") -> Inputs:
    """q, k and v of the class called name, contiguous; the same for the same seed on the same kind of device."""
    generator = torch.Generator(device).manual_seed(seed ^ zlib.crc32(name.encode()))
    return CLASSES[name](shape, generator)


# ---- what the planted kernels read -----------------------------------------------------------------------------------

SECRETS = 16384  # floats: more than any control reads


def planted_secrets(seed: int, device: str = "cuda") -> dict[str, Tensor]:
    """Classes of data for tests/controls/, float32 [SECRETS] each: every planted leak shows between two of them.

    Finite values stay below 2^9, because one control goes round a loop as often as a value says.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rest = torch.randn(SECRETS, generator=generator, device=device)
    ramp = torch.linspace(1, 256, SECRETS, device=device)
    spoilt = rest.clone()
    spoilt[::5] = torch.nan
    return {
        "zeros": torch.zeros(SECRETS, device=device),
        "normal": rest,
        "large": rest * 64,  # 2^x is denormal below -126, two standard deviations
        "ascending": ramp,
        "descending": ramp.flip(0),
        "denormals": torch.full((SECRETS,), 1e-40, device=device),
        "NaN": spoilt,
    }
