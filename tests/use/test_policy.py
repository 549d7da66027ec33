"""policy("secure" | "hybrid" | "audit") and set_policy over unmodified models: what runs where, what is refused, what
is reported; nested, in threads, eager and compiled."""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import Target, normal, qkv, same_bits
from torch import Tensor

# How a model may have imported it; set_policy has to find this name.
from torch.nn.functional import scaled_dot_product_attention as imported_sdpa

import dhp_safe_fa

pytestmark = pytest.mark.usefixtures("no_policy_left")

MASK = torch.ones(33, 33, dtype=torch.bool)
fullgraph_or_not = pytest.mark.parametrize("fullgraph", [True, False])
every_policy = pytest.mark.parametrize("name", ["secure", "hybrid", "audit"])


@pytest.fixture
def q(target: Target, rng: torch.Generator) -> Tensor:
    return normal(rng, (2, 4, 33, 64), target)


def attend(q: Tensor, **arguments: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q, is_causal=True, **arguments)


def ours(q: Tensor) -> Tensor:
    return dhp_safe_fa.attention(q, q, q, is_causal=True)


def masked(q: Tensor) -> Tensor:
    """A call that dhp does not serve."""
    return F.scaled_dot_product_attention(q, q, q, attn_mask=MASK.to(q.device))


def backends(policy: dhp_safe_fa.Policy) -> dict[str, int]:
    """Calls by backend."""
    counts: dict[str, int] = {}
    for call, count in policy.calls.items():
        counts[call.backend] = counts.get(call.backend, 0) + count
    return counts


# ---- the three policies ---------------------------------------------------------------------------------------------


def test_secure(q: Tensor) -> None:
    torch_result = attend(q)
    with dhp_safe_fa.policy("secure") as policy:
        assert same_bits(attend(q), ours(q))
        assert same_bits(torch.ops.aten.scaled_dot_product_attention(q, q, q, None, 0.0, True), ours(q))
        assert same_bits(torch.ops.aten.scaled_dot_product_attention.default(q, q, q, None, 0.0, True), ours(q))
        with pytest.raises(RuntimeError, match=r"policy\('secure'\): attn_mask: given, .*; supported: None"):
            masked(q)
    assert backends(policy) == {"dhp": 3}
    assert same_bits(attend(q), torch_result), "the policy outlives its block"


REASONS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "mask": (masked, "attn_mask"),
    "dropout": (lambda q: attend(q, dropout_p=0.5), "dropout_p"),
    "head_dim": (lambda q: attend(q.repeat(1, 1, 1, 9)), "head_dim 576"),
    "scale": (lambda q: attend(q, scale=-1.0), "scale"),
    "value": (lambda q: F.scaled_dot_product_attention(q, q, q.repeat(1, 1, 1, 9)), "value"),
    "grouped_heads_unasked": (lambda q: F.scaled_dot_product_attention(q, q[:, :2], q[:, :2]), "enable_gqa"),
}


@pytest.mark.parametrize("case", REASONS)
def test_every_reason(q: Tensor, case: str) -> None:
    call, word = REASONS[case]
    with dhp_safe_fa.policy("secure") as secure, pytest.raises(RuntimeError, match=rf"^dhp_safe_fa.policy.*{word}"):
        call(q)
    assert not secure.calls
    if case == "grouped_heads_unasked":
        with dhp_safe_fa.policy("audit"), pytest.raises(RuntimeError):
            call(q)  # torch refuses it too
        return
    torch.manual_seed(0)
    want = call(q)
    for name in ("hybrid", "audit"):
        with warnings.catch_warnings(record=True) as caught, dhp_safe_fa.policy(name) as policy:
            warnings.simplefilter("always")
            torch.manual_seed(0)
            torch.testing.assert_close(call(q), want, rtol=0, atol=0, equal_nan=True)
        (noted,) = policy.calls
        assert noted.reason is not None and word in noted.reason and noted.backend != "dhp"
        assert len([w for w in caught if "policy('hybrid')" in str(w.message)]) == (name == "hybrid")


