"""Bad input: an error that names the argument, what was given and what is supported; on real and on meta tensors."""

from __future__ import annotations

import gc
import math
import re
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from harness import CPU_MAX_HEAD_DIM, FUNCTIONS, HOPPER_MISSING, Target, max_head_dim, needs_hopper, qkv, refusal
from torch import Tensor
from torch.autograd import forward_ad

import dhp_safe_fa

Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def refuse(q: Tensor, k: Tensor, v: Tensor, *words: str, **arguments: Any) -> None:
    """Both operators raise, and the message has every word (a regular expression) in any order."""
    for call in FUNCTIONS:
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call(q, k, v, **arguments)
        message = str(caught.value)
        for word in words:
            assert re.search(word, message), f"{word!r} is not in: {message}"


def zeros(shapes: Shapes, device: str, dtype: torch.dtype = torch.float16) -> list[Tensor]:
    return [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]


def same_words(q: Tensor, k: Tensor, v: Tensor, **arguments: Any) -> str:
    return refusal(FUNCTIONS, {"q": q, "k": k, "v": v, **arguments})


@pytest.fixture(params=["real", "meta"])
def place(request: pytest.FixtureRequest, device: str) -> str:
    """The device, and the meta device: a compiled graph is refused when it is traced, not when it runs."""
    return device if request.param == "real" else "meta"


# ---- shapes ---------------------------------------------------------------------------------------------------------

Q = (2, 4, 6, 64)
K = (2, 2, 5, 64)

BAD_SHAPES: dict[str, tuple[Shapes, list[str]]] = {
    "q_rank_3": ((Q[1:], K, K), [r"\bq\b", "rank|dim", r"\b3\b", r"\b4\b"]),
    "k_rank_3": ((Q, K[1:], K), [r"\bk\b", "rank|dim", r"\b3\b", r"\b4\b"]),
    "v_rank_5": ((Q, K, (1, *K)), [r"\bv\b", "rank|dim", r"\b5\b", r"\b4\b"]),
    "q_rank_0": (((), K, K), [r"\bq\b", "rank|dim", r"\b0\b", r"\b4\b"]),
    "head_count_not_a_multiple": (((2, 5, 6, 64), K, K), ["head", r"\b5\b", r"\b2\b", "multiple|divi"]),
    "more_key_heads_than_query_heads": (((2, 1, 6, 64), K, K), ["head", r"\b1\b", r"\b2\b", "multiple|divi"]),
    "no_key_head": ((Q, (2, 0, 5, 64), (2, 0, 5, 64)), [r"\bk\b", "head", r"\b0\b"]),
    "no_key_head_no_query_head": (((2, 0, 6, 64), (2, 0, 5, 64), (2, 0, 5, 64)), [r"\bk\b", "head", r"\b0\b"]),
    "v_length": ((Q, K, (2, 2, 7, 64)), [r"\bv\b", r"\b7\b", r"\b5\b"]),
    "v_heads": ((Q, K, (2, 4, 5, 64)), [r"\bv\b", r"\b4\b", r"\b2\b"]),
    "v_head_dim": ((Q, K, (2, 2, 5, 0)), [r"\bv\b", "head_dim", r"\b0\b"]),
    "v_batch": ((Q, K, (1, 2, 5, 64)), [r"\bv\b", r"\b1\b", r"\b2\b"]),
    "k_batch": ((Q, (3, 2, 5, 64), (3, 2, 5, 64)), [r"\bk\b", "batch", r"\b3\b", r"\b2\b"]),
    "k_batch_does_not_broadcast": ((Q, (1, 2, 5, 64), (1, 2, 5, 64)), [r"\bk\b", "batch", r"\b1\b", r"\b2\b"]),
    "k_head_dim": ((Q, (2, 2, 5, 32), (2, 2, 5, 32)), [r"\bk\b", "head_dim", r"\b32\b", r"\b64\b"]),
    "head_dim_0": (
        ((2, 4, 6, 0), (2, 2, 5, 0), (2, 2, 5, 0)),
        ["head_dim", r"\b0\b", "supported|at least|must|expected"],
    ),
}


