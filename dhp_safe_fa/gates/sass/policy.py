"""The declassification policy: the reviewed exceptions, each with its reason, and nothing else.

A JSON file: ``{"declassifications": [{"effect", "kernel", "instruction", "source", "reason"}, ...],
"public_memory": [{"kernel", "parameter", "name", "reason", "made_by"}, ...]}``; the second list may be left out.
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
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from .listing import Instruction

PUBLIC_RESULT, ACCEPTED = "public-result", "accepted"


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
    """All exceptions, and which of them were needed so far."""

    entries: list[Declassification] = field(default_factory=list)
    public_memory: list[PublicMemory] = field(default_factory=list)
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
    entries = content.get("declassifications") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise PolicyError(f"{path}: no list called declassifications")
    policy = Policy()
    for number, entry in enumerate(entries, 1):
        try:
            made = Declassification(**entry)
        except TypeError as error:
            raise PolicyError(f"{path}: entry {number}: {error}") from error
        if made.effect not in (PUBLIC_RESULT, ACCEPTED) or len(made.reason) < 10:
            raise PolicyError(f"{path}: entry {number}: effect is {PUBLIC_RESULT} or {ACCEPTED}, with a reason")
        policy.entries.append(made)
    for number, entry in enumerate(content.get("public_memory", []), 1):
        try:
            declaration = PublicMemory(**entry)
        except TypeError as error:
            raise PolicyError(f"{path}: public memory {number}: {error}") from error
        is_place = isinstance(declaration.parameter, int) and declaration.parameter >= 0
        if not is_place or declaration.parameter % 8 or not declaration.name or len(declaration.reason) < 10:
            raise PolicyError(
                f"{path}: public memory {number}: parameter is a multiple of 8 bytes, with a name and a reason"
            )
        if not isinstance(declaration.made_by, str):
            raise PolicyError(f"{path}: public memory {number}: made_by is a pattern of kernels")
        policy.public_memory.append(declaration)
    return policy
