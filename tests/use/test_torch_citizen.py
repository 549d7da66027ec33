"""The operators among torch's own machinery: opcheck, compile, export, fake and meta tensors, autograd, vmap, autocast,
inference mode, deterministic mode, threads, processes, streams, CUDA graphs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F
from harness import DEVICES, EXPANSIONS, LAYOUTS, Target, attend, needs_hopper, normal, qkv, same_bits
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import dhp_safe_fa

ARGUMENTS = "Tensor q, Tensor k, Tensor v, bool is_causal=False, float? scale=None, int causal_offset=0"
SCHEMAS = {
    "attention": f"dhp::attention({ARGUMENTS}) -> Tensor",
    "attention_lse": f"dhp::attention_lse({ARGUMENTS}) -> (Tensor out, Tensor lse)",
}
OPERATORS = [torch.ops.dhp.attention.default, torch.ops.dhp.attention_lse.default]
both_operators = pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name())

# Inductor and forward mode still use torch.jit, which torch has deprecated.
torch_jit_is_deprecated = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else result


# ---- registration ---------------------------------------------------------------------------------------------------


@both_operators
def test_schema(operator: Any) -> None:
    name = operator.name().removeprefix("dhp::")
    want = torch._C.parse_schema(SCHEMAS[name])
    assert str(operator._schema) == str(want)
    assert not operator._schema.is_mutable


def samples(rng: torch.Generator, device: str) -> Iterator[tuple[tuple[Tensor, ...], dict[str, Any]]]:
    q, k, v = qkv(rng, Target(device, torch.float16), 2, 4, 4, 33, 70, 64)
    yield (q, k, v), {}
    yield (q, k, v), {"is_causal": True, "scale": 0.2, "causal_offset": 37}
    yield (q, k[:, :2], v[:, :2]), {"is_causal": True}
    yield (q, k[:, :1], v[:, :1]), {"is_causal": True, "causal_offset": -3}
    for layout in ("transposed_bshd", "heads_of_packed_qkv", "every_second_column", "columns_outermost"):
        yield tuple(LAYOUTS[layout](t) for t in (q, k, v)), {"is_causal": True, "causal_offset": -5}
    yield tuple(EXPANSIONS["head_stride_0"](t) for t in (q, k, v)), {}
    yield (q[:0], k[:0], v[:0]), {}
    yield (q[:, :, :0], k, v), {}
    yield (q, k[:, :, :0], v[:, :, :0]), {"is_causal": True}
    yield (q[:, :, :1], k, v), {}


@both_operators
def test_opcheck(operator: Any, device: str, rng: torch.Generator) -> None:
    for arguments, options in samples(rng, device):
        torch.library.opcheck(operator, arguments, options)


@both_operators
def test_opcheck_of_autograd_registration(operator: Any, target: Target, rng: torch.Generator) -> None:
    """Needs inputs that require grad, which the operator refuses to run with; the check itself does not run it."""
    tensors = [t.requires_grad_() for t in qkv(rng, target, 1, 2, 2, 3, 4, 64)]
    torch.library.opcheck(operator, tuple(tensors), test_utils="test_autograd_registration")


def test_functions_are_the_operators(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    out, lse = dhp_safe_fa.attention_lse(q, k, v, is_causal=True, scale=0.3, causal_offset=9)
    assert same_bits(out, dhp_safe_fa.attention(q, k, v, is_causal=True, scale=0.3, causal_offset=9))
    assert same_bits(out, torch.ops.dhp.attention(q, k, v, True, 0.3, 9))
    op_out, op_lse = torch.ops.dhp.attention_lse(q, k, v, is_causal=True, scale=0.3, causal_offset=9)
    assert same_bits(out, op_out) and same_bits(lse, op_lse)


# ---- shapes and strides without data --------------------------------------------------------------------------------


def described(result: Tensor | tuple[Tensor, ...]) -> list[tuple[Any, ...]]:
    """Strides of an empty tensor mean nothing, and torch.empty_like's own differ between real and fake ones."""
    return [(t.shape, t.stride() if t.numel() else None, t.dtype, t.storage_offset()) for t in as_tuple(result)]