def test_dtype_that_torch_does_not_serve_either(q: Tensor) -> None:
    with dhp_safe_fa.policy("secure") as secure, pytest.raises(RuntimeError, match=r"dtype: torch\.complex64"):
        attend(q.to(torch.complex64))
    assert not secure.calls


def test_hybrid(q: Tensor) -> None:
    """What dhp supports runs through it; the rest is counted, and each reason warned of once."""
    want = masked(q)
    with dhp_safe_fa.policy("hybrid") as policy:
        for _ in range(3):
            assert same_bits(attend(q), ours(q))
        with pytest.warns(UserWarning, match=r"policy\('hybrid'\): torch's own attention runs: attn_mask"):
            assert same_bits(masked(q), want)
        assert same_bits(masked(q), want), "a second warning would be an error here"
        with pytest.warns(UserWarning, match="dropout_p"):
            attend(q, dropout_p=0.5)
    counted = {(c.backend == "dhp", c.reason and c.reason.split(":")[0]): n for c, n in policy.calls.items()}
    assert counted == {(True, None): 3, (False, "attn_mask"): 2, (False, "dropout_p"): 1}


def test_hybrid_warns_of_the_line_that_calls(q: Tensor) -> None:
    """Not of one in torch or in the package; also where torch's layers are in between."""
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval().to(device=q.device, dtype=q.dtype)
    compiled = torch.compile(masked, backend="eager")
    calls: list[Callable[[], Any]] = [
        lambda: F.scaled_dot_product_attention(q, q, q, dropout_p=0.5),
        lambda: layer(q[0], q[0], q[0]),
        lambda: compiled(q),
    ]
    for call in calls:
        with dhp_safe_fa.policy("hybrid"), pytest.warns(UserWarning, match="torch's own attention runs") as caught:
            call()
        assert [warning.filename for warning in caught] == [__file__]


def test_a_padding_mask_is_answered_as_one(q: Tensor) -> None:
    """Advice about a cache does not help whoever masks padding; shapes tell, not values."""
    for shape, advice in (((2, 1, 1, 33), "padding"), ((33,), "padding"), ((2, 1, 33, 33), "causal_offset")):
        mask = torch.ones(shape, dtype=torch.bool, device=q.device)
        with dhp_safe_fa.policy("secure"), pytest.raises(RuntimeError, match="attn_mask: given, shape") as caught:
            F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        assert advice in str(caught.value) and str(list(shape)) in str(caught.value)
        assert ("causal_offset" in str(caught.value)) == (advice == "causal_offset")


def test_audit(target: Target, rng: torch.Generator) -> None:
    """Results are torch's; the list has shape, dtype, torch's choice, and what dhp would do."""
    q, k, v = qkv(rng, target, 2, 4, 2, 33, 70, 64)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True), masked(q), attend(q)
    with dhp_safe_fa.policy("audit") as policy:
        got = F.scaled_dot_product_attention(q, k, v, enable_gqa=True), masked(q), attend(q)
        dhp_safe_fa.attention(q, k, v)
        torch.ops.dhp.attention_lse(q, k, v)
    assert all(same_bits(g, w) for g, w in zip(got, want, strict=True))
    dtype, place = str(target.dtype).removeprefix("torch."), str(q.device)
    grouped, square = ((2, 4, 33, 64), (2, 2, 70, 64)), ((2, 4, 33, 64), (2, 4, 33, 64))
    names = torch.nn.attention.SDPBackend.__members__
    for call in policy.calls:
        assert (call.dtype, call.device) == (dtype, place)
        assert call.backend == "dhp" or call.backend in names
    found = [((c.query, c.key), c.backend == "dhp", c.reason is None, n) for c, n in policy.calls.items()]
    assert found == [
        (grouped, False, True, 1),
        (square, False, False, 1),
        (square, False, True, 1),
        (grouped, True, True, 2),
    ]
    choice = torch._fused_sdp_choice(q, q, q, None, 0.0, True)
    assert names[list(policy.calls)[2].backend].value == choice
    table = str(policy)
    assert "audit: dhp would serve 4 of 5 calls" in table and "2x4x33x64" in table and "attn_mask: given" in table


