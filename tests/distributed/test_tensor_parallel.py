"""Tensor parallelism: attention has the bits of one process, results and gradients, and training ends in the same
parameters in every run. The sums of row-parallel layers round otherwise with the number of ranks."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
import small_layer
import small_llama
import torch
import torch.distributed as dist
from harness import same_bits
from recorded import assert_as_one_process
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
from training import Trained, assert_same_parameters, assert_same_training, twice

import dhp_safe_fa


def train_llama() -> Trained:
    return small_llama.train(small_llama.make_parallel(init_device_mesh("cpu", (dist.get_world_size(),))))


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_llama(ranks: int, tmp_path: Path) -> None:
    trained = launch.run(twice, ranks, tmp_path, train_llama)
    assert_as_one_process([rank.calls for rank in trained], 1, small_llama.STEP)
    alone = small_llama.train(small_llama.make())
    assert_same_training(trained, alone, 1e-5)
    # Why nothing is said of a whole model: behind the first sum over ranks attention is given other bits, here q.
    second_layer = torch.cat([rank.calls[1].arguments[0] for rank in trained], 1)
    torch.testing.assert_close(second_layer, alone.calls[1].arguments[0], rtol=1e-5, atol=1e-5)
    assert not same_bits(second_layer, alone.calls[1].arguments[0])


def train_sharded_llama() -> Trained:
    """Two ranks share the heads, two pairs the batch and the parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "heads"))
    model = small_llama.make_parallel(mesh["heads"])
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh["data"])
    pair, half = mesh["data"].get_local_rank(), small_llama.BATCH // 2
    return small_llama.train(model, slice(pair * half, (pair + 1) * half))


@pytest.mark.long
def test_llama_with_fsdp(tmp_path: Path) -> None:
    trained = launch.run(twice, 4, tmp_path, train_sharded_llama)
    for pair in (trained[:2], trained[2:]):
        assert_as_one_process([rank.calls for rank in pair], 1, small_llama.STEP)
    assert_same_training(trained, small_llama.train(small_llama.make()), 1e-5)


def train_layer() -> Trained:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    one = twice(small_layer.train, mesh)
    with dhp_safe_fa.policy("secure") as secure:
        assert_same_parameters(small_layer.train(mesh, sdpa=True), one)
    assert {call.backend for call in secure.calls} == {"dhp"}
    return one


def test_dtensors(tmp_path: Path) -> None:
    """A layer that gives attention DTensors, recorded whole. SDPA under a policy trains to the same bits."""
    trained = launch.run(train_layer, 2, tmp_path)
    for rank in trained:
        assert rank.calls[0].arguments[0].shape[1] == small_layer.WIDTH // small_layer.HEAD_DIM
        assert_as_one_process([rank.calls], 1, small_layer.STEP)
    assert_same_training(trained, small_layer.train(None), 1e-5)
