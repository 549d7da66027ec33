"""Small models with random weights, and the attention of every layer as it is called."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from greedy import assert_same_tokens
from torch import Tensor

pytest.importorskip("transformers", minversion="5.23", reason="continuous batching of older ones refuses our name")
from transformers import (
    AttentionInterface,
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from dhp_safe_fa.integrations.transformers import NAME, attention_forward

VOCABULARY, WINDOW = 257, 21
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Larger than usual, so that attention is not nearly uniform and the logits are far apart.
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "attn_implementation": NAME,
}
# Full attention, a window in every layer, a window in every other and soft caps, and these windows and sinks.
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=WINDOW)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SIZES, head_dim=32, sliding_window=WINDOW, attn_logit_softcapping=2.0)
    ),
    "gpt_oss": lambda: with_sinks(
        GptOssForCausalLM(
            # Both experts for every token: which one it is sent to may hang on a rounding.
            GptOssConfig(**SIZES, head_dim=32, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=2)
        )
    ),
}
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}


def with_sinks(model: GptOssForCausalLM) -> GptOssForCausalLM:
    """Sinks that are felt."""
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks, 1.0)
    return model


def build(name: str, rng: torch.Generator, dtype: torch.dtype = torch.float32) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=rng)))
        return MODELS[name]().eval().to(dtype)


def options_of(layer: Any) -> dict[str, Any]:
    """Of a layer's attention, as the operators take them."""
    size = getattr(layer, "sliding_window", getattr(layer.config, "sliding_window", None))
    sinks = getattr(layer, "sinks", None)
    return {
        "is_causal": True,
        "scale": layer.scaling,
        "window": (-1, -1) if size is None else (int(size) - 1, 0),
        "softcap": getattr(layer, "attn_logit_softcapping", None),
        "sinks": None if sinks is None else sinks.detach().float(),
    }


def prompts(rng: torch.Generator, *lengths: int) -> list[list[int]]:
    return [torch.randint(VOCABULARY, (length,), generator=rng).tolist() for length in lengths]


def assert_as_alone(model: Any, prompts: list[list[int]], texts: list[list[int]]) -> None:
    """Each text has its prompt's greedy tokens by generate(), but for rounding: that of matrix products differs with
    the number of rows."""
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        options = {**GREEDY, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True}
        alone = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        best = alone.sequences[0, len(prompt) :].tolist()
        assert_same_tokens(text, best, [of_step[0] for of_step in alone.logits])


class Seen(NamedTuple):
    """A call of attention_forward: of which layer, with what, and its result, [B, Hq, Sq, D]."""

    layer: torch.nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor


@contextmanager
def recorded() -> Iterator[list[Seen]]:
    """The calls of every model within the block."""
    seen: list[Seen] = []

    def recorder(layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        out, weights = attention_forward(layer, query, key, value, *rest, **options)
        # A static cache writes into the same keys later.
        seen.append(Seen(layer, query, key.clone(), value.clone(), out.transpose(1, 2)))
        return out, weights

    AttentionInterface.register(NAME, recorder)
    try:
        yield seen
    finally:
        AttentionInterface.register(NAME, attention_forward)
