"""transformers models with attn_implementation="dhp": small Llama and Qwen models with random weights give the logits
and the text they give with SDPA, padded batches too, and what is not served is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from greedy import assert_same_tokens
from harness import Target, same_bits
from torch import Tensor
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers_names import CACHE

import dhp_safe_fa
from dhp_safe_fa.integrations.transformers import NAME, VisibleKeys, attention_forward, visible_keys
from dhp_safe_fa.integrations.transformers import attention as interface

VOCABULARY = 257
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    # Larger than usual, so that attention is not nearly uniform and the logits are far apart.
    "initializer_range": 0.1,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
# Two query heads share a key head in both; Qwen normalises queries and keys, and its heads are not hidden_size / heads.
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=128)),
}
GENERATE: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "pad_token_id": 0}

# (Sq, Sk) of every call of the operator.
CALLS: list[tuple[int, int]] = []


@pytest.fixture(autouse=True)
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def attention(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        CALLS.append((query.shape[2], key.shape[2]))
        return dhp_safe_fa.attention(query, key, value, **options)

    CALLS.clear()
    monkeypatch.setattr(interface, "attention", attention)
    with torch.no_grad():
        yield


def build(make: Any, rng: torch.Generator, target: Target) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(int(torch.randint(2**31, (1,), generator=rng)))
        return make().eval().to(device=target.device, dtype=target.dtype)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, target: Target, rng: torch.Generator) -> PreTrainedModel:
    built: PreTrainedModel = build(MODELS[request.param], rng, target)
    return built


def tokens(rng: torch.Generator, target: Target, batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=rng).to(target.device)


def padding(target: Target, length: int, spans: list[tuple[int, int]]) -> Tensor:
    """int64 [B, length], 1 where the row's span has a token."""
    mask = torch.zeros(len(spans), length, dtype=torch.int64, device=target.device)
    for row, (start, stop) in enumerate(spans):
        mask[row, start:stop] = 1
    return mask


