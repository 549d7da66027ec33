"""The exit code of a command whose reader may have read enough: ``... | head``."""

from __future__ import annotations

from collections.abc import Callable

# Neither verdict of a command: it did not end.
_NO_VERDICT = 2


def exit_code(main: Callable[[], int]) -> int:
    """What main returns. rich ends the process with 1 where nobody reads any more, which would be a verdict."""
    try:
        return main()
    except SystemExit as ended:  # argparse's are 0 and 2
        return _NO_VERDICT if ended.code not in (0, None) else 0
