"""Bad input of the backward: an error that names the argument; the same words with data and without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import DEVICES, max_head_dim, refusal

BACKWARD = torch.ops.dhp.attention_backward
Q, K, ROWS = (2, 4, 6, 64), (2, 2, 5, 64), (2, 4, 6)
NAMES = ["grad_out", "q", "k", "v", "out", "lse", "grad_lse"]


def good(device: str) -> dict[str, Any]:
    shapes = dict(zip(NAMES, (Q, Q, K, K, Q, ROWS, ROWS), strict=True))
    return {
        name: torch.zeros(shape, device=device, dtype=torch.float16 if len(shape) == 4 else torch.float32)
        for name, shape in shapes.items()
    }


def refused(arguments: dict[str, Any], fake: bool = True) -> str:
    return refusal([BACKWARD], arguments, fake)


@pytest.mark.parametrize("name", NAMES)
def test_shapes(device: str, name: str) -> None:
    """A wrong length, and a wrong rank."""
    arguments = good(device)
    arguments[name] = torch.cat([arguments[name]] * 2, dim=2)
    blamed = {"q": "lse", "k": "v"}.get(name, name)  # the first that does not fit to it
    assert refused(arguments).startswith(f"dhp::attention_backward: {blamed}: shape")
    arguments = good(device)
    arguments[name] = arguments[name][0]
    message = refused(arguments)
    assert f"{name}: rank 3; expected 4 dimensions" in message or f"{name}: shape [4, 6]; expected [2, 4, 6]" in message


@pytest.mark.parametrize("name", NAMES)
def test_dtypes(device: str, name: str) -> None:
    arguments = good(device)
    arguments[name] = arguments[name].bfloat16()
    message = refused(arguments)
    if name in ("lse", "grad_lse"):
        assert message == f"dhp::attention_backward: {name}: dtype bfloat16; expected float32"
    else:
        blamed = "k" if name == "q" else name
        assert message.startswith(f"dhp::attention_backward: {blamed}: dtype") and "they must agree" in message
    arguments[name] = arguments[name].int()
    assert f"{name}: dtype int32; " in refused(arguments)


@pytest.mark.parametrize("name", NAMES)
def test_devices(device: str, name: str) -> None:
    arguments = good(device)
    arguments[name] = arguments[name].to("meta" if device == "cpu" else "cpu")
    with pytest.raises(RuntimeError, match="device"):
        BACKWARD(**arguments)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "grad_lse"])
def test_none(device: str, name: str) -> None:
    arguments = good(device)
    arguments[name] = None
    shape = r"\[B, H, S\]" if name == "lse" else r"\[B, H, S, D\]"
    with pytest.raises(RuntimeError, match=f"dhp::attention_backward: {name}: None; expected a tensor {shape}"):
        BACKWARD(**arguments)


def test_options(device: str) -> None:
    assert "scale: -1; supported: 0 to 2^100" in refused(good(device) | {"scale": -1.0})
    message = refused(good(device) | {"causal_offset": 5})
    assert "causal_offset: 5 without is_causal" in message


@pytest.mark.parametrize("device", DEVICES)
def test_head_dim(device: str) -> None:
    d = max_head_dim(device) + 8
    q, k, rows = torch.zeros(1, 2, 3, d), torch.zeros(1, 2, 4, d), torch.zeros(1, 2, 3)
    tensors = {"grad_out": q, "q": q, "k": k, "v": k, "out": q}
    arguments = {name: t.to(device, torch.float16) for name, t in tensors.items()} | {"lse": rows.to(device)}
    assert f"q: head_dim {d}" in refused(arguments, fake=False)


def test_a_failed_call_leaves_the_next_one_right(device: str) -> None:
    arguments = good(device)
    arguments["grad_out"] = torch.ones_like(arguments["q"])
    arguments["lse"] = torch.full_like(arguments["lse"], 1.6)
    before = BACKWARD(**arguments)
    refused(arguments | {"out": arguments["out"][:, :, :3]})
    assert all(torch.equal(b, a) for b, a in zip(before, BACKWARD(**arguments), strict=True))
