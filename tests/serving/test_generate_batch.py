"""Continuous batching: each request has the attention, bit for bit, that it has alone, however the scheduler cuts its
prompt and whomever it shares a forward pass with; and its greedy tokens are those of generate()."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import needs_hopper, needs_kernels, same_bits
from small_models import GREEDY, MODELS, SIZES, WINDOW, assert_as_alone, build, options_of, prompts
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from transformers import AttentionInterface, CompileConfig, Gemma3Config, LlamaConfig, LlamaForCausalLM
from transformers.generation import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.masking_utils import create_causal_mask
from transformers_names import CACHE

import dhp_safe_fa
from dhp_safe_fa.integrations.transformers import NAME, PAGED_NAME, serving
from dhp_safe_fa.integrations.transformers.paged import (
    CPU_PLACES,
    Places,
    _places_of,
    _whole_groups,
    paged_attention_forward,
)

# Shorter than the window, longer than it, and longer than the CPU kernels' groups of keys.
LENGTHS = (3, 150, 40, 1, 77)
# All prompts in one forward pass; or most of them cut, beside requests that are decoding.
TOGETHER, CUT = 512, 33


def generate_batch(
    model: Any, requests: list[list[int]], tokens_at_a_time: int = TOGETHER, warmup: bool = True, **options: Any
) -> Any:
    config = ContinuousBatchingConfig(num_blocks=64, page_size=16, max_batch_tokens=tokens_at_a_time, **options)
    generation = GenerationConfig(eos_token_id=-1, **GREEDY)
    configs: Any = {"generation_config": generation, "continuous_batching_config": config}
    return list(model.generate_batch(requests, **configs, warmup=warmup).values())


class Request:
    """What a layer was given for a request, forward pass by forward pass, and what came out: [1, H, tokens, D]."""

    def __init__(self) -> None:
        self.parts: list[tuple[Tensor, ...]] = []

    def whole(self) -> tuple[Tensor, ...]:
        return tuple(torch.cat(parts, dim=2) for parts in zip(*self.parts, strict=True))


@pytest.fixture
def requests_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """By layer, then by request; and how many requests each forward pass had."""
    layers: dict[torch.nn.Module, dict[str, Request]] = {}
    batches: list[list[str]] = []
    prepare = ContinuousBatchingIOs.prepare_batch_tensors

    def prepared(self: Any, requests_in_batch: Any, *rest: Any, **options: Any) -> None:
        batches.append([request.state.request_id for request in requests_in_batch])
        prepare(self, requests_in_batch, *rest, **options)

    def recorder(layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        out, weights = paged_attention_forward(layer, query, key, value, *rest, **options)
        ends_q = options["cu_seq_lens_q"].tolist()[1:]
        # With the cached ones in front, but before transformers 5.24, where attention updates the cache.
        ends_k = ends_q if "cache" in options else options["cu_seq_lens_k"].tolist()[1:]
        for request, begin, end, end_k in zip(batches[-1], [0, *ends_q], ends_q, ends_k, strict=False):
            own_q, own_k = slice(begin, end), slice(end_k - (end - begin), end_k)
            rows = ((query, own_q), (key, own_k), (value, own_k), (out.transpose(1, 2), own_q))
            parts = tuple(t[:, :, own] for t, own in rows)
            layers.setdefault(layer, {}).setdefault(request, Request()).parts.append(parts)
        return out, weights

    monkeypatch.setattr(ContinuousBatchingIOs, "prepare_batch_tensors", prepared)
    registered = AttentionInterface()[PAGED_NAME]
    AttentionInterface.register(PAGED_NAME, recorder)
    yield layers, batches
    AttentionInterface.register(PAGED_NAME, registered)


def have_the_bits_they_have_alone(layers: dict[torch.nn.Module, dict[str, Request]]) -> bool:
    """Every row of every request, against one call for all of its tokens."""
    same = []
    for layer, requests in layers.items():
        for request in requests.values():
            q, k, v, out = request.whole()
            same.append(same_bits(out, dhp_safe_fa.attention(q, k, v, **options_of(layer))))
    return all(same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens_at_a_time", [TOGETHER, CUT])
@pytest.mark.parametrize("name", MODELS)
def test_attention_is_that_of_each_request_alone(
    name: str, tokens_at_a_time: int, dtype: torch.dtype, rng: torch.Generator, requests_of: Any
) -> None:
    model, texts = build(name, rng, dtype), prompts(rng, *LENGTHS)
    with serving(model):
        results = generate_batch(model, texts, tokens_at_a_time)
    layers, batches = requests_of
    assert len(layers) == 2 and max(map(len, batches)) > 1
    for requests in layers.values():
        assert sorted(request.whole()[0].shape[2] for request in requests.values()) == sorted(n + 11 for n in LENGTHS)
    cut = max(len(request.parts) for requests in layers.values() for request in requests.values()) > 12
    assert cut == (tokens_at_a_time == CUT)
    assert have_the_bits_they_have_alone(layers)
    if dtype == torch.float32:
        assert_as_alone(model, texts, [result.generated_tokens for result in results])


def without_window(*args: Any, **options: Any) -> Tensor:
    return dhp_safe_fa.attention_varlen(*args, **{**options, "window": (-1, -1)})


def as_one_sequence(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> Tensor:
    begins_q, begins_k = (torch.tensor([0, t.shape[0]], dtype=torch.int32) for t in (q, k))
    return dhp_safe_fa.attention_varlen(q, k, v, begins_q, begins_k, q.shape[0], k.shape[0], **options)


def where_they_lie(*lengths: Any) -> Any:
    """No whole groups of keys."""
    return torch.arange(int(lengths[1][-1])), lengths[1]


@pytest.mark.parametrize(
    ("what", "wrong"),
    [("attention_varlen", without_window), ("attention_varlen", as_one_sequence), ("_whole_groups", where_they_lie)],
)
def test_a_wrong_call_is_found(
    what: str, wrong: Any, rng: torch.Generator, requests_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the comparison above shows nothing: windows, lengths and groups of keys each change some bits."""
    monkeypatch.setattr(f"{paged_attention_forward.__module__}.{what}", wrong)
    model, texts = build("mistral", rng), prompts(rng, *LENGTHS)
    with serving(model):
        generate_batch(model, texts, CUT)
    assert not have_the_bits_they_have_alone(requests_of[0])


