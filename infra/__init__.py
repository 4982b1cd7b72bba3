"""What runs around the swarm: brokers, stores, servers. It runs from the checkout and is not installed."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def importable() -> dict[str, str]:
    """The environment variable with which a child process imports `infra`, whatever its folder."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *([before] if before else [])])}
