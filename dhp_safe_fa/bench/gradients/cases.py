"""The backward pass as a case: what it reads, how much work it is, what is right; and a training step, which is the
forward pass and the backward pass in one call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa.bench import cases, reference
from dhp_safe_fa.bench.cases import Case, CaseSet, Inputs
from dhp_safe_fa.bench.gradients.reference import GradientJudge, gradients_and_those_of

# The shortest length of the forward's sweep is not among the anchors of the backward.
SHORTEST = 1024


class BackwardCase(Case):
    """The gradients of attention by q, k and v, given that of its output. Beside the forward's attributes:

    q, k, v, out, lse and grad_out are read; dq, dk and dv are written. S and P are computed again, and dP, dq, dk and
    dv: five products where the forward has two.
    """

    direction: ClassVar[str] = "backward"
    products: ClassVar[int] = 5
    repeats: ClassVar[int] = 10

    @property
    def input_bytes(self) -> int:
        """q, k, v, out, grad_out and lse, which is float32."""
        queries = math.prod(self.shape)
        elements = 3 * queries + 2 * math.prod(self.key_shape)
        return elements * self.torch_dtype.itemsize + queries // self.head_dim * torch.float32.itemsize

    @property
    def bytes(self) -> int:
        """All inputs and dq, dk and dv, each moved once."""
        written = math.prod(self.shape) + 2 * math.prod(self.key_shape)
        return self.input_bytes + written * self.torch_dtype.itemsize

    def draw(self, device: str, generator: torch.Generator, layout: str) -> Inputs:
        """q, k, v, out, lse and grad_out: normal numbers, and what this project's forward makes of them."""
        q, k, v = super().draw(device, generator, layout)
        grad_out = self.normal(self.shape, device, generator, layout)
        out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=self.causal)
        return q, k, v, out, lse, grad_out

    def bind(self, attend: Callable[..., Any], inputs: Inputs) -> Callable[[], Any]:
        """attend prepares the call (peers.Prepare), at the first call: it may refuse."""
        prepared: list[Callable[[], Any]] = []

        def call() -> Any:
            if not prepared:
                prepared.append(attend(*inputs, self.causal))
            return prepared[0]()

        return call

    def judge(self, inputs: Inputs, generator: torch.Generator) -> reference.Judge:
        q, k, v, out, _, grad_out = inputs
        return _judge(self, q, k, v, out, grad_out)


class TrainingCase(BackwardCase):
    """Forward and backward through torch's autograd, as a model calls them: seven products."""

    direction: ClassVar[str] = "training"
    products: ClassVar[int] = 7

    @property
    def input_bytes(self) -> int:
        """q, k, v and grad_out."""
        return (2 * math.prod(self.shape) + 2 * math.prod(self.key_shape)) * self.torch_dtype.itemsize

    @property
    def bytes(self) -> int:
        """The backward's, and what the forward moves: out and lse are written and read."""
        return super().bytes + math.prod(self.shape) * self.torch_dtype.itemsize

    def draw(self, device: str, generator: torch.Generator, layout: str) -> Inputs:
        """q, k and v, which require grad, and grad_out."""
        q, k, v = (tensor.requires_grad_() for tensor in Case.draw(self, device, generator, layout))
        return q, k, v, self.normal(self.shape, device, generator, layout)

    def bind(self, attend: Callable[..., Tensor], inputs: Inputs) -> Callable[[], Any]:
        """attend: the forward's (bench.peers.Attend)."""
        q, k, v, grad_out = inputs
        return lambda: torch.autograd.grad(attend(q, k, v, self.causal), (q, k, v), grad_out)

    def judge(self, inputs: Inputs, generator: torch.Generator) -> reference.Judge:
        q, k, v, grad_out = (tensor.detach() for tensor in inputs)
        return _judge(self, q, k, v, dhp_safe_fa.attention(q, k, v, is_causal=self.causal), grad_out)


def _judge(case: Case, q: Tensor, k: Tensor, v: Tensor, out: Tensor, grad_out: Tensor) -> reference.Judge:
    return GradientJudge(case.dtype, *gradients_and_those_of(out, q, k, v, grad_out, case.causal))


def anchor_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """The rows of the backward's anchors: the sweep without its shortest length; without dtypes in bfloat16."""
    found = cases.sweep_cases(dtypes or ["bfloat16"], device, quick)
    return [case for case in found if case.seqlen >= SHORTEST]


SETS: Mapping[str, CaseSet] = {**cases.SETS, "anchors": anchor_cases}
