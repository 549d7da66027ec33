from collections.abc import Sequence
from typing import Any

def kernels() -> list[dict[str, Any]]: ...
def cubin(name: str) -> bytes: ...
def plan(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: str,
    is_causal: bool = False,
    causal_offset: int = 0,
    window_left: int = -1,
    window_right: int = -1,
) -> dict[str, Any] | None: ...
def plan_packed(
    q_shape: tuple[int, int, int],
    k_shape: tuple[int, int, int],
    dtype: str,
    sequences: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softcap: float = 0.0,
    with_sinks: bool = False,
) -> dict[str, Any] | None: ...
def plan_backward(
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    dtype: str,
    is_causal: bool = False,
    causal_offset: int = 0,
    need_dq: bool = True,
    need_dk: bool = True,
    need_dv: bool = True,
) -> list[dict[str, Any]]: ...
def build_info() -> dict[str, Any]: ...
