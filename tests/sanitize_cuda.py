"""A few calls of every shipped kernel and their gradients, small enough for compute-sanitizer: run by `make sanitize`
on a Hopper GPU.

Odd lengths, causal and full, GQA, a query longer than its keys, fully masked rows, head dimensions that need zero fill,
rows of several key segments, windows.
Every output row must be right, or NaN from end to end: the tools slow the warps that load, now and then by more than
the kernel is willing to wait for a tile; it must then fail closed, never return wrong numbers. Every kernel must give a
right row at least once, but for those that racecheck, named as the argument, always slows too much. A second argument
is a part of the names of the kernels that are wanted; others run only beside them.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa import _inspect
from dhp_safe_fa.gates import sinks as sinks_of
from dhp_safe_fa.gates.families.packed import ASKED, Asked
from dhp_safe_fa.gates.families.packed import attend as attend_packed

# Under racecheck the CTAs of a cluster wait in vain for each other; at head_dim 128 fold has their parts alone.
FAILS_CLOSED = {"racecheck": ("dec_", "fold_float16_d128", "fold_bfloat16_d128")}

SHAPES = [  # B, Hq, Hk, Sq, Sk
    (1, 2, 2, 65, 129),
    (2, 4, 2, 130, 300),
    (1, 1, 1, 200, 40),
    (1, 4, 2, 3, 2000),
    (1, 66, 6, 100, 130),
    (1, 132, 12, 100, 130),
    (1, 132, 12, 192, 1500),
    (1, 8, 8, 1, 4200),
    (1, 2, 2, 65, 8300),
    (1, 2, 1, 3, 11000),  # more keys than a segment at any head_dim: split,
    (1, 132, 12, 100, 10500),  # and one after the other
]


class Call(NamedTuple):
    """q and k are shapes, v has that of k; dtype is torch's name."""

    q: tuple[int, int, int, int]
    k: tuple[int, int, int, int]
    dtype: str
    is_causal: bool
    causal_offset: int
    window_left: int = -1
    window_right: int = -1

    def packed_kernels(self, asked: Asked) -> list[str]:
        """Of those that serve it as packed sequences."""
        q, k = ((size[0] * size[2], size[1], size[3]) for size in (self.q, self.k))
        lengths = self.q[0], self.q[2], self.k[2]
        plan = _inspect.plan_packed(q, k, self.dtype, *lengths, asked.softcap or 0.0, asked.has_sinks)
        return ["tiles", *([str(plan["kernel"])] if plan else [])]

    def forward_kernels(self) -> list[str]:
        """Names of the shipped kernels that serve it: one, and where that makes parts of rows, one that folds them."""
        plan = _inspect.plan(*self)
        assert plan is not None
        by_name = {str(kernel["name"]): kernel for kernel in _inspect.kernels()}
        name = str(plan["kernel"])
        folds = [
            fold
            for fold, kernel in by_name.items()
            if kernel["family"] == "fold" and all(kernel[of] == by_name[name][of] for of in ("dtype", "head_dim"))
        ]
        return [name, *(folds if plan["splits"] > 1 else ())]

    @property
    def is_windowed(self) -> bool:
        return (self.window_left, self.window_right) != (-1, -1)

    @property
    def mask(self) -> dict[str, object]:
        window = (self.window_left, self.window_right)
        return {"is_causal": self.is_causal, "causal_offset": self.causal_offset, "window": window}

    def backward_kernels(self) -> list[str]:
        """Of its gradients, with dq and without; within a window it has none."""
        if self.is_windowed:
            return []
        backward = [launch for need in (True, False) for launch in _inspect.plan_backward(*self[:5], need_dq=need)]
        return list(dict.fromkeys(str(launch["kernel"]) for launch in backward))

    def kernels(self) -> list[str]:
        return [*self.forward_kernels(), *self.backward_kernels()]