@pytest.mark.parametrize(("shapes", "words"), BAD_SHAPES.values(), ids=BAD_SHAPES.keys())
def test_shapes(place: str, shapes: Shapes, words: list[str]) -> None:
    refuse(*zeros(shapes, place), *words)
    if place != "meta":
        same_words(*zeros(shapes, place))


@pytest.mark.parametrize("empty", [(0, 4, 6), (2, 4, 0)], ids=["no_batch", "no_query"])
def test_an_empty_result_excuses_nothing(device: str, empty: tuple[int, int, int]) -> None:
    b, h, s = empty
    refuse(*zeros(((b, h, s, 64), (b, 3, 5, 64), (b, 3, 5, 64)), device), "head", "multiple|divi")
    refuse(*zeros(((b, h, s, 64), (b, 2, 5, 64), (b, 2, 9, 64)), device), r"\bv\b")


def test_head_dim_too_large(device: str) -> None:
    largest = max_head_dim(device)
    d = largest + 8
    shapes = ((2, 4, 6, d), (2, 2, 5, d), (2, 2, 5, d))
    refuse(*zeros(shapes, device), "head_dim", rf"\b{d}\b", rf"\b{largest}\b")


def test_largest_cpu_head_dim_is_256() -> None:
    shapes = ((1, 1, 2, 257), (1, 1, 2, 257), (1, 1, 2, 257))
    refuse(*zeros(shapes, "cpu", torch.float32), "head_dim", r"\b257\b", rf"\b{CPU_MAX_HEAD_DIM}\b")


@needs_hopper
@pytest.mark.parametrize("d", [1, 4, 63, 65, 100])
def test_cuda_head_dim_not_a_multiple_of_8(d: int) -> None:
    shapes = ((2, 4, 6, d), (2, 2, 5, d), (2, 2, 5, d))
    refuse(*zeros(shapes, "cuda"), "head_dim", rf"\b{d}\b", r"multiple of 8")


@needs_hopper
def test_cuda_grid_too_large() -> None:
    """2^32 heads of one row; expanded, so that only the refusal comes before the memory runs out."""
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device="cuda").expand(2**16, 2**16, 1, 64)
    refuse(q, q, q, r"\bq\b", r"(?i)supported|at most|limit|grid|2\^31|21474836")


@needs_hopper
def test_cuda_too_many_keys() -> None:
    """Tile coordinates have 32 bits."""
    q = torch.zeros(1, 1, 1, 64, dtype=torch.float16, device="cuda")
    k = q.expand(1, 1, 2**33, 64)
    refuse(q, k, k, r"\bk\b", r"(?i)supported|at most|limit|2\^31|21474836")


# ---- dtypes ---------------------------------------------------------------------------------------------------------

SHAPES: Shapes = (Q, K, K)


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_dtype(place: str, dtype: torch.dtype) -> None:
    """The dtype that was given is named as torch's Python calls it."""
    name = str(dtype).removeprefix("torch.")
    tensors = [torch.zeros(shape, device=place).to(dtype) for shape in SHAPES]
    refuse(*tensors, r"\bq\b", f"dtype {name};", "float16", "bfloat16", "float32", "float64")
    if place != "meta":
        same_words(*tensors)


@pytest.mark.parametrize("odd_one", ["q", "k", "v"])
def test_mixed_dtypes(place: str, odd_one: str) -> None:
    tensors = dict(zip("qkv", zeros(SHAPES, place, torch.bfloat16), strict=True))
    tensors[odd_one] = tensors[odd_one].half()
    names = r"\bv\b" if odd_one == "v" else r"\bk\b"
    refuse(*tensors.values(), names, "dtype", "float16", "bfloat16")
    if place != "meta":
        same_words(*tensors.values())


@pytest.mark.parametrize("odd_one", ["k", "v"])
def test_one_unsupported_dtype(device: str, odd_one: str) -> None:
    tensors = dict(zip("qkv", zeros(SHAPES, device), strict=True))
    tensors[odd_one] = tensors[odd_one].double()
    refuse(*tensors.values(), rf"\b{odd_one}\b", "dtype")


