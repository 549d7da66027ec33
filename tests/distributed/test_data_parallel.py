"""Data parallelism, FSDP2 and DDP: attention has the bits of one process that computes the whole batch, and training
ends in the same parameters in every run. Sums of gradients round otherwise with the number of ranks."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
import small_llama
import torch
import torch.distributed as dist
from recorded import assert_as_one_process
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import init_device_mesh
from training import Trained, assert_same_training, twice

RANKS = 2
# Calls of a step in which the forward of a layer is computed again before its backward.
STEP_OF_CHECKPOINTS = ["attention_lse", "attention_lse", *("attention_lse", "attention_backward") * 2]


def part() -> slice:
    """This rank's rows of the batch."""
    each = small_llama.BATCH // RANKS
    return slice(dist.get_rank() * each, (dist.get_rank() + 1) * each)


def train_fsdp() -> Trained:
    model, mesh = small_llama.make(), init_device_mesh("cpu", (RANKS,))
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh)
    return small_llama.train(model, part())


def train_fsdp_in_bfloat16() -> Trained:
    """Parameters in float32, products in bfloat16, and each layer a checkpoint."""
    model, mesh = small_llama.make(), init_device_mesh("cpu", (RANKS,))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model.model.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in model.model.layers)
    for layer in (*model.model.layers, model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    return small_llama.train(model, part())


def train_ddp() -> Trained:
    return small_llama.train(torch.nn.parallel.DistributedDataParallel(small_llama.make()), part())


def both() -> list[Trained]:
    return [twice(train_fsdp), twice(train_ddp)]


def test_fsdp_and_ddp(tmp_path: Path) -> None:
    alone = small_llama.train(small_llama.make())
    for trained in zip(*launch.run(both, RANKS, tmp_path), strict=True):
        assert_as_one_process([rank.calls for rank in trained], 0, small_llama.STEP)
        assert_same_training(list(trained), alone, 1e-5)


@pytest.mark.long
def test_fsdp_in_bfloat16_with_checkpoints(tmp_path: Path) -> None:
    trained = launch.run(twice, RANKS, tmp_path, train_fsdp_in_bfloat16)
    assert {call.results[0].dtype for rank in trained for call in rank.calls} == {torch.bfloat16}
    assert_as_one_process([rank.calls for rank in trained], 0, STEP_OF_CHECKPOINTS)
    assert_same_training(trained, small_llama.train(small_llama.make()), 3e-2)
