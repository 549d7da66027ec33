"""When greedy tokens count as the same."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def assert_same_tokens(found: Sequence[int], best: Sequence[int], scores: Sequence[Tensor]) -> None:
    """Up to where two are all but equal: rounding chooses between them, and later tokens follow from that.

    Args:
        found: tokens of one text.
        best: those that they should be, the best of
        scores: [vocabulary] for each.
    """
    for token, expected, of_step in zip(found, best, scores, strict=True):
        if token != expected:
            assert of_step[expected] - of_step[token] < 1e-4, "another token, and not by a hair"
            break
