"""Attention in float64, written for the eye, and how far the operator may be from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Unit roundoff: the largest relative error of one rounding to nearest.
FLOAT32_ROUNDOFF = 2.0**-24
ROUNDOFF = {
    torch.float64: 2.0**-53,
    torch.float32: FLOAT32_ROUNDOFF,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
}

# Half of the smallest subnormal: the absolute error of a rounding that underflows.
UNDERFLOW = {torch.float64: 2.0**-1075, torch.float32: 2.0**-150, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-134}

# Promised for standard normal inputs: ||out - ref|| / ||ref|| against float64.
RELATIVE_ERROR = {torch.float32: 1e-6, torch.float16: 3.5e-4, torch.bfloat16: 3e-3}

# The same for each of dq, dk and dv, of 1024 rows and head_dim 4 and more; and of fewer rows, where those that see few
# keys weigh more: what is left of their dP - delta after cancellation has the rounding of out.
RELATIVE_GRADIENT_ERROR = {torch.float32: 2e-6, torch.float16: 3.3e-4, torch.bfloat16: 2.6e-3}
RELATIVE_GRADIENT_ERROR_OF_FEW = {torch.float32: 2e-6, torch.float16: 3.8e-4, torch.bfloat16: 3e-3}

# Below this many elements the norm of the error is one draw of the rounding, not its mean.
ELEMENTS_FOR_NORM = 4096

# Rows that the reference computes together: what a CPU's cache holds, and what keeps a GPU busy.
BLOCK = {"cpu": 64, "cuda": 512}


class Reference(NamedTuple):
    """float64 results and, per element or row, the magnitudes that rounding errors scale with."""

    out: Tensor  # [B, Hq, Sq, Dv]
    lse: Tensor  # [B, Hq, Sq]
    magnitude: Tensor  # [B, Hq, Sq, Dv]: sum_j p_j |v_j|
    tail: Tensor  # [B, Hq, Sq, Dv]: sum_j |v_j| / sum_j exp(s_j - max s), what underflowing p_j scale with
    score_magnitude: Tensor  # [B, Hq, Sq]: scale * sum_d |q_d| max_j |k_jd|, no score's terms add up to more
    keys: int  # Sk
    softcap: float = 0.0  # 0: none

    def score_error(self, of_products: float) -> Tensor:
        """[B, Hq, Sq]: of float32 scores, given what is lost of their magnitude; a soft cap's tangent loses 2 ulp."""
        return FLOAT32_ROUNDOFF * (of_products * self.score_magnitude + 8 * self.softcap)


class Mask(NamedTuple):
    """Query i may see key j iff lowest <= j - i <= highest: what csrc/mask.h describes, by itself."""

    lowest: float = -math.inf
    highest: float = math.inf

    @classmethod
    def of_call(cls, is_causal: bool, causal_offset: int, window: tuple[int, int] = (-1, -1)) -> Mask:
        left, right = (math.inf if side == -1 else side for side in window)
        return cls(causal_offset - left, causal_offset + min(right, 0 if is_causal else math.inf))