@pytest.mark.parametrize("kept", [20, 4090, 8195])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_hopper)])
def test_windows_over_segments(rng: torch.Generator, device: str, kept: int) -> None:
    """Whatever a cache has kept of the keys, and wherever the segments begin that the kernels fold."""
    length, chunk, heads = 8300, 40, 2
    q, k, v = torch.randn(3, 1, heads, length, 16, generator=rng).to(device)
    if device == "cuda":
        q, k, v = (t.bfloat16() for t in (q, k, v))
    window = (kept, 0)
    want = dhp_safe_fa.attention(q, k, v, is_causal=True, window=window)
    for first in (60, 4050, 4080, 4096, 4100, 4170, 8190, 8260):
        cached = slice(max(first - kept, 0), first + chunk)
        both = ([0, chunk], [0, cached.stop - cached.start])
        ends_q, ends_k = (torch.tensor(ends, dtype=torch.int32, device=device) for ends in both)
        positions = torch.arange(first, first + chunk, device=device)[None]
        rows, begins = _whole_groups(ends_q, ends_k, positions, _places_of(q, kept + 1))
        own = [t[0, :, cached].transpose(0, 1)[rows] for t in (k, v)]
        queries = q[0, :, first : first + chunk].transpose(0, 1)
        options: Any = {"is_causal": True, "window": window}
        out = dhp_safe_fa.attention_varlen(queries, *own, ends_q, begins, chunk, int(begins[-1]), **options)
        assert same_bits(out.transpose(0, 1), want[0, :, first : first + chunk])


