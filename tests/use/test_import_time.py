"""What `import dhp_safe_fa` costs beyond torch, and what it does not bring along."""

from __future__ import annotations

import compileall
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import dhp_safe_fa

LIMIT_MS = 50
ATTEMPTS = 20

IMPORT = """
import json, sys, time
import torch
before = set(sys.modules)
start = time.process_time()
import dhp_safe_fa
spent = time.process_time() - start
print(json.dumps({"ms": 1e3 * spent, "new": sorted(set(sys.modules) - before)}))
"""


def import_once() -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_import_time() -> None:
    """Processor time, which other load on the machine does not stretch much, and the best of a few attempts; with
    bytecode, as an installed package has it, also where PYTHONDONTWRITEBYTECODE keeps imports from writing any."""
    compileall.compile_dir(Path(dhp_safe_fa.__file__).parent, quiet=2)
    spent = []
    for _ in range(ATTEMPTS):
        spent.append(import_once()["ms"])
        if spent[-1] <= LIMIT_MS:
            return
    raise AssertionError(f"importing dhp_safe_fa took {', '.join(f'{ms:.0f}' for ms in spent)} ms, {LIMIT_MS} allowed")


def test_nothing_is_imported_unasked() -> None:
    """Neither what the integrations, the tables and the pictures need, nor torch's compiler."""
    foreign = [name for name in import_once()["new"] if name.split(".")[0] != "dhp_safe_fa"]
    brought = {name.split(".")[0] for name in foreign} - set(sys.stdlib_module_names)
    assert brought == set()


def test_without_transformers_the_message_says_what_to_install() -> None:
    program = "import sys; sys.modules['transformers'] = None; import dhp_safe_fa.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    *_, said = done.stderr.splitlines()
    assert said == "ImportError: transformers is not installed: pip install 'transformers>=5.23'"