@needs_hopper
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_dtypes_on_cuda(dtype: torch.dtype) -> None:
    refuse(*zeros(SHAPES, "cuda", dtype), str(dtype).removeprefix("torch."), "float16", "bfloat16")


# ---- where tensors are ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", ["q", "k", "v"])
def test_devices_differ(device: str, elsewhere: str) -> None:
    """One tensor of a CPU call has no data; one tensor of a CUDA call is on the CPU."""
    tensors = dict(zip("qkv", zeros(SHAPES, device), strict=True))
    tensors[elsewhere] = tensors[elsewhere].to("meta" if device == "cpu" else "cpu")
    refuse(*tensors.values(), "device")


@pytest.mark.parametrize("sparse", ["q", "k", "v"])
def test_sparse(device: str, sparse: str) -> None:
    tensors = dict(zip("qkv", zeros(SHAPES, device), strict=True))
    tensors[sparse] = tensors[sparse].to_sparse()
    refuse(*tensors.values())


@pytest.mark.skipif(
    not torch.cuda.is_available() or HOPPER_MISSING is None, reason="there is no GPU that is not a Hopper GPU here"
)
def test_unsupported_gpu() -> None:
    refuse(*zeros(SHAPES, "cuda"), "Hopper", "9.0", re.escape(torch.cuda.get_device_name()))


# ---- scale ----------------------------------------------------------------------------------------------------------

LARGEST_SCALE = 2.0**100


@pytest.mark.parametrize("scale", [-1.0, -1e-30, math.nan, math.inf, -math.inf])
def test_scale(place: str, scale: float) -> None:
    given = {math.inf: "inf", -math.inf: "-inf"}.get(scale, "nan" if math.isnan(scale) else "-1")
    refuse(*zeros(SHAPES, place), "scale", given, r"0 to 2\^100", scale=scale)
    if place != "meta":
        same_words(*zeros(SHAPES, place), scale=scale)


def test_large_scale(place: str) -> None:
    for scale in (1e300, math.nextafter(LARGEST_SCALE, math.inf)):
        refuse(*zeros(SHAPES, place), "scale", r"0 to 2\^100", scale=scale)
    dhp_safe_fa.attention(*zeros(SHAPES, place), scale=LARGEST_SCALE)


def test_empty_result_still_checks_scale(device: str) -> None:
    refuse(*zeros(((0, 4, 6, 64), (0, 2, 5, 64), (0, 2, 5, 64)), device), "scale", scale=-1.0)