@pytest.mark.parametrize("model", [torch.nn.Linear(2, 2), None], ids=["a layer", "None"])
def test_what_is_no_model_is_not_served(model: Any) -> None:
    with (
        pytest.raises(ValueError, match=r"a (Linear|NoneType) to serve; supported: a model of transformers"),
        serving(model),
    ):
        pass


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_keys_begin_at_tiles_of_cuda(dtype: torch.dtype) -> None:
    """Three requests, at positions 150, 5 and 300, with 21, 6 and 40 keys in the cache and behind it."""
    positions, ends_q = torch.tensor([[150, 5, 300]], dtype=dtype), torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    ends_k = torch.tensor([0, 21, 27, 67], dtype=torch.int32)
    rows, begins = _whole_groups(ends_q, ends_k, positions, Places(128, 8192))
    fronts = (130 - 128, 0, 261 - 256)  # keys since the tile of the first one began
    assert begins.tolist() == [0, 23, 29, 74]
    assert rows.tolist() == [0] * fronts[0] + list(range(27)) + [27] * fronts[2] + list(range(27, 67))


@needs_hopper
@pytest.mark.parametrize("tokens_at_a_time", [TOGETHER, CUT])
@pytest.mark.parametrize("name", MODELS)
def test_on_cuda(name: str, tokens_at_a_time: int, rng: torch.Generator, requests_of: Any) -> None:
    """Without graphs, which cannot be looked into."""
    model, texts = build(name, rng, torch.bfloat16).cuda(), prompts(rng, *LENGTHS)
    with serving(model):
        results = generate_batch(model, texts, tokens_at_a_time, use_cuda_graph=False, use_async_batching=False)
    assert all(result.error is None for result in results)
    assert have_the_bits_they_have_alone(requests_of[0])


@needs_hopper
def test_graphs_on_cuda(rng: torch.Generator) -> None:
    """The same tokens as without; a window cannot be in one."""
    model, texts = build("llama", rng, torch.bfloat16).cuda(), prompts(rng, *LENGTHS)
    with serving(model):
        eager, graphs = (
            generate_batch(model, texts, use_cuda_graph=graph, use_async_batching=False) for graph in (False, True)
        )
    assert [result.generated_tokens for result in graphs] == [result.generated_tokens for result in eager]
    model = build("mistral", rng, torch.bfloat16).cuda()
    with serving(model):
        results = generate_batch(model, texts, use_cuda_graph=True, use_async_batching=False)
    assert all("a sliding window in a CUDA graph" in result.error for result in results)


@needs_kernels
@pytest.mark.parametrize(
    ("head_dim", "tile", "segment"),
    [(32, 128, 8192), (64, 128, 8192), (128, 128, 4096), (136, 80, 10240), (256, 80, 10240)],
)
def test_where_groups_and_segments_of_keys_begin(head_dim: int, tile: int, segment: int) -> None:
    """As docs/kernel.md says of the kernels; segments are none where a window is no wider than one."""
    with FakeTensorMode() as mode:
        meta = torch.empty((5, 2, head_dim), dtype=torch.bfloat16, device="meta")
        on_cuda = FakeTensor(mode, meta, torch.device("cuda:0"))
        assert _places_of(on_cuda, segment) == Places(tile, tile)
        assert _places_of(on_cuda, segment + 1) == Places(tile, segment)
    assert _places_of(torch.empty(5, 2, head_dim), 7) == CPU_PLACES


def test_pages_that_requests_share(rng: torch.Generator, requests_of: Any) -> None:
    """Prompts with a beginning in common: transformers computes it once."""
    model = build("llama", rng)
    [begin] = prompts(rng, 64)
    texts = [begin + end for end in prompts(rng, 1, 5, 9, 30)]
    with serving(model):
        results = generate_batch(model, texts, 128)
    computed = [request.whole()[0].shape[2] for request in next(iter(requests_of[0].values())).values()]
    assert max(computed) >= 64 + 11 and min(computed) < 64
    assert_as_alone(model, texts, [result.generated_tokens for result in results])


def test_compiled(rng: torch.Generator) -> None:
    """Attention is left out of the graphs. transformers then fills batches up to a few sizes."""
    torch.compiler.reset()
    model, texts = build("mistral", rng), prompts(rng, 3, 50)
    config = CompileConfig(backend="aot_eager", mode=None, fullgraph=False, dynamic=True)
    with serving(model):
        results = generate_batch(model, texts, 64, warmup=False, varlen_compile_config=config)
    assert_as_alone(model, texts, [result.generated_tokens for result in results])


