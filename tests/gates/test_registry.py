"""The one list of gates: what it says is so, and a line more in it is a gate more everywhere."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from dhp_safe_fa import _inspect, evidence
from dhp_safe_fa.gates import provenance, registry


@pytest.mark.parametrize("gate", registry.GATES, ids=lambda gate: gate.name)
def test_a_gate_is_what_the_list_says(gate: registry.Gate) -> None:
    module = importlib.import_module(f"dhp_safe_fa.gates.{gate.name}.gate")
    assert hasattr(module, "run") == gate.executes
    assert hasattr(module, "plot") == gate.draws
    known = provenance.here().keys()
    assert all(set(gate.took_part(kernel["name"], kernel["family"])) <= known for kernel in _inspect.kernels())


def test_what_needs_no_gpu_runs_first() -> None:
    """`gates all` and the burn loop rely on it: what can be told anywhere is told before a GPU is asked for."""
    assert [gate.executes for gate in registry.GATES] == sorted(gate.executes for gate in registry.GATES)


def test_every_contract_rests_on_one_gate_and_has_its_row() -> None:
    contracts = [contract for gate in registry.GATES for contract in gate.contracts]
    assert len(set(contracts)) == len(contracts) and registry.BINDING not in contracts
    readme = (evidence.CHECKOUT.parents[1] / "README.md").read_text(encoding="utf-8")
    assert all(f"| {contract} | " in readme for contract in (*contracts, registry.BINDING))


LINE = '    Gate("odour", "it smells of nothing", ("C8",)),\n'
PROGRAM = """
import sys, types
from pathlib import Path
import dhp_safe_fa.gates

path = Path(dhp_safe_fa.gates.__file__).parent / "registry.py"
before, end, after = path.read_text().partition(")  # fmt: skip")
registry = types.ModuleType("dhp_safe_fa.gates.registry")
sys.modules[registry.__name__] = dhp_safe_fa.gates.registry = registry
exec(before + LINE + end + after, vars(registry))

from dhp_safe_fa import evidence
from dhp_safe_fa.burn.log.records import Record
from dhp_safe_fa.gates import cli, controls, provenance
from dhp_safe_fa.gates.evidence import contracts, writer
from dhp_safe_fa.gates.peers import page

assert evidence.GATES[-1] == "odour" and len(evidence.GATES) == 5
assert cli._parser().parse_args(["odour", "--quick"]).gate == "odour"
assert "gate odour" in provenance.of_gates()

source = FOLDER / "planted.cu"
head = "// control: expects sass=branch counters=may bitwise=may timing=may"
source.write_text(head + "\\n")
try:
    controls.read_header(source)
except controls.ControlError as error:
    assert "odour=SEEN" in str(error)
else:
    raise AssertionError("a control that says nothing of the gate was accepted")
source.write_text(head + " odour=caught\\n")
assert controls.read_header(source).executing["odour"] == "caught"

now = {part: "digest" for part in (*provenance.here(), "kernels abc")}
gates = {gate: {"verdict": "PASS", "run": 0} for gate in evidence.GATES[:4]}
run = {"environment": {}, "quick": [], "digests": dict(now)}
known = evidence.Evidence([run], {"abc": {"cubin_sha256": "aa", "family": "forward", "gates": gates}})
status = evidence.compare(known, {"abc": "aa"}, now)
assert status.state == "stale" and status.reasons == ("not run (odour; 1 of 1 kernels)",), status
assert contracts.states(known, {"abc": "aa"}, now)["C8"] == "not run (1 of 1)"
report = {"kernel": "abc", "cubin_sha256": "aa", "instructions": 1, "predicated_branches": 0, "indirect_branches": 0,
          "secret_findings": [], "unknown_opcodes": [], "verdict": "PASS"}
run = {"how": {"kernels": ["abc"]}, "sass": [report]}
result = {"subject": "abc", "verdict": "PASS", "figures": {}, "problems": [], "controls": []}
run |= {gate: [result] for gate in evidence.GATES[1:4]} | {"odour": []}
try:
    writer._entry({"name": "abc", "family": "forward", "cubin_sha256": "aa", "registers": 1, "spill_bytes": 0},
                  {}, [run], now, None, {})
except writer.Refused as error:
    assert "abc: 0 results of the gate odour" in str(error)
else:
    raise AssertionError("evidence without the gate was accepted")
assert Record("x", "run", "", None, None, {}).required[-1] == "odour"
peer = {gate: {"verdict": "NOT RUN", "figures": {}, "problems": [], "run": 0, "shapes": []}
        for gate in evidence.GATES}
assert "## Odour" in page.page({"runs": [], "peers": {"p": peer}})
print("a gate more")
"""


def test_one_line_more_is_a_gate_more(tmp_path: Path) -> None:
    """The list with one line added, before anything else reads it."""
    program = f"LINE = {LINE!r}\nFOLDER = __import__('pathlib').Path({str(tmp_path)!r})\n{PROGRAM}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "a gate more\n", done.stderr