# ---- causal_offset --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal_offset", [5, -3, 2**40])
def test_causal_offset_without_is_causal(place: str, causal_offset: int) -> None:
    """It would change nothing, so whoever passes it means something else."""
    words = "causal_offset", f": {causal_offset} without is_causal", "supported: 0, or is_causal=True"
    refuse(*zeros(SHAPES, place), *words, causal_offset=causal_offset)
    if place != "meta":
        same_words(*zeros(SHAPES, place), causal_offset=causal_offset)
    with pytest.raises(RuntimeError, match="without is_causal"):
        torch.ops.dhp.attention(*zeros(SHAPES, place), False, None, causal_offset)
    torch.compiler.reset()
    compiled = torch.compile(dhp_safe_fa.attention, fullgraph=True, backend="eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match="without is_causal"):
        compiled(*zeros(SHAPES, place), causal_offset=causal_offset)


# ---- Python ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["q", "k", "v"])
@pytest.mark.parametrize("given", [None, [[1.0]], 3], ids=["None", "list", "number"])
def test_what_is_no_tensor(device: str, missing: str, given: object) -> None:
    tensors: dict[str, Any] = dict(zip("qkv", zeros(SHAPES, device), strict=True))
    tensors[missing] = given
    for name in "None" if given is None else type(given).__name__, "expected a tensor":
        refuse(*tensors.values(), rf"\b{missing}: ", name)
    if given is None:
        for operator in (torch.ops.dhp.attention, torch.ops.dhp.attention_lse):
            with pytest.raises(RuntimeError, match=f"{missing}: None; expected a tensor"):
                operator(*tensors.values())


OTHER_TYPES: list[tuple[dict[str, Any], str]] = [
    ({"is_causal": None}, "is_causal: None; supported: True or False"),
    ({"is_causal": "yes"}, "is_causal: 'yes'; supported: True or False"),
    ({"is_causal": 0.5}, "is_causal: 0.5; supported: True or False"),
    ({"is_causal": 2}, "is_causal: 2; supported: True or False"),
    ({"is_causal": torch.tensor(0.5)}, r"is_causal: a tensor of shape \(\), torch.float32; supported: True or False"),
    ({"scale": "x"}, "scale: 'x'; expected a number, or None"),
    ({"softcap": "x"}, "softcap: 'x'; expected a number, or None"),
    ({"sinks": [1.0, 2.0]}, "sinks: list; expected a tensor, or None"),
    ({"window": (2**70, 0)}, r"window: \(1180591620717411303424, 0\); supported: integers of 64 bits"),
    ({"scale": 10**400}, "scale: a number of 1329 bits; supported: 0 to 2"),
    ({"scale": torch.zeros(4)}, r"scale: a tensor of shape \(4,\), torch.float32; expected a number"),
    ({"softcap": torch.ones(2)}, r"softcap: a tensor of shape \(2,\), torch.float32; expected a number"),
    ({"scale": torch.tensor(0.3, requires_grad=True)}, "scale: a tensor that requires a gradient; supported: a number"),
    ({"softcap": torch.tensor(3.0, requires_grad=True)}, "softcap: a tensor that requires a gradient"),
    ({"is_causal": torch.ones(5)}, r"is_causal: a tensor of shape \(5,\), torch.float32; supported: True or False"),
    ({"scale": torch.tensor(1 + 0j)}, r"scale: a tensor of shape \(\), torch.complex64; expected a number"),
    ({"scale": torch.tensor(0.5, device="meta")}, "scale: a tensor of shape .*, on meta; expected a number"),
    ({"softcap": torch.tensor(3.0, device="meta")}, "softcap: a tensor of shape .*, on meta; expected a number"),
    ({"window": (torch.tensor(2.9), 0)}, "window, left: a tensor of shape .*; expected a whole number"),
    ({"window": (0, torch.tensor([1, 2]))}, "window, right: a tensor of shape .*; expected a number"),
]


@pytest.mark.parametrize(("options", "words"), OTHER_TYPES, ids=[str(options) for options, _ in OTHER_TYPES])
def test_options_of_another_type(options: dict[str, Any], words: str) -> None:
    q, rows = torch.randn(1, 2, 5, 8), torch.randn(7, 2, 8)
    cu = torch.tensor([0, 7], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"dhp::attention: {words}"):
        dhp_safe_fa.attention(q, q, q, **options)
    with pytest.raises(RuntimeError, match=f"dhp::attention_varlen: {words}"):
        dhp_safe_fa.attention_varlen(rows, rows, rows, cu, cu, 7, 7, **options)


def test_numbers_in_tensors(device: str) -> None:
    """Of one element, as torch takes them; of a parameter where no gradient is recorded."""
    q, k, v = zeros(SHAPES, device)
    given: dict[str, Any] = {"scale": 0.5, "is_causal": True, "causal_offset": 1, "window": (2, 0)}
    want = dhp_safe_fa.attention(q, k, v, **given)
    with torch.no_grad():
        scale = torch.tensor(0.5, requires_grad=True)
        places = {"causal_offset": torch.tensor(1), "window": (torch.tensor(2), torch.tensor(0))}
        assert torch.equal(dhp_safe_fa.attention(q, k, v, is_causal=True, scale=scale, **places), want)


@pytest.mark.parametrize("flag", [1, np.bool_(True), torch.tensor(True), torch.tensor([True])], ids=repr)
def test_is_causal_of_other_types(flag: Any) -> None:
    """What says True or False and nothing else."""
    q = torch.randn(1, 2, 5, 8)
    want = dhp_safe_fa.attention(q, q, q, is_causal=True)
    assert torch.equal(dhp_safe_fa.attention(q, q, q, is_causal=flag), want)


def test_a_tensor_as_number_is_not_blamed_for_others() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in "qkv")
    with pytest.raises(RuntimeError, match=r"\bk: "):
        dhp_safe_fa.attention(q, torch.randn(1, 2, 5, 16), v, scale=torch.tensor(0.5))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"scale: 2\.5353e\+30; supported: 0 to 2"):
        dhp_safe_fa.attention(q, k, v, scale=2**101)