@pytest.fixture
def secure() -> Iterator[None]:
    dhp_safe_fa.set_policy("secure")
    yield
    dhp_safe_fa.set_policy(None)


@pytest.mark.usefixtures("secure")
def test_secure(rng: torch.Generator) -> None:
    """A policy that is set for the process reaches the thread in which transformers generates."""
    model, texts = build("llama", rng), prompts(rng, 3, 50)
    with serving(model):
        results = generate_batch(model, texts)
    assert_as_alone(model, texts, [result.generated_tokens for result in results])
    model.set_attn_implementation("sdpa")
    assert "policy('secure'): attn_mask" in generate_batch(model, texts)[0].error


# ---- refused --------------------------------------------------------------------------------------------------------


def test_what_an_operator_refuses(rng: torch.Generator) -> None:
    """Is in the results: transformers catches what its thread raises."""
    model = LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=264)).eval()
    with serving(model):
        results = generate_batch(model, prompts(rng, 3, 5))
    assert all("q: head_dim 264; supported" in result.error and result.generated_tokens == [] for result in results)


def test_models_that_are_refused(rng: torch.Generator) -> None:
    model = build("llama", rng)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attn_implementation='sdpa'; load it with 'dhp'"), serving(model):
        pass
    model.set_attn_implementation(NAME)
    with pytest.raises(ValueError, match="continuous batching on meta"), serving(model.to("meta")):
        pass


def test_parts_of_a_model_get_back_what_they_had() -> None:
    config = Gemma3Config(attn_implementation={"": NAME, "text_config": NAME, "vision_config": "sdpa"})
    model: Any = SimpleNamespace(config=config, device=torch.device("cpu"))
    configs = (config, config.text_config, config.vision_config)
    with serving(model):
        assert [part._attn_implementation for part in configs] == [PAGED_NAME] * 3
    assert [part._attn_implementation for part in configs] == [NAME, NAME, "sdpa"]


def test_other_calls_are_refused(rng: torch.Generator) -> None:
    """And the model is as before behind the block, also if something fails in it."""
    model, ids = build("llama", rng), torch.tensor(prompts(rng, 5))
    before = model(ids).logits
    with pytest.raises(ValueError, match="without a paged cache"), serving(model):
        model(ids)
    assert same_bits(model(ids).logits, before)
    with pytest.raises(ValueError, match="not supported for continuous batching"):
        generate_batch(model, ids.tolist(), auto_switch_to_flash=False)


def test_masks_that_are_refused(rng: torch.Generator) -> None:
    model = build("mistral", rng)
    inputs: Any = {"inputs_embeds": torch.empty(1, 9, 8), "attention_mask": None, CACHE: None}
    with serving(model):
        with pytest.raises(ValueError, match="custom mask"):
            create_causal_mask(model.config, **inputs, or_mask_function=lambda b, h, q, k: k < 3)
        model.config.is_causal = False
        everything = create_causal_mask(model.config, **inputs)
    q = torch.randn(1, 4, 9, 32, generator=rng)
    layer = model.model.layers[0].self_attn
    with pytest.raises(ValueError, match="without a causal mask"):
        paged_attention_forward(layer, q, q, q, everything, cache=object())
    layer.is_causal = False
    with pytest.raises(ValueError, match="without a causal mask"):
        paged_attention_forward(layer, q, q, q, None, read_index=[])
    windowed = everything._replace(is_causal=True, window=WINDOW)
    with pytest.raises(ValueError, match=f"chunk or window of {WINDOW} keys"):
        paged_attention_forward(layer, q, q, q, windowed, cache=object())


def test_a_window_without_positions_is_refused() -> None:
    begins = torch.tensor([0, 5], dtype=torch.int32)
    with pytest.raises(ValueError, match="not given position_ids"):
        _whole_groups(begins, begins, None, CPU_PLACES)
