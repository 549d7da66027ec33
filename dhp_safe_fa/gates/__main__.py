"""python -m dhp_safe_fa.gates GATE: exit code 0 pass, 1 fail, 2 invalid or not run. A crash is no verdict either."""

from __future__ import annotations

import sys
import traceback

try:
    from dhp_safe_fa.gates.cli import main

    code = main()
except ImportError as error:
    print(f"NOT RUN: {error} (pip install 'dhp_safe_fa[gates]')", file=sys.stderr)
    code = 2
except Exception:
    traceback.print_exc()
    print("INVALID: the gate itself failed", file=sys.stderr)
    code = 2
sys.exit(code)
