"""The gates as tests: ``pytest -m gates`` runs each on what is shipped. The gate `sass` is in test_gates_cli.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp_safe_fa.gates import cli, registry
from dhp_safe_fa.gates.verdict import NOT_RUN, PASS


@pytest.mark.gates
@pytest.mark.long
@pytest.mark.parametrize("gate", registry.EXECUTING)
def test_shipped_kernels_pass(gate: str, tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    code = cli.main([gate, "--quick", "--json", str(file)])
    results = json.loads(file.read_text())
    if all(result["verdict"] == NOT_RUN for result in results):
        assert code == 2
        pytest.skip(results[0]["problems"][0])
    assert {result["subject"]: (result["verdict"], result["problems"]) for result in results} == {
        result["subject"]: (PASS, []) for result in results
    }
    assert code == 0
