"""End to end: a small Llama with random weights gives the same logits and the same text with our attention in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness import Target
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM

import dhp_safe_fa

NAME = "dhp_test"
VOCABULARY = 257
CALLS: list[tuple[int, int]] = []  # (Sq, Sk) of every call of the adapter


def adapter(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [B, H, S, D] in, [B, S, H, D] out; new tokens come last in the cache."""
    assert attention_mask is None and dropout == 0.0, "the tests have neither padding nor dropout"
    sq, sk = query.shape[2], key.shape[2]
    CALLS.append((sq, sk))
    out = dhp_safe_fa.attention(query, key, value, is_causal=True, scale=scaling, causal_offset=sk - sq)
    return out.transpose(1, 2).contiguous(), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """The causal structure needs no mask tensor, and with a cache causal_offset says where the rows are."""
    return None


AttentionInterface.register(NAME, adapter)
AttentionMaskInterface.register(NAME, no_mask)


@pytest.fixture
def model(target: Target, rng: torch.Generator) -> Iterator[LlamaForCausalLM]:
    """Two layers, four query heads on two key heads, head_dim 64."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        # Larger than usual, so that attention is not nearly uniform and the logits are far apart.
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=rng)))
        model = LlamaForCausalLM(config).eval()
    CALLS.clear()
    with torch.no_grad():
        yield model.to(device=target.device, dtype=target.dtype)


def tokens(rng: torch.Generator, target: Target, batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=rng).to(target.device)


def assert_logits_agree(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Relative to the size of the logits: rounding to the model's dtype, through two layers on either side."""
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= tolerance, f"relative error of the logits {error:.3g}"


@pytest.mark.parametrize("length", [1, 17, 129, 300])
def test_prefill(model: LlamaForCausalLM, target: Target, rng: torch.Generator, length: int) -> None:
    ids = tokens(rng, target, 2, length)
    model.set_attn_implementation("sdpa")
    want = model(ids, use_cache=False).logits
    assert CALLS == []
    model.set_attn_implementation(NAME)
    got = model(ids, use_cache=False).logits
    assert set(CALLS) == {(length, length)} and len(CALLS) == 2, "one call in each of the two layers"
    assert_logits_agree(got, want, target.dtype)


def test_cached_decoding_and_chunked_prefill(model: LlamaForCausalLM, target: Target, rng: torch.Generator) -> None:
    """A cache filled by 70, then 33, then single tokens gives at every position the logits of one prefill."""
    ids = tokens(rng, target, 2, 110)
    model.set_attn_implementation("sdpa")
    want = model(ids, use_cache=False).logits
    model.set_attn_implementation(NAME)
    cache, parts = None, []
    for chunk in ids.split([70, 33, 1, 1, 1, 1, 1, 1, 1], dim=1):
        result = model(chunk, past_key_values=cache, use_cache=True)
        cache = result.past_key_values
        parts.append(result.logits)
    assert CALLS[-1] == (1, 110)
    assert_logits_agree(torch.cat(parts, dim=1), want, target.dtype)


def test_generated_text(model: LlamaForCausalLM, target: Target, rng: torch.Generator) -> None:
    """Greedy decoding with the cache. In float32 the same tokens; else the scores of the tokens that SDPA chose."""
    ids = tokens(rng, target, 2, 40)
    options: dict[str, Any] = {
        "max_new_tokens": 24,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    model.set_attn_implementation("sdpa")
    want = model.generate(ids, **options)
    model.set_attn_implementation(NAME)
    got = model.generate(ids, **options)
    assert CALLS[-1] == (1, 40 + 23)
    assert_logits_agree(got.logits[0], want.logits[0], target.dtype)
    if target.dtype == torch.float32:
        assert torch.equal(got.sequences, want.sequences)
    else:
        forced = model(want.sequences[:, :-1], use_cache=False).logits[:, 39:]
        assert_logits_agree(forced, torch.stack(want.logits, dim=1), target.dtype)


def test_adapter_is_what_the_model_calls(model: LlamaForCausalLM, target: Target, rng: torch.Generator) -> None:
    """A wrong causal offset must change the logits, or the comparison above shows nothing."""
    ids = tokens(rng, target, 1, 50)
    model.set_attn_implementation(NAME)
    right = model(ids, use_cache=False).logits

    def blind(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Any:
        return dhp_safe_fa.attention(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("dhp_test_blind", blind)
    AttentionMaskInterface.register("dhp_test_blind", no_mask)
    model.set_attn_implementation("dhp_test_blind")
    wrong = model(ids, use_cache=False).logits
    error = float((wrong.double() - right.double()).norm() / right.double().norm())
    assert error > 0.05
