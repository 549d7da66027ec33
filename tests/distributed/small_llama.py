"""A small Llama with random weights, and text that it can learn."""

from __future__ import annotations

from typing import Any

import torch
import training
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from training import Trained
from transformers import LlamaConfig, LlamaForCausalLM

import dhp_safe_fa.integrations.transformers

BATCH, LENGTH, VOCABULARY = 4, 33, 64
CONFIG: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,  # two of them share a key head, and each of four ranks has a key head
    "num_key_value_heads": 4,
    "max_position_embeddings": 128,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Calls of the operators in a training step.
STEP = ["attention_lse", "attention_lse", "attention_backward", "attention_backward"]


def make() -> LlamaForCausalLM:
    """The same weights whenever it is called."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        name = dhp_safe_fa.integrations.transformers.NAME
        return LlamaForCausalLM(LlamaConfig(**CONFIG, attn_implementation=name))


def make_parallel(mesh: DeviceMesh) -> LlamaForCausalLM:
    """Each rank of the mesh has a part of the heads, as plain tensors, and of the columns of the MLP."""
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    rows = ("self_attn.o_proj", "mlp.down_proj")
    model = make()
    for layer in model.model.layers:
        plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
        parallelize_module(layer, mesh, plan | {name: RowwiseParallel() for name in rows})
    return model


def text(step: int) -> torch.Tensor:
    """int64 [BATCH, LENGTH]: counting by one, two or three, which can be learned."""
    rng = torch.Generator().manual_seed(step)
    first = torch.randint(VOCABULARY, (BATCH, 1), generator=rng)
    return (first + torch.arange(LENGTH) * torch.randint(1, 4, (BATCH, 1), generator=rng)) % VOCABULARY


def train(model: torch.nn.Module, rows: slice = slice(None)) -> Trained:
    """On these rows of every batch."""

    def loss(step: int) -> torch.Tensor:
        ids = text(step)[rows]
        found: torch.Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return found

    return training.train(model, loss)
