"""Is an output right: float64 attention on a sample of rows, and the limits that an output has to keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# Rows that are checked: all of a small output, else this many spread over all heads, never fewer than MIN_ROWS a head.
SAMPLED_ROWS = 16384
MIN_ROWS = 64

# float64 numbers held at a time, of the scores and of the keys: 0.5 GB each.
CHUNK_ELEMENTS = 2**26

# What the project promises for normal inputs: ‖out − ref‖ / ‖ref‖ against float64.
RELATIVE_ERROR = {"float32": 1e-6, "float16": 3.5e-4, "bfloat16": 3e-3}

# Of fewer elements the error is a draw of the rounding rather than its mean, and may be twice as large.
ELEMENTS_FOR_NORM = 4096

# One row may be this much worse than the whole; a wrong tile makes it a thousand times worse.
ROW_FACTOR = 8

# A peer is only compared if it computes the same thing; it may round more often than we do.
PEER_FACTOR = 10

# Largest difference to SDPA at the start shapes. A causal output's first rows are single values of v, up to 5: there
# two units in the last place are more than that, and allowed.
SDPA_DIFFERENCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.6e-2}


class Sample(NamedTuple):
    """Rows of the true output; heads counts batch and head together."""

    rows: Tensor  # [heads, R], int64: which rows
    out: Tensor  # [heads, R, D], float64

    def errors(self, out: Tensor) -> tuple[float, float]:
        """(‖out − ref‖ / ‖ref‖ over the sample, the same of its worst row) of out [B, H, S, D]."""
        heads, _, d = self.out.shape
        picked = out.reshape(heads, -1, d).gather(1, self.rows[..., None].expand_as(self.out)).double()
        difference = picked - self.out
        rows = difference.norm(dim=-1) / self.out.norm(dim=-1)
        return float(difference.norm() / self.out.norm()), float(rows.max())


def sample(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool,
    generator: torch.Generator,
    *,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Sample:
    """softmax(q kᵀ / √D) v in float64 on q's device: in every head one random row of every stretch of S / R rows.

    q is [B, H, S, D]; k and v are [B, Hk, Sk, D], and each of their heads serves H / Hk neighbouring heads of q.
    window, softcap and sinks: as of dhp_safe_fa.attention.
    """
    left, right = window[0], 0 if is_causal else window[1]
    (b, h, s, d), sk = q.shape, k.size(2)
    heads, group = b * h, h // k.size(1)
    count = min(s, max(MIN_ROWS, SAMPLED_ROWS // heads))
    stretch = torch.arange(count, device=q.device) + torch.rand(
        heads, count, generator=generator, dtype=torch.float64, device=q.device
    )
    rows = (stretch * s / count).long().clamp(max=s - 1)
    queries, keys, values = (t.flatten(0, 1) for t in (q, k, v))
    out = torch.empty(heads, count, d, dtype=torch.float64, device=q.device)
    step = max(1, CHUNK_ELEMENTS // (max(count, d) * sk))
    for chunk in torch.arange(heads, device=q.device).split(step):
        picked = queries[chunk].gather(1, rows[chunk, :, None].expand(-1, -1, d)).double()
        scores = picked @ keys[chunk // group].double().mT * d**-0.5
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        ahead = torch.arange(sk, device=q.device) - rows[chunk, :, None]  # of the query's own place
        if right != -1:
            scores.masked_fill_(ahead > right, -torch.inf)
        if left != -1:
            scores.masked_fill_(ahead < -left, -torch.inf)
        if sinks is not None:
            of_head = sinks.double()[chunk % h][:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat([scores, of_head], dim=-1)
        out[chunk] = torch.softmax(scores, dim=-1)[..., :sk] @ values[chunk // group].double()
    return Sample(rows, out)


def sdpa_difference(out: Tensor, expected: Tensor) -> tuple[float, float]:
    """(largest absolute difference over the whole output, the limit for it)."""
    largest = float(expected.abs().max())
    limit = max(SDPA_DIFFERENCE[str(out.dtype).removeprefix("torch.")], 2 * torch.finfo(out.dtype).eps * largest)
    return float((out.float() - expected.float()).abs().max()), limit


class Verdict(NamedTuple):
    """
    Attributes:
        relative_error: over the sample; of several outputs the largest.
        max_abs_diff_sdpa: over the whole output; None if it was not asked.
        wrong: what is wrong, or None.
        errors: the relative error of each output by name, if there are several.
    """

    relative_error: float
    max_abs_diff_sdpa: float | None
    wrong: str | None
    errors: dict[str, float] | None = None


class Judge(Protocol):
    """Says whether outputs of one case on one set of inputs are right."""

    def ours(self, out: Any) -> Verdict:
        """By the limits that this project keeps; NaN is wrong."""

    def peer(self, out: Any) -> Verdict:
        """A peer has to compute the same thing, not as accurately."""


@dataclass(frozen=True)
class SampleJudge:
    """Of an output that is compared with a sample alone."""

    dtype: str
    true: Sample

    def ours(self, out: Tensor) -> Verdict:
        relative, worst_row = self.true.errors(out)
        limit = RELATIVE_ERROR[self.dtype] * (1 if self.true.out.numel() >= ELEMENTS_FOR_NORM else 2)
        wrong = None
        if not relative <= limit:
            wrong = f"relative error {relative:.2e} against float64, allowed {limit:.1e}"
        elif not worst_row <= ROW_FACTOR * limit:
            wrong = f"relative error {worst_row:.2e} of one row against float64, allowed {ROW_FACTOR * limit:.1e}"
        return Verdict(relative, None, wrong)

    def peer(self, out: Tensor) -> Verdict:
        relative, _ = self.true.errors(out)
        right = relative <= PEER_FACTOR * RELATIVE_ERROR[self.dtype]
        return Verdict(relative, None, None if right else f"relative error {relative:.2e}")


@dataclass(frozen=True)
class OutputJudge(SampleJudge):
    """Of the forward's output. expected: computes SDPA's output."""

    expected: Callable[[], Tensor]

    def ours(self, out: Tensor) -> Verdict:
        said = super().ours(out)
        difference, allowed = sdpa_difference(out, self.expected())
        wrong = None if difference <= allowed else f"differs from SDPA by {difference:.2e}, allowed {allowed:.1e}"
        return said._replace(max_abs_diff_sdpa=difference, wrong=said.wrong or wrong)
