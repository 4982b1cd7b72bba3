"""Every step of `make gpu` on a processor, in small: the same code but for the device's name."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu.steps import STEPS

pytestmark = [pytest.mark.soak, pytest.mark.vllm, pytest.mark.kafka, pytest.mark.services]


@pytest.mark.timeout(3600)
def test_every_step_but_those_for_a_gpu_alone_is_rehearsed(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--shape", "tiny", "--minutes", "55"]
    done = subprocess.run([*words, "--out", str(tmp_path)], capture_output=True, text=True)
    found = json.loads((tmp_path / "results.json").read_text())
    ended = {name: (one["status"], one["reason"]) for name, one in found.items()}
    wanted = {step.name for step in STEPS if not step.gpu_only}
    assert {name for name, (status, _) in ended.items() if status == "done"} == wanted, ended
    assert done.returncode == 0, done.stdout
    for step in STEPS:
        assert all(f"not rehearsed: {step.name}: {what}" in done.stdout for what in step.unrehearsed)
    assert (
        found["replay"]["facts"]["n0: rounds repeated"]
        == found["replay"]["facts"]["n0: rounds repeated bit for bit"]
    )
