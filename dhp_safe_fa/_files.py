"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def can_write(path: Path) -> bool:
    """Whether a file could be written there, by what is known without doing it: asked before a long run."""
    return path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()


def write_whole(text: str, path: Path) -> None:
    """Write a text file. A temporary neighbour takes its name at the end, so that no failure leaves half a file. What
    is no file, such as /dev/null or a pipe, is written to and stays what it is."""
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it readable by its owner alone
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