@pytest.mark.parametrize("name", ["hybrid", "audit"])
def test_torch_runs_what_its_choice_cannot_be_asked_for(name: str) -> None:
    """Without key heads asking torch ends the process, and with a mask without dimensions it raises an IndexError; the
    calls themselves return something empty."""
    headless, empty = torch.randn(2, 0, 40, 8), torch.randn(2, 4, 0, 8)
    with warnings.catch_warnings(), dhp_safe_fa.policy(name) as policy:
        warnings.simplefilter("ignore")
        assert F.scaled_dot_product_attention(headless, headless, headless, enable_gqa=True).shape == headless.shape
        assert F.scaled_dot_product_attention(empty, empty, empty, torch.tensor(0.0)).shape == empty.shape
    assert {call.backend for call in policy.calls} == {"none"}


def test_audit_with_a_backend_chosen_by_hand(q: Tensor) -> None:
    with dhp_safe_fa.policy("audit") as policy, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        attend(q)
    assert backends(policy) == {"MATH": 1}


def test_unknown_name() -> None:
    for call in (dhp_safe_fa.policy, dhp_safe_fa.set_policy):
        with pytest.raises(ValueError, match="name: 'fast'; supported: 'secure', 'hybrid', 'audit'"):
            call("fast")
        with pytest.raises(ValueError, match=r"name: \[\]; supported: 'secure'"):
            call([])  # type: ignore[arg-type]


# ---- models that know nothing of it ---------------------------------------------------------------------------------


def encoder(target: Target) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, batch_first=True)
    return layer.eval().to(device=target.device, dtype=target.dtype)


def test_encoder_layer(target: Target, rng: torch.Generator) -> None:
    """torch's layer calls attention from within a function that a mode sees first."""
    layer, x = encoder(target), normal(rng, (2, 33, 256), target)
    want = layer(x)
    with dhp_safe_fa.policy("secure") as policy:
        got = layer(x)
    assert backends(policy) == {"dhp": 1}
    torch.testing.assert_close(got, want, atol=2e-2, rtol=2e-2)


def test_attention_weights_are_refused(target: Target, rng: torch.Generator) -> None:
    """With need_weights the module computes attention by hand, out of reach of any policy over SDPA."""
    heads = torch.nn.MultiheadAttention(256, 4, batch_first=True).eval().to(device=target.device, dtype=target.dtype)
    x = normal(rng, (2, 33, 256), target)
    want = heads(x, x, x)[0]
    with dhp_safe_fa.policy("secure"):
        with pytest.raises(RuntimeError, match=r"need_weights: True .* pass need_weights=False"):
            heads(x, x, x)
        heads(x, x, x, need_weights=False)
    with dhp_safe_fa.policy("audit") as audit:
        assert same_bits(heads(x, x, x)[0], want)
    assert [call.reason is None for call in audit.calls] == [False]
    (call,) = audit.calls
    assert call.query == call.key == (2, 4, 33, 64), "[..., Hq, Sq, D], as calls of SDPA"


# ---- nesting --------------------------------------------------------------------------------------------------------


