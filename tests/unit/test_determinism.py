"""The same bits in every process that trains or repeats, whatever its caller's environment says."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sapo.core.determinism import FIXED, arithmetic, differences, fix

STEPS = """
import sys, threading
sys.path[:0] = sys.argv[1:3]
threads, busy = int(sys.argv[3]), sys.argv[4] == "busy"
import sapo
import json, torch
from learn_support import batch, group
from transformers import Qwen2Config, Qwen2ForCausalLM
from sapo.core.config.load import LearnConfig
from sapo.core.determinism import arithmetic
from sapo.learn.update import Learner
from sapo.policy.models import weights_sha256

torch.set_num_threads(threads)
over = threading.Event()

def burn():
    a = torch.full((300, 300), 0.5)
    while not over.is_set():
        a = a @ a / 300

if busy:
    for _ in range(2):
        threading.Thread(target=burn, daemon=True).start()
torch.manual_seed(0)
sizes = dict(vocab_size=512, hidden_size=128, intermediate_size=512, num_hidden_layers=2)
model = Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2))
learner = Learner(model, LearnConfig(lr=1e-3), temperature=1.0)
groups = [
    group(
        range(20 + g), [[(7 * k + 3 * t + g) % 500 + 5 for t in range(9 + k)] for k in range(6)],
        [float(k % 2) for k in range(6)], position=g,
    )
    for g in range(4)
]
for _ in range(3):
    assert learner.step(batch(*groups)).skipped is None
over.set()
print(json.dumps({"digest": weights_sha256(model), "threads": torch.get_num_threads(), **arithmetic()}))
"""
OTHER = {
    "MKL_CBWR": "COMPATIBLE",
    "MKL_DYNAMIC": "TRUE",
    "OMP_DYNAMIC": "TRUE",
    "OMP_THREAD_LIMIT": "1",
    "OMP_SCHEDULE": "dynamic,1",
}


def start(threads: int, busy: bool, **variables: str) -> "subprocess.Popen[str]":
    here = Path(__file__).parent
    words = [str(here), str(here.parent), str(threads), "busy" if busy else "calm"]
    env = {**{name: value for name, value in os.environ.items() if name not in FIXED}, **variables}
    return subprocess.Popen([sys.executable, "-c", STEPS, *words], env=env, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    """What four processes at once make of the same steps, two of them busy and in another environment."""
    children = {
        "one": start(1, False),
        "one, otherwise": start(1, True, **OTHER, OMP_NUM_THREADS="2", MKL_NUM_THREADS="2"),
        "two": start(2, False),
        "two, otherwise": start(2, True, **OTHER, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"),
    }
    return {name: json.loads(child.communicate(timeout=200)[0]) for name, child in children.items()}


def test_a_fresh_process_under_load_and_other_settings_ends_with_the_same_bits(found):
    assert found["one"] == found["one, otherwise"]
    assert found["two"] == found["two, otherwise"]


def test_what_the_bits_depend_on_is_what_is_in_effect(found):
    assert [result["threads"] for result in found.values()] == [1, 1, 2, 2]
    assert {result["mkl"] for result in found.values()} <= {"AUTO", "absent"}
    assert {key: found["one"][key] for key in arithmetic()} == arithmetic()


def test_settings_of_the_caller_that_would_change_the_bits_are_replaced() -> None:
    environment = {**OTHER, "PATH": "/bin"}
    fix(environment)
    assert environment == {**FIXED, "OMP_SCHEDULE": "dynamic,1", "PATH": "/bin"}


def test_what_is_other_than_where_a_round_was_recorded_is_named() -> None:
    recorded: dict[str, str | int] = {**arithmetic(), "config": "ab"}
    assert differences(recorded) == ""
    assert differences(None) == ""
    elsewhere = differences({"torch": "1.0", "cpu": arithmetic()["cpu"], "mkl": "OFF"})
    assert elsewhere.startswith("mkl was OFF, is ")
    assert "torch was 1.0, is " in elsewhere
    assert "cpu" not in elsewhere
