"""Weights in memory that two processes see."""

import os
import subprocess
import sys

import pytest
import torch

from sapo.policy.engines.shared_weights import SharedWeights
from sapo.policy.engines.vllm import one_gpu

READER = """
import sys, torch
from sapo.policy.engines.shared_weights import SharedWeights, Slot
slots = [Slot("a", torch.float32, (2, 3), 0), Slot("b", torch.bfloat16, (3,), 64)]
found = SharedWeights(int(sys.argv[1]), slots).tensors
print(found["a"].tolist(), found["b"].tolist())
"""


def test_another_process_sees_what_is_written_and_the_memory_ends_with_its_holders() -> None:
    values = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.tensor([1, 2, 3], dtype=torch.bfloat16))]
    shared = SharedWeights.like((name, torch.zeros_like(value)) for name, value in values)
    assert [slot.start % 64 for slot in shared.slots] == [0, 0]
    shared.write(values)
    command = [sys.executable, "-c", READER, str(shared.descriptor)]
    seen = subprocess.run(command, pass_fds=[shared.descriptor], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] [1.0, 2.0, 3.0]"
    descriptor = shared.descriptor
    shared.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize(
    ("device", "visible", "seen"),
    [
        ("cpu", "", None),
        ("cuda", "", "0"),
        ("cuda:1", "", "1"),
        ("cuda:1", "4,7", "7"),
        ("cuda:0", "GPU-a", "GPU-a"),
    ],
)
def test_vllm_sees_the_policys_gpu_alone(device: str, visible: str, seen: str | None) -> None:
    found = one_gpu(torch.device(device), {"CUDA_VISIBLE_DEVICES": visible} if visible else {})
    assert found.get("CUDA_VISIBLE_DEVICES") == seen
