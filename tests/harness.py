"""What the tests share: where to run, how inputs lie in memory, and one way to call the operator."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import dhp_safe_fa
from dhp_safe_fa import _inspect

CPU_MAX_HEAD_DIM = 256

# Names as `dhp_safe_fa._inspect` spells them.
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}

# An integer type of the same width, to compare bits (NaN equals NaN, -0 differs from +0).
_BITS = {
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
    torch.float64: torch.int64,
}


class Target(NamedTuple):
    """One place the operator runs: a device and an element type it serves there."""

    device: str
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{self.device}-{DTYPE_NAMES[self.dtype]}"


def missing_hopper() -> str | None:
    """Why the CUDA half of the suite cannot run here; None where it can."""
    if not torch.cuda.is_available():
        return "nothing was run on device cuda: torch sees no GPU"
    if torch.cuda.get_device_capability() != (9, 0):
        return f"nothing was run on device cuda: {torch.cuda.get_device_name()} is not a Hopper GPU"
    return None


HOPPER_MISSING = missing_hopper()
needs_hopper = pytest.mark.skipif(HOPPER_MISSING is not None, reason=str(HOPPER_MISSING))
needs_kernels = pytest.mark.skipif(not _inspect.kernels(), reason="this build has no GPU kernels (no nvcc was found)")
DEVICES = ["cpu"] if HOPPER_MISSING else ["cpu", "cuda"]
TARGETS = [
    Target(device, dtype) for device in DEVICES for dtype in DTYPE_NAMES if device == "cpu" or dtype != torch.float32
]
on_the_cpu = pytest.mark.parametrize("target", [Target("cpu", dtype) for dtype in DTYPE_NAMES], ids=str)


def max_head_dim(device: str) -> int:
    """Largest head_dim that the operator serves on the device."""
    if device == "cpu":
        return CPU_MAX_HEAD_DIM
    return max(int(kernel["head_dim"]) for kernel in _inspect.kernels())


# ---- inputs ---------------------------------------------------------------------------------------------------------


def normal(rng: torch.Generator, shape: tuple[int, ...], target: Target) -> Tensor:
    """Standard normal values, drawn on the CPU so that one seed means one input everywhere."""
    return torch.randn(shape, generator=rng).to(target.dtype).to(target.device)


def qkv(
    rng: torch.Generator, target: Target, b: int, hq: int, hk: int, sq: int, sk: int, d: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [b, hq, sq, d] and k, v [b, hk, sk, d]."""
    return (
        normal(rng, (b, hq, sq, d), target),
        normal(rng, (b, hk, sk, d), target),
        normal(rng, (b, hk, sk, d), target),
    )