def test_nesting_adds_up(q: Tensor) -> None:
    """An inner policy cannot allow what an outer one refuses."""
    with dhp_safe_fa.policy("secure") as secure:
        with dhp_safe_fa.policy("hybrid") as inside, pytest.raises(RuntimeError, match="policy\\('secure'\\)"):
            masked(q)
        assert not inside.calls, "torch did not run"
        heads = torch.nn.MultiheadAttention(q.shape[-1], 4, batch_first=True).to(q)
        for name in ("hybrid", "audit"):
            with dhp_safe_fa.policy(name), pytest.raises(RuntimeError, match="policy\\('secure'\\): need_weights"):
                heads(q[:, 0], q[:, 0], q[:, 0])
        with dhp_safe_fa.policy("audit") as audit:
            assert same_bits(attend(q), ours(q))
    assert backends(secure) == {"dhp": 1}
    assert sum(audit.calls.values()) == 1 + 1, "the call, and the one of ours() for comparison"
    with dhp_safe_fa.policy("hybrid") as hybrid:
        with dhp_safe_fa.policy("secure"), pytest.raises(RuntimeError, match="policy\\('secure'\\)"):
            masked(q)
        with pytest.warns(UserWarning, match="attn_mask"):
            masked(q)
    assert sum(hybrid.calls.values()) == 1
    with dhp_safe_fa.policy("audit") as audit, dhp_safe_fa.policy("secure"):
        attend(q)
    assert backends(audit) == {"dhp": 1}, "the audit outside sees what the policy inside chose"
    with dhp_safe_fa.policy("secure"), dhp_safe_fa.policy("audit") as audit:
        attend(q)
    assert backends(audit) == {"dhp": 1}, "and the one inside what the policy outside will choose"


def test_a_policy_may_be_entered_again(q: Tensor) -> None:
    policy = dhp_safe_fa.policy("hybrid")
    for _ in range(2):
        with policy, policy:
            attend(q)
    assert backends(policy) == {"dhp": 2}


def test_an_exception_ends_the_policy(q: Tensor) -> None:
    want = attend(q)
    for name in ("secure", "audit"):
        with pytest.raises(KeyError), dhp_safe_fa.policy(name):
            raise KeyError
        assert same_bits(attend(q), want)


# ---- threads --------------------------------------------------------------------------------------------------------


