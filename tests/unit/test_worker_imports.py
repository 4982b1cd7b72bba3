"""What a task worker loads with ReasoningGYM."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOADED = """
import sys
import sapo.tasks.gym, sapo.tasks.worker_main

print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def test_a_worker_loads_no_model_library() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = set(done.stdout.split())
    assert "reasoning_gym" in loaded
    assert not loaded & {"torch", "transformers"}
