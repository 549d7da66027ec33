"""dhp_safe_fa._inspect: what this build ships and what it would launch, and that this is what runs."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest
import sanitize_cuda
import torch
from harness import Target, attend, gradients, max_head_dim, needs_hopper, needs_kernels, normal, qkv
from reference import (
    ELEMENTS_FOR_NORM,
    assert_accurate,
    assert_gradients_match,
    assert_matches,
    reference,
    reference_gradients,
)

import dhp_safe_fa
from dhp_safe_fa import _inspect
from dhp_safe_fa.gates import sinks as sinks_of
from dhp_safe_fa.gates.families.packed import ASKED
from dhp_safe_fa.gates.families.packed import attend as attend_packed

KERNELS: list[dict[str, Any]] = _inspect.kernels()

# A register file of 65,536 and, for one CTA, 227 KiB of shared memory: CUDA Programming Guide, compute capability 9.0.
MAX_REGISTERS, REGISTER_FILE, MAX_SHARED_BYTES = 255, 65536, 227 * 1024


def plan(q: tuple[int, ...], k: tuple[int, ...], dtype: str = "float16", **mask: Any) -> dict[str, Any]:
    result: dict[str, Any] = _inspect.plan(q, k, dtype, **mask)
    return result


def test_version_is_one() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", dhp_safe_fa.__version__)
    assert dhp_safe_fa.__version__ in [str(value) for value in _inspect.build_info().values()]


# ---- kernels --------------------------------------------------------------------------------------------------------


@needs_kernels
def test_both_dtypes_and_head_dims_are_built() -> None:
    built = {(kernel["dtype"], kernel["head_dim"]) for kernel in KERNELS}
    assert {(dtype, d) for dtype in ("float16", "bfloat16") for d in (64, 128, 256)} <= built


@needs_kernels
def test_names_and_hashes_are_unique() -> None:
    assert len({kernel["name"] for kernel in KERNELS}) == len(KERNELS)
    assert len({kernel["cubin_sha256"] for kernel in KERNELS}) == len(KERNELS)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel["name"]))
def test_kernel_fits_the_machine(kernel: dict[str, Any]) -> None:
    assert kernel["spill_bytes"] == 0
    assert 0 < kernel["registers"] <= MAX_REGISTERS
    assert kernel["registers"] * kernel["threads"] <= REGISTER_FILE
    assert 0 <= kernel["shared_bytes"] <= MAX_SHARED_BYTES
    assert kernel["threads"] % 128 == 0 and kernel["threads"] >= 128 * kernel["warpgroups"]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel["name"]))
def test_hash_is_that_of_the_machine_code(kernel: dict[str, Any]) -> None:
    cubin = _inspect.cubin(kernel["name"])
    assert cubin.startswith(b"\x7fELF")
    assert hashlib.sha256(cubin).hexdigest() == kernel["cubin_sha256"]


def test_unknown_kernel() -> None:
    with pytest.raises(KeyError, match="no_such_kernel"):
        _inspect.cubin("no_such_kernel")


# ---- plans ----------------------------------------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("d", [8, 16, 56, 64, 72, 120, 128, 136, 256])
def test_plan_takes_the_smallest_kernel_that_fits(dtype: str, d: int) -> None:
    by_name = {kernel["name"]: kernel for kernel in KERNELS}
    chosen = by_name[plan((1, 8, 512, d), (1, 8, 512, d), dtype)["kernel"]]
    assert chosen["dtype"] == dtype
    assert chosen["head_dim"] == min(kernel["head_dim"] for kernel in KERNELS if kernel["head_dim"] >= d)


@needs_kernels
@pytest.mark.parametrize("sq", [1, 63, 64, 65, 127, 128, 129, 1000])
def test_plan_covers_every_query_row_once(sq: int) -> None:
    got = plan((3, 10, sq, 64), (3, 5, 77, 64))
    kernel = next(kernel for kernel in KERNELS if kernel["name"] == got["kernel"])
    pack = got["heads_per_tile"]
    assert 10 // 5 % pack == 0 and (pack == 1 or pack * sq <= 64)
    assert got["q_tiles"] == -(-sq * pack // kernel["tile_q"])
    assert got["items"] == 3 * 10 // pack * got["q_tiles"]
    assert got["grid"] == min(got["items"], 132 * kernel["ctas_per_sm"])
    assert got["threads"] == kernel["threads"] and got["shared_bytes"] == kernel["shared_bytes"]
    assert 0 <= got["listed_groups"] <= got["items"]


def segment_keys(kernel: dict[str, Any]) -> int:
    return int(kernel["tile_k"] * kernel["segment_tiles"])


@needs_kernels
def test_segments_are_of_the_forward() -> None:
    """As many keys for each head_dim, like a key tile; other families have none, or room for so many."""
    forwards = [kernel for kernel in KERNELS if kernel["family"] == "forward"]
    of_head_dim = {kernel["head_dim"]: segment_keys(kernel) for kernel in forwards}
    assert all(segment_keys(kernel) == of_head_dim[kernel["head_dim"]] > 0 for kernel in forwards)
    assert all(kernel["segment_tiles"].bit_count() == 1 for kernel in forwards)  # its bits are a mask
    lasting = {kernel["head_dim"] for kernel in forwards if kernel["part"] == "out" and not kernel["is_short"]}
    assert lasting == set(of_head_dim), "rows of several segments have no kernel at a head_dim"
    for kernel in KERNELS:
        if kernel["family"] == "decode":
            assert 0 < segment_keys(kernel) <= of_head_dim[kernel["head_dim"]]
        elif kernel["family"] != "forward":
            assert kernel["segment_tiles"] == 0


@needs_kernels
@pytest.mark.parametrize("d", [64, 120, 128, 256])
@pytest.mark.parametrize("queries", [1, 70, 30_000])
def test_plan_of_long_rows(queries: int, d: int) -> None:
    """Rows of one segment have no parts; others have them, for each segment of a tile if these are split."""
    by_name = {kernel["name"]: kernel for kernel in KERNELS}
    for keys in (1000, 4097, 8193, 10_241, 30_001):
        got = plan((1, 4, queries, d), (1, 2, keys, d))
        kernel = by_name[got["kernel"]]
        segments = -(-keys // segment_keys(kernel))
        assert got["splits"] in (1, segments)
        whole = 4 // got["heads_per_tile"] * got["q_tiles"]
        assert got["items"] == whole * got["splits"]
        rows = 0 if segments == 1 else (got["items"] if got["splits"] > 1 else got["grid"]) * kernel["tile_q"]
        assert got["parts"] == rows


@needs_kernels
def test_key_walk_is_the_same_for_every_shape() -> None:
    """Row invariance: the kernel, and so its key tile, may depend on head_dim and dtype alone; where rows have parts,
    segments, too."""
    shapes = [((b, h, sq, 64), (b, h, sk, 64)) for b in (1, 9) for h in (1, 32) for sq in (1, 700) for sk in (1, 9000)]
    plans = [
        plan(q, k, is_causal=causal, causal_offset=offset)
        for q, k in shapes
        for causal, offset in ((False, 0), (True, 5))
    ]
    by_name = {kernel["name"]: kernel for kernel in KERNELS}
    assert len({by_name[p["kernel"]]["tile_k"] for p in plans}) == 1
    assert len({by_name[p["kernel"]]["segment_tiles"] for p in plans if p["parts"]}) == 1


@needs_kernels
@pytest.mark.parametrize("q", [(0, 8, 5, 64), (2, 0, 5, 64), (2, 8, 0, 64)], ids=str)
def test_nothing_to_launch(q: tuple[int, ...]) -> None:
    assert _inspect.plan(q, (q[0], 4, 7, 64), "float16") is None


@needs_kernels
@pytest.mark.parametrize(
    ("q", "k"),
    [
        ((2**16, 2**16, 1, 64), (2**16, 2**16, 1, 64)),
        ((1, 1, 2**40, 64), (1, 1, 64, 64)),
        ((1, 1, 1, 64), (1, 1, 2**40, 64)),
        ((2**31, 1, 1, 64), (2**31, 1, 1, 64)),
        ((1, 2**31, 1, 64), (1, 1, 1, 64)),
        ((2**20, 2**20, 2**20, 64), (2**20, 2**20, 2**20, 64)),
        ((2**62, 4, 4, 64), (2**62, 4, 4, 64)),
    ],
    ids=str,
)
def test_too_large_for_the_grid(q: tuple[int, ...], k: tuple[int, ...]) -> None:
    with pytest.raises(
        (ValueError, RuntimeError), match=r"\b[qk]\b.*(supported|at most|limit|large|grid|2\^31|21474836)"
    ):
        _inspect.plan(q, k, "float16")


@needs_kernels
def test_largest_supported_grid_is_planned() -> None:
    """A long sequence that real models have: a million tokens of 128 heads."""
    got = plan((1, 128, 2**20, 128), (1, 8, 2**20, 128), "bfloat16", is_causal=True)
    assert got["mirrored"] and got["grid"] < 2**10
    assert got["items"] == (128 + got["listed_groups"]) * got["q_tiles"] // 2


@needs_kernels
@pytest.mark.parametrize(
    ("q", "k", "dtype", "words"),
    [
        ((1, 8, 64, 60), (1, 8, 64, 60), "float16", "head_dim.*60.*8"),
        ((1, 8, 64, 0), (1, 8, 64, 0), "float16", "head_dim.*0"),
        ((1, 8, 64, 4096), (1, 8, 64, 4096), "float16", "head_dim.*4096"),
        ((1, 8, 64, 64), (1, 3, 64, 64), "float16", "(?s)(?=.*8)(?=.*3).*multiple"),
        ((1, 8, 64, 64), (2, 8, 64, 64), "float16", "batch"),
        ((1, 8, 64, 64), (1, 8, 64, 128), "float16", "head_dim"),
        ((1, 8, 64, 64), (1, 0, 64, 64), "float16", r"\bk\b"),
        ((1, 8, -1, 64), (1, 8, 64, 64), "float16", r"\bq\b"),
        ((1, 8, 64, 64), (1, 8, 64, 64), "float32", "float32.*float16.*bfloat16"),
        ((1, 8, 64, 64), (1, 8, 64, 64), "int8", "int8"),
    ],
)
def test_plan_refuses(q: tuple[int, ...], k: tuple[int, ...], dtype: str, words: str) -> None:
    with pytest.raises((ValueError, RuntimeError), match=words):
        _inspect.plan(q, k, dtype)


# ---- what is planned runs -------------------------------------------------------------------------------------------


# (B, Hq, Hk, Sq, Sk) from one decoded token to many long rows: every kernel is the plan of one of them.
CALLS = [
    (1, 2, 1, 1, 300),
    (1, 2, 1, 1, 100),
    (1, 8, 2, 1, 2500),
    (1, 8, 8, 1, 4200),
    (1, 8, 8, 70, 8260),
    (1, 2, 1, 1, 11000),  # more keys than a segment at any head_dim: split,
    (1, 132, 12, 100, 10500),  # and one after the other
    (1, 2, 2, 70, 300),
    (2, 4, 2, 300, 500),
    (1, 66, 6, 100, 130),
    (4, 16, 4, 1000, 700),
    (8, 32, 8, 1500, 130),
    (1, 32, 32, 2300, 2300),
]


# Of those that launch kernels of windows: the last row is far behind key 0.
WINDOW = (40, 30)


def calls_of(kernel: dict[str, Any]) -> list[tuple[int, int, int, int, int]]:
    """Those that launch the kernel: themselves, for their gradients, with dq or without, or as packed sequences."""
    d, dtype = kernel["head_dim"], kernel["dtype"]

    def launched(b: int, hq: int, hk: int, sq: int, sk: int) -> list[str]:
        q, k = (b, hq, sq, d), (b, hk, sk, d)
        forward = sanitize_cuda.Call(q, k, dtype, False, 0).forward_kernels()
        if kernel["part"] == "window out":
            forward = sanitize_cuda.Call(q, k, dtype, False, 0, *WINDOW).forward_kernels()
        backward = [each for need in (True, False) for each in _inspect.plan_backward(q, k, dtype, need_dq=need)]
        packed = [
            _inspect.plan_packed((b * sq, hq, d), (b * sk, hk, d), dtype, b, sq, sk, *forms)
            for forms in ((), (0.0, True), (3.0, False))
        ]
        return ["tiles", *forward, *(each["kernel"] for each in (*backward, *packed) if each)]

    return [call for call in CALLS if kernel["name"] in launched(*call)]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel["name"]))
def test_every_shipped_kernel_is_used(kernel: dict[str, Any]) -> None:
    assert calls_of(kernel)


def packed_kernels_of(call: sanitize_cuda.Call) -> list[str]:
    """Where the sanitizers run it as packed sequences, in all forms."""
    is_packed = not call.is_windowed and not (call.is_causal and call.causal_offset)
    return [name for asked in ASKED.values() for name in call.packed_kernels(asked)] if is_packed else []


@needs_kernels
def test_the_sanitizers_meet_every_kernel() -> None:
    met = {name for call in sanitize_cuda.calls() for name in (*call.kernels(), *packed_kernels_of(call))}
    assert met == {kernel["name"] for kernel in KERNELS}


@needs_hopper
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: str(kernel["name"]))
def test_every_shipped_kernel_is_right(kernel: dict[str, Any], rng: torch.Generator) -> None:
    for b, hq, hk, sq, sk in calls_of(kernel):
        target = Target("cuda", getattr(torch, kernel["dtype"]))
        q, k, v = qkv(rng, target, b, hq, hk, sq, sk, kernel["head_dim"])
        for is_causal, offset in ((False, 0), (True, 200)):
            if kernel["part"] in ("out", "fold"):
                out, lse = attend(q, k, v, is_causal, causal_offset=offset)
                check = assert_accurate if out.numel() >= ELEMENTS_FOR_NORM else assert_matches
                check(out, lse, reference(q, k, v, is_causal, causal_offset=offset))
            elif kernel["part"] == "window out":
                within = {"causal_offset": offset, "window": WINDOW}
                assert_matches(*attend(q, k, v, is_causal, **within), reference(q, k, v, is_causal, **within))
            elif kernel["part"] in ("tiles", *ASKED):
                asked = ASKED.get(kernel["part"], ASKED["packed out"])
                sinks = torch.randn(hq, generator=rng).to(q.device) if asked.has_sinks else None
                inputs = (q, k, v) if sinks is None else sinks_of.beside((q, k, v), sinks)
                out, lse = attend_packed(inputs, is_causal, softcap=asked.softcap)
                assert_matches(out, lse, reference(q, k, v, is_causal, softcap=asked.softcap, sinks=sinks))
            else:
                grad_out = normal(rng, tuple(q.shape), target)
                mask = {"is_causal": is_causal, "causal_offset": offset}
                got = gradients(q, k, v, grad_out, None, **mask)
                assert_gradients_match(got, reference_gradients(q, k, v, grad_out, None, **mask))


@needs_hopper
def test_largest_head_dim_is_the_one_reported() -> None:
    assert max_head_dim("cuda") == _inspect.build_info()["max_head_dim_cuda"]
