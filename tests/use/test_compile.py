"""The operators under torch.compile, torch.export, ahead-of-time inductor, and what traces graphs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from harness import LAYOUTS, Target, gradients, normal, qkv, require_ahead_of_time, same_bits, torch_jit_is_deprecated
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import dhp_safe_fa


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


@pytest.mark.long
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


@pytest.mark.parametrize("which", ["q", "kv", "qkv"])
def test_compile_with_gradients(device: str, rng: torch.Generator, which: str, fresh_compiler: None) -> None:
    """One graph each way, with dynamic shapes; the backward computes what is needed alone."""
    graphs: list[list[Any]] = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append([node for node in graph.graph.nodes if "dhp" in str(node.target)])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=keep)
    compiled = torch.compile(cached_block, fullgraph=True, dynamic=True, backend=backend)
    for sq, sk in ((5, 50), (9, 72)):  # the offset is their difference
        inputs = qkv(rng, Target(device, torch.float16), 2, 4, 2, sq, sk, 64)
        found = []
        for function in (compiled, cached_block):
            leaves = [t.clone().requires_grad_(name in which) for name, t in zip("qkv", inputs, strict=True)]
            out, lse = function(*leaves)
            (out.sum() + lse.sum()).backward()
            found.append([t.grad for t in leaves if t.requires_grad])
        assert all(same_bits(g, w) for g, w in zip(*found, strict=True))
    (forward,), (backward,) = graphs
    assert forward.target is torch.ops.dhp.attention_lse.default
    given = dict(zip((a.name for a in backward.target._schema.arguments), backward.args, strict=False))
    assert [given.get(f"need_d{name}", True) for name in "qkv"] == [name in which for name in "qkv"]


@torch_jit_is_deprecated
def test_compiled_training_step(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    """Inductor, one graph; the parameters after three steps are those of eager within rounding, and repeat exactly."""
    target = Target(device, torch.float32 if device == "cpu" else torch.bfloat16)
    rows, weight = normal(rng, (2, 40, 64), target), normal(rng, (3 * 64, 64), target) / 8

    def train(compile_it: bool) -> Tensor:
        parameter = weight.clone().requires_grad_()

        def loss(x: Tensor) -> Tensor:
            return block((x @ parameter.T).unflatten(-1, (3, 4, 16))).float().square().mean()

        step = torch.compile(loss, fullgraph=True) if compile_it else loss
        for _ in range(3):
            step(rows).backward()
            assert parameter.grad is not None
            with torch.no_grad():
                parameter -= parameter.grad
            parameter.grad = None
        return parameter.detach()

    first = train(True)
    assert same_bits(first, train(True))
    tolerance = 1e-5 if device == "cpu" else 2e-2
    torch.testing.assert_close(first, train(False), rtol=tolerance, atol=tolerance)
    assert not torch.equal(first, weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch._dynamo asks for it
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_backward(device: str, rng: torch.Generator, backend: str, fresh_compiler: None) -> None:
    """Compiled autograd: the backward pass of an eager call becomes a graph of its own."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    leaves = [t.requires_grad_() for t in qkv(rng, Target(device, dtype), 1, 2, 2, 5, 7, 64)]
    loss = dhp_safe_fa.attention(*leaves, is_causal=True).float().square().sum()
    want = torch.autograd.grad(loss, leaves, retain_graph=True)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda: loss.backward(), backend=backend)()
    assert all(leaf.grad is not None and same_bits(leaf.grad, w) for leaf, w in zip(leaves, want, strict=True))


