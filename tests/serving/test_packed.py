"""Packed sequences in one forward pass: each has, bit for bit, the attention that it has alone."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import needs_hopper, same_bits
from small_models import MODELS, VOCABULARY, WINDOW, build, options_of, recorded
from torch import Tensor
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask
from transformers_names import CACHE

import dhp_safe_fa
from dhp_safe_fa.integrations.transformers import attention as interface
from dhp_safe_fa.integrations.transformers import masks

# transformers' gpt-oss shows its masks no position_ids: packed sequences have to come with their lengths.
BY_POSITIONS = [name for name in MODELS if name != "gpt_oss"]

# Shorter and longer than the window; the rows of a batch are packed each in its own way.
ROWS = [[1, 40, 7, 62, 20], [100, 30]]


def positions(rows: list[list[int]]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in rows])


def tokens(rng: torch.Generator, batch: int, length: int) -> Tensor:
    return torch.randint(VOCABULARY, (batch, length), generator=rng)


def spans(row: list[int]) -> list[slice]:
    ends = [0, *torch.tensor(row).cumsum(0).tolist()]
    return [slice(start, stop) for start, stop in pairwise(ends)]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The operators that were called."""
    calls: list[str] = []

    def count(name: str) -> Callable[..., Tensor]:
        function = getattr(dhp_safe_fa, name)
        return lambda *args, **options: calls.append(name) or function(*args, **options)

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(interface, name, count(name))
    return calls


def assert_each_as_alone(seen: Any, rows: list[list[int]]) -> None:
    for layer, query, key, value, out in seen:
        for b, row in enumerate(rows):
            for span in spans(row):
                q, k, v = (t[b : b + 1, :, span] for t in (query, key, value))
                alone = dhp_safe_fa.attention(q, k, v, **options_of(layer))
                assert same_bits(out[b : b + 1, :, span], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BY_POSITIONS)
def test_position_ids_that_restart(name: str, dtype: torch.dtype, rng: torch.Generator, counted: list[str]) -> None:
    model, ids = build(name, rng, dtype), tokens(rng, 2, 130)
    with torch.no_grad(), recorded() as seen:
        logits = model(ids, position_ids=positions(ROWS), use_cache=False).logits
    assert counted == ["attention_varlen"] * 2, "one call in each of the two layers"
    assert_each_as_alone(seen, ROWS)
    with torch.no_grad():
        for b, row in enumerate(ROWS):
            for span in spans(row):
                alone = model(ids[b : b + 1, span], use_cache=False).logits[0]
                error = float((logits[b, span] - alone).norm() / alone.norm())
                assert error < (1e-5 if dtype == torch.float32 else 4e-2)


@needs_hopper
@pytest.mark.parametrize("name", BY_POSITIONS)
def test_on_cuda(name: str, rng: torch.Generator, counted: list[str]) -> None:
    """One call a layer where no gradient is recorded, and one for each sequence where one is."""
    model, ids, places = build(name, rng, torch.bfloat16).cuda(), tokens(rng, 2, 130).cuda(), positions(ROWS).cuda()
    with torch.no_grad(), recorded() as seen:
        model(ids, position_ids=places, use_cache=False)
        assert_each_as_alone(seen, ROWS)
    assert counted == ["attention_varlen"] * 2
    counted.clear()
    if name == "llama":
        model(ids, position_ids=places, use_cache=False).logits.sum().backward()
        assert counted == ["attention"] * 2 * sum(map(len, ROWS))


