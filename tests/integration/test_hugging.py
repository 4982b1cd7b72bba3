"""What a node's process loads: nothing that is only there, and makes each of many processes larger."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COURSE = """
import sys
from pathlib import Path
from swarms import make_home, open_node, small_config

config = small_config(["swarm.nodes=1", "batch.external=0", "swarm.rounds=2"])
with open_node(config, make_home(Path(sys.argv[1]) / "home", config)) as node:
    while not node.finished:
        node.run_round()
    assert node.parts.deliverer.drain(60)
print("loaded", *sorted({name.split(".")[0] for name in sys.modules}))
"""
"""Two rounds of a node in silo, and all that they owe delivered."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Top-level modules that a node's process holds after its rounds."""
    folder = tmp_path_factory.mktemp("silo")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "SAPO_KEYS": str(folder / "keys"),
    }
    done = subprocess.run(
        [sys.executable, "-c", COURSE, str(folder)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_a_nodes_process_holds_what_its_rounds_need(loaded: set[str]) -> None:
    assert {"torch", "transformers", "deltalake", "pyarrow"} <= loaded
