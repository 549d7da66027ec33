"""The exit code of a command whose reader may have read enough: ``... | head``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

# Neither verdict of a command: nobody has read it.
_NO_VERDICT = 2


def exit_code(main: Callable[[], int]) -> int:
    """What main returns, if somebody has read what it wrote."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:  # Python is not to complain at its end, either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_VERDICT
    except SystemExit as ended:  # rich's, in the same case, is 1; argparse's are 0 and 2
        return _NO_VERDICT if ended.code not in (0, None) else 0
    return code