def test_a_window_and_the_sequences_matter(rng: torch.Generator) -> None:
    """Or the comparisons above show nothing: without either some rows have other bits."""
    model, ids = build("mistral", rng), tokens(rng, 1, 130)
    with torch.no_grad(), recorded() as seen:
        model(ids, position_ids=positions(ROWS[:1]), use_cache=False)
    layer, query, key, value, out = seen[0]
    whole = dhp_safe_fa.attention(query, key, value, **options_of(layer))
    assert same_bits(whole[:, :, :1], out[:, :, :1]) and not same_bits(whole, out)
    long = spans(ROWS[0])[3]
    q, k, v = (t[:, :, long] for t in (query, key, value))
    unbounded = dhp_safe_fa.attention(q, k, v, is_causal=True, scale=layer.scaling)
    assert same_bits(unbounded[:, :, :WINDOW], out[:, :, long][:, :, :WINDOW])
    assert not same_bits(unbounded, out[:, :, long])


def layers_of(model: Any, ids: Tensor, positions: Tensor) -> list[tuple[torch.nn.Module, Tensor, Tensor]]:
    """Every layer that has no others in it, in the order of their calls, with what it was given and what it gave."""
    calls: list[tuple[torch.nn.Module, Tensor, Tensor]] = []
    leaves = [module for module in model.modules() if not list(module.children())]
    hooks = [leaf.register_forward_hook(lambda *call: calls.append((call[0], call[1][0], call[2]))) for leaf in leaves]
    with torch.no_grad():
        model(ids, position_ids=positions, use_cache=False)
    for hook in hooks:
        hook.remove()
    return calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_only_matrix_products_round_differently(dtype: torch.dtype, rng: torch.Generator) -> None:
    """Where a sequence first has other bits than alone, a linear layer made them out of the same ones: in which order
    torch adds up products depends on their number of rows."""
    model, ids = build("llama", rng, dtype), tokens(rng, 1, 130)
    packed = layers_of(model, ids, positions(ROWS[:1]))
    for span in spans(ROWS[0]):
        alone = layers_of(model, ids[:, span], positions([[span.stop - span.start]]))
        for (layer, given, gave), (same_layer, given_packed, gave_packed) in zip(alone, packed, strict=True):
            assert layer is same_layer
            if isinstance(gave, Tensor) and not same_bits(gave, gave_packed[:, span]):
                assert isinstance(layer, torch.nn.Linear) and same_bits(given, given_packed[:, span])
                break


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("with_positions", "with_cache"), [(True, False), (True, True), (False, False)])
def test_cu_seq_lens(
    name: str, with_positions: bool, with_cache: bool, rng: torch.Generator, counted: list[str]
) -> None:
    """What transformers' collator for packed sequences hands to the model. With a new cache, which models make if not
    told otherwise, transformers does not look at positions."""
    model, ids, row = build(name, rng), tokens(rng, 1, 130), ROWS[:1]
    begins = torch.tensor([0, *torch.tensor(row[0]).cumsum(0).tolist()], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": begins, "cu_seq_lens_k": begins, "max_length_q": 62, "max_length_k": 62}
    with torch.no_grad(), recorded() as seen:
        model(ids, position_ids=positions(row) if with_positions else None, use_cache=with_cache, **lengths)
    assert counted == ["attention_varlen"] * 2
    assert_each_as_alone(seen, row)


@pytest.mark.parametrize("name", BY_POSITIONS)
def test_gradients(name: str, rng: torch.Generator, counted: list[str]) -> None:
    """One call for all sequences; the loss over all of them has the gradients of their losses alone, added up."""
    model, ids = build(name, rng).train(), tokens(rng, 2, 130)

    def loss(logits: Tensor) -> Tensor:
        return logits.square().sum() / 1e4

    with recorded() as seen:
        loss(model(ids, position_ids=positions(ROWS), use_cache=False).logits).backward()
    assert counted == ["attention_varlen"] * 2
    assert_each_as_alone(seen, ROWS)
    together = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for b, row in enumerate(ROWS):
        for span in spans(row):
            loss(model(ids[b : b + 1, span], use_cache=False).logits).backward()
    for grad, parameter in zip(together, model.parameters(), strict=True):
        assert float((grad - parameter.grad).norm() / parameter.grad.norm()) < 1e-4


# ---- refused --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "options", "words"),
    [
        ([0, 5, 9], {}, r"begin and end at \[0, 5, 9\]; supported: ascending, from 0 to all 10"),
        ([0, 7, 5, 10], {}, "supported: ascending"),
        ([0, 5, 10], {"cu_seq_lens_k": torch.tensor([0, 6, 10])}, "cu_seq_lens_k differs"),
        ([0, 5, 10], {"cu_seq_lens_k": [0, 5, 10]}, r"cu_seq_lens_k: list; expected a tensor \[sequences \+ 1\]"),
        ([0, 5, 10], {"position_ids": positions([[4, 6]])}, r"is \[0, 5, 10\], but by position_ids it is \[0, 4, 10\]"),
        ([0, 5, 10], {"attention_mask": torch.tensor([[0] + [1] * 9])}, "with padding or a cache"),
    ],
    ids=["short", "descending", "keys", "no tensor", "positions", "padding"],
)
def test_lengths_that_are_refused(
    lengths: list[int], options: dict[str, Any], words: str, rng: torch.Generator
) -> None:
    with pytest.raises(ValueError, match=words):
        build("llama", rng)(tokens(rng, 1, 10), use_cache=False, cu_seq_lens_q=torch.tensor(lengths), **options)


