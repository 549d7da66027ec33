"""The declassification policy: the reviewed exceptions, each with its reason, and nothing else.

A JSON file: ``{"declassifications": [{"effect", "kernel", "instruction", "source", "reason"}, ...]}``.
effect ``public-result``: what the instruction loads is public (a table of lengths, say). effect ``accepted``: the
findings at the instruction are accepted. kernel, instruction and source (file:line) are shell patterns (fnmatch) and
have to match all three; source may be left out.
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


@dataclass
class Policy:
    """All exceptions, and which of them were needed so far."""

    entries: list[Declassification] = field(default_factory=list)
    used: set[Declassification] = field(default_factory=set)

    def allows(self, effect: str, kernel: str, instruction: Instruction) -> bool:
        matching = [e for e in self.entries if e.effect == effect and e.matches(kernel, instruction)]
        self.used.update(matching)
        return bool(matching)

    @property
    def unused(self) -> list[Declassification]:
        return [entry for entry in self.entries if entry not in self.used]


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
    return policy