def visible_keys(row: int, sk: int, mask: Mask) -> range:
    """The keys that query `row` may see."""
    first, last = (int(min(max(row + end, 0), sk)) for end in (mask.lowest, mask.highest + 1))
    return range(first, max(first, last))


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int = 0,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
    mask: Mask | None = None,
) -> Reference:
    """softmax(scale * q k^T) v over the visible keys alone, and its log-sum-exp, in float64 on q's device.

    `mask` takes the place of is_causal, causal_offset and window. A row without a key: out 0, lse its head's sink, or
    -inf. NaN and Inf take the course of IEEE arithmetic, so a row whose scores are all -inf is NaN with lse -inf, and a
    score of +inf gives NaN with lse +inf.
    """
    (_, hq, sq, d), sk = q.shape, k.shape[2]
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    mask = Mask.of_call(is_causal, causal_offset, window) if mask is None else mask
    group = hq // k.shape[1]
    q = q.double()
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    sink = torch.full([hq], -math.inf).to(q) if sinks is None else sinks.double()
    sink = sink[None, :, None, None]
    zeros = q.new_zeros(*q.shape[:3], v.shape[3])
    result = Reference(
        out=zeros,
        lse=sink[..., 0].expand(q.shape[:3]).clone(),
        magnitude=zeros.clone(),
        tail=zeros.clone(),
        score_magnitude=torch.zeros_like(q[..., 0]),
        keys=sk,
        softcap=softcap or 0.0,
    )
    if sk == 0 or q.numel() == 0:
        return result

    v_abs = v.abs()
    # Of the keys before each; what is not finite is left out, since it would spoil the differences behind it.
    v_abs_sums = torch.nn.functional.pad(v_abs.masked_fill(~v_abs.isfinite(), 0.0).cumsum(dim=2), (0, 0, 1, 0))
    q_abs, k_abs = (t.abs().masked_fill(~t.isfinite(), 0.0) for t in (q, k))
    result.score_magnitude.copy_(scale * (q_abs * k_abs.amax(dim=2, keepdim=True)).sum(dim=-1))
    # 0 * NaN is NaN: beside non-finite values rows that see different keys are computed apart, each with exactly
    # its own keys instead of zero weights.
    block = BLOCK[q.device.type] if mask == Mask() or bool(v.isfinite().all()) else 1
    for first in range(0, sq, block):
        rows = slice(first, min(first + block, sq))
        ranges = [visible_keys(i, sk, mask) for i in range(rows.start, rows.stop)]
        if not any(ranges):
            continue
        seen = slice(min(keys.start for keys in ranges if keys), max(keys.stop for keys in ranges if keys))
        starts = torch.tensor([keys.start for keys in ranges], device=q.device)
        stops = torch.tensor([keys.stop for keys in ranges], device=q.device)
        keys = torch.arange(seen.start, seen.stop, device=q.device)
        hidden = (keys < starts[:, None]) | (keys >= stops[:, None])
        scores = scale * (q[:, :, rows] @ k[:, :, seen].mT)
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        top = torch.maximum(scores.masked_fill_(hidden, -math.inf).amax(dim=-1, keepdim=True), sink)
        p = scores.sub_(top).exp_()
        total = p.sum(dim=-1, keepdim=True) + (sink - top).exp().nan_to_num(0.0 if sinks is None else math.nan)
        # An infinite maximum is the log-sum-exp; subtracting it from itself has made NaN of the sum.
        lse = torch.where(top.isinf(), top, top + total.log())
        # A row without a key has NaN weights here; it keeps its zeros.
        keyless = (starts == stops)[:, None]
        lse = torch.where(keyless, sink, lse)
        result.out[:, :, rows] = (p @ v[:, :, seen] / total).masked_fill_(keyless, 0.0)
        result.lse[:, :, rows] = lse[..., 0]
        result.magnitude[:, :, rows] = (p @ v_abs[:, :, seen] / total).masked_fill_(keyless, 0.0)
        v_abs_seen = v_abs_sums[:, :, stops] - v_abs_sums[:, :, starts]
        result.tail[:, :, rows] = (v_abs_seen / total).masked_fill_(keyless, 0.0)
    return result


def assert_matches(out: Tensor, lse: Tensor, ref: Reference, head_dim: int | None = None) -> None:
    """Every element of out and lse is within the rounding error that its own inputs allow; NaN and Inf are in place.

    head_dim: of q, where v has another one.
    out: one rounding of the result and two of the probabilities (numerator, sum) to the input dtype; exponentials,
    sums and scores in float32, with room for hardware approximations of 2^-22.
    """
    u = ROUNDOFF[out.dtype]
    head_dim = out.shape[3] if head_dim is None else head_dim
    # Error of one float32 score: a random walk over head_dim products and four roundings of the scaled score.
    delta = ref.score_error(4 + 2 * math.sqrt(head_dim))
    relative = 2 * u + 2 * torch.expm1(delta)[..., None] + FLOAT32_ROUNDOFF * (32 + 2 * math.sqrt(ref.keys))
    underflow = UNDERFLOW[out.dtype] * (1 + ref.tail)
    _assert_within("out", out, ref.out, u * ref.out.abs() + relative * ref.magnitude + underflow)
    _assert_within("lse", lse, ref.lse, 2e-5 * ref.lse.abs().clamp(min=1.0) + delta)