@both_operators
@pytest.mark.parametrize("layout", [*LAYOUTS, *EXPANSIONS])
@pytest.mark.parametrize("shape", [(2, 4, 33, 64), (2, 4, 1, 64), (1, 4, 5, 8), (2, 4, 0, 64), (0, 4, 5, 64)], ids=str)
def test_fake_and_meta_agree_with_the_real_result(
    operator: Any, target: Target, rng: torch.Generator, layout: str, shape: tuple[int, int, int, int]
) -> None:
    b, h, s, d = shape
    q, k, v = ((LAYOUTS | EXPANSIONS)[layout](t) for t in qkv(rng, target, b, h, h, s, s, d))
    want = operator(q, k, v, True)
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(t) for t in (q, k, v)), True)
    assert described(fake) == described(want)
    assert all(f.device == w.device for f, w in zip(as_tuple(fake), as_tuple(want), strict=True))
    meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in (q, k, v)]
    assert described(operator(*meta, True)) == described(want)


def test_meta_allocates_nothing() -> None:
    q = torch.empty(64, 128, 2**20, 128, dtype=torch.bfloat16, device="meta")
    out, lse = dhp_safe_fa.attention_lse(q, q, q)
    assert out.is_meta and out.shape == q.shape and lse.is_meta and lse.dtype == torch.float32


# ---- torch.compile and export ---------------------------------------------------------------------------------------