def test_compiled_transforms(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    q, k, v = (normal(rng, (3, 1, 2, 9, 16), Target(device, torch.float16)) for _ in range(3))
    each = torch.func.vmap(torch.func.grad(lambda *t: dhp_safe_fa.attention(*t).float().sum(), argnums=(0, 1, 2)))
    compiled = torch.compile(each, fullgraph=True, backend="aot_eager")
    assert all(same_bits(g, w) for g, w in zip(compiled(q, k, v), each(q, k, v), strict=True))


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


def test_export_with_independent_lengths(device: str, rng: torch.Generator) -> None:
    """The causal_offset is computed from them."""

    class Cached(torch.nn.Module):
        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return cached_block(q, k, v)

    target = Target(device, torch.float16)
    queries, keys = torch.export.Dim("queries", min=2, max=64), torch.export.Dim("keys", min=2, max=4096)
    example = tuple(qkv(rng, target, 2, 4, 2, 5, 50, 64))
    program = torch.export.export(Cached(), example, dynamic_shapes=({2: queries}, {2: keys}, {2: keys}))
    for sq, sk in ((2, 50), (9, 72)):
        tensors = qkv(rng, target, 2, 4, 2, sq, sk, 64)
        assert all(same_bits(g, w) for g, w in zip(program.module()(*tensors), cached_block(*tensors), strict=True))


@pytest.mark.parametrize("name", ["scale", "softcap"])
def test_a_tensor_in_place_of_a_number(name: str, rng: torch.Generator, fresh_compiler: None) -> None:
    """Its number is taken out between two graphs."""
    q, k, v = qkv(rng, Target("cpu", torch.float32), 1, 2, 2, 5, 7, 64)
    compiled = torch.compile(lambda number: dhp_safe_fa.attention(q, k, v, **{name: number}), backend="aot_eager")
    for number in (0.25, 0.5):
        got = compiled(torch.tensor(number, dtype=torch.float64))
        assert same_bits(got, dhp_safe_fa.attention(q, k, v, **{name: number}))  # type: ignore[arg-type]


def packed_block(rows: torch.Tensor, cu_seqlens: torch.Tensor, longest: int) -> torch.Tensor:
    return dhp_safe_fa.attention_varlen(*rows, cu_seqlens, cu_seqlens, longest, longest, is_causal=True)


def test_one_graph_for_packed_sequences_of_all_lengths(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    graphs = []

    def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(packed_block, fullgraph=True, dynamic=True, backend=keep)
    for longest in (5, 9, 40):
        rows = normal(rng, (3, longest + 3, 2, 64), Target(device, torch.float16))
        cu_seqlens = torch.tensor([0, longest, longest + 3], dtype=torch.int32, device=device)
        assert same_bits(compiled(rows, cu_seqlens, longest), packed_block(rows, cu_seqlens, longest))
    assert len(graphs) == 1


def test_export_with_the_longest_of_packed_sequences(device: str, rng: torch.Generator) -> None:
    class Packed(torch.nn.Module):
        def forward(self, rows: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
            longest: Any = cu_seqlens.diff().max().item()
            return packed_block(rows, cu_seqlens, longest)

    def example(longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([0, longest, longest + 3], dtype=torch.int32, device=device)
        return normal(rng, (3, longest + 3, 2, 64), Target(device, torch.float16)), lengths

    tokens = torch.export.Dim("tokens", min=2, max=4096)
    program = torch.export.export(Packed(), example(5), dynamic_shapes=({1: tokens}, None))
    for longest in (5, 40):
        given = example(longest)
        assert same_bits(program.module()(*given), Packed()(*given))


# torch.export itself uses what torch has deprecated.
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_gradients_of_an_exported_program(device: str, rng: torch.Generator) -> None:
    """Exported without gradients in mind, then trained: the graph must not drop them in silence."""
    example = normal(rng, (2, 50, 3, 4, 64), Target(device, torch.float16))
    with torch.no_grad():
        program = torch.export.export(Block(), (example,))
    leaf = example.clone().requires_grad_()
    (want,) = torch.autograd.grad(block(leaf).sum(), leaf)
    for exported in (program, program.run_decompositions()):
        (found,) = torch.autograd.grad(exported.module()(leaf).sum(), leaf)
        # Decomposed, the three rows are slices, whose gradients torch adds to zeros: -0 becomes 0.
        assert same_bits(found + 0, want + 0)


@pytest.mark.long
@torch_jit_is_deprecated
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_ahead_of_time_inductor(device: str, rng: torch.Generator, fresh_compiler: None, tmp_path: Path) -> None:
    """Compiled to a package on disk with a dynamic length, loaded and run without the Python of the model."""
    require_ahead_of_time(tmp_path, device)
    target = Target(device, torch.float16)
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(Block(), (normal(rng, (2, 50, 3, 4, 64), target),), dynamic_shapes=({1: length},))
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "block.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for s in (2, 50, 129):
        rows = normal(rng, (2, s, 3, 4, 64), target)
        assert same_bits(loaded(rows), block(rows))


def test_vmap_compiled(device: str, rng: torch.Generator, fresh_compiler: None) -> None:
    q, k, v = (normal(rng, (3, 2, 4, 33, 64), Target(device, torch.float16)) for _ in range(3))
    mapped = torch.func.vmap(dhp_safe_fa.attention)
    assert same_bits(torch.compile(mapped, fullgraph=True, backend="aot_eager")(q, k, v), mapped(q, k, v))


# ---- tracing --------------------------------------------------------------------------------------------------------


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
    (found,) = torch.autograd.grad(traced(q.requires_grad_(), k, v).sum(), q)
    assert same_bits(found, gradients(q.detach(), k, v, torch.ones_like(q)).dq)


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
