"""A small Llama with random weights is trained on made-up text: as by SDPA, and twice with the same bits."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import needs_hopper, same_bits
from transformers import LlamaConfig, LlamaForCausalLM

import dhp_safe_fa
import dhp_safe_fa.integrations.transformers

STEPS, BATCH, LENGTH, VOCABULARY = 50, 4, 48, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Rows padded on the right and on the left: attention is computed sequence by sequence.
SPANS = [(0, LENGTH), (0, 30), (11, LENGTH), (0, LENGTH)]

Trained = tuple[dict[str, torch.Tensor], list[float]]


def train(
    attention: str,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    padded: bool = False,
    wrap: Callable[[], Any] = contextlib.nullcontext,
    checkpoints: bool = False,
) -> Trained:
    """Parameters and losses after STEPS optimiser steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SIZES, attn_implementation=attention)).to(device, dtype).train()
    if checkpoints:
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rng = torch.Generator().manual_seed(1)
    mask = torch.ones(BATCH, LENGTH, dtype=torch.int64)
    for row, (start, stop) in enumerate(SPANS if padded else []):
        mask[row, :start] = mask[row, stop:] = 0
    losses = []
    for _ in range(STEPS):
        first = torch.randint(VOCABULARY, (BATCH, 1), generator=rng)
        ids = (first + torch.arange(LENGTH) * torch.randint(1, 4, (BATCH, 1), generator=rng)) % VOCABULARY
        labels = ids.masked_fill(mask == 0, -100)
        options = {"attention_mask": mask.to(device)} if padded else {}
        with wrap():
            loss = model(ids.to(device), labels=labels.to(device), use_cache=False, **options).loss
            optimiser.zero_grad()
            loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}, losses


def assert_same_run(one: Trained, other: Trained) -> None:
    assert one[1] == other[1]
    for name, parameter in one[0].items():
        assert same_bits(parameter, other[0][name]), name


def assert_like_sdpa(ours: Trained, theirs: Trained, tolerance: float) -> None:
    """The whole curve; and it falls, so that there is something to compare."""
    assert theirs[1][-1] < 0.8 * theirs[1][0]
    for step, (loss, want) in enumerate(zip(ours[1], theirs[1], strict=True)):
        assert abs(loss - want) <= tolerance * want, f"step {step}: loss {loss}, with SDPA {want}"


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_as_sdpa_and_twice_the_same(padded: bool) -> None:
    ours = train("dhp", padded=padded)
    assert_same_run(ours, train("dhp", padded=padded))
    assert_like_sdpa(ours, train("sdpa", padded=padded), 1e-3)


def test_unmodified_under_a_policy() -> None:
    """The model asks for SDPA, and the policy serves it: the bits of attn_implementation="dhp"; checkpoints too."""
    ours = train("dhp")
    assert_same_run(train("sdpa", wrap=lambda: dhp_safe_fa.policy("secure")), ours)
    assert_same_run(train("sdpa", wrap=lambda: dhp_safe_fa.policy("secure"), checkpoints=True), ours)


def test_the_comparison_sees_a_wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """SDPA without the gradient of its keys is not taken for SDPA."""
    right, sdpa = train("sdpa"), F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, **o: sdpa(q, k.detach(), v, **o))
    with pytest.raises(AssertionError, match="loss"):
        assert_like_sdpa(train("sdpa"), right, 1e-3)


ON_A_GPU = """
import sys, torch
sys.path[:0] = sys.argv[1:3]
from test_llama import assert_like_sdpa, assert_same_run, train
torch.use_deterministic_algorithms(True)
for padded in (False, True):
    ours = train("dhp", "cuda", torch.bfloat16, padded)
    assert_same_run(ours, train("dhp", "cuda", torch.bfloat16, padded))
    assert_like_sdpa(ours, train("sdpa", "cuda", torch.bfloat16, padded), 5e-2)
"""


@needs_hopper
def test_on_a_gpu() -> None:
    """In a process of its own: cuBLAS reads how it is to be deterministic from the environment, once."""
    here = Path(__file__).parent
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", ON_A_GPU, str(here), str(here.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
