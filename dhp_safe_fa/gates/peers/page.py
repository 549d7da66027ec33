"""audits/peers.md from audits/peers.json: every figure on the page is one of the file's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..registry import EXECUTING, NAMES

_SHOWN = 6  # problems of one gate; the JSON has more

HEAD = """\
# The peers under the same gates

Written by `make peers` from `audits/peers.json`; do not edit. These libraries were made to be fast and accurate, and
never promised to pass. The page says what their kernels were seen to do by the gates that this library's own kernels
have to pass (`docs/gates-sass.md`, `audits/SOUNDNESS.md`).
"""

READING = """\
How to read the machine-code table:

- *predicated* is a plain count of conditional branches, calls, returns and exits, on lengths or on anything else.
- *findings* are places to which the analysis finds a way from the content of what a kernel reads: q, k and v, of
  gradients also out, lse and grad_out. It is conservative: it merges all callers of a subroutine and all paths, so a
  finding is a way that it cannot rule out, and the count an upper bound. What really happens on different inputs is
  the matter of the other gates.
- Lengths that a kernel reads from memory are declared public in `audits/peers_policy.json`.
"""


def page(content: Mapping[str, Any]) -> str:
    """The page as Markdown."""
    peers: Mapping[str, Mapping[str, Any]] = content["peers"]
    runs = [f"{number}. {_machine(run)}" for number, run in enumerate(content["runs"], 1)]
    parts = [HEAD, _verdicts(peers), "Runs, by the numbers behind the verdicts:\n", *runs]
    parts += ["", "## Machine code\n", READING]
    parts += [_sass(name, peer["sass"]) for name, peer in peers.items() if "sass" in peer]
    for gate in EXECUTING:
        asked = {name: peer[gate] for name, peer in peers.items() if gate in peer}
        parts += [f"## {gate.capitalize()}\n", _table(asked)]
        parts += [text for name, result in asked.items() if (text := _problems(name, result))]
    return "\n".join(parts)


def _row(cells: Iterable[object]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |\n"


def _grid(head: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    head = list(head)
    return _row(head) + _row("---" for _ in head) + "".join(_row(row) for row in rows)


def _machine(known: Mapping[str, Any]) -> str:
    named = {"driver": "driver", "CUDA": "cuda", "torch": "torch", "cuDNN": "cudnn", "commit": "commit", "date": "date"}
    parts = [f"Machine: {known.get('gpu')}", *(f"{text} {known.get(key)}" for text, key in named.items())]
    return ", ".join(parts) + "."


def _verdicts(peers: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [[name, *(_verdict(peer.get(gate)) for gate in NAMES)] for name, peer in peers.items()]
    who: dict[str, dict[str, None]] = {}  # by shapes: peers and runs, each once
    for name, peer in peers.items():
        for result in peer.values():
            who.setdefault(", ".join(result["shapes"]) or "none were run", {})[f"{name} ({result['run'] + 1})"] = None
    shapes = "".join(f"- {', '.join(of)}: {some}\n" for some, of in who.items())
    return _grid(["peer", *NAMES], rows) + f"\nShapes (B, H, S, head_dim):\n\n{shapes}"


def _verdict(result: Mapping[str, Any] | None) -> str:
    """With the number of its run; of a gate that was not asked: nothing."""
    return f"{result['verdict']} ({result['run'] + 1})" if result else "–"


def _sass(name: str, sass: Mapping[str, Any]) -> str:
    kernels = sass.get("kernels", [])
    text = f"### {name}: {sass['verdict']}\n\n" + "".join(f"- {problem}\n" for problem in sass["problems"])
    if not kernels:
        return text
    rows = []
    for number, kernel in enumerate(kernels, 1):
        findings = ", ".join(f"{count} {kind}" for kind, count in kernel["findings"].items()) or "none"
        figures = (kernel[key] for key in ("instructions", "registers", "spill_bytes", "predicated_branches"))
        rows.append([number, *figures, findings, len(kernel["unknown_opcodes"])])
    head = ["kernel", "instructions", "registers", "spill bytes", "predicated", "findings", "unknown opcodes"]
    text += _grid(head, rows) + "\n"
    for number, kernel in enumerate(kernels, 1):
        text += f"{number}. `{kernel['kernel']}` (cubin SHA-256 `{kernel['cubin_sha256'][:16]}…`)\n"
    return text + "\n" + _examples(kernels[0])


def _examples(kernel: Mapping[str, Any]) -> str:
    """The shortest way to each kind of finding, of one kernel."""
    if not kernel["examples"]:
        return ""
    text = "The shortest way to each kind, in kernel 1 (its last steps):\n\n"
    for kind, steps in kernel["examples"].items():
        text += f"- {kind}: `{'` → `'.join(step.replace('`', '') for step in steps)}`\n"
    opcodes = ", ".join(f"{count} {opcode}" for opcode, count in kernel["guarded_opcodes"].items())
    return text + (f"- most of the guarded arithmetic: {opcodes}\n" if opcodes else "")


def _table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What a gate found of each peer."""
    measured = [result["figures"] for result in results.values()]
    keys = list(dict.fromkeys(key for figures in measured for key, value in figures.items() if _is_plain(value)))
    rows = []
    for name, result in results.items():
        figures = result["figures"]
        rows.append([name, *(_cell(figures.get(key)) for key in keys), result["verdict"]])
    return _grid(["peer", *keys, "verdict"], rows)


def _is_plain(value: object) -> bool:
    return isinstance(value, (int, float, str))


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if _is_plain(value) else "–"


def _problems(name: str, result: Mapping[str, Any]) -> str:
    problems = result["problems"]
    more = len(problems) - _SHOWN + result.get("more_problems", 0)
    text = "".join(f"- {problem}\n" for problem in problems[:_SHOWN])
    if more > 0:
        text += f"- … and {more} more\n"
    return f"{name}:\n\n{text}" if problems else ""