def assert_logits_agree(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    """Relative to the size of the logits: rounding to the model's dtype, through two layers on either side."""
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    error = float((got.double() - want.double()).norm() / want.double().norm())
    assert error <= tolerance, f"relative error of the logits {error:.3g}"


# ---- the logits and the text of SDPA --------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 17, 129, 300])
def test_prefill(model: Any, target: Target, rng: torch.Generator, length: int) -> None:
    ids = tokens(rng, target, 2, length)
    model.set_attn_implementation("sdpa")
    want = model(ids, use_cache=False).logits
    assert CALLS == []
    model.set_attn_implementation(NAME)
    got = model(ids, use_cache=False).logits
    assert len(CALLS) == 2 and set(CALLS) == {(length, length)}, "one call in each of the two layers"
    assert_logits_agree(got, want, target.dtype)


def test_cached_decoding_and_chunked_prefill(model: Any, target: Target, rng: torch.Generator) -> None:
    """A cache filled by 70, then 33, then single tokens gives at every position the logits of one prefill."""
    ids = tokens(rng, target, 2, 110)
    model.set_attn_implementation("sdpa")
    want = model(ids, use_cache=False).logits
    model.set_attn_implementation(NAME)
    cache, parts = None, []
    for chunk in ids.split([70, 33, 1, 1, 1, 1, 1, 1, 1], dim=1):
        result = model(chunk, **{CACHE: cache}, use_cache=True)
        cache = getattr(result, CACHE)
        parts.append(result.logits)
    assert CALLS[-1] == (1, 110)
    assert_logits_agree(torch.cat(parts, dim=1), want, target.dtype)


@pytest.mark.parametrize("left_padded", [False, True], ids=["equal_lengths", "left_padded"])
def test_generated_text(model: Any, target: Target, rng: torch.Generator, left_padded: bool) -> None:
    """Greedy decoding with the cache. In float32 the same tokens, up to where SDPA's best two are all but equal; else
    the scores of the tokens that SDPA chose."""
    ids = tokens(rng, target, 3, 40)
    mask = padding(target, 40, [(0, 40), (13, 40), (39, 40)] if left_padded else [(0, 40)] * 3)
    options = {**GENERATE, "attention_mask": mask, "return_dict_in_generate": True, "output_logits": True}
    model.set_attn_implementation("sdpa")
    want = model.generate(ids, **options)
    assert CALLS == []
    model.set_attn_implementation(NAME)
    got = model.generate(ids, **options)
    assert CALLS[-3 if left_padded else -1] == (1, 40 + 23)
    assert_logits_agree(got.logits[0], want.logits[0], target.dtype)
    if target.dtype == torch.float32:
        assert torch.equal(got.sequences[:, :40], want.sequences[:, :40])
        for one, other, scores in zip(got.sequences, want.sequences, torch.stack(want.logits, dim=1), strict=True):
            assert_same_tokens(one[40:].tolist(), other[40:].tolist(), list(scores))
    elif not left_padded:
        forced = model(want.sequences[:, :-1], use_cache=False).logits[:, 39:]
        assert_logits_agree(forced, torch.stack(want.logits, dim=1), target.dtype)


@pytest.mark.parametrize(
    "spans", [[(0, 50), (0, 9)], [(0, 50), (41, 50)], [(3, 40), (0, 50)], [(7, 44), (7, 44)]], ids=str
)
def test_padding_on_either_side(model: Any, target: Target, rng: torch.Generator, spans: list[tuple[int, int]]) -> None:
    ids, mask = tokens(rng, target, 2, 50), padding(target, 50, spans)
    # transformers' models count positions from the padding's start unless told otherwise.
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    model.set_attn_implementation("sdpa")
    want = model(ids, attention_mask=mask, position_ids=positions).logits
    model.set_attn_implementation(NAME)
    got = model(ids, attention_mask=mask, position_ids=positions).logits
    keep = mask.bool()
    assert_logits_agree(got[keep], want[keep], target.dtype)
    calls = len({*spans})
    assert len(CALLS) == 2 * calls, "rows that lie alike share a call"


def test_adapter_is_what_the_model_calls(model: Any, target: Target, rng: torch.Generator) -> None:
    """A wrong causal offset must change the logits, or the comparisons above show nothing."""
    ids = tokens(rng, target, 1, 50)
    model.set_attn_implementation(NAME)
    right = model(ids, use_cache=False).logits

    def blind(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kw: Any) -> Any:
        return dhp_safe_fa.attention(query, key, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("dhp_test_blind", blind)
    AttentionMaskInterface.register("dhp_test_blind", visible_keys)
    model.set_attn_implementation("dhp_test_blind")
    wrong = model(ids, use_cache=False).logits
    error = float((wrong.double() - right.double()).norm() / right.double().norm())
    assert error > 0.05


def test_encoder_with_padding(target: Target, rng: torch.Generator) -> None:
    """Bidirectional attention: each row sees its own tokens, all of them."""
    sizes = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256}
    bert = build(lambda: BertModel(BertConfig(vocab_size=VOCABULARY, **sizes)), rng, target)
    ids, mask = tokens(rng, target, 3, 50), padding(target, 50, [(0, 50), (0, 9), (0, 31)])
    results = []
    for name in ("sdpa", NAME):
        bert.set_attn_implementation(name)
        results.append(bert(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    assert len(CALLS) == 2 * 3
    assert_logits_agree(results[1], results[0], target.dtype)


# ---- row invariance -------------------------------------------------------------------------------------------------


def test_a_prompt_has_the_same_attention_bits_alone_and_in_a_batch(
    model: Any, target: Target, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every attention output of a left-padded batch, in prefill and decoding, against the same prompt's queries, keys
    and values alone: no padding, no neighbour, no mask."""
    seen: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
    attend = interface._attend

    def recorded(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        out = attend(query, key, value, *rest)
        seen.append((query, key, value, out))
        return out

    monkeypatch.setattr(interface, "_attend", recorded)
    starts = [0, 5, 150, 5, 161]
    mask = padding(target, 170, [(start, 170) for start in starts])
    model.set_attn_implementation(NAME)
    model.generate(tokens(rng, target, 5, 170), attention_mask=mask, **{**GENERATE, "max_new_tokens": 4})
    assert [query.shape[2] for query, *_ in seen] == [170, 170, 1, 1, 1, 1, 1, 1]
    for query, key, value, out in seen:
        for row, start in enumerate(starts):
            first = start if query.shape[2] > 1 else 0
            q = query[row : row + 1, :, first:]
            k, v = (t[row : row + 1, :, start:] for t in (key, value))
            alone = dhp_safe_fa.attention(q, k, v, is_causal=True, causal_offset=k.shape[2] - q.shape[2])
            assert same_bits(out[row : row + 1, :, first:], alone)


@pytest.mark.parametrize("lengths", [(37, 37, 37), (90, 37, 140)], ids=str)
def test_interface_is_row_invariant(target: Target, rng: torch.Generator, lengths: tuple[int, ...]) -> None:
    """The prompt of 37 tokens alone, and in the middle of a batch that is padded on the left."""
    longest, d = max(lengths), 64
    q, k, v = (torch.randn(1, h, 37, d, generator=rng).to(target.device, target.dtype) for h in (4, 2, 2))
    batch = []
    for t in (q, k, v):
        around = torch.randn(3, t.shape[1], longest, d, generator=rng).to(target.device, target.dtype)
        around[1, :, longest - 37 :] = t[0]
        batch.append(around)
    module = torch.nn.Module()
    mask = padding(target, longest, [(longest - length, longest) for length in lengths]).bool()
    visible = visible_keys(q_length=longest, kv_length=longest, attention_mask=mask)
    inside, _ = attention_forward(module, *batch, visible)
    alone, _ = attention_forward(module, q, k, v, visible_keys(q_length=37, kv_length=37))
    assert same_bits(inside[1, longest - 37 :], alone[0])


# ---- torch.compile --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fullgraph", [True, False])
def test_compiled_model(device: str, rng: torch.Generator, fullgraph: bool) -> None:
    """Without padding in one graph; with padding the mask is read between two graphs."""
    torch.compiler.reset()
    target = Target(device, torch.bfloat16)
    model = build(MODELS["qwen3"], rng, target)
    model.set_attn_implementation(NAME)
    compiled = torch.compile(model, fullgraph=fullgraph, backend="aot_eager")
    ids, mask = tokens(rng, target, 2, 30), padding(target, 30, [(0, 30), (11, 30)])
    assert_logits_agree(compiled(ids).logits, model(ids).logits, target.dtype)
    if not fullgraph:
        got, want = compiled(ids, attention_mask=mask).logits, model(ids, attention_mask=mask).logits
        assert_logits_agree(got[mask.bool()], want[mask.bool()], target.dtype)


@pytest.mark.parametrize("length", [50, 51, 130])
def test_sliding_window(target: Target, rng: torch.Generator, length: int) -> None:
    """Before it bites and after; in a batch with padding on either side; and while decoding from the model's cache."""
    mistral = build(lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=50)), rng, target)
    ids = tokens(rng, target, 3, length)
    mask = padding(target, length, [(0, length), (9, length), (0, length - 20)])
    found, generated = {}, {}
    for name in ("sdpa", NAME):
        mistral.set_attn_implementation(name)
        options = {**GENERATE, "attention_mask": torch.ones_like(ids[:1])}
        with torch.no_grad():
            generated[name] = mistral.generate(ids[:1], **options, return_dict_in_generate=True, output_logits=True)
            found[name] = [mistral(ids).logits, mistral(ids, attention_mask=mask).logits[mask.bool()]]
    # a step follows from the tokens before it, which rounding may change
    equal = (generated[NAME].sequences == generated["sdpa"].sequences)[0, length:].long().cumprod(dim=0)
    steps = int(equal[:-1].sum()) + 1 if target.dtype == torch.float32 else 1
    for name, each in generated.items():
        found[name] += each.logits[:steps]
    for got, want in zip(found[NAME], found["sdpa"], strict=True):
        assert_logits_agree(got, want, target.dtype)


# ---- refused --------------------------------------------------------------------------------------------------------

CPU = Target("cpu", torch.float32)


def small(rng: torch.Generator) -> Any:
    model = build(MODELS["llama"], rng, CPU)
    model.set_attn_implementation(NAME)
    return model


def test_chunk_is_refused_where_it_bites(rng: torch.Generator) -> None:
    """Its layers pass no sliding window."""
    q = torch.randn(1, 1, 9, 8)
    visible = VisibleKeys(9, 9, True, 0, None, 8)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match="chunk or window of 8 keys over 9 tokens; supported: up to 8 tokens"):
        attention_forward(module, q, q, q, visible)
    out, _ = attention_forward(module, q, q, q, visible, sliding_window=8)
    assert out.shape == (1, 9, 1, 8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])}, "padding between the tokens of row 0"),
        ({"attention_mask": torch.ones(1, 1, 5, 5)}, "made outside of the model"),
    ],
    ids=["hole", "4_d"],
)
def test_masks_that_are_refused(rng: torch.Generator, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        small(rng)(tokens(rng, CPU, 1, 5), **arguments)


def test_padding_in_one_graph_is_refused(rng: torch.Generator) -> None:
    ids = tokens(rng, CPU, 2, 5)
    compiled = torch.compile(small(rng), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match="attention_mask is read, which no graph does"):
        compiled(ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]), use_cache=True)
    torch.compiler.reset()