def test_a_tangent_of_a_scale_is_not_lost() -> None:
    q = torch.randn(1, 2, 5, 8)
    with forward_ad.dual_level():
        scale = forward_ad.make_dual(torch.tensor(0.5), torch.tensor(1.0))
        with pytest.raises(RuntimeError, match="scale: a tensor that requires a gradient"):
            dhp_safe_fa.attention(q, q, q, scale=scale)  # type: ignore[arg-type]


@pytest.mark.parametrize("length", [torch.tensor(7.9), torch.tensor([7, 8])], ids=["fraction", "two"])
def test_lengths_in_tensors(length: Any) -> None:
    rows, cu = torch.randn(7, 2, 8), torch.tensor([0, 7], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"max_seqlen_q: a tensor of shape .*; expected a"):
        dhp_safe_fa.attention_varlen(rows, rows, rows, cu, cu, length, 7)


@pytest.mark.parametrize("offset", [None, 1.5, 2**80, torch.tensor(1.5)], ids=str)
def test_no_causal_offset(offset: Any) -> None:
    q = torch.randn(1, 2, 5, 8)
    words = "causal_offset: .*; (expected whole numbers|expected a whole number|supported: integers of 64 bits)"
    with pytest.raises(RuntimeError, match=words):
        dhp_safe_fa.attention(q, q, q, is_causal=True, causal_offset=offset)


def test_lengths_of_another_type() -> None:
    rows, cu = torch.randn(7, 2, 8), torch.tensor([0, 7], dtype=torch.int32)
    calls: list[tuple[tuple[Any, ...], str]] = [
        (([0, 7], cu, 7, 7), r"cu_seqlens_q: list; expected a tensor"),
        ((cu, [0, 7], 7, 7), r"cu_seqlens_k: list; expected a tensor, or None"),
        ((cu, cu, None, 7), r"max_seqlen_q: None; expected whole numbers"),
    ]
    for sequences, words in calls:
        with pytest.raises(RuntimeError, match=f"dhp::attention_varlen: {words}"):
            dhp_safe_fa.attention_varlen(rows, rows, rows, *sequences)


def test_tensors_of_another_layout() -> None:
    q = torch.randn(1, 2, 5, 8)
    nested = torch.nested.nested_tensor([q[0], q[0]], layout=torch.jagged)
    for given, kind in ((q.to_sparse(), "sparse coo"), (q.to_mkldnn(), "mkldnn"), (nested, "nested")):
        with pytest.raises(RuntimeError, match=f"dhp::attention: q: a {kind} tensor; supported: strided tensors"):
            dhp_safe_fa.attention(given, q, q)


def test_options_are_keywords() -> None:
    q, k, v = zeros(SHAPES, "cpu")
    for call in FUNCTIONS:
        with pytest.raises(TypeError):
            call(q, k, v, True)


def test_a_failed_call_leaves_the_next_one_right(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 6, 5, 64)
    before = dhp_safe_fa.attention(q, k, v)
    refuse(q, k, v[:, :, :3], r"\bv\b")
    assert torch.equal(before, dhp_safe_fa.attention(q, k, v))


