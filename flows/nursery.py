"""Loads what nodes, archive and evaluation need, once, and forks them (`sapo.ops.fork_server`)."""

import argparse
import contextlib
import socket

# before all else that imports transformers: who does so first decides what comes along
import sapo.policy.hf_import  # noqa: F401

# isort: split
# every node needs these when it registers its first version: 230 modules more held its rounds up for seconds
import mlflow.pyfunc.model
import mlflow.transformers  # noqa: F401
import transformers.models.auto.feature_extraction_auto
import transformers.models.auto.image_processing_auto  # noqa: F401

from flows import archive, evaluate, node
from sapo.ops.fork_server import serve

with contextlib.suppress(ImportError):  # optional; where it is installed, MLflow and transformers load it
    import peft  # noqa: F401


def main() -> None:
    """The process of the nursery."""
    parser = argparse.ArgumentParser(prog="python -m flows.nursery")
    parser.add_argument("--socket", type=int, required=True, help="descriptor of the line to the crew")
    parser.add_argument("--lifeline", type=int, required=True, help="descriptor that closes with the crew")
    given, _ = parser.parse_known_args()
    mains = {"flows.node": node.main, "flows.archive": archive.main, "flows.evaluate": evaluate.main}
    serve(socket.socket(fileno=given.socket), given.lifeline, mains)


if __name__ == "__main__":
    main()