def test_a_model_is_not_exported(rng: torch.Generator) -> None:
    with pytest.raises(Exception, match=r"torch\.export of a model"):
        torch.export.export(small(rng), (tokens(rng, CPU, 1, 5),), {"use_cache": False})


@pytest.mark.parametrize("name", ["Bloom", "Mpt"])
def test_models_that_compute_with_the_mask_are_refused(name: str, rng: torch.Generator) -> None:
    """They add a bias to it, and know no attention but their own."""
    layers = {"n_layer": 1, "n_layers": 1, "n_head": 2, "n_heads": 2}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "d_model": 32, **layers}
    config = getattr(transformers, f"{name}Config")(**sizes, attn_implementation=NAME)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with pytest.raises(ValueError, match=r"computes with the mask itself.*supported: models that hand it"):
        model(tokens(rng, CPU, 1, 5))


def test_dropout_is_refused(rng: torch.Generator) -> None:
    model, ids = small(rng), tokens(rng, CPU, 1, 5)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with pytest.raises(ValueError, match=r"dropout 0\.1"):
        model.train()(ids)


@pytest.mark.parametrize("option", [*interface.UNSUPPORTED, "cache", "read_index"])
def test_options_that_are_refused(rng: torch.Generator, option: str) -> None:
    q = torch.randn(1, 2, 5, 16, generator=rng)
    given = True if option == "output_attentions" else torch.zeros(2)
    with pytest.raises(ValueError, match=option):
        attention_forward(torch.nn.Module(), q, q, q, None, **{option: given})


