"""Are packed sequences right: each by itself against float64 attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dhp_safe_fa.bench.reference import OutputJudge, Sample, Verdict, sample


def packed_sample(
    q: Tensor, k: Tensor, v: Tensor, seqlens: Sequence[int], is_causal: bool, generator: torch.Generator
) -> Sample:
    """``sample`` of every sequence, as rows of [H, tokens, D]. q is [tokens, H, D]; k and v are [tokens, Hk, D]."""
    heads_first = (tensor.transpose(0, 1)[None].split(list(seqlens), dim=2) for tensor in (q, k, v))
    rows, outs, first = [], [], 0
    for one_q, one_k, one_v in zip(*heads_first, strict=True):
        found = sample(one_q, one_k, one_v, is_causal, generator)
        rows.append(first + found.rows)
        outs.append(found.out)
        first += one_q.size(2)
    return Sample(torch.cat(rows, dim=1), torch.cat(outs, dim=1))


class PackedJudge(OutputJudge):
    """Of [tokens, H, D]; expected and true are of [H, tokens, D]."""

    def ours(self, out: Tensor) -> Verdict:
        return super().ours(out.transpose(0, 1))

    def peer(self, out: Tensor) -> Verdict:
        return super().peer(out.transpose(0, 1))