def test_threads_do_not_share_a_block(target: Target, rng: torch.Generator) -> None:
    """Four threads in different policies at the same time, 50 calls each, and one in none."""
    q = normal(rng, (1, 2, 33, 64), target)
    plain, served, refused = attend(q), ours(q), masked(q)
    start, faults = threading.Barrier(5), []
    shared = dhp_safe_fa.policy("secure")

    def work(policy: dhp_safe_fa.Policy | None) -> None:
        def one_call() -> None:
            want = served if policy is not None and policy.name != "audit" else plain
            if not same_bits(attend(q), want):
                faults.append(f"wrong result under {policy and policy.name}")
            if policy is not None and policy.name == "secure":
                try:
                    masked(q)
                    faults.append("secure let a mask through")
                except RuntimeError:
                    pass
            elif not same_bits(masked(q), refused):
                faults.append("wrong masked result")

        with torch.no_grad(), warnings.catch_warnings():
            start.wait()
            for _ in range(50):
                if policy is None:
                    one_call()
                else:
                    with policy:
                        one_call()

    policies = [shared, shared, dhp_safe_fa.policy("audit"), dhp_safe_fa.policy("hybrid"), None]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        threads = [threading.Thread(target=work, args=(policy,)) for policy in policies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert faults == []
    assert backends(shared) == {"dhp": 100}, "two threads counted in one policy"
    assert sum(policies[2].calls.values()) == sum(policies[3].calls.values()) == 100


# ---- the setting for the whole process ------------------------------------------------------------------------------


def test_set_policy_reaches_every_thread_and_every_name(q: Tensor) -> None:
    want, calls = attend(q), []
    running, done = threading.Event(), threading.Event()

    def early() -> None:
        """A thread that is there before the policy is."""
        running.wait()
        calls.append(imported_sdpa(q, q, q, is_causal=True))
        done.set()

    thread = threading.Thread(target=early)
    thread.start()
    policy = dhp_safe_fa.set_policy("secure")
    running.set()
    thread.join()
    assert done.is_set() and policy is not None
    late = threading.Thread(target=lambda: calls.append(attend(q)))
    late.start()
    late.join()
    assert len(calls) == 2 and all(same_bits(out, ours(q)) for out in calls)
    with pytest.raises(RuntimeError, match="attn_mask"):
        masked(q)
    assert backends(policy) == {"dhp": 2}
    assert dhp_safe_fa.set_policy(None) is None
    assert same_bits(attend(q), want) and same_bits(imported_sdpa(q, q, q, is_causal=True), want)
    assert F.scaled_dot_product_attention is imported_sdpa is torch._C._nn.scaled_dot_product_attention
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("name", ["secure", "audit"])
def test_any_thread_may_change_the_setting(q: Tensor, name: str) -> None:
    """Set here, compiled and removed there."""
    policy = dhp_safe_fa.set_policy(name)
    results = []

    def elsewhere() -> None:
        with torch.no_grad():
            results.append(torch.compile(attend, fullgraph=True, backend="aot_eager")(q))
        results.append(dhp_safe_fa.set_policy(None))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    want = attend(q) if name == "audit" else ours(q)
    assert same_bits(results[0], want) and results[1] is None
    assert policy is not None and sum(policy.calls.values()) == 1
    assert torch.compile(lambda: torch.compiler.is_compiling(), backend="eager")(), "an ended audit compiles again"


def test_set_policy_reaches_encoder_layers(target: Target, rng: torch.Generator) -> None:
    layer, x = encoder(target), normal(rng, (2, 33, 256), target)
    with dhp_safe_fa.policy("secure"):
        want = layer(x)
    policy = dhp_safe_fa.set_policy("secure")
    assert same_bits(layer(x), want)
    assert policy is not None and backends(policy) == {"dhp": 1}


def test_a_block_inside_of_the_setting(q: Tensor) -> None:
    setting = dhp_safe_fa.set_policy("secure")
    with dhp_safe_fa.policy("hybrid"), pytest.raises(RuntimeError, match="policy\\('secure'\\)"):
        masked(q)
    hybrid = dhp_safe_fa.set_policy("hybrid")
    with dhp_safe_fa.policy("secure"), pytest.raises(RuntimeError, match="policy\\('secure'\\)"):
        masked(q)
    assert setting is not None and hybrid is not None and not setting.calls and not hybrid.calls


@fullgraph_or_not
def test_compiled_before_the_setting(q: Tensor, fullgraph: bool) -> None:
    compiled = torch.compile(attend, fullgraph=fullgraph, backend="aot_eager")
    want = compiled(q)
    policy = dhp_safe_fa.set_policy("secure")
    assert same_bits(compiled(q), ours(q))
    assert policy is not None and backends(policy) == {"dhp": 1}
    dhp_safe_fa.set_policy(None)
    assert same_bits(compiled(q), want)


# ---- torch.compile --------------------------------------------------------------------------------------------------


@fullgraph_or_not
def test_compiled(q: Tensor, fullgraph: bool) -> None:
    """A graph of one policy is never used under another one, nor without."""
    compiled = torch.compile(attend, fullgraph=fullgraph, backend="aot_eager")
    want = compiled(q)
    assert same_bits(want, attend(q))
    for name in ("hybrid", "secure", "hybrid", "secure"):
        with dhp_safe_fa.policy(name):
            assert same_bits(compiled(q), ours(q))
        assert same_bits(compiled(q), want)
        with dhp_safe_fa.policy("audit") as audit:
            assert same_bits(compiled(q), want)
        assert backends(audit) != {} and "dhp" not in backends(audit), "an audit sees calls of compiled functions"


def test_compiled_calls_and_others_are_counted_together(q: Tensor) -> None:
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with dhp_safe_fa.policy("hybrid") as policy:
        for _ in range(3):
            compiled(q)
            attend(q)
    assert backends(policy) == {"dhp": 1 + 3}, "a compiled call counts once, however often it is run"


@fullgraph_or_not
def test_compiled_calls_that_are_not_served(q: Tensor, fullgraph: bool) -> None:
    compiled = torch.compile(masked, fullgraph=fullgraph, backend="aot_eager")
    with dhp_safe_fa.policy("hybrid") as policy:
        with pytest.warns(UserWarning, match="attn_mask"):
            got = compiled(q)
        assert same_bits(got, masked(q))
    assert [call.reason is None for call in policy.calls] == [False] * len(policy.calls)
    with dhp_safe_fa.policy("secure"), pytest.raises(RuntimeError, match=r"attn_mask: given, .*; supported: None"):
        compiled(q)
    assert same_bits(compiled(q), got)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_compiled_by_inductor_with_dynamic_shapes(device: str, rng: torch.Generator) -> None:
    target = Target(device, torch.bfloat16)
    compiled = torch.compile(lambda q: attend(q * 2) + 1, fullgraph=True, dynamic=True)
    with dhp_safe_fa.policy("secure") as policy:
        for length in (33, 50, 70):
            q = normal(rng, (2, 4, length, 64), target)
            assert same_bits(compiled(q), ours(q * 2) + 1)
    assert sum(policy.calls.values()) == 1, "counted once, when it was compiled"


@fullgraph_or_not
def test_policy_inside_of_the_compiled_function(q: Tensor, fullgraph: bool) -> None:
    def function(q: Tensor) -> Tensor:
        with dhp_safe_fa.policy("secure"):
            return attend(q)

    assert same_bits(torch.compile(function, fullgraph=fullgraph, backend="aot_eager")(q), ours(q))


@fullgraph_or_not
def test_compiled_encoder_layer(target: Target, rng: torch.Generator, fullgraph: bool) -> None:
    """Compiled, torch chooses its fused layer also under a mode: refused, until it is switched off."""
    layer, x = encoder(target), normal(rng, (2, 33, 256), target)
    with dhp_safe_fa.policy("secure"):
        with pytest.raises(RuntimeError, match="fused encoder layer"):
            torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")(x)
        torch.compiler.reset()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            got = torch.compile(layer, fullgraph=fullgraph, backend="aot_eager")(x)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
        torch.testing.assert_close(got, layer(x), atol=2e-2, rtol=2e-2)


def test_export_under_a_policy(q: Tensor) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q)

    with dhp_safe_fa.policy("secure"):
        program = torch.export.export(Model(), (q,))
    assert any("dhp" in str(node.target) for node in program.graph.nodes)
    assert same_bits(program.module()(q), ours(q))