def test_a_refusal_frees_what_it_was_given() -> None:
    """All tensors of a call are taken from the dispatcher's stack before any is refused."""
    k, rows, cu = torch.ones(1, 2, 5, 8), torch.ones(7, 2, 8), torch.tensor([0, 7], dtype=torch.int32)
    ops = torch.ops.dhp
    calls: list[tuple[Tensor, Callable[[Tensor], object]]] = [
        (k, lambda t: ops.attention(None, t, k)),
        (k, lambda t: ops.attention_lse(k, None, t)),
        (k, lambda t: ops.attention_backward(None, t, k, k, k, torch.ones(1, 2, 5))),
        (k, lambda t: ops.attention_sinks_backward(None, t, torch.ones(1, 2, 5), torch.ones(2))),
        (rows, lambda t: ops.attention_varlen(None, rows, t, cu, cu, 7, 7)),
    ]
    for like, call in calls:
        given = like.clone()
        freed = weakref.ref(given)
        with pytest.raises(RuntimeError, match="None; expected a tensor"):
            call(given)
        del given
        gc.collect()
        assert freed() is None


def freed(t: Tensor, bytes_left: int = 0) -> Tensor:
    gone = t.clone()
    gone.untyped_storage().resize_(bytes_left)
    return gone


def test_storage_that_was_freed(device: str) -> None:
    q, rows = torch.randn(1, 2, 5, 8).half().to(device), torch.randn(1, 2, 5, device=device)
    packed, numbers = torch.randn(7, 2, 8).half().to(device), torch.tensor([0, 7], dtype=torch.int32, device=device)
    pages = torch.randn(4, 16, 2, 8).half().to(device)
    table, used = torch.zeros(1, 2, dtype=torch.int32, device=device), numbers[1:]
    sinks, ops = torch.randn(2, device=device), torch.ops.dhp
    whole = q.new_zeros(1, 2, 7, 8)
    view = whole[:, :, 2:]
    whole.untyped_storage().resize_(0)

    def paged(k: Tensor, table: Tensor) -> object:
        return ops.attention_varlen(packed, k, pages, numbers, None, 7, 7, seqused_k=used, page_table=table)

    calls: list[tuple[str, Callable[[], object]]] = [
        ("k", lambda: ops.attention(q, freed(q), q)),
        ("k", lambda: ops.attention(q, freed(q, 2 * q.numel() - 1), q)),
        ("v", lambda: ops.attention_lse(q, q, view)),
        ("sinks", lambda: ops.attention(q, q, q, sinks=freed(sinks))),
        ("lse", lambda: ops.attention_backward(q, q, q, q, q, freed(rows))),
        ("grad_lse", lambda: ops.attention_backward(q, q, q, q, q, rows, grad_lse=freed(rows))),
        ("q", lambda: ops.attention_varlen(freed(packed), packed, packed, numbers, numbers, 7, 7)),
        ("cu_seqlens_q", lambda: ops.attention_varlen(packed, packed, packed, freed(numbers), numbers, 7, 7)),
        ("cu_seqlens_k", lambda: ops.attention_varlen(packed, packed, packed, numbers, freed(numbers), 7, 7)),
        ("k", lambda: paged(freed(pages), table)),
        ("page_table", lambda: paged(pages, freed(table))),
    ]
    for name, call in calls:
        with pytest.raises(RuntimeError, match=f": {name}: its memory ends before its last element; its storage has"):
            call()


def test_no_memory() -> None:
    x = torch.randn(1, 1, 1, 1)
    q, k = x.expand(2**30, 2**10, 2**9, 1), x.expand(2**30, 1, 1, 1)
    with pytest.raises(RuntimeError, match=r"a tensor of shape \[1073741824, 1024, 512, 1\], float32, could not"):
        torch.ops.dhp.attention(q, k, k)


@pytest.mark.parametrize("window", [None, 5, "ab", (-1, None), (1.0, 0), (1, 2, 3)], ids=str)
def test_no_window(window: Any) -> None:
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(RuntimeError, match=r"window: .*; expected \(left, right\), two numbers of keys"):
        dhp_safe_fa.attention(q, q, q, window=window)
