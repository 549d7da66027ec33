"""Inputs of the gate `timing`: classes with equal bit statistics, and the power classes.

Values that switch more transistors draw more power, and a GPU may answer with a lower clock; that channel is measured
and reported apart. The matched classes therefore hold the same numbers in another order: the same keys and values
sorted by score, or the same absolute values with the same number of signs in every row.
"""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from .. import inputs
from ..inputs import Inputs, Shape

# The reference is one draw; SAME are copies of it at other addresses, for A/A.
REFERENCE = "as drawn"
SAME = ("same 1", "same 2")
PERMUTED = "signs permuted"
MATCHED = ("other order", "ascending", "descending", PERMUTED)
POWER_REFERENCE = "normal"
POWER = ("zeros", "ones", "large")
# Of these the one whose clock is farthest from the reference's, by which the gate knows how much of a launch waits.
UNLIKE = "zeros"

# Standard deviation of the scores along the common direction, in nats. With 3, the running maximum climbs over some 20
# nats when keys ascend, and stays where it is when they descend.
_SPREAD = 3.0


def _ordered(tensor: Tensor, order: Tensor) -> Tensor:
    """Rows of [B, H, S, D] in the order [B, H, S]."""
    return tensor.gather(2, order[..., None].expand_as(tensor))


def permute_signs(tensor: Tensor, generator: Generator) -> Tensor:
    """The signs of each row dealt out anew among its elements."""
    order = torch.rand(tensor.shape, generator=generator, device=tensor.device).argsort(dim=-1)
    negative = tensor.signbit().gather(-1, order)
    return torch.where(negative, -tensor.abs(), tensor.abs())


def matched(shape: Shape, seed: int, device: str = "cuda") -> dict[str, Inputs]:
    """The reference, its copies, and the matched classes: all with the same bits, in other places.

    Queries of a head share a direction, so that one order of the keys is ascending in score for every row (within the
    noise that makes the rows differ).
    """
    generator = torch.Generator(device).manual_seed(seed)
    q, k, v = inputs.normal(shape, generator)
    size = (shape.batch, shape.heads_k, 1, shape.head_dim)
    direction = torch.randn(size, generator=generator, device=device)
    direction *= shape.head_dim**0.5 / direction.norm(dim=-1, keepdim=True)
    group = shape.heads_q // shape.heads_k
    q = (q + _SPREAD * direction.repeat_interleave(group, dim=1)).to(q.dtype)
    ascending = (k.float() * direction).sum(-1).argsort(dim=2)
    other = torch.rand(k.shape[:3], generator=generator, device=device).argsort(dim=2)
    return {
        REFERENCE: (q, k, v),
        **{name: (q.clone(), k.clone(), v.clone()) for name in SAME},
        "other order": (q, _ordered(k, other), _ordered(v, other)),
        "ascending": (q, _ordered(k, ascending), _ordered(v, ascending)),
        "descending": (q, _ordered(k, ascending.flip(2)), _ordered(v, ascending.flip(2))),
        PERMUTED: tuple(permute_signs(t, generator) for t in (q, k, v)),
    }


def power(shape: Shape, seed: int, device: str = "cuda") -> dict[str, Inputs]:
    """Classes that draw unlike power: normal, all bits 0, all ones, normal times 30."""
    q, k, v = inputs.make("zeros", shape, seed, device)
    return {
        POWER_REFERENCE: inputs.make("normal", shape, seed, device),
        "zeros": (q, k, v),
        "ones": (torch.ones_like(q), torch.ones_like(k), torch.ones_like(v)),
        "large": inputs.make("large", shape, seed, device),
    }