def test_a_program_exported_without_the_policy(q: Tensor) -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            return attend(q)

    program = torch.export.export(Model(), (q,))
    with dhp_safe_fa.policy("secure") as policy:
        assert same_bits(program.module()(q), ours(q))
    assert backends(policy) == {"dhp": 1}


def test_torch_kernels_called_directly(q: Tensor) -> None:
    operator = torch.ops.aten._scaled_dot_product_attention_math
    want = operator(q, q, q)[0]
    for call in (operator, operator.default):
        with dhp_safe_fa.policy("secure"), pytest.raises(RuntimeError, match=r"_attention_math.*: called directly"):
            call(q, q, q)
        with dhp_safe_fa.policy("hybrid"):
            assert same_bits(call(q, q, q)[0], want)


FIRST_USE = """
import torch, dhp_safe_fa
import torch.nn.functional as F
q = torch.randn(1, 2, 9, 8)
with torch.no_grad(), {entered} as policy:
    out = torch.compile(lambda q: F.scaled_dot_product_attention(q, q, q), fullgraph=True, backend="aot_eager")(q)
counted = sum(policy.calls.values())
dhp_safe_fa.set_policy(None)
want = dhp_safe_fa.attention(q, q, q), F.scaled_dot_product_attention(q, q, q)
print(*(torch.equal(out, each) for each in want), counted)
"""
SETTING = "contextlib.nullcontext(dhp_safe_fa.set_policy('{name}'))"


@pytest.mark.long
@pytest.mark.parametrize("name", ["secure", "hybrid", "audit"])
@pytest.mark.parametrize("setting", [False, True], ids=["block", "setting"])
def test_first_compilation_of_a_process(name: str, setting: bool) -> None:
    """Nothing of the compiler is loaded yet when the policy begins."""
    entered = SETTING.format(name=name) if setting else f"dhp_safe_fa.policy('{name}')"
    code = "import contextlib" + FIRST_USE.format(entered=entered)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ours_ran, torch_ran, calls = done.stdout.split()
    assert calls == "1"
    if name == "audit":
        assert torch_ran == "True"
    else:
        assert ours_ran == "True"