def calls() -> Iterator[Call]:
    for dtype, d in itertools.product(("float16", "bfloat16"), (64, 56, 128, 72, 256, 200)):
        for b, hq, hk, sq, sk in SHAPES:
            for is_causal, offset in ((False, 0), (True, 0), (True, sk - sq), (True, -70)):
                yield Call((b, hq, sq, d), (b, hk, sk, d), dtype, is_causal, offset)
            if sk <= 2000:  # a decoding step's window ends with the last key
                yield Call((b, hq, sq, d), (b, hk, sk, d), dtype, True, max(0, sk - sq), min(90, sk // 2), 0)
                yield Call((b, hq, sq, d), (b, hk, sk, d), dtype, False, max(0, sk - sq), 10, 40)


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """q kᵀ / √D, [B, Hq, Sq, Sk]. Rows of the heads that share keys are rows of one product: no key is copied."""
    rows = q.unflatten(1, (k.size(1), -1)).flatten(2, 3)
    return (rows @ k.transpose(2, 3) * q.size(3) ** -0.5).unflatten(2, (-1, q.size(2))).flatten(1, 2)


def rows_of(probabilities: Tensor, v: Tensor) -> Tensor:
    """P v, likewise."""
    rows = probabilities.unflatten(1, (v.size(1), -1)).flatten(2, 3)
    return (rows @ v).unflatten(2, (-1, probabilities.size(2))).flatten(1, 2)


def expected(
    q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, is_causal: bool, causal_offset: int, window: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention in float32 and the gradients of q, k and v; rows that see no key are 0."""
    leaves = query, key, value = [t.float().requires_grad_() for t in (q, k, v)]
    scores = scores_of(query, key)
    if is_causal or window != (-1, -1):
        row, column = (torch.arange(n, device=q.device) for n in (q.size(2), k.size(2)))
        ahead = column - row[:, None] - causal_offset
        right = 0 if is_causal else window[1]
        hidden = (ahead > right if right >= 0 else False) | (ahead < -window[0] if window[0] >= 0 else False)
        # finite, so that the gradient of a row without keys is 0 and not NaN
        scores = scores.masked_fill(hidden, torch.finfo(torch.float32).min)
        probabilities = scores.softmax(3).masked_fill(hidden, 0.0)
    else:
        probabilities = scores.softmax(3)
    out = rows_of(probabilities, value)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad_out.float())
    return out.detach(), dq, dk, dv


def with_form(
    q: Tensor, k: Tensor, v: Tensor, is_causal: bool, softcap: float | None, sinks: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention and lse in float32, aligned at the top left, with sinks and perhaps a soft cap."""
    scores = scores_of(q.float(), k.float())
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    row, column = (torch.arange(n, device=q.device) for n in (q.size(2), k.size(2)))
    scores = scores.masked_fill(column > row[:, None], -torch.inf) if is_causal else scores
    scores = torch.cat([scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)], dim=3)
    return rows_of(scores.softmax(3)[..., :-1], v.float()), scores.logsumexp(3)


def check_packed(call: Call, asked: Asked, inputs: tuple[Tensor, ...], out: Tensor, lse: Tensor) -> bool:
    """Whether not all rows failed closed. out, lse: of the call without a form."""
    sinks = torch.randn(call.q[1], device="cuda") * 3
    given = sinks_of.beside(inputs, sinks) if asked.has_sinks else inputs
    packed_out, packed_lse = attend_packed(given, call.is_causal, softcap=asked.softcap)
    gone = packed_out.isnan().all(3) & packed_lse.isnan()
    if asked.has_sinks:
        q, k, v = inputs
        true, true_lse = with_form(q, k, v, call.is_causal, asked.softcap, sinks)
        is_near = (packed_out - true).abs().amax(3) <= 0.05 * max(1.0, float(true.abs().max()))  # not so of NaN
        differs = ~(is_near & ((packed_lse - true_lse).abs() <= 0.05))
    else:
        lost = out.isnan().all(3) & lse.isnan()
        differs = ((packed_out != out).any(3) | (packed_lse != lse)) & ~lost
    assert not bool((differs & ~gone).any()), f"wrong packed rows: {call} {asked}"
    return not bool(gone.all())


def main(tool: str, wanted: str) -> None:
    slowed = FAILS_CLOSED.get(tool)
    names = [str(kernel["name"]) for kernel in _inspect.kernels() if wanted in str(kernel["name"])]
    right = dict.fromkeys(names, 0)  # calls with right rows, by kernel
    closed = 0
    for call in calls():
        is_packed = not call.is_windowed and not (call.is_causal and call.causal_offset)  # there rows have other places
        launched = {asked: call.packed_kernels(asked) for asked in (ASKED.values() if is_packed else ())}
        if not right.keys() & {*call.kernels(), *(name for some in launched.values() for name in some)}:
            continue
        dtype = getattr(torch, call.dtype)
        q, grad_out = torch.randn(2, *call.q, device="cuda").to(dtype)
        k, v = torch.randn(2, *call.k, device="cuda").to(dtype)
        mask = {"is_causal": call.is_causal, "causal_offset": call.causal_offset}
        out, lse = dhp_safe_fa.attention_lse(q, k, v, **call.mask)
        true_out, *true_gradients = expected(q, k, v, grad_out, **call.mask)
        lost = out.isnan().all(3) & lse.isnan()
        forward_failed = bool(lost.any())
        gradients: tuple[Tensor, ...] = ()
        if not forward_failed and right.keys() & {*call.backward_kernels()}:  # else its gradients are NaN, too
            inputs = grad_out, q, k, v, out, lse
            without_dq = torch.ops.dhp.attention_backward(*inputs, **mask, need_dq=False)[1:]
            gradients = (*torch.ops.dhp.attention_backward(*inputs, **mask), *without_dq)
            true_gradients += true_gradients[1:]
        failed = [lost, *(t.isnan().all(3) for t in gradients)]
        names = ("out", "dq", "dk", "dv", "dk without dq", "dv without dq")
        founds, trues = (out, *gradients), (true_out, *true_gradients)
        for name, found, true, gone in zip(names, founds, trues, failed, strict=False):
            # 16-bit P and dS: errors of a sum grow with its terms
            wrong = (found - true).abs().amax(3) > 0.05 * max(1.0, float(true.abs().max()))
            assert not bool(((wrong | found.isnan().any(3)) & ~gone).any()), f"wrong rows of {name}: {call}"
        finished = not any(bool(gone.all()) for gone in failed)
        for kernel in right.keys() & {*(call.forward_kernels() if forward_failed else call.kernels())}:
            right[kernel] += finished
        for asked, kernels in launched.items():
            if right.keys() & {*kernels}:
                is_right = check_packed(call, asked, (q, k, v), out, lse)
                for kernel in right.keys() & {*kernels}:
                    right[kernel] += is_right
        closed += any(bool(gone.any()) for gone in failed)
    missing = [kernel for kernel, count in right.items() if count == 0 and not (slowed and kernel.startswith(slowed))]
    assert not missing, f"these kernels gave no right row: {missing}"
    print(f"{len(right)} kernels ran, no row wrong; calls with rows that failed closed: {closed}")


if __name__ == "__main__":
    main(*(*sys.argv[1:3], "", "")[:2])
