"""A Llama that transformers shards over two ranks (tp_plan="auto") generates text, alone and in continuous batches:
attention with the bits of one process, and the same tokens in every run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import launch
import small_llama
import torch
from recorded import Call, Recorded, assert_as_one_process, assert_packed_as_one_process
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.distributed import DistributedConfig
from transformers.generation import ContinuousBatchingConfig, GenerationConfig

from dhp_safe_fa.integrations.transformers import PAGED_NAME, serving
from dhp_safe_fa.integrations.transformers.paged import paged_attention_forward

NEW_TOKENS = 12
# The second sequence is shorter: it stands behind padding, and attention is computed sequence by sequence.
PADDING = 4


def divided(folder: str) -> Any:
    configuration = DistributedConfig(tp_plan="auto")
    return LlamaForCausalLM.from_pretrained(folder, attn_implementation="dhp", distributed_config=configuration).eval()


def generate(folder: str) -> tuple[torch.Tensor, list[Call]]:
    model = divided(folder)
    prompt, mask = small_llama.text(0)[:2, :17], torch.ones(2, 17, dtype=torch.int64)
    mask[1, :PADDING] = 0
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    with Recorded() as recorded:
        tokens = model.generate(prompt, attention_mask=mask, **options)
    assert torch.equal(tokens, model.generate(prompt, attention_mask=mask, **options))
    return tokens, recorded.calls


def test_generate(tmp_path: Path) -> None:
    model = tmp_path / "model"
    small_llama.make().save_pretrained(model)
    (first, one), (second, other) = launch.run(generate, 2, tmp_path, str(model))
    assert first.shape == (2, 17 + NEW_TOKENS) and torch.equal(first, second)
    layers, sequences = 2, 2
    assert_as_one_process([one, other], 1, ["attention"] * NEW_TOKENS * layers * sequences)


# More than fit into a forward pass, so that one is cut while others are decoded.
REQUESTS, TOKENS_AT_A_TIME = ((1, 33), (3, 20), (5, 7)), 24


def generate_batch(folder: str) -> tuple[list[list[int]], list[Call]]:
    """What its thread computes is seen in the attention interface: a dispatch mode is at work in one thread alone."""
    model, recorded = divided(folder), Recorded()

    def recorder(*arguments: Any, **options: Any) -> Any:
        with recorded:
            return paged_attention_forward(*arguments, **options)

    AttentionInterface.register(PAGED_NAME, recorder)
    prompts = [[(first + i) % small_llama.VOCABULARY for i in range(length)] for first, length in REQUESTS]
    configs: Any = {
        "generation_config": GenerationConfig(
            max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(
            num_blocks=64, page_size=16, max_batch_tokens=TOKENS_AT_A_TIME
        ),
    }
    with serving(model):
        results = model.generate_batch(prompts, **configs)
    assert all(result.error is None for result in results.values())
    return [result.generated_tokens for result in results.values()], recorded.calls


def test_generate_batch(tmp_path: Path) -> None:
    model = tmp_path / "model"
    small_llama.make().save_pretrained(model)
    (first, one), (second, other) = launch.run(generate_batch, 2, tmp_path, str(model))
    assert first == second and [len(tokens) for tokens in first] == [NEW_TOKENS] * len(REQUESTS)
    layers = 2
    assert_packed_as_one_process([one, other], NEW_TOKENS * layers)
