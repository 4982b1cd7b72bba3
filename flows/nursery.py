"""Loads what nodes, archive and evaluation need, once, and forks them (`sapo.nursery`)."""

import argparse
import socket

import mlflow.transformers  # noqa: F401  needed by every node when it registers a version

from flows import archive, evaluate, node
from sapo.nursery import serve


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
