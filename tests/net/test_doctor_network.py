"""The doctor on two emulated hosts: it finds the rate of the link, and says what a step takes there."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from ranks import python_of_forks

TIMEOUT_S = 110.0


@pytest.mark.net
@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("launcher", ["torchrun", "mpirun"])
@pytest.mark.usefixtures("emulated_hosts")
def test_the_doctor_finds_the_link_and_what_pays(tmp_path: Path, launcher: str) -> None:
    file = tmp_path / "doctor.json"
    doctor = ["doctor", "--params", "1m", "--compute", "0.05", "--methods", "onebitadam", "--json", str(file)]
    emulate = ["emulate", "--hosts", "2", "--rate", "50mbit", "--launcher", launcher, "--timeout", "100", "--"]
    onebit = [python_of_forks(), "-m", "onebit"]
    run = subprocess.run([*onebit, *emulate, *onebit, *doctor], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert run.returncode == 0, run.stderr + run.stdout
    found = json.loads(file.read_text())
    (link,) = found["links"]
    assert 0.8 < 8 * link["bytes_per_s"] / 50e6 < 1.05 and link["latency_s"] > 0 and found["slow"] is None
    assert [node["name"] for node in found["nodes"]] == ["ob0", "ob1"]
    dense = "DDP float32" if launcher == "torchrun" else "dense float32"
    predicted = found["predicted"]
    assert set(predicted) == {dense, "OnebitAdam", "OnebitAdam, warm-up"}
    wire_s = 4 * found["params"] / link["bytes_per_s"]  # two ranks send and receive as much as they hold
    assert 0.8 * wire_s < predicted[dense]["hidden"] < 1.5 * wire_s + 0.3
    assert found["verdict"]["pays"] and predicted["OnebitAdam"]["hidden"] < predicted[dense]["hidden"]
    assert "Verdict: OnebitAdam pays" in run.stdout and "ob0" in run.stdout
