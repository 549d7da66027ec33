"""transformers' mask interface: which keys each query may see, read once in a forward pass for each kind of layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

NAME = "dhp"

MaskFunction = Callable[..., Any]


def refuse(sentence: str) -> NoReturn:
    raise ValueError(f"attn_implementation={NAME!r}: {sentence}")


def refuse_window(size: int, tokens: int) -> NoReturn:
    refuse(
        f"a chunk or window of {size} keys over {tokens} tokens; supported: up to {size} tokens, where it hides none, "
        "and causal sliding windows (for longer sequences use attn_implementation 'sdpa' or 'eager')"
    )


def refuse_biases() -> NoReturn:
    refuse(
        "a model that computes with the mask itself, as those do that add a bias of each position to it (ALiBi: Bloom, "
        "MPT); supported: models that hand it to their attention as it is"
    )


def refuse_custom(mask: str) -> NoReturn:
    refuse(
        f"a custom mask ({mask}); supported: causal attention, sliding windows and bidirectional attention, "
        "with padding or over packed sequences"
    )


@dataclass(frozen=True)
class VisibleKeys:
    """Which keys each query may see: what the mask interface hands to every layer, instead of a mask.

    Attributes:
        queries, keys: Sq and Sk of the layer's attention.
        is_causal: query i sees key j only if j <= i + causal_offset.
        causal_offset: position of the first query less that of the first key; 0 if not is_causal.
        sequences: [start, stop) among the keys, for each row of the batch; None if there is no padding.
        window: a query sees so many keys, itself the last; None if it sees all before it.
        packed: where each sequence begins among the tokens of the batch, row behind row, and where the last one ends;
            None if every row is one sequence.
    """

    queries: int
    keys: int
    is_causal: bool
    causal_offset: int
    sequences: tuple[tuple[int, int], ...] | None
    window: int | None = None
    packed: tuple[int, ...] | None = None

    # For a static cache generate() prepares masks ahead, asks these of them as of 4-D tensors, and hands them to the
    # model, which asks the mask interface with them again.
    ndim: ClassVar[int] = 4

    def contiguous(self) -> VisibleKeys:
        return self

    def to(self, *_: object, **__: object) -> NoReturn:
        refuse_biases()

    def __radd__(self, _: object) -> NoReturn:
        refuse_biases()


# ---- what a mask function says --------------------------------------------------------------------------------------


class Pattern(NamedTuple):
    """Of a mask: causal or not, the sliding window, and the number of the packed sequence of each token, [B, S]."""

    is_causal: bool
    window: int | None = None
    numbers: Tensor | None = None


def _parts(mask_function: MaskFunction) -> Iterator[tuple[str, dict[str, Any]]]:
    """Of transformers' mask functions that all have to hold: the names of their makers, and what these were given."""
    if not isinstance(mask_function, FunctionType) or mask_function.__module__ != causal_mask_function.__module__:
        refuse_custom(repr(mask_function))
    maker = mask_function.__qualname__.partition(".")[0]
    cells = zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True)
    given = {name: cell.cell_contents for name, cell in cells}
    if maker == "and_masks":
        for part in given["mask_functions"]:
            yield from _parts(part)
    elif maker == "remap_positions_for_packed_sequence":  # positions ascend by one in a sequence: no distance changes
        yield from _parts(given["mask_function"])
    else:
        yield maker, given


def pattern_of(
    mask_function: MaskFunction, local_size: int | None, allow_is_causal_skip: bool, allow_is_bidirectional_skip: bool
) -> Pattern:
    """Arguments as of :func:`visible_keys`. A window of local_size may turn out to be a chunk: the layer knows."""
    if mask_function in (causal_mask_function, bidirectional_mask_function):
        return Pattern(mask_function is causal_mask_function)
    if local_size is not None and (allow_is_causal_skip or allow_is_bidirectional_skip):
        return Pattern(allow_is_causal_skip, local_size)
    if torch.compiler.is_exporting():
        refuse("torch.export of a model, which takes every call for packed; supported: torch.compile")
    if torch.compiler.is_compiling():  # which cannot look into a function
        refuse(
            "packed sequences or a custom mask under torch.compile, where transformers takes every call without a "
            "cache for packed: pass use_cache=True"
        )
    pattern = Pattern(False)
    for maker, given in _parts(mask_function):
        if maker == "causal_mask_function":
            pattern = pattern._replace(is_causal=True)
        elif maker == "sliding_window_overlay":
            pattern = pattern._replace(window=given["sliding_window"])
        elif maker == "packed_sequence_mask_function":
            pattern = pattern._replace(numbers=given["packed_sequence_mask"])
        elif maker != "bidirectional_mask_function":
            refuse_custom(maker)
    return pattern