def _assert_within(name: str, got: Tensor, want: Tensor, bound: Tensor) -> None:
    finite = want.isfinite()
    wide = got.double()
    same = torch.where(finite, (wide - want).abs() <= bound, (wide == want) | (wide.isnan() & want.isnan()))
    if not bool(same.all()):
        where = tuple(int(i) for i in (~same).nonzero()[0])
        raise AssertionError(
            f"{name}: {int((~same).sum())} of {same.numel()} elements are wrong; the first at {where}: "
            f"got {float(wide[where])!r}, want {float(want[where])!r} within {float(bound[where]):.3g}"
        )


def assert_accurate(out: Tensor, lse: Tensor, ref: Reference) -> None:
    """assert_matches, and the promised relative error of the whole tensor. For standard normal q, k, v."""
    assert_matches(out, lse, ref)
    assert out.numel() >= ELEMENTS_FOR_NORM, "too few elements for the norm of the error to mean anything"
    error = float((out.double() - ref.out).norm() / ref.out.norm())
    assert error <= RELATIVE_ERROR[out.dtype], f"relative error {error:.3g} against float64"


# ---- gradients ------------------------------------------------------------------------------------------------------


class ReferenceGradients(NamedTuple):
    """float64, of the shapes of q, k and v; and how far rounding may take each element."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    bounds: tuple[Tensor, Tensor, Tensor]


def reference_gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int = 0,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> ReferenceGradients:
    """Those of reference(), row by row over exactly the visible keys, so that nothing crosses the mask.

    Rounding: of probabilities, of their gradients and of out (in delta) to the dtype of the inputs; of scores, sums and
    exponentials to float32. Each is relative to the terms of a sum, not to the sum, in which they may cancel.
    """
    (_, _, sq, d), sk, dtype = q.shape, k.shape[2], q.dtype
    scale = 1.0 / math.sqrt(d) if scale is None else scale
    mask = Mask.of_call(is_causal, causal_offset, window)
    expected = reference(q, k, v, scale=scale, mask=mask, softcap=softcap, sinks=sinks)
    group = q.shape[1] // k.shape[1]
    q, grad_out = q.double(), grad_out.double()
    keys, values = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    grad_lse = torch.zeros_like(expected.lse) if grad_lse is None else grad_lse.double()
    delta = (grad_out * expected.out).sum(dim=-1) - grad_lse
    delta_terms = (grad_out * expected.out).abs().sum(dim=-1) + grad_lse.abs()

    float32 = min(FLOAT32_ROUNDOFF, ROUNDOFF[dtype])
    score_error = float32 / FLOAT32_ROUNDOFF * expected.score_error(8 + 4 * math.sqrt(d))
    relative = 3 * ROUNDOFF[dtype] + 2 * torch.expm1(score_error) + float32 * (64 + 2 * math.sqrt(d + max(sq, sk)))
    smallest = max(UNDERFLOW[dtype], 2.0**-126)  # the CPU takes subnormal float32 numbers for zero

    dq, dk, dv = found = [torch.zeros_like(t) for t in (q, keys, values)]
    dq_bound, dk_bound, dv_bound = bounds = [torch.zeros_like(t) for t in found]
    for row in range(sq):
        visible = visible_keys(row, sk, mask)
        if not visible:
            continue
        seen, one = slice(visible.start, visible.stop), slice(row, row + 1)
        q_row, g_row, k_seen, v_seen = q[:, :, one], grad_out[:, :, one], keys[:, :, seen], values[:, :, seen]
        lse = expected.lse[:, :, one, None]
        # A score was +inf, or all were -inf: softmax of the row is NaN.
        scores = scale * (q_row @ k_seen.mT)
        tangent = torch.tanh(scores / softcap) if softcap else torch.zeros_like(scores)
        p = ((softcap * tangent if softcap else scores) - lse).exp().masked_fill(~lse.isfinite(), math.nan)
        ds = scale * p * (g_row @ v_seen.mT - delta[:, :, one, None]) * (1 - tangent**2)
        dv[:, :, seen] += p.mT * g_row
        dk[:, :, seen] += ds.mT * q_row
        dq[:, :, one] = ds @ k_seen

        terms = g_row.abs() @ v_seen.abs().mT + delta_terms[:, :, one, None]
        p_error = relative[:, :, one, None] * p + smallest
        slope_error = 2 * score_error[:, :, one, None] / softcap + 8 * float32 if softcap else 0.0
        ds_error = scale * (p_error + slope_error * p) * terms + smallest
        dv_bound[:, :, seen] += p_error.mT * g_row.abs()
        dk_bound[:, :, seen] += ds_error.mT * q_row.abs()
        dq_bound[:, :, one] = ds_error @ k_seen.abs()
    for tensors in (found, bounds):
        tensors[1:] = [t.unflatten(1, (k.shape[1], group)).sum(dim=2) for t in tensors[1:]]
    for gradient, bound in zip(found, bounds, strict=True):
        bound += ROUNDOFF[dtype] * gradient.abs() + smallest
    return ReferenceGradients(found[0], found[1], found[2], (bounds[0], bounds[1], bounds[2]))


def reference_sinks_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """[Hq], float64: the gradient of sinks for those of attention_lse's results; and how far rounding may take it.

    Options are those of :func:`reference`. A row of lse -inf, which has no sink either, adds nothing.
    """
    expected = reference(q, k, v, sinks=sinks, **options)
    grad_out, dtype = grad_out.double(), q.dtype
    grad_lse = torch.zeros_like(expected.lse) if grad_lse is None else grad_lse.double()
    p = (sinks.double()[:, None] - expected.lse).exp()
    rows = p * (grad_lse - (grad_out * expected.out).sum(dim=-1))

    # As of a probability, and of out in delta.
    float32 = min(FLOAT32_ROUNDOFF, ROUNDOFF[dtype])
    score_error = float32 / FLOAT32_ROUNDOFF * expected.score_error(8 + 4 * math.sqrt(q.shape[3]))
    relative = 3 * ROUNDOFF[dtype] + 2 * torch.expm1(score_error)
    relative = relative + float32 * (64 + 2 * expected.lse.abs() + 2 * math.sqrt(v.shape[3] + k.shape[2]))
    bound = p * relative * ((grad_out.abs() * expected.magnitude).sum(dim=-1) + grad_lse.abs())
    is_empty = expected.lse == -math.inf
    return tuple(t.masked_fill(is_empty, 0.0).sum(dim=(0, 2)) for t in (rows, bound))  # type: ignore[return-value]


def assert_sinks_gradient_matches(got: Tensor, want: tuple[Tensor, Tensor]) -> None:
    """Within the rounding error that its own inputs allow; NaN and Inf are in place."""
    _assert_within("dsinks", got, want[0], want[1] + ROUNDOFF[got.dtype] * want[0].abs())


def assert_gradients_match(got: Sequence[Tensor], want: ReferenceGradients) -> None:
    """Every element is within the rounding error that its own inputs allow; NaN and Inf are in place."""
    for name, gradient, expected, bound in zip(("dq", "dk", "dv"), got, want[:3], want.bounds, strict=True):
        _assert_within(name, gradient, expected, bound)


def assert_gradients_accurate(got: Sequence[Tensor], want: ReferenceGradients) -> None:
    """The same, and the promised relative error of each. For standard normal inputs."""
    assert_gradients_match(got, want)
    for name, gradient, expected in zip(("dq", "dk", "dv"), got, want[:3], strict=True):
        assert gradient.numel() >= ELEMENTS_FOR_NORM, "too few elements for the norm of the error to mean anything"
        error = float((gradient.double() - expected).norm() / expected.norm())
        few = min(t.size(2) for t in got) < 1024
        promised = (RELATIVE_GRADIENT_ERROR_OF_FEW if few else RELATIVE_GRADIENT_ERROR)[gradient.dtype]
        assert error <= promised, f"{name}: relative error {error:.3g} against float64"