def block(qkv_rows: Tensor) -> Tensor:
    """What a model does around attention: [B, S, 3, H, D] in, [B, S, H * D] out."""
    q, k, v = qkv_rows.permute(2, 0, 3, 1, 4)
    return dhp_safe_fa.attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def cached_block(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Decoding on a cache: the offset is computed from shapes."""
    return dhp_safe_fa.attention_lse(q * 2, k, v + 1, is_causal=True, causal_offset=k.shape[2] - q.shape[2])


@pytest.fixture(scope="module")
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The compiler's usual cache on disk may hold graphs from an earlier build of the operators."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


@pytest.fixture
def fresh_compiler(compiler_cache: None) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@torch_jit_is_deprecated
def test_compile_with_dynamic_shapes(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    """One graph, inductor, any length, no recompilation, the bits of eager."""
    target = Target(device, torch.float16)
    compiled = torch.compile(block, fullgraph=True, dynamic=True)
    first = normal(rng, (2, 50, 3, 4, 64), target)
    assert same_bits(compiled(first), block(first))
    with torch.compiler.set_stance("fail_on_recompile"):
        for batch, length in ((2, 17), (3, 64), (5, 129), (2, 500)):
            rows = normal(rng, (batch, length, 3, 4, 64), target)
            assert same_bits(compiled(rows), block(rows))


def test_compile_with_offset_from_shapes(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    compiled = torch.compile(cached_block, fullgraph=True, dynamic=True, backend="aot_eager")
    for sq, sk in ((5, 50), (7, 70), (9, 72)):
        tensors = qkv(rng, Target(device, torch.float16), 2, 4, 2, sq, sk, 64)
        for got, want in zip(compiled(*tensors), cached_block(*tensors), strict=True):
            assert same_bits(got, want)


@torch_jit_is_deprecated
@pytest.mark.parametrize("layout", ["transposed_bshd", "every_second_column", "columns_outermost"])
def test_compile_keeps_strides(device: str, rng: torch.Generator, layout: str, fresh_compiler: None) -> None:
    """Inductor may choose the layout of q * 2; what comes out has to lie as the graph was promised."""
    tensors = [LAYOUTS[layout](t) for t in qkv(rng, Target(device, torch.float16), 2, 4, 2, 33, 70, 64)]
    got, want = torch.compile(cached_block, fullgraph=True)(*tensors), cached_block(*tensors)
    for g, w in zip(got, want, strict=True):
        assert same_bits(g, w)
    assert got[0].stride() == want[0].stride()


def test_compile_under_autocast(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    q, k, v = (t.float() for t in qkv(rng, Target(device, torch.bfloat16), 2, 4, 2, 33, 70, 64))
    compiled = torch.compile(dhp_safe_fa.attention, fullgraph=True, backend="aot_eager")
    with torch.autocast(device, dtype=torch.bfloat16):
        got, want = compiled(q, k, v), dhp_safe_fa.attention(q, k, v)
    assert got.dtype == torch.bfloat16 and same_bits(got, want)


def test_compile_refuses_gradients(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    q, k, v = qkv(rng, Target(device, torch.float16), 2, 4, 2, 33, 70, 64)
    compiled = torch.compile(dhp_safe_fa.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="backward"):
        compiled(q.requires_grad_(), k, v)
    with torch.no_grad():
        assert same_bits(compiled(q, k, v), dhp_safe_fa.attention(q, k, v))


class Block(torch.nn.Module):
    def forward(self, qkv_rows: Tensor) -> Tensor:
        return block(qkv_rows)


def test_export(device: str, rng: torch.Generator) -> None:
    target = Target(device, torch.float16)
    length = torch.export.Dim("length", min=2, max=4096)
    example = normal(rng, (2, 50, 3, 4, 64), target)
    program = torch.export.export(Block(), (example,), dynamic_shapes=({1: length},))
    assert any("dhp" in str(node.target) for node in program.graph.nodes), "the operator is not in the graph"
    for s in (2, 50, 129):
        rows = normal(rng, (2, s, 3, 4, 64), target)
        assert same_bits(program.module()(rows), block(rows))


# torch.export itself uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_exported_program_refuses_gradients(device: str, rng: torch.Generator) -> None:
    """Exported without gradients in mind, then trained: the graph must not drop them in silence."""
    example = normal(rng, (2, 50, 3, 4, 64), Target(device, torch.float16))
    with torch.no_grad():
        program = torch.export.export(Block(), (example,))
    with pytest.raises(RuntimeError, match="backward"):
        program.module()(example.clone().requires_grad_())
    with pytest.raises(RuntimeError, match="backward"):
        program.run_decompositions().module()(example.clone().requires_grad_())


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


@torch_jit_is_deprecated
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_ahead_of_time_inductor(device: str, rng: torch.Generator, fresh_compiler: None, tmp_path: Path) -> None:
    """Compiled to a package on disk with a dynamic length, loaded and run without the Python of the model."""
    if torch.version.cuda:  # torch 2.11.0+cu130 was seen to crash while it loads any package, for either device
        control = subprocess.run([sys.executable, "-c", ADDITIONS_AHEAD_OF_TIME, tmp_path, device], check=False)
        if control.returncode < 0:
            pytest.skip(f"torch {torch.__version__} dies of signal {-control.returncode} on a package of x + 1 alone")
    target = Target(device, torch.float16)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Block(), (normal(rng, (2, 50, 3, 4, 64), target),), dynamic_shapes=({1: length},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for s in (2, 50, 129):
        rows = normal(rng, (2, s, 3, 4, 64), target)
        assert same_bits(loaded(rows), block(rows))


# ---- autograd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [dhp_safe_fa.attention, dhp_safe_fa.attention_lse])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_refuses_gradients_that_operators_do_not_see(
    function: Callable[..., Any], name: str, target: Target, rng: torch.Generator
) -> None:
    """Below a dispatch mode, and inside a wrapper subclass, gradients would be dropped in silence."""
    tensors = dict(zip("qkv", qkv(rng, target, 1, 2, 2, 5, 6, 8), strict=True))
    wrapped = {n: TwoTensor(t, t).requires_grad_(n == name) for n, t in tensors.items()}
    tensors[name].requires_grad_()
    with FlopCounterMode(display=False), pytest.raises(RuntimeError, match=f"{name} requires grad"):
        function(**tensors)
    with pytest.raises(RuntimeError, match=f"{name} requires grad"):
        function(**wrapped)
    with torch.no_grad(), FlopCounterMode(display=False):
        function(**tensors)


@torch_jit_is_deprecated
def test_jit_trace_checks_itself(target: Target, rng: torch.Generator) -> None:
    """With gradients recorded, then without: it compares the lines from which the operator was called."""
    q, k, v = qkv(rng, target, 1, 2, 2, 5, 6, 8)
    traced = torch.jit.trace(lambda x: dhp_safe_fa.attention(x, k, v), (q,))
    assert same_bits(traced(2 * q), dhp_safe_fa.attention(2 * q, k, v))


@both_operators
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_runs_without_gradients(operator: Any, mode: Callable[[], Any], target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    want = as_tuple(operator(q, k, v))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    with mode():
        got = as_tuple(operator(q, k, v))
    assert all(same_bits(g, w) and not g.requires_grad for g, w in zip(got, want, strict=True))
    detached = as_tuple(operator(q.detach(), k.detach(), v.detach()))
    assert all(same_bits(g, w) and not g.requires_grad for g, w in zip(detached, want, strict=True))


def test_inference_tensors_outside_of_inference_mode(target: Target, rng: torch.Generator) -> None:
    with torch.inference_mode():
        q, k, v = (t.clone() for t in qkv(rng, target, 2, 4, 2, 33, 70, 64))
        want = dhp_safe_fa.attention(q, k, v)
    assert want.is_inference()
    assert same_bits(dhp_safe_fa.attention(q, k, v), want)


@both_operators
def test_functional_gradients_are_refused(operator: Any, target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 1, 2, 2, 3, 4, 64)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda x: as_tuple(operator(x, k, v))[0].float().sum())(q)


@torch_jit_is_deprecated
@both_operators
@pytest.mark.parametrize("which", [0, 1, 2], ids=["q", "k", "v"])
def test_forward_mode_gradients_are_refused(operator: Any, target: Target, rng: torch.Generator, which: int) -> None:
    """A tangent that is dropped without a word is a silently wrong gradient."""
    tensors = list(qkv(rng, target, 1, 2, 2, 3, 4, 64))
    with forward_ad.dual_level():
        tensors[which] = forward_ad.make_dual(tensors[which], torch.ones_like(tensors[which]))
        with pytest.raises(RuntimeError):
            operator(*tensors)


# ---- torch.func.vmap ------------------------------------------------------------------------------------------------


def test_vmap(target: Target, rng: torch.Generator) -> None:
    """Any dimension may be mapped over, of any of the inputs; the rows have the bits of separate calls."""
    q, k, v = (normal(rng, (3, *t), target) for t in ((2, 4, 33, 64), (2, 2, 70, 64), (2, 2, 70, 64)))
    want = [dhp_safe_fa.attention(q[i], k[i], v[i], is_causal=True) for i in range(3)]
    for d in range(5):
        mapped = torch.func.vmap(lambda *t: dhp_safe_fa.attention(*t, is_causal=True), in_dims=(0, d, -1), out_dims=d)
        out = mapped(q, k.movedim(0, d), v.movedim(0, -1))
        assert same_bits(out.movedim(d, 0), torch.stack(want))
    shared = torch.func.vmap(dhp_safe_fa.attention, in_dims=(0, None, None))(q, k[0], v[0])
    assert same_bits(shared, torch.stack([dhp_safe_fa.attention(q[i], k[0], v[0]) for i in range(3)]))


def test_nested_vmap(target: Target, rng: torch.Generator) -> None:
    """Every query set with every key set."""
    q, k, v = (normal(rng, (n, *t), target) for n, t in ((3, (2, 4, 9, 64)), (2, (2, 2, 7, 64)), (2, (2, 2, 7, 64))))
    over_q = torch.func.vmap(dhp_safe_fa.attention_lse, in_dims=(0, None, None))
    out, lse = torch.func.vmap(over_q, in_dims=(None, 0, 0))(q, k, v)
    for i in range(2):
        for j in range(3):
            want, want_lse = dhp_safe_fa.attention_lse(q[j], k[i], v[i])
            assert same_bits(out[i, j], want) and same_bits(lse[i, j], want_lse)


def test_vmap_over_something_else(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    want = dhp_safe_fa.attention(q, k, v)
    added = torch.func.vmap(lambda x: dhp_safe_fa.attention(q, k, v) + x)(torch.zeros(3, device=q.device).to(q.dtype))
    assert same_bits(added, (want + 0).expand(3, *want.shape))


def test_vmap_of_nothing(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    mapped = torch.func.vmap(dhp_safe_fa.attention, in_dims=(0, None, None))
    out = mapped(q[None, :0].expand(3, 0, 4, 9, 64), k[:0], v[:0])
    assert out.shape == (3, 0, 4, 9, 64)


def test_vmap_compiled(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    q, k, v = (normal(rng, (3, 2, 4, 33, 64), Target(device, torch.float16)) for _ in range(3))
    mapped = torch.func.vmap(dhp_safe_fa.attention)
    assert same_bits(torch.compile(mapped, fullgraph=True, backend="aot_eager")(q, k, v), mapped(q, k, v))


def test_vmap_refusals(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    with pytest.raises(RuntimeError, match=r"rank 3 inside of vmap; expected 4 dimensions \[B, H, S, D\]"):
        torch.func.vmap(dhp_safe_fa.attention)(q, k, v)
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.vmap(torch.func.grad(lambda x: dhp_safe_fa.attention(x, k, v).float().sum()))(q[None])
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.grad(lambda x: torch.func.vmap(lambda y: dhp_safe_fa.attention(y, k, v))(x).float().sum())(q[None])
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.jvp(lambda x: dhp_safe_fa.attention(x, k, v), (q,), (q,))
    x = q[None].requires_grad_()  # what vmap hands on does not say so
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.vmap(lambda y: dhp_safe_fa.attention(y, k, v))(x)
    with pytest.raises(RuntimeError, match="no backward"):
        torch.func.vmap(lambda y: dhp_safe_fa.attention_lse(y * 2, k, v))(x)


def test_traced_symbolically() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return dhp_safe_fa.attention(q, k, v, is_causal=True)

    nodes = [node.target for node in torch.fx.symbolic_trace(Model()).graph.nodes if node.op == "call_function"]
    assert nodes == [torch.ops.dhp.attention.default]


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_traced_with_tensors(target: Target, rng: torch.Generator, pre_dispatch: bool) -> None:
    """The graph is the operator alone: nothing of what was looked up while gradients were recorded."""
    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    traced = make_fx(lambda q, k, v: dhp_safe_fa.attention(q, k, v), pre_dispatch=pre_dispatch)(q, k, v)
    nodes = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert nodes == [torch.ops.dhp.attention.default]
    with pytest.raises(RuntimeError, match="no backward"):
        traced(q.requires_grad_(), k, v)


def test_function_modes_see_grad_mode_as_it_is(target: Target, rng: torch.Generator) -> None:
    factor = torch.ones((), device=target.device, dtype=target.dtype, requires_grad=True)
    seen = []

    class Scaled(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {})) * factor

    q, k, v = qkv(rng, target, 2, 4, 2, 9, 7, 64)
    with Scaled():
        out = dhp_safe_fa.attention(q, k, v)
    assert out.requires_grad and torch._C._set_grad_enabled not in seen


# ---- autocast -------------------------------------------------------------------------------------------------------


@both_operators
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("given", ["float32", "other_half", "mixed"])
def test_autocast(operator: Any, device: str, rng: torch.Generator, dtype: torch.dtype, given: str) -> None:
    """Everything in the autocast dtype, as SDPA does it."""
    float32 = Target(device, torch.float32)
    other_half = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    dtypes = {
        "float32": (torch.float32,) * 3,
        "other_half": (other_half,) * 3,
        "mixed": (dtype, torch.float32, other_half),
    }[given]
    q, k, v = (t.to(d) for t, d in zip(qkv(rng, float32, 2, 4, 4, 33, 70, 64), dtypes, strict=True))
    want = as_tuple(operator(q.to(dtype), k.to(dtype), v.to(dtype), True, 0.3, 7))
    with torch.autocast(device, dtype=dtype):
        got = as_tuple(operator(q, k, v, True, 0.3, 7))
        by_name = as_tuple(operator(q, k, v, is_causal=True, scale=0.3, causal_offset=7))
        sdpa = F.scaled_dot_product_attention(q, k, v)
    assert got[0].dtype == sdpa.dtype == dtype
    for tensors in (got, by_name):
        assert all(same_bits(g, w) for g, w in zip(tensors, want, strict=True))


def test_autocast_that_is_off_casts_nothing(device: str, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target(device, torch.float16), 2, 4, 2, 33, 70, 64)
    with torch.autocast(device, dtype=torch.bfloat16), torch.autocast(device, enabled=False):
        assert dhp_safe_fa.attention(q, k, v).dtype == torch.float16
        with pytest.raises(RuntimeError, match="dtype"):
            dhp_safe_fa.attention(q, k.float(), v)


def test_autocast_still_refuses_gradients(device: str, rng: torch.Generator) -> None:
    q, k, v = (t.float() for t in qkv(rng, Target(device, torch.bfloat16), 2, 4, 2, 33, 70, 64))
    for tensors in ((q.clone().requires_grad_(), k, v), (q, k.clone().requires_grad_(), v)):
        with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(RuntimeError, match="backward"):
            dhp_safe_fa.attention(*tensors)


def test_autocast_does_not_take_double(device: str, rng: torch.Generator) -> None:
    """As everywhere in torch, autocast leaves float64 alone."""
    q, k, v = (t.double() for t in qkv(rng, Target(device, torch.bfloat16), 2, 4, 2, 33, 70, 64))
    with torch.autocast(device, dtype=torch.bfloat16), pytest.raises(RuntimeError, match="dtype"):
        dhp_safe_fa.attention(q, k, v)


# ---- modes ----------------------------------------------------------------------------------------------------------


def test_deterministic_mode_changes_no_bit(target: Target, rng: torch.Generator) -> None:
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    want = dhp_safe_fa.attention_lse(q, k, v)
    assert all(same_bits(g, w) for g, w in zip(attend(q, k, v), want, strict=True)), "attend runs deterministically"


@pytest.mark.skipif("cuda" in DEVICES, reason="this checks a machine without a Hopper GPU")
def test_import_opens_no_gpu() -> None:
    """The package loads and serves the CPU where there is no driver at all."""
    code = "import torch, dhp_safe_fa; x = torch.ones(1, 1, 2, 8); print(dhp_safe_fa.attention(x, x, x).sum().item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "16.0"), done.stderr


FIRST_CALL = """
import torch, dhp_safe_fa
x = torch.randn(1, 2, 16, 8)
with {context}:
    dhp_safe_fa.attention(x, x, x)
try:
    dhp_safe_fa.attention(x.clone().requires_grad_(), x, x)
except RuntimeError as error:
    print("no backward" in str(error))
"""


@pytest.mark.parametrize(
    "context", ["torch.inference_mode()", "torch.no_grad()", "torch.inference_mode(), torch.enable_grad()"]
)
def test_gradients_are_refused_whatever_the_first_call_of_a_process_was(context: str) -> None:
    code = FIRST_CALL.format(context=context)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


# ---- threads and processes ------------------------------------------------------------------------------------------


def test_concurrent_threads(target: Target, rng: torch.Generator) -> None:
    """Eight threads, each with inputs of its own, 25 calls each, while the kernels are loaded by the first."""
    inputs = [qkv(rng, target, 2, 4, 2, 33 + i, 70, 64) for i in range(8)]
    with ThreadPoolExecutor(max_workers=8) as threads:
        results = list(threads.map(lambda t: [dhp_safe_fa.attention(*t, is_causal=True) for _ in range(25)], inputs))
    for tensors, outs in zip(inputs, results, strict=True):
        want = dhp_safe_fa.attention(*tensors, is_causal=True)
        assert all(same_bits(out, want) for out in outs)


@needs_hopper
def test_threads_with_streams_of_their_own(rng: torch.Generator) -> None:
    inputs = [qkv(rng, Target("cuda", torch.float16), 2, 4, 2, 130 + i, 200, 64) for i in range(4)]
    torch.cuda.synchronize()

    def work(tensors: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outs = [dhp_safe_fa.attention(*tensors) for _ in range(25)]
        stream.synchronize()
        return outs

    with ThreadPoolExecutor(max_workers=4) as threads:
        results = list(threads.map(work, inputs))
    for tensors, outs in zip(inputs, results, strict=True):
        assert all(same_bits(out, dhp_safe_fa.attention(*tensors)) for out in outs)


# A process that has used all of its threads hands work to a child. torch's threads do not survive a fork, for none of
# its operators: the child has to do with one, as it has in torch's DataLoader.
CHILD = """
import sys, torch, torch.multiprocessing as multiprocessing, dhp_safe_fa

def work(q, k, v, queue):
    torch.set_num_threads(1)
    queue.put(dhp_safe_fa.attention(q, k, v, is_causal=True).cpu().numpy())

if __name__ == "__main__":
    method, device = sys.argv[1:]
    q, k, v = (torch.randn(4, 8, 130, 64, device=device, dtype=torch.float16) for _ in range(3))
    want = dhp_safe_fa.attention(q, k, v, is_causal=True).cpu()
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    child = context.Process(target=work, args=(q, k, v, queue), daemon=True)
    child.start()
    got = torch.from_numpy(queue.get(timeout=100))
    child.join()
    print(child.exitcode, torch.equal(got, want))
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_child_process(device: str, method: str, tmp_path: Path) -> None:
    if (device, method) == ("cuda", "fork"):
        pytest.skip("CUDA itself does not survive a fork")
    script = tmp_path / "parent.py"
    script.write_text(CHILD)
    root = Path(dhp_safe_fa.__file__).parents[1]
    command = [sys.executable, str(script), method, device]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=300, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert (done.returncode, done.stdout.strip()) == (0, "0 True"), done.stderr


# ---- CUDA: streams and graphs ---------------------------------------------------------------------------------------

# About 50 ms at 2 GHz: long enough that work on another stream would overtake.
SLEEP_CYCLES = 100_000_000


@needs_hopper
def test_runs_on_the_current_stream(rng: torch.Generator) -> None:
    """Inputs arrive late on a side stream; a launch on any other stream would read what was there before."""
    q, k, v = qkv(rng, Target("cuda", torch.float16), 2, 4, 2, 130, 200, 64)
    want = dhp_safe_fa.attention(q, k, v)
    late = [torch.full_like(t, torch.nan) for t in (q, k, v)]
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(SLEEP_CYCLES)
        for tensor, value in zip(late, (q, k, v), strict=True):
            tensor.copy_(value)
        got = dhp_safe_fa.attention(*late)
        # What is enqueued next on this stream waits for the kernel.
        copy = got.clone()
        got.zero_()
    side.synchronize()
    assert same_bits(copy, want)


@needs_hopper
def test_returns_before_the_work_is_done(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda", torch.float16), 2, 4, 2, 130, 200, 64)
    dhp_safe_fa.attention(q, k, v)
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    dhp_safe_fa.attention(q, k, v)
    assert not torch.cuda.current_stream().query(), "the call waited for the stream"
    torch.cuda.synchronize()


@needs_hopper
@pytest.mark.parametrize("layout", ["contiguous", "transposed_bshd", "rows_of_odd_stride"])
def test_cuda_graph(rng: torch.Generator, layout: str) -> None:
    """Captured once, replayed on new inputs."""
    target = Target("cuda", torch.bfloat16)
    tensors = [LAYOUTS[layout](t) for t in qkv(rng, target, 2, 4, 2, 130, 200, 64)]
    dhp_safe_fa.attention_lse(*tensors)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = dhp_safe_fa.attention_lse(*tensors, is_causal=True, causal_offset=70)
    for _ in range(3):
        for tensor, value in zip(tensors, qkv(rng, target, 2, 4, 2, 130, 200, 64), strict=True):
            tensor.copy_(value)
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        want, want_lse = attend(*tensors, is_causal=True, causal_offset=70)
        assert same_bits(out, want) and same_bits(lse, want_lse)


FIRST_CALL_IN_A_CAPTURE = """
import torch, dhp_safe_fa
x = torch.randn(1, 2, 70, 64, device="cuda", dtype=torch.float16)
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out = dhp_safe_fa.attention(x, x, x)
graph.replay()
print(torch.equal(out, dhp_safe_fa.attention(x, x, x)))
"""


@needs_hopper
def test_first_call_of_a_process_may_be_captured() -> None:
    """Loading the kernel must not break a capture."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


@needs_hopper
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_tensors_on_another_gpu_than_the_current_one(rng: torch.Generator) -> None:
    q, k, v = qkv(rng, Target("cuda:0", torch.float16), 2, 4, 2, 130, 200, 64)
    want = dhp_safe_fa.attention(q, k, v)
    with torch.cuda.device(0):
        got = dhp_safe_fa.attention(*(t.to("cuda:1") for t in (q, k, v)))
        assert torch.cuda.current_device() == 0
    assert got.device == torch.device("cuda:1")
    assert same_bits(got.cpu(), want.cpu())
    with pytest.raises(RuntimeError, match="device"):
        dhp_safe_fa.attention(q, k.to("cuda:1"), v)
