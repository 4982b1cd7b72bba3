"""Whether this container's part of the swarm is well; exits with 1 and says why when it is not.

A node is well when it finished something within the last minutes. The archive, which is idle when nobody
publishes, is well when it can reach bus and store. Of anything else that runs in the image nothing is known.
"""

import os
import socket
import sys
import time
from pathlib import Path
from urllib.parse import urlparse

from node import NAME_FILE

LIMIT_S = 600.0
"""A round, or a held-out probe, may take this long."""
PORTS = {"http": 80, "https": 443}
"""Of addresses that name none."""


def node(home: Path, name: str) -> str | None:
    """What is wrong with a node, if anything."""
    written = [path.stat().st_mtime for path in (home / name).glob("journal.sqlite*")]
    if not written:
        return f"{name} has no journal yet"
    age = time.time() - max(written)
    return f"{name} has written nothing for {age:.0f} s" if age > LIMIT_S else None


def reachable(address: str) -> str | None:
    """What is wrong with the server at a URL, or at `host:port`, if anything."""
    found = urlparse(address if "://" in address else f"//{address}")
    try:
        place = (found.hostname or "", found.port or PORTS[found.scheme])
        socket.create_connection(place, timeout=3.0).close()
    except OSError as error:
        return f"{address} cannot be reached: {error}"
    except (KeyError, ValueError):
        return f"{address} names no port"
    return None


def main() -> None:
    """Look once."""
    if sys.argv[1:] == ["archive"]:
        servers = os.environ["SAPO_BUS__SERVERS"].split(",")
        wrong = [reachable(server) for server in (servers[0], os.environ["AWS_ENDPOINT_URL"])]
    elif sys.argv[1:] == ["node"] or NAME_FILE.exists():
        wrong = [node(Path(os.environ["SAPO_HOME"]), NAME_FILE.read_text(encoding="utf-8"))]
    else:
        wrong = []
    problems = [problem for problem in wrong if problem is not None]
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
