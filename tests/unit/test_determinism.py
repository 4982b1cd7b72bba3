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
busy = sys.argv[3] == "busy"
import sapo
import json, torch
from learn_support import batch, group
from transformers import Qwen2Config, Qwen2ForCausalLM
from sapo.core.config.load import LearnConfig
from sapo.core.determinism import arithmetic
from sapo.learn.update import Learner
from sapo.policy.models import weights_sha256

over = threading.Event()

def burn():
    a = torch.full((300, 300), 0.5)
    while not over.is_set():
        a = a @ a / 300

if busy:
    for _ in range(2):
        threading.Thread(target=burn, daemon=True).start()
def trained(threads):
    torch.set_num_threads(threads)
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
    return {"digest": weights_sha256(model), "threads": torch.get_num_threads(), **arithmetic()}

order = (2, 1) if busy else (1, 2)
found = {threads: trained(threads) for threads in order}
over.set()
print(json.dumps([found[1], found[2]]))
"""
OTHER = {
    "MKL_CBWR": "COMPATIBLE",
    "MKL_DYNAMIC": "TRUE",
    "OMP_DYNAMIC": "TRUE",
    "OMP_THREAD_LIMIT": "1",
    "OMP_SCHEDULE": "dynamic,1",
}


def start(busy: bool, **variables: str) -> "subprocess.Popen[str]":
    here = Path(__file__).parent
    words = [str(here), str(here.parent), "busy" if busy else "calm"]
    env = {**{name: value for name, value in os.environ.items() if name not in FIXED}, **variables}
    return subprocess.Popen([sys.executable, "-c", STEPS, *words], env=env, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def found() -> dict[str, list[dict[str, Any]]]:
    """What two processes make of the same steps, by one thread and by two.

    One of them is busy, is in another environment, and begins with the two threads.
    """
    children = {"calm": start(False), "busy": start(True, **OTHER, OMP_NUM_THREADS="2", MKL_NUM_THREADS="1")}
    return {name: json.loads(child.communicate(timeout=200)[0]) for name, child in children.items()}


def test_a_fresh_process_under_load_and_other_settings_ends_with_the_same_bits(
    found: dict[str, list[dict[str, Any]]],
) -> None:
    assert found["calm"] == found["busy"]


def test_what_the_bits_depend_on_is_what_is_in_effect(found: dict[str, list[dict[str, Any]]]) -> None:
    results = [result for one in found.values() for result in one]
    assert [result["threads"] for result in results] == [1, 2, 1, 2]
    assert {result["mkl"] for result in results} <= {"AUTO", "absent"}
    assert {key: results[0][key] for key in arithmetic()} == arithmetic()


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
