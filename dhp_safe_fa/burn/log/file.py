"""The log's file, audits/iterations.jsonl: one JSON object a line (lines.py), each bound to the line of its parent.

A line whose parent was changed afterwards is refused.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from dhp_safe_fa._files import write_whole
from dhp_safe_fa.burn.log.lines import from_line, to_line
from dhp_safe_fa.burn.log.records import Parent, Record
from dhp_safe_fa.gates import registry


class LogError(ValueError):
    """The log, or a name looked up in it, is not as it should be; one sentence."""


@dataclass(frozen=True)
class Log:
    """The records of a file in order; lines: the text of each."""

    path: Path
    records: list[Record]
    lines: list[str]

    def find(self, name: str) -> Record:
        for record in self.records:
            if record.name == name:
                return record
        known = ", ".join(record.name for record in self.records) or "the log is empty"
        raise LogError(f"no iteration '{name}' in {self.path}; there are: {known}")

    def best(self, family: str) -> Record | None:
        """The latest iteration of a kernel family that was to proceed."""
        of_it = (record for record in reversed(self.records) if record.family == family)
        return next((record for record in of_it if record.decision == "proceed"), None)

    def parent(self, record: Record) -> Parent:
        return Parent(record.name, _sha256(self.lines[self.records.index(record)]))

    def gpu(self) -> str | None:
        """The one GPU model that the log is about; None as long as nothing was measured."""
        return next((record.chip.gpu for record in self.records if record.chip), None)

    def check_new(self, name: str, gpu: str | None) -> None:
        """LogError if a record of this name or GPU may not be appended."""
        if not name or name != name.strip() or len(name) > 60 or not name.isprintable():
            raise LogError(f"name '{name}': give one of 1 to 60 printable characters without spaces around them")
        if any(record.name == name for record in self.records):
            raise LogError(f"name '{name}': {self.path} has an iteration of this name already")
        if gpu and self.gpu() not in (None, gpu):
            raise LogError(f"{self.path} is a log of {self.gpu()}, and this is {gpu}: keep one log for each with --log")


def load(path: Path) -> Log:
    """An absent file is an empty log. LogError names the line that is not whole or contradicts itself."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError as error:
        raise LogError(f"{path}: is no text: {error}") from error
    records: list[Record] = []
    known: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = from_line(line)
            if record.name in known:
                raise ValueError(f"{record.name}: a second iteration of this name")
            if record.chip and records and (gpus := {r.chip.gpu for r in records if r.chip} - {record.chip.gpu}):
                raise ValueError(f"{record.name}: measured on {record.chip.gpu}, the lines before on {', '.join(gpus)}")
            if record.parent and known.get(record.parent.name) != record.parent.sha256:
                raise ValueError(f"{record.name}: its parent '{record.parent.name}' is not an earlier, unchanged line")
        except ValueError as error:
            raise LogError(f"{path}, line {number}: {error}") from error
        records.append(record)
        known[record.name] = _sha256(line)
    return Log(path, records, lines)


def append(path: Path, record: Record) -> None:
    """Adds a line, whole or not at all: the file is written anew beside the old one and takes its name.

    LogError if the record would not be read back, or if its name has been taken meanwhile.
    """
    log = load(path)
    log.check_new(record.name, record.chip.gpu if record.chip else None)
    if record.required != list(registry.NAMES):
        raise LogError(f"not written: {record.name}: it has to name all gates of today: {', '.join(registry.NAMES)}")
    line = to_line(record)
    try:
        from_line(line)
    except ValueError as error:
        raise LogError(f"not written: {error}") from error
    write_whole("".join(f"{text}\n" for text in [*log.lines, line]), path)


def _sha256(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()
