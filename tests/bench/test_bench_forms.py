"""`bench --forms`: windows, soft caps and sinks; what their cases say, and that everybody computes the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import dhp_safe_fa
from dhp_safe_fa.bench import __main__ as command
from dhp_safe_fa.bench.cases import Inputs
from dhp_safe_fa.bench.directions import parse
from dhp_safe_fa.bench.forms import peers
from dhp_safe_fa.bench.forms.cases import FORM_SHAPES, FormCase

TEXTS = [
    "1,4/2,40,16:causal",
    "2,4,40,16",
    "1,4/2,40,16:window7:causal",
    "1,4,40,16:window3",
    "1,4/2,40,16:softcap2:causal",
    "1,4/2,40,16:sinks",
    "2,4/2,40,16:window0:softcap3:sinks:causal",
    "1,4/2,9/40,16:sinks",
]


def made(text: str) -> tuple[FormCase, Inputs, torch.Generator]:
    case, generator = FormCase.parse(text, "float32"), torch.Generator().manual_seed(5)
    return case, case.draw("cpu", generator, "BSHD"), generator


@pytest.mark.parametrize("text", [*TEXTS, *FORM_SHAPES["cuda"], *FORM_SHAPES["cpu"]])
def test_labels_are_read_back(text: str) -> None:
    case = FormCase.parse(text, "bfloat16")
    assert parse(case.label) == case and case.label.endswith(":bfloat16:forms")
    in_another_order = ":".join([text.split(":")[0], *reversed(text.split(":")[1:])])
    assert FormCase.parse(in_another_order, "bfloat16") == case


@pytest.mark.parametrize("text", TEXTS)
def test_work_is_what_is_seen(text: str) -> None:
    case, inputs, _ = made(text)
    form = case._form(inputs)
    if form.window != (-1, -1):
        seen = peers._seen(case.seqlen, case.key_shape[2], form.bounds, torch.device("cpu"))
        assert case.flops == 4 * case.batch * case.heads * int(seen.sum()) * case.head_dim


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["ours", "masked", "unfused", "varlen_attn", "fa3", "flex"])
def test_everybody_computes_the_same_or_refuses(text: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, inputs, generator = made(text)
    judge = case.judge(inputs, generator)
    if name in ("ours", "masked", "unfused"):
        attend = getattr(peers, name)
    else:
        monkeypatch.setattr(torch, "compile", lambda function, **_: function)
        attend = peers.INSTALLED[name][2]({"varlen_attn": as_varlen, "fa3": as_flash, "flex": as_flex}[name])
    call = case.bind(attend, inputs)
    no_caps = name in ("masked", "varlen_attn")
    if (case.sinks and name not in ("ours", "unfused")) or (case.softcap and no_caps):
        with pytest.raises(ValueError, match="has no sinks"):
            call()
        return
    assert (judge.ours if name == "ours" else judge.peer)(call()).wrong is None


def as_varlen(q: Tensor, k: Tensor, v: Tensor, *given: Any, window_size: Any, enable_gqa: bool = False) -> Tensor:
    """As torch's takes its arguments."""
    assert enable_gqa == (k.size(1) < q.size(1))
    return dhp_safe_fa.attention_varlen(q, k, v, *given, window=window_size, alignment="top-left")


def as_flash(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window_size: Any, softcap: float) -> tuple[Tensor, None]:
    """As FlashAttention's, on [B, S, H, D]."""
    heads_first = (t.transpose(1, 2) for t in (q, k, v))
    out = dhp_safe_fa.attention(*heads_first, is_causal=causal, window=window_size, softcap=softcap)
    return out.transpose(1, 2), None


def as_flex(q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, score_mod: Any, enable_gqa: bool) -> Tensor:
    """As flex_attention says of itself, without blocks."""
    if enable_gqa:
        k, v = (t.repeat_interleave(q.size(1) // k.size(1), dim=1) for t in (k, v))
    scores = q @ k.mT * q.size(3) ** -0.5
    if score_mod:
        scores = score_mod(scores, None, None, None, None)
    if block_mask:
        row, key = torch.arange(q.size(2))[:, None], torch.arange(k.size(2))
        scores = scores.masked_fill(~block_mask.mask_mod(torch.tensor(0), torch.tensor(0), row, key), -torch.inf)
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("text", [text for text in TEXTS if ":window" in text or "softcap" in text or "sinks" in text])
def test_a_form_that_is_forgotten_is_wrong(text: str) -> None:
    case, inputs, generator = made(text)
    judge, form = case.judge(inputs, generator), case._form(inputs)
    for without in (form._replace(window=(-1, -1)), form._replace(softcap=None), form._replace(sinks=None)):
        if without != form:
            assert judge.ours(peers.ours(*inputs[:3], without)).wrong is not None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,4,40,16:window3:window4", "window and window; expected each once"),
        ("1,4,40,16:softcap0", "a soft cap of 0; expected a positive number"),
        ("1,4,40,16:window-1", "'window-1' is neither a mask"),
        ("1,4,40,16:sinks:sinks", "sinks and sinks; expected each once"),
        ("1,4,9/40,16:window3:causal", "causal with 9 queries and 40 keys"),
        ("1,4,40/9,16:window3", "a window with 40 queries and 9 keys; only equal numbers are compared there"),
    ],
)
def test_mistakes(text: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--forms", "--device", "cpu", "--shapes", text]) == 2
    assert words in capsys.readouterr().err


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    shapes = ["1,4/2,40,16:window7:causal", "1,4/2,40,16:sinks:causal"]
    assert command.main(["--forms", "--device", "cpu", "--quick", "--shapes", *shapes]) == 0
    printed = capsys.readouterr().out
    assert "window7" in printed and "masked: SDPA has no sinks" in printed
