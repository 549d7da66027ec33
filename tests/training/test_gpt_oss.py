"""A small gpt-oss with random weights, every other layer with a window, trains its sinks on the CPU: as eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import same_bits
from transformers import GptOssConfig, GptOssForCausalLM

import dhp_safe_fa.integrations.transformers  # noqa: F401

STEPS, BATCH, LENGTH, VOCABULARY = 8, 3, 40, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 9,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SPANS = [(0, LENGTH), (0, 25), (11, LENGTH)]


def build(attention: str, dtype: torch.dtype = torch.float32) -> GptOssForCausalLM:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(GptOssConfig(**SIZES, attn_implementation=attention)).train()
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks, 1.0)
    return model.to(dtype)


def sinks_of(model: GptOssForCausalLM) -> list[torch.nn.Parameter]:
    return [layer.self_attn.sinks for layer in model.model.layers]


def loss_of(model: GptOssForCausalLM, step: int = 0, padded: bool = False) -> torch.Tensor:
    ids = (torch.arange(BATCH * LENGTH).reshape(BATCH, LENGTH) * (step + 1)) % VOCABULARY
    mask = torch.ones_like(ids)
    for row, (start, stop) in enumerate(SPANS if padded else []):
        mask[row, :start] = mask[row, stop:] = 0
    options = {"attention_mask": mask} if padded else {}
    loss: torch.Tensor = model(ids, labels=ids.masked_fill(mask == 0, -100), use_cache=False, **options).loss
    return loss


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_a_step_as_eagerly(padded: bool) -> None:
    ours, theirs = build("dhp"), build("eager")
    for model in (ours, theirs):
        loss_of(model, padded=padded).backward()
    for (name, mine), (_, other) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        if mine.grad is None and other.grad is None:  # an expert that no token was sent to
            continue
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-3, atol=1e-6, msg=name)
    assert all(float(sinks.grad.norm()) > 1e-4 for sinks in sinks_of(ours)), "there is something to compare"


def test_in_bfloat16() -> None:
    """Sinks are parameters of the model's dtype, and so are their gradients."""
    ours, theirs = build("dhp", torch.bfloat16), build("eager")
    for model in (ours, theirs):
        loss_of(model).backward()
    for mine, other in zip(sinks_of(ours), sinks_of(theirs), strict=True):
        assert mine.grad.dtype == torch.bfloat16
        assert float((mine.grad.float() - other.grad).norm() / other.grad.norm()) < 0.2


def test_training_twice_the_same() -> None:
    def train(attention: str) -> tuple[list[torch.Tensor], list[float]]:
        model, losses = build(attention), []
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(STEPS):
            loss = loss_of(model, step)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
        return [sinks.detach() for sinks in sinks_of(model)], losses

    first, losses = train("dhp")
    second, again = train("dhp")
    assert losses == again and all(same_bits(a, b) for a, b in zip(first, second, strict=True))
    for trained, before in zip(first, sinks_of(build("dhp")), strict=True):
        assert (trained - before).abs().min() > 1e-4, "every sink has learned"
    assert all(abs(a - b) <= 1e-3 * b for a, b in zip(losses, train("eager")[1], strict=True))