# ---- the interface --------------------------------------------------------------------------------------------------


def visible_keys(
    *,
    kv_length: int,
    q_length: int = 0,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    cache_position: Tensor | None = None,
    mask_function: MaskFunction = causal_mask_function,
    attention_mask: Tensor | VisibleKeys | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    **_options: object,
) -> VisibleKeys:
    """transformers' mask interface, called once in a forward pass for each kind of layer.

    Args:
        q_length, q_offset: number of queries, and position of the first one. Of a static cache that is a tensor, and
            reading it waits for the device.
        kv_length, kv_offset: number of keys, and position of the first one. A static cache also counts those that are
            not there yet, which no causal query sees.
        cache_position: [Sq], positions of the queries: what older transformers give in place of q_length and q_offset.
        mask_function: transformers' description of the mask.
        attention_mask: bool [B, kv_offset + kv_length], False at padding.
        local_size: size of the sliding window or chunk, if mask_function has one.
        allow_is_causal_skip, allow_is_bidirectional_skip: mask_function is causal, bidirectional, and nothing more than
            that but for local_size.

    Raises:
        ValueError: a mask that is not served.
    """
    if isinstance(attention_mask, VisibleKeys):
        return attention_mask
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], int(cache_position[0])
    is_causal, window, numbers = pattern_of(
        mask_function, local_size, allow_is_causal_skip, allow_is_bidirectional_skip
    )
    if isinstance(q_offset, Tensor):
        if not is_causal:
            refuse("a static cache, which holds keys that are not there yet, without a causal mask")
        q_offset = int(q_offset)
    packed = None if numbers is None else _packed(numbers)
    longest = q_offset + q_length if packed is None else max(stop - start for start, stop in pairwise(packed))
    if window is not None and longest <= window:
        window = None
    if window is not None and not is_causal:
        refuse_window(window, longest)
    sequences = None if attention_mask is None else _sequences(attention_mask[:, kv_offset : kv_offset + kv_length])
    if sequences is not None and all(sequence == (0, kv_length) for sequence in sequences):
        sequences = None
    causal_offset = q_offset - kv_offset if is_causal else 0
    return VisibleKeys(q_length, kv_length, is_causal, causal_offset, sequences, window, packed)


def _packed(numbers: Tensor) -> tuple[int, ...]:
    """VisibleKeys.packed, of the number of each token's sequence, [B, S]; waits for the device, once."""
    begins = numbers.diff(dim=1, prepend=numbers[:, :1] - 1) != 0
    return (*begins.flatten().nonzero().flatten().tolist(), numbers.numel())


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason=f"attn_implementation={NAME!r}: attention_mask is read, which no graph does"
)
def _sequences(mask: Tensor) -> tuple[tuple[int, int], ...]:
    """[start, stop) of the tokens in each row of a bool mask [B, Sk]; waits for the device, once."""
    length = mask.shape[1]
    position = torch.arange(length, device=mask.device)
    start = position.masked_fill(~mask, length).amin(dim=1)
    stop = position.masked_fill(~mask, -1).amax(dim=1) + 1
    rows: list[list[int]] = torch.stack([start, stop, mask.sum(dim=1)], dim=1).tolist()
    for row, (first, last, count) in enumerate(rows):
        if count not in (0, last - first):
            refuse(
                f"attention_mask has padding between the tokens of row {row}; "
                "supported: padding before and after a sequence"
            )
    return tuple((first, last) if count else (0, 0) for first, last, count in rows)
