"""Are gradients right: attention's in float64, all of them, and the limits that they have to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dhp_safe_fa.bench.reference import CHUNK_ELEMENTS, ELEMENTS_FOR_NORM, PEER_FACTOR, ROW_FACTOR, Verdict

NAMES = ("dq", "dk", "dv")

# What the project promises of each gradient for normal inputs: ‖gradient − ref‖ / ‖ref‖ against float64.
RELATIVE_ERROR = {"float32": 2e-6, "float16": 3.3e-4, "bfloat16": 2.6e-3}


# (dq, dk, dv)
Gradients = tuple[Tensor, Tensor, Tensor]


def gradients(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, is_causal: bool) -> Gradients:
    """Those of softmax(q kᵀ / √D) v by q, k and v, in float64 on q's device, in q's, k's and v's shapes.

    q and grad_out are [B, H, S, D]; k and v are [B, Hk, Sk, D], and each of their heads serves H / Hk neighbouring
    heads of q.
    """
    (exact,) = _gradients(q, k, v, grad_out, is_causal, [None])
    return exact


def gradients_and_those_of(
    out: Tensor, q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, is_causal: bool
) -> tuple[Gradients, Gradients]:
    """`gradients`, and those that follow from out, [B, H, S, D]: what the forward rounded softmax(q kᵀ / √D) v to."""
    exact, of_out = _gradients(q, k, v, grad_out, is_causal, [None, out])
    return exact, of_out


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, is_causal: bool, outs: Sequence[Tensor | None]
) -> list[Gradients]:
    """The gradients that follow from each of outs; from the exact one for None."""
    (b, h, s, d), sk = q.shape, k.size(2)
    group, scale = h // k.size(1), d**-0.5
    queries, given, keys, values = (tensor.flatten(0, 1) for tensor in (q, grad_out, k, v))
    rounded = [None if out is None else out.flatten(0, 1) for out in outs]
    dq = [torch.empty(b * h, s, d, dtype=torch.float64, device=q.device) for _ in outs]
    *dk, dv = (torch.zeros(keys.shape, dtype=torch.float64, device=q.device) for _ in range(len(outs) + 1))
    rows = min(s, max(1, CHUNK_ELEMENTS // sk))
    step = max(1, CHUNK_ELEMENTS // (rows * max(sk, d)))
    for heads in torch.arange(b * h, device=q.device).split(step):
        served = heads // group
        key, value = keys[served].double(), values[served].double()
        for first in range(0, s, rows):
            here = slice(first, first + rows)
            query, grad = queries[heads, here].double(), given[heads, here].double()
            scores = query @ key.mT * scale
            if is_causal:
                hidden = torch.arange(sk, device=q.device) > torch.arange(s, device=q.device)[here, None]
                scores.masked_fill_(hidden, -torch.inf)
            p = torch.softmax(scores, dim=-1)
            dp = grad @ value.mT
            for i, out in enumerate(rounded):
                mean = p @ value if out is None else out[heads, here].double()
                ds = p * (dp - (grad * mean).sum(-1, keepdim=True)) * scale
                dq[i][heads, here] = ds @ key
                dk[i].index_add_(0, served, ds.mT @ query)
            dv.index_add_(0, served, p.mT @ grad)
    return [(by_q.view(q.shape), by_k.view(k.shape), dv.view(v.shape)) for by_q, by_k in zip(dq, dk, strict=True)]


def errors(true: Tensor, gradient: Tensor) -> tuple[float, float]:
    """(‖gradient − true‖ / ‖true‖, the same of its worst row by that row's norm or, if that is more, the mean row's).

    A row whose true gradient is nearly 0, such as the first one of a causal dq, has no relative error of its own.
    """
    difference = gradient.double() - true
    norm, rows = true.norm(), true.norm(dim=-1)
    mean = norm / max(1, rows.numel()) ** 0.5
    return float(difference.norm() / norm), float((difference.norm(dim=-1) / rows.clamp(min=float(mean))).max())


@dataclass(frozen=True)
class GradientJudge:
    """Of (dq, dk, dv), in float64.

    Attributes:
        dtype: of what is judged.
        true: the whole of each is compared with.
        of_out: rows are compared with; what follows from the forward's rounded out. Where one key has nearly all of a
            row's probability, dP - delta is nearly 0, and the rounding of out, of which delta is made, is most of it,
            in every implementation that is given out.
    """

    dtype: str
    true: Gradients
    of_out: Gradients

    def _verdict(self, found: Sequence[Tensor], factor: float) -> Verdict:
        limits = [factor * RELATIVE_ERROR[self.dtype] * (1 if t.numel() >= ELEMENTS_FOR_NORM else 2) for t in self.true]
        measured = [
            (errors(true, gradient)[0], errors(of_out, gradient)[1])
            for true, of_out, gradient in zip(self.true, self.of_out, found, strict=True)
        ]
        wrong = None
        for name, (relative, row), limit in zip(NAMES, measured, limits, strict=True):
            if not relative <= limit:
                wrong = wrong or f"relative error {relative:.2e} of {name} against float64, allowed {limit:.1e}"
            if not row <= ROW_FACTOR * limit:
                said = (
                    f"relative error {row:.2e} of one row of {name} against float64, allowed {ROW_FACTOR * limit:.1e}"
                )
                wrong = wrong or said
        by_name = {name: relative for name, (relative, _) in zip(NAMES, measured, strict=True)}
        return Verdict(max(by_name.values()), None, wrong, by_name)

    def ours(self, out: Sequence[Tensor]) -> Verdict:
        return self._verdict(out, 1)

    def peer(self, out: Sequence[Tensor]) -> Verdict:
        return self._verdict(out, PEER_FACTOR)
