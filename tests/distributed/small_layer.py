"""Causal self-attention over eight query heads and four key heads, as a model of plain torch that is given DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import training
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import Trained

import dhp_safe_fa
import dhp_safe_fa.integrations.dtensor

WIDTH, KEY_WIDTH, HEAD_DIM = 64, 32, 8
STEP = ["attention_lse", "attention_backward"]  # calls of the operators in a training step


class Layer(torch.nn.Module):
    """[B, S, WIDTH] to [B, S, WIDTH], by dhp_safe_fa.attention or by torch's SDPA."""

    def __init__(self, sdpa: bool = False) -> None:
        super().__init__()
        self.q, self.o = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.k, self.v = torch.nn.Linear(WIDTH, KEY_WIDTH), torch.nn.Linear(WIDTH, KEY_WIDTH)
        self.sdpa = sdpa

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (project(x).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for project in (self.q, self.k, self.v))
        if self.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = dhp_safe_fa.attention(q, k, v, is_causal=True)
        found: torch.Tensor = self.o(out.transpose(1, 2).flatten(-2))
        return found


def train(mesh: DeviceMesh | None, sdpa: bool = False, each_step: Callable[[int], object] = lambda _: None) -> Trained:
    """In one process, or tensor parallel over the mesh; each_step is called before every step, with its number."""
    torch.manual_seed(0)
    layer = Layer(sdpa)
    if mesh is not None:
        plan: dict[str, Any] = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
        parallelize_module(layer, mesh, plan | {"o": RowwiseParallel()})
    x = torch.randn(3, 21, WIDTH)

    def loss(step: int) -> torch.Tensor:
        each_step(step)
        return F.mse_loss(layer(x), x.roll(1, dims=1) / 10)

    return training.train(layer, loss)
