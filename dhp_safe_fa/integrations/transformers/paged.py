"""Continuous batching of transformers (generate_batch and its managers) over its paged cache.

    with serving(model):
        results = model.generate_batch(prompts, generation_config=...)

transformers packs what is left of each request's tokens into one row, hands over the cache of all layers, and says
where each request begins among queries and keys. Lengths, and which page a request has, are public.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.masking_utils import causal_mask_function

from dhp_safe_fa._operator.schema import CUDA_MAX_HEAD_DIM
from dhp_safe_fa._ops import attention_varlen
from dhp_safe_fa._segments import segment_of
from dhp_safe_fa.integrations.transformers.attention import operator_options
from dhp_safe_fa.integrations.transformers.masks import NAME, MaskFunction, Pattern, pattern_of, refuse, refuse_window

# transformers takes a name with "flash" in it for attention over packed requests, without a mask of its making, and
# with the digits 2 or 3 behind it for the libraries of these versions.
PAGED_NAME = "dhp_flash_paged"


class Places(NamedTuple):
    """A row's bits depend on where, from a call's first key on, groups of so many keys begin, and segments of so many,
    which are folded."""

    group: int
    segment: int


# DHP_CPU_TILE_K in csrc/cpu/tile.h, DHP_SEGMENT_KEYS in csrc/cpu/segments.h.
CPU_PLACES = Places(96, 4096)


@contextmanager
def serving(model: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """Within the block the model's generate_batch, and managers of continuous batching, run through dhp.

    Args:
        model: with attn_implementation="dhp". Other calls of it are refused within the block.

    Raises:
        ValueError: another model. What the requests ask for and is not served is in their results, as their error.
    """
    if not hasattr(getattr(model, "config", None), "_attn_implementation"):
        refuse(f"a {type(model).__name__} to serve; supported: a model of transformers")
    config = model.config
    if config._attn_implementation != NAME:
        refuse(f"the model has attn_implementation={config._attn_implementation!r}; load it with {NAME!r} to serve it")
    if model.device.type not in ("cpu", "cuda"):
        refuse(f"continuous batching on {model.device.type}, where attention_varlen is not; supported: cpu, cuda")
    # Not set_attn_implementation, which looks for a library behind a name with "flash" in it. One name goes to all
    # parts of a model (language, vision); a name for each brings back what they had.
    parts = {name: getattr(config, name)._attn_implementation for name in config.sub_configs if getattr(config, name)}
    config._attn_implementation = PAGED_NAME
    try:
        yield model
    finally:
        config._attn_implementation = {"": NAME, **parts}


def pattern_of_requests(
    *,
    mask_function: MaskFunction = causal_mask_function,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_options: object,
) -> Pattern:
    """transformers' mask interface, of which only the pattern counts here: arguments as of :func:`visible_keys`."""
    return pattern_of(mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip)


def paged_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Pattern | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    cache: Any = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: attends to all keys of each request, the cached ones in front.

    Args:
        query: [1, Hq, tokens, D], request behind request.
        key, value: [1, Hk, tokens of q and of the cache, D]; with cache only those of q, to be written into it.
        attention_mask: of :func:`pattern_of_requests`; None from transformers 5.24 on, whose masks for a paged cache
            are the causal one and the layer's sliding window, whatever else the model asks for.
        scaling: factor of the scores; 1/sqrt(D) by default.
        sliding_window: what tells a window from a chunk, of which attention_mask has the size.
        cache: transformers' PagedAttentionCache, which before 5.24 is the attention's to update.

    Returns:
        [1, tokens, Hq, D], and None in place of attention weights.

    Raises:
        ValueError: an option or a mask that is not served. RuntimeError: from :func:`dhp_safe_fa.attention_varlen`.
    """
    if cache is None and "read_index" not in options:
        refuse("a call without a paged cache within `with serving(model):`; supported: generate_batch")
    if attention_mask is None:
        attention_mask = Pattern(bool(getattr(module, "is_causal", True)), sliding_window)
    if not isinstance(attention_mask, Pattern) or not attention_mask.is_causal:
        refuse("continuous batching without a causal mask")
    if attention_mask.window not in (None, sliding_window):
        refuse_window(attention_mask.window, query.shape[2])
    common = operator_options(True, attention_mask.window, scaling, dropout, options)
    if cache is not None:
        key, value = cache.update(key_states=key, value_states=value, layer_idx=module.layer_idx, kwargs=options)
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))  # [tokens, H, D]
    begins_q, begins_k, longest_k = (options[name] for name in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_k"))
    if attention_mask.window is not None:
        if q.is_cuda and torch.cuda.is_current_stream_capturing():
            refuse("a sliding window in a CUDA graph; supported: ContinuousBatchingConfig(use_cuda_graph=False)")
        places = _places_of(q, attention_mask.window)
        rows, begins_k = _whole_groups(begins_q, begins_k, options.get("position_ids"), places)
        k, v, longest_k = k[rows], v[rows], int(begins_k.diff().max())
    return attention_varlen(q, k, v, begins_q, begins_k, options["max_length_q"], longest_k, **common)[None], None


def _places_of(q: Tensor, window: int) -> Places:
    """On CUDA a group is a key tile of the kernels that serve q's head_dim, and a segment so many of them; but within a
    window of so many keys that is no wider than a segment a row is one chain, which segments do not cut."""
    if not q.is_cuda:
        return CPU_PLACES
    segment = segment_of(q.shape[-1])
    if segment is None:
        refuse(f"head_dim {q.shape[-1]}; supported on CUDA: multiples of 8 up to {CUDA_MAX_HEAD_DIM}")
    return Places(segment.tile_k, segment.tile_k if window <= segment.keys else segment.keys)


def _whole_groups(
    begins_q: Tensor, begins_k: Tensor, position_ids: Tensor | None, places: Places
) -> tuple[Tensor, Tensor]:
    """Of a cache that keeps a window: which rows of k to take, and where each request begins among them.

    Each request gets as many keys more in front, which the window hides, as there are between its first key and the
    group of that key; or, if its keys would not lie in one segment as they do, or do not, as many as make groups and
    segments begin where they did. So its bits do not depend on where the scheduler has cut its prompt.
    """
    if position_ids is None:
        refuse("a sliding window in a layer that is not given position_ids; supported: models whose layers are")
    lengths_q, lengths_k = begins_q.diff(), begins_k.diff()
    # Under torch.compile there are requests of no length behind the last token.
    first_query = begins_q[:-1].long().clamp(max=position_ids.numel() - 1)
    # In int64: segments may have more keys than int32 can count, which position_ids may be.
    first_key = position_ids.flatten()[first_query].long() - (lengths_k - lengths_q)
    front = first_key % places.group
    is_whole = (first_key % places.segment + lengths_k <= places.segment) & (front + lengths_k <= places.segment)
    front = torch.where(is_whole, front, first_key % math.lcm(*places))
    lengths = lengths_k + front
    begins = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    first = begins_k[:-1].repeat_interleave(lengths)
    moved = (begins[:-1] + front - begins_k[:-1]).repeat_interleave(lengths)
    return (torch.arange(int(begins[-1]), device=begins.device) - moved).maximum(first), begins
