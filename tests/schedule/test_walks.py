"""What the CTAs of a backward launch own and walk: backward/walks.cpp asks for all of every CTA, on the host."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from compiling import COMPILER, Substitution, families, needs_compiler, run
from simulated import VIOLATION, compile_kernel
from simulated_backward import BACKWARD
from simulated_one_pass import ONE_PASS

pytestmark = needs_compiler

# B, Hq, Hk, Sq, Sk, is_causal, causal_offset
Call = tuple[int, int, int, int, int, int, int]

EDGES: list[Call] = [
    (1, 1, 1, 1, 1, 1, 0),
    (2, 4, 2, 128, 128, 1, 0),
    (1, 2, 1, 129, 127, 1, 0),
    (1, 1, 1, 300, 200, 1, -100),  # the first queries see nothing
    (1, 1, 1, 200, 300, 1, -200),  # nobody sees anything
    (1, 1, 1, 200, 500, 1, 0),  # the last keys are seen by nobody
    (1, 1, 1, 200, 500, 1, 300),
    (1, 1, 1, 97, 191, 1, 500),  # everybody sees everything
    (1, 3, 1, 257, 385, 0, 0),
]


def random_call(random: Random) -> Call:
    key_heads, group = random.choice([1, 2, 3]), random.choice([1, 2, 5])
    seqlen_q, seqlen_k = (int(10 ** random.uniform(0, 2.7)) for _ in range(2))
    offset = random.choice([0, seqlen_k - seqlen_q, random.randint(-2 * seqlen_q, 2 * seqlen_k)])
    is_causal = random.randint(0, 1)
    return random.randint(1, 2), key_heads * group, key_heads, seqlen_q, seqlen_k, is_causal, is_causal * offset


def walked(folder: Path, kernel: families.Kernel, calls: Sequence[Call], changes: tuple[Substitution, ...]) -> str:
    """What backward/walks.cpp says of the calls."""
    compiled = compile_kernel(BACKWARD, kernel, "walks.cpp", folder, changes)
    program = folder / "walk"
    # without the kernel itself, and so without the simulator that it would call
    linked = run(*COMPILER, compiled, "-Wl,--gc-sections", "-o", program)
    assert linked.returncode == 0, linked.stderr
    lines = "".join(" ".join(map(str, call)) + "\n" for call in calls)
    result = subprocess.run([program], input=lines, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode in (0, VIOLATION), f"ended with status {result.returncode}: {result.stderr}"
    return result.stdout


@pytest.mark.parametrize("kernel", [*ONE_PASS.kernels, *BACKWARD.kernels], ids=lambda kernel: kernel.name)
def test_every_visible_pair_is_walked_once(tmp_path: Path, session_seed: int, kernel: families.Kernel) -> None:
    print(f"to repeat these calls: pytest --seed {session_seed}")
    random = Random(session_seed)
    calls = [*EDGES, *(random_call(random) for _ in range(300))]
    assert walked(tmp_path, kernel, calls, ()) == f"{len(calls)} calls\n"


WRONG_WALKS = {
    "first_tile_is_the_second": ("w.start = first_seeing / WALK;", "w.start = first_seeing / WALK + 1;"),
    "one_masked_tile_too_few_of_queries": (
        "tiles_of(all_see_from) - w.start",
        "tiles_of(all_see_from) - w.start - 1",
    ),
    "a_key_too_few": (
        "min(last_own + p->causal_offset + 1, p->seqlen_k)",
        "min(last_own + p->causal_offset, p->seqlen_k)",
    ),
    "one_masked_tile_too_few_of_keys": ("- max(seen_by_all, 0) / WALK;", "- tiles_of(max(seen_by_all, 0));"),
    "heads_of_another_key_head": ("w.head = w.own_head * w.heads;", "w.head = w.own_head;"),
    "heads_of_the_list_from_the_first_on": ("p->ordered_heads + rest", "rest"),
    "a_list_in_the_order_of_heads": (
        "in_order ? p->by_own_tiles : p->by_listed_heads);",
        "p->by_own_tiles);",
    ),
}


@pytest.mark.parametrize("wrong", WRONG_WALKS.values(), ids=WRONG_WALKS.keys())
def test_a_wrong_walk_is_found(tmp_path: Path, wrong: Substitution) -> None:
    of_keys, of_queries = BACKWARD.kernels[0], BACKWARD.kernels[-1]
    said = [walked(tmp_path / kernel.name, kernel, EDGES, (wrong,)) for kernel in (of_keys, of_queries)]
    assert any(text.startswith("violation: ") for text in said)