def test_custom_masks_are_refused(rng: torch.Generator) -> None:
    """Alone, over packed sequences, and where tokens see later ones of their block."""
    config = build("mistral", rng).config
    config.attention_chunk_size = 4
    options: dict[str, Any] = {"inputs_embeds": torch.empty(1, 10, 8), "attention_mask": None, CACHE: None}
    packed = {**options, "position_ids": positions([[4, 6]])}
    masks_of_transformers: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
        (create_causal_mask, {**options, "or_mask_function": lambda b, h, q, k: k < 3}, "or_masks"),
        (create_causal_mask, {**options, "and_mask_function": lambda b, h, q, k: k < 3}, "lambda"),
        (create_causal_mask, {**packed, "or_mask_function": lambda b, h, q, k: k < 3}, "or_masks"),
        (create_causal_mask, {**options, "block_sequence_ids": torch.zeros(1, 10, dtype=torch.int64)}, "or_masks"),
        (create_chunked_causal_mask, packed, "chunked_overlay"),
    ]
    for create, arguments, words in masks_of_transformers:
        with pytest.raises(ValueError, match=f"custom mask .*{words}"):
            create(config, **arguments)
    assert create_causal_mask(config, **packed).packed == (0, 4, 10)


def test_torch_compile(rng: torch.Generator) -> None:
    """Reads the mask between graphs. In one graph it is refused, where transformers takes any call without a cache for
    packed."""
    torch.compiler.reset()
    model, ids = build("llama", rng), tokens(rng, 1, 130)
    with torch.no_grad():
        want = model(ids, position_ids=positions(ROWS[:1]), use_cache=False).logits
        compiled = torch.compile(model, backend="aot_eager")
        got = compiled(ids, position_ids=positions(ROWS[:1]), use_cache=False).logits
        assert float((got - want).norm() / want.norm()) < 1e-5
        torch.compiler.reset()
        with pytest.raises(Exception, match="pass use_cache=True"):
            torch.compile(model, backend="aot_eager", fullgraph=True)(ids, use_cache=False)


def test_bidirectional_packed_sequences() -> None:
    """Which models without a causal mask describe as bidirectional and packed."""
    from transformers.masking_utils import and_masks, bidirectional_mask_function, packed_sequence_mask_function

    numbers = torch.tensor([[0, 0, 1, 1, 1]])
    mask = and_masks(bidirectional_mask_function, packed_sequence_mask_function(numbers))
    visible = masks.visible_keys(q_length=5, kv_length=5, mask_function=mask, allow_is_causal_skip=False)
    assert (visible.is_causal, visible.window, visible.packed) == (False, None, (0, 2, 5))
