"""Cases of forms of attention beside masks: sliding windows, soft caps, sinks, and any of them together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from dhp_safe_fa.bench import reference
from dhp_safe_fa.bench.cases import QUICK_STRIDE, Case, CaseSet, Inputs, parse_case
from dhp_safe_fa.bench.forms.peers import Form

if TYPE_CHECKING:
    from typing_extensions import Self

# On CUDA each head_dim without a form, to compare with, and in a window; then soft caps and sinks, and both with the
# windows that Gemma 2 and gpt-oss have. "causal" is written out: it is what models with forms are.
FORM_SHAPES = {
    "cuda": (
        *("1,16,16384,128:causal", "1,16,16384,128:window1023:causal"),
        *("1,32,16384,64:causal", "1,32,16384,64:window1023:causal"),
        *("1,8,16384,256:causal", "1,8,16384,256:window1023:causal"),
        *("4,16/4,4096,128:causal", "4,16/4,4096,128:softcap50:causal", "4,16/4,4096,128:sinks:causal"),
        *("2,8/4,8192,256:window4095:softcap50:causal", "2,64/8,4096,64:window127:sinks:causal"),
        "1,64/8,2048,64:window127:sinks:causal",  # of which others may store the scores
    ),
    "cpu": (
        *("1,8/2,1024,64:causal", "1,8/2,1024,64:window127:causal", "1,8/2,1024,64:softcap50:causal"),
        *("1,8/2,1024,64:sinks:causal", "1,8/2,1024,64:window127:softcap50:sinks:causal"),
    ),
}

_WORD = re.compile(r"(?P<name>window|softcap)(?P<number>0|[1-9]\d{0,8})|sinks", re.ASCII)


@dataclass(frozen=True)
class FormCase(Case):
    """The forward where a query sees no more than ``window`` keys before its own (and behind it, without a causal
    mask), scores are capped, or each head has a sink.

    Raises:
        ValueError: as Case; or a window for different lengths, or softcap is 0.
    """

    window: int | None = None
    softcap: int | None = None
    sinks: bool = False

    direction: ClassVar[str] = "forms"
    may_be_refused: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window is not None and self.key_seqlen:
            raise ValueError(
                f"shape '{self.sizes}': a window with {self.seqlen} queries and {self.key_seqlen} keys; only equal "
                "numbers are compared there, because implementations align windows with different corners"
            )
        if self.softcap == 0:
            raise ValueError(f"shape '{self.sizes}': a soft cap of 0; expected a positive number")

    @classmethod
    def parse(cls, text: str, default_dtype: str) -> Self:
        """``B,H[/Hk],S[/Sk],D[:windowKEYS][:softcapCAP][:sinks][:full|:causal][:dtype]``."""
        words = text.split(":")
        found = [match for word in words if (match := _WORD.fullmatch(word))]
        names = [match["name"] or "sinks" for match in found]
        if len(names) > len(set(names)):
            raise ValueError(f"shape '{text}': {' and '.join(names)}; expected each once")
        case = parse_case(":".join(word for word in words if not _WORD.fullmatch(word)), default_dtype)
        numbers = {str(match["name"]): int(match["number"]) for match in found if match["name"]}
        return cls(**vars(case), window=numbers.get("window"), softcap=numbers.get("softcap"), sinks="sinks" in names)

    @property
    def sizes(self) -> str:
        """The forward's, and the forms."""
        forms = [f"{name}{number}" for name in ("window", "softcap") if (number := getattr(self, name)) is not None]
        return ":".join([super().sizes, *forms, *(["sinks"] if self.sinks else [])])

    @property
    def flops(self) -> float:
        """As the forward's, of what the window leaves to be seen."""
        if self.window is None:
            return super().flops
        row = torch.arange(self.seqlen, dtype=torch.float64)
        last = row if self.causal else (row + self.window).clamp(max=self.seqlen - 1)
        seen = float((last - (row - self.window).clamp(min=0) + 1).sum())
        return 2.0 * self.products * self.batch * self.heads * seen * self.head_dim

    @property
    def in_sweep(self) -> bool:
        return False

    def check_served(self) -> None:
        """Nothing: the call itself says so."""

    def draw(self, device: str, generator: torch.Generator, layout: str) -> Inputs:
        """q, k, v, and sinks [H] if there are any."""
        given = super().draw(device, generator, layout)
        return (*given, torch.randn(self.heads, generator=generator, device=device)) if self.sinks else given

    def _form(self, inputs: Inputs) -> Form:
        window = (-1, -1) if self.window is None else (self.window, 0 if self.causal else self.window)
        return Form(self.causal, window, self.softcap, inputs[3] if self.sinks else None)

    def bind(self, attend: Callable[..., Tensor], inputs: Inputs) -> Callable[[], Any]:
        """attend: forms.peers.FormAttend."""
        q, k, v = inputs[:3]
        form = self._form(inputs)
        return lambda: attend(q, k, v, form)

    def judge(self, inputs: Inputs, generator: torch.Generator) -> reference.Judge:
        q, k, v = inputs[:3]
        form = self._form(inputs)
        options: dict[str, Any] = {"window": form.window, "softcap": form.softcap, "sinks": form.sinks}
        return reference.SampleJudge(self.dtype, reference.sample(q, k, v, self.causal, generator, **options))


def form_cases(dtypes: list[str] | None, device: str, quick: bool) -> list[Case]:
    """Without dtypes in bfloat16, on a CPU in float32."""
    stride = QUICK_STRIDE if quick else 1
    chosen = dtypes or ["float32" if device == "cpu" else "bfloat16"]
    return [FormCase.parse(text, dtype) for dtype in chosen for text in FORM_SHAPES[device][::stride]]


FORM_SETS: Mapping[str, CaseSet] = {"forms": form_cases}
