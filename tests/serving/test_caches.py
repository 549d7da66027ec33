"""Static caches, whose keys behind the last written one do not count, and prompts that are read in chunks: each row of
attention has the bits that it has without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import needs_hopper, same_bits
from small_models import GREEDY, MODELS, VOCABULARY, WINDOW, Seen, assert_as_alone, build, options_of, prompts, recorded
from torch import Tensor
from transformers import StaticCache
from transformers.masking_utils import create_bidirectional_mask
from transformers_names import CACHE

import dhp_safe_fa

# Shorter than the window, all along; growing beyond it while decoding; longer from the beginning.
LENGTHS = (5, 15, 70)


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    options = {**GREEDY, "pad_token_id": 0, "return_dict_in_generate": True, "output_logits": True, **options}
    return model.generate(ids, attention_mask=mask, **options)


def check_static_cache(model: Any, rng: torch.Generator, **options: Any) -> None:
    """All the bits that come out with the default cache, of padded prompts of mixed lengths, too."""
    for length in LENGTHS:
        ids = torch.randint(VOCABULARY, (3, length), generator=rng).to(model.device)
        padded = torch.arange(length) >= torch.tensor([[0], [3], [length - 1]])
        for mask in (None, padded.long().to(model.device)):
            kinds = (None, "static")
            want, got = (generate(model, ids, mask, cache_implementation=kind, **options) for kind in kinds)
            assert isinstance(getattr(got, CACHE), StaticCache)
            assert torch.equal(got.sequences, want.sequences)
            assert all(same_bits(g, w) for g, w in zip(got.logits, want.logits, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_static_cache(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    check_static_cache(build(name, rng, dtype), rng)


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_static_cache_on_cuda(name: str, dtype: torch.dtype, rng: torch.Generator) -> None:
    """Eagerly: compiled, every step would be a graph of its own."""
    check_static_cache(build(name, rng, dtype).cuda(), rng, disable_compile=True)


@pytest.mark.parametrize("name", MODELS)
def test_static_cache_of_mixed_lengths(name: str, rng: torch.Generator) -> None:
    """Each prompt has the tokens that it has alone."""
    model, texts = build(name, rng), prompts(rng, *LENGTHS)
    longest = max(LENGTHS)
    ids = torch.tensor([[0] * (longest - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    got = generate(model, ids, mask, cache_implementation="static").sequences[:, longest:]
    assert_as_alone(model, texts, got.tolist())


@pytest.mark.parametrize("name", MODELS)
def test_keys_that_are_not_there_yet_do_not_count(name: str, rng: torch.Generator) -> None:
    """Chunk by chunk, with NaN wherever the cache was not written."""
    model, ids = build(name, rng), torch.randint(VOCABULARY, (2, 60), generator=rng)
    found = []
    for poison in (0.0, torch.nan):
        cache = StaticCache(config=model.config, max_cache_len=80)
        cache.early_initialization(batch_size=2, num_heads=2, head_dim=32, dtype=torch.float32, device="cpu")
        for layer in cache.layers:
            layer.keys.fill_(poison)
            layer.values.fill_(poison)
        with torch.no_grad():
            chunks = ids.split([7, 30, 1, 1, 21], dim=1)
            found.append(torch.cat([model(chunk, **{CACHE: cache}).logits for chunk in chunks], dim=1))
    assert found[1].isfinite().all() and same_bits(found[0], found[1])


def whole(seen: list[Seen], layer: torch.nn.Module) -> tuple[Tensor, ...]:
    """Queries, keys, values and results of all calls of a layer whose cache keeps every key."""
    calls = [call for call in seen if call.layer is layer]
    length = sum(call.query.shape[2] for call in calls)
    key, value = (t[:, :, :length] for t in (calls[-1].key, calls[-1].value))
    return torch.cat([call.query for call in calls], dim=2), key, value, torch.cat([call.out for call in calls], dim=2)


@pytest.mark.parametrize("kind", [None, "static"], ids=["dynamic", "static"])
def test_a_prompt_in_chunks(kind: str | None, rng: torch.Generator) -> None:
    """The attention of one call over prompt and text, and the same tokens."""
    model, [text] = build("llama", rng), prompts(rng, 150)
    with recorded() as seen:
        got = generate(model, torch.tensor([text]), cache_implementation=kind, prefill_chunk_size=32)
    assert [call.query.shape[2] for call in seen[::2]] == [32, 32, 32, 32, 22, *[1] * 11]
    for layer in {call.layer for call in seen}:
        q, k, v, out = whole(seen, layer)
        assert same_bits(out, dhp_safe_fa.attention(q, k, v, is_causal=True, scale=layer.scaling))
    assert_as_alone(model, [text], got.sequences[:, 150:].tolist())


@pytest.mark.parametrize("kind", [None, "static"], ids=["dynamic", "static"])
@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_prompt_in_chunks_behind_a_window(name: str, kind: str | None, rng: torch.Generator) -> None:
    """Each call sees the last keys of its window, and the tokens are the same."""
    model, [text] = build(name, rng), prompts(rng, 150)
    with recorded() as seen:
        got = generate(model, torch.tensor([text]), cache_implementation=kind, prefill_chunk_size=32)
    hidden = 0
    for layer, q, k, v, out in seen:
        options = options_of(layer)
        if options["window"] != (-1, -1) and k.shape[2] == q.shape[2] + WINDOW - 1:  # the cache is full
            hidden += 1
            offset = k.shape[2] - q.shape[2]
            want = dhp_safe_fa.attention(q, k, v, causal_offset=offset, **options)
            assert same_bits(out, want)
    assert hidden > 10
    assert_as_alone(model, [text], got.sequences[:, 150:].tolist())


def test_static_cache_without_a_causal_mask_is_refused(rng: torch.Generator) -> None:
    """Every query would see the keys that are not there yet."""
    model = build("llama", rng)
    cache = StaticCache(config=model.config, max_cache_len=20)
    with torch.no_grad():
        model(torch.tensor(prompts(rng, 5)), **{CACHE: cache})
    with pytest.raises(ValueError, match="static cache, which holds keys that are not there yet, without a causal"):
        create_bidirectional_mask(model.config, torch.empty(1, 3, 8), None, **{CACHE: cache})
