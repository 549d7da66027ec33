"""The declassification policy: the reviewed exceptions, each with its reason, and nothing else.

A JSON file: ``{"declassifications": [{"effect", "kernel", "instruction", "source", "reason"}, ...],
"public_memory": [{"kernel", "parameter", "name", "reason", "made_by"}, ...]}``; either list may be left out.
effect ``public-result``: what the instruction loads is public (a table of lengths, say). effect ``accepted``: the
findings at the instruction are accepted. kernel, instruction and source (file:line) are shell patterns (fnmatch) and
have to match all three; source may be left out. public_memory: that what a pointer parameter of these kernels points
to is public, a table of pages, say; parameter is its place, in bytes from the first one, name what people call it. The
gate then proves that the kernel does not write there. made_by, which may be left out, is a pattern of the kernels that
do, in a launch before: then the gate also proves that all that these store in global memory is public, and that this
kernel reads there only when they have ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, field, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from ..provenance import POLICY
from .listing import Instruction

PUBLIC_RESULT, ACCEPTED = "public-result", "accepted"
_LEAST_REASON = 10  # letters: fewer say nothing


class PolicyError(Exception):
    """The policy file does not say what it should; the text says where."""


@dataclass(frozen=True)
class Declassification:
    """One exception."""

    effect: str
    kernel: str
    instruction: str
    reason: str
    source: str = "*"

    def matches(self, kernel: str, instruction: Instruction) -> bool:
        return (
            fnmatchcase(kernel, self.kernel)
            and fnmatchcase(instruction.text, self.instruction)
            and fnmatchcase(instruction.source, self.source)
        )


@dataclass(frozen=True)
class PublicMemory:
    """A pointer parameter to public memory."""

    kernel: str
    parameter: int
    name: str
    reason: str
    made_by: str = ""


@dataclass
class Policy:
    """All exceptions, and which of them were needed so far. is_shipped: those of the kernels that ship."""

    entries: list[Declassification] = field(default_factory=list)
    public_memory: list[PublicMemory] = field(default_factory=list)
    is_shipped: bool = False
    used: set[Declassification | PublicMemory] = field(default_factory=set)

    def allows(self, effect: str, kernel: str, instruction: Instruction) -> bool:
        matching = [e for e in self.entries if e.effect == effect and e.matches(kernel, instruction)]
        self.used.update(matching)
        return bool(matching)

    def declared(self, kernel: str) -> dict[int, str]:
        """Of this kernel: the place of each pointer parameter to public memory, and its name."""
        matching = [entry for entry in self.public_memory if fnmatchcase(kernel, entry.kernel)]
        self.used.update(matching)
        return {entry.parameter: entry.name for entry in matching}

    def made_before(self, kernel: str) -> set[int]:
        """Of those places, the ones of memory that another launch writes."""
        return {e.parameter for e in self.public_memory if e.made_by and fnmatchcase(kernel, e.kernel)}

    def is_maker(self, kernel: str) -> bool:
        """Whether it writes memory that others take for public."""
        return any(entry.made_by and fnmatchcase(kernel, entry.made_by) for entry in self.public_memory)


def load(path: Path) -> Policy:
    """Read a policy file. PolicyError for anything but the format above; a reason of under ten letters is none."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path}: {error}") from error
    lists = ("declassifications", "public_memory")
    if not isinstance(content, dict) or not any(name in content for name in lists):
        raise PolicyError(f"{path}: no list called {' or '.join(lists)}")
    policy = Policy(is_shipped=path.resolve() == POLICY.resolve())
    policy.entries = [
        _declassification(entry, f"{path}: declassification {number}")
        for number, entry in _listed(content, lists[0], path)
    ]
    policy.public_memory = [
        _public_memory(entry, f"{path}: public memory {number}") for number, entry in _listed(content, lists[1], path)
    ]
    return policy


def _listed(content: dict[str, Any], name: str, path: Path) -> Iterable[tuple[int, Any]]:
    entries = content.get(name, [])
    if not isinstance(entries, list):
        raise PolicyError(f"{path}: {name} is no list")
    return enumerate(entries, 1)


def _checked(entry: Any, kind: type, place: str) -> dict[str, Any]:
    """The entry, which has all that it needs and nothing else. All but a place are words."""
    known = {one.name: one.default is MISSING for one in fields(kind)}
    if not isinstance(entry, dict):
        raise PolicyError(f"{place}: is no object with {', '.join(known)}")
    for name in entry:
        if name not in known:
            raise PolicyError(f"{place}: {name} is unknown; there are {', '.join(known)}")
    for name, is_needed in known.items():
        if is_needed and name not in entry:
            raise PolicyError(f"{place}: {name} is missing")
        if name in entry and name != "parameter" and not isinstance(entry[name], str):
            raise PolicyError(f"{place}: {name} is {entry[name]!r}; supported: text")
    if len(entry["reason"]) < _LEAST_REASON:
        raise PolicyError(f"{place}: reason is {entry['reason']!r}; supported: {_LEAST_REASON} letters or more")
    return entry


def _declassification(entry: Any, place: str) -> Declassification:
    made = Declassification(**_checked(entry, Declassification, place))
    if made.effect not in (PUBLIC_RESULT, ACCEPTED):
        raise PolicyError(f"{place}: effect is {made.effect!r}; supported: {PUBLIC_RESULT}, {ACCEPTED}")
    return made


def _public_memory(entry: Any, place: str) -> PublicMemory:
    made = PublicMemory(**_checked(entry, PublicMemory, place))
    if type(made.parameter) is not int or made.parameter < 0 or made.parameter % 8:
        raise PolicyError(f"{place}: parameter is {made.parameter!r}; supported: bytes from the first, multiples of 8")
    if not made.name:
        raise PolicyError(f"{place}: name is empty")
    return made