def _nan_block(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The memory around a view is NaN: a kernel that reads a neighbour cannot hide it."""
    return like.new_full(shape, torch.nan)


def _bshd(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def _packed_heads(t: Tensor) -> Tensor:
    b, h, s, d = t.shape
    view = _nan_block(t, (b, s, 3 * h, d))[:, :, h : 2 * h].transpose(1, 2)
    return view.copy_(t)


def _padded_rows(t: Tensor) -> Tensor:
    b, h, s, d = t.shape
    return _nan_block(t, (b, h, s + 2, d + 8))[:, :, 1 : s + 1, :d].copy_(t)


def _odd_rows(t: Tensor) -> Tensor:
    b, h, s, d = t.shape
    return _nan_block(t, (b, h, s, d + 3))[..., 1 : d + 1].copy_(t)


def _every_second_column(t: Tensor) -> Tensor:
    b, h, s, d = t.shape
    return _nan_block(t, (b, h, s, 2 * d))[..., ::2].copy_(t)


def _unaligned(t: Tensor) -> Tensor:
    return _nan_block(t, (t.numel() + 1,))[1:].view(t.shape).copy_(t)


def _columns_outermost(t: Tensor) -> Tensor:
    return t.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)


# Same values, other strides and offsets.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "transposed_bshd": _bshd,
    "heads_of_packed_qkv": _packed_heads,
    "padded_rows": _padded_rows,
    "rows_of_odd_stride": _odd_rows,
    "every_second_column": _every_second_column,
    "storage_offset_1": _unaligned,
    "columns_outermost": _columns_outermost,
}

# Stride 0: these repeat the first batch, head or row, so they change the values too.
EXPANSIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "batch_stride_0": lambda t: t[:1].expand(t.shape),
    "head_stride_0": lambda t: t[:, :1].expand(t.shape),
    "row_stride_0": lambda t: t[:, :, :1].expand(t.shape),
}


# ---- calls ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN inside: an output element that nobody writes shows."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal shape, dtype and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = _BITS[a.dtype]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))


def assert_compiled_and_vmapped(q: Tensor, k: Tensor, v: Tensor, out: Tensor, **options: Any) -> None:
    """`out`, which an eager call has given, has the same bits from a compiled one, and mapped over the batch."""
    torch.compiler.reset()
    compiled = torch.compile(dhp_safe_fa.attention, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(q, k, v, **options), out)
    mapped = torch.func.vmap(lambda *t: dhp_safe_fa.attention(*t, **options))(q[:, None], k[:, None], v[:, None])
    assert same_bits(mapped[:, 0], out)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int = 0,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out, lse) of attention_lse on poisoned memory, after checking what every call has to hold:

    both operators give the same bits; out lies in memory as torch.empty_like(q), or contiguous if v is of another
    head_dim; lse is float32, contiguous.
    """
    with poisoned_memory():
        options: Any = {"is_causal": is_causal, "scale": scale, "causal_offset": causal_offset, "window": window}
        options |= {"softcap": softcap, "sinks": sinks}
        out, lse = dhp_safe_fa.attention_lse(q, k, v, **options)
        alone = dhp_safe_fa.attention(q, k, v, **options)
    like = torch.empty_like(q) if v.shape[3] == q.shape[3] else q.new_empty([*q.shape[:3], v.shape[3]])
    for tensor in (out, alone):
        assert tensor.shape == like.shape and tensor.dtype == q.dtype and tensor.device == q.device
        assert tensor.stride() == like.stride(), f"out has strides {tensor.stride()}, empty_like(q) {like.stride()}"
    assert lse.shape == q.shape[:3] and lse.dtype == torch.float32 and lse.device == q.device
    assert lse.is_contiguous()
    assert same_bits(out, alone), "attention and attention_lse differ"
    return out, lse


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor


def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    grad_lse: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    causal_offset: int = 0,
    window: tuple[int, int] = (-1, -1),
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Gradients:
    """(dq, dk, dv) of attention_backward on poisoned memory, after checking what every call has to hold:

    each lies in memory as torch.empty_like of its input; alone, each has the same bits, and the others are left out.
    """
    places, forms = (is_causal, scale, causal_offset), (*window, softcap)
    with torch.no_grad(), poisoned_memory():
        out, lse = torch.ops.dhp.attention_lse(q, k, v, *places, *forms, sinks)
        given = (grad_out, q, k, v, out, lse, *places, grad_lse)

        def call(*needed: bool) -> tuple[Tensor, Tensor, Tensor]:
            return torch.ops.dhp.attention_backward(*given, *needed, *forms)  # type: ignore[no-any-return]

        found = Gradients(*call(True, True, True))
        for i, like in enumerate((q, k, v)):
            assert found[i].shape == like.shape and found[i].dtype == like.dtype and found[i].device == like.device
            assert found[i].stride() == torch.empty_like(like).stride(), f"d{'qkv'[i]} has strides {found[i].stride()}"
            alone = call(*(i == j for j in range(3)))
            nan = [int(t[i].isnan().sum()) for t in (found, alone)]
            assert same_bits(alone[i], found[i]), f"d{'qkv'[i]} alone differs; NaN {nan[1]}, else {nan[0]}"
            assert all(alone[j].shape == (0,) for j in range(3) if j != i)
    return found


# ---- operators ------------------------------------------------------------------------------------------------------

FUNCTIONS = [dhp_safe_fa.attention, dhp_safe_fa.attention_lse]
OPERATORS = [torch.ops.dhp.attention.default, torch.ops.dhp.attention_lse.default]
both_operators = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name())

# Inductor and forward mode still use torch.jit, which torch has deprecated.
torch_jit_is_deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def refusal(calls: Sequence[Callable[..., Any]], arguments: Mapping[str, Any], fake: bool = True) -> str:
    """The message of the RuntimeError that every call raises, the same of all; and without data, if `fake`."""
    answers = set()
    for call in calls:
        for without_data in (False, True) if fake else (False,):
            with FakeTensorMode() if without_data else contextlib.nullcontext() as mode:
                given = {n: mode.from_tensor(t) if mode and isinstance(t, Tensor) else t for n, t in arguments.items()}
                with pytest.raises(RuntimeError) as caught:
                    call(**given)
            answers.add(str(caught.value))
    assert len(answers) == 1, answers
    return answers.pop()


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


# ---- torch ----------------------------------------------------------------------------------------------------------

ADDITIONS_AHEAD_OF_TIME = """
import sys, torch

class Additions(torch.nn.Module):
    def forward(self, x):
        return x + 1

folder, device = sys.argv[1:]
program = torch.export.export(Additions(), (torch.zeros(4, device=device),))
package = torch._inductor.aoti_compile_and_package(program, package_path=f"{folder}/additions.pt2")
torch._inductor.aoti_load_package(package)
"""


def require_ahead_of_time(folder: Path, device: str) -> None:
    """Skips where torch dies while it loads any package: torch 2.11.0+cu130 was seen to, for either device."""
    if torch.version.cuda:
        control = subprocess.run([sys.executable, "-c", ADDITIONS_AHEAD_OF_TIME, folder, device], check=False)
        if control.returncode < 0:
            pytest.skip(f"torch {torch.__version__} dies of signal {-control.returncode} on a package of x + 1 alone")
