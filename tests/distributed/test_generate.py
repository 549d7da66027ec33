"""A Llama that transformers shards over two ranks (tp_plan="auto") generates text: attention with the bits of one
process, and the same tokens in every run."""

from __future__ import annotations

from pathlib import Path

import launch
import small_llama
import torch
from recorded import Call, Recorded, assert_as_one_process
from transformers import LlamaForCausalLM
from transformers.distributed import DistributedConfig

NEW_TOKENS = 12
# The second sequence is shorter: it stands behind padding, and attention is computed sequence by sequence.
PADDING = 4


def generate(folder: str) -> tuple[torch.Tensor, list[Call]]:
    model = LlamaForCausalLM.from_pretrained(
        folder, attn_implementation="dhp", distributed_config=DistributedConfig(tp_plan="auto")
    ).eval()
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