def test_a_mask_of_another_layer_is_refused(rng: torch.Generator) -> None:
    q = torch.randn(2, 2, 5, 16, generator=rng)
    module = torch.nn.Module()
    with pytest.raises(ValueError, match="6 keys, the layer has 5 and 5"):
        attention_forward(module, q, q, q, VisibleKeys(5, 6, True, 1, None))
    with pytest.raises(ValueError, match="1 rows for a batch of 2"):
        attention_forward(module, q, q, q, VisibleKeys(5, 5, True, 0, ((1, 5),)))


def test_without_a_mask_the_module_says_whether_attention_is_causal(rng: torch.Generator) -> None:
    """Vision models and others that never ask for a mask."""
    q, k = torch.randn(2, 2, 5, 16, generator=rng), torch.randn(2, 2, 9, 16, generator=rng)
    module = torch.nn.Module()
    for is_causal in (True, False):
        module.is_causal = is_causal
        out, _ = attention_forward(module, q, q, q, None)
        assert same_bits(out.transpose(1, 2), dhp_safe_fa.attention(q, q, q, is_causal=is_causal))
        with_flag, _ = attention_forward(module, q, q, q, None, is_causal=not is_causal)
        assert same_bits(with_flag.transpose(1, 2), dhp_safe_fa.attention(q, q, q, is_causal=not is_causal))
    module.is_causal = True
    decoded, _ = attention_forward(module, q[:, :, :1], k, k, None)
    assert same_bits(decoded.transpose(1, 2), dhp_safe_fa.attention(q[:, :, :1], k, k))
    with pytest.raises(ValueError, match="5 queries stand among 9 keys"):
        attention_forward(module, q, k, k, None)
    with pytest.raises(ValueError, match="window of 8 keys over 9"):
        attention_forward(module, q[:, :, :1], k, k, None, sliding_window=8)
