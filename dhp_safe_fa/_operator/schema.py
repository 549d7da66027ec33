"""The operators' schemas, and the library with their kernels (csrc/torch), which importing this module loads.

Schemas are defined here because the stable ABI of torch 2.10 cannot set tags from C++.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NoReturn

import torch

# The options of a call as schemas spell them; their order is that of the struct in csrc/torch/calls.h. A backward has
# what it alone is given in between.
_FIRST = "bool is_causal=False, float? scale=None, SymInt causal_offset=0"
_LATER = "int window_left=-1, int window_right=-1, float? softcap=None"
# The last option, which the forward alone has: of a backward sinks are in the lse, and their gradient is apart.
_SINKS = "Tensor? sinks=None"
# Every operator that computes attention, and what it returns. Autocast, vmap, policies and DTensor's rules go by this
# list.
OPERATORS = {"attention": "Tensor", "attention_lse": "(Tensor out, Tensor lse)"}
# Their derivative. A gradient that is not needed comes as an empty tensor, of size [0].
BACKWARD = "attention_backward"
# The gradient of sinks, of either: [H].
SINKS_BACKWARD = "attention_sinks_backward"
# Attention within packed sequences, and its derivative.
VARLEN = "attention_varlen"
VARLEN_BACKWARD = "attention_varlen_backward"
BACKWARDS = (BACKWARD, VARLEN_BACKWARD, SINKS_BACKWARD)
_VARLEN_OPTIONS = (
    "Tensor cu_seqlens_q, Tensor? cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "bool is_causal=False, float? scale=None, bool is_bottom_right=True, int window_left=-1, int window_right=-1, "
    "float? softcap=None, Tensor? seqused_k=None, Tensor? page_table=None, Tensor? leftpad_k=None"
)
_NEEDED = "Tensor? grad_lse=None, bool need_dq=True, bool need_dk=True, bool need_dv=True"

HALVES = (torch.float16, torch.bfloat16)  # served on the CPU and on CUDA
AUTOCAST = (*HALVES, torch.float32)  # what autocast takes: as everywhere in torch, not float64
DTYPES = (*AUTOCAST, torch.float64)
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)  # what a scale or a soft cap may be
LARGEST = 2.0**100  # scale; but for float64 also softcap and scale / softcap
CPU_MAX_HEAD_DIM = 256  # as in csrc/check.h
PAGE_SIZES = (16, 32, 64, 128, 256)  # of a cache, as in csrc/varlen.c
OLDEST_TORCH = (2, 10)  # its stable ABI is what libdhp_torch.so was built for

LIBRARY = torch.library.Library("dhp", "DEF")
_ARGUMENTS = f"Tensor q, Tensor k, Tensor v, {_FIRST}, {_LATER}, {_SINKS}"
SCHEMAS = [f"{name}({_ARGUMENTS}) -> {returns}" for name, returns in OPERATORS.items()]
SCHEMAS.append(f"{VARLEN}(Tensor q, Tensor k, Tensor v, {_VARLEN_OPTIONS}, {_SINKS}) -> (Tensor out, Tensor lse)")
SCHEMAS += [
    f"{name}(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {options})"
    " -> (Tensor dq, Tensor dk, Tensor dv)"
    for name, options in (
        (BACKWARD, f"{_FIRST}, {_NEEDED}, {_LATER}"),
        (VARLEN_BACKWARD, f"{_VARLEN_OPTIONS}, {_NEEDED}"),
    )
]
SCHEMAS.append(
    f"{SINKS_BACKWARD}(Tensor grad_out, Tensor out, Tensor lse, Tensor sinks, Tensor? grad_lse=None) -> Tensor"
)
for _schema in SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

# The options by name, with what they are where a call leaves them out.
DEFAULTS = {each.name: each.default_value for each in torch.ops.dhp.attention.default._schema.arguments[3:]}


def refuse(operator: str, sentence: str) -> NoReturn:
    """As the library does: RuntimeError, with the operator's name in front."""
    raise RuntimeError(f"dhp::{operator}: {sentence}")


def _load() -> None:
    path = Path(__file__).parents[1] / "libdhp_torch.so"
    if not path.exists():
        raise ImportError(
            f"{path} is missing: the package is not built here. Run `make build` in a checkout, or `pip install .` and "
            "then Python in another folder, where it does not find these sources first."
        )
    if tuple(map(int, torch.__version__.split(".")[:2])) < OLDEST_TORCH:  # would end in an undefined symbol
        raise ImportError(f"torch {torch.__version__}; supported: 2.10 and newer. Run `pip install 'torch>=2.10'`.")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        verify = Path(__file__).parents[1] / "verify.py"
        raise ImportError(f"{error}. `python {verify}` says whether the files are those that were built.") from error


_load()

# Of the kernels of this build; 0 without any. Asked once, because torch.compile cannot look into the module that knows,
# and only now: what does not load has been said by the line above.
CUDA_MAX_HEAD_DIM = int(importlib.import_module("dhp_safe_fa._inspect").build_info()["max_head_dim_cuda"])
