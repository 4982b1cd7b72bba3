"""Starts a node under the first name of this site that no other container has.

All containers of the service `node` share one home on one volume. A name is held by a lock on a file there,
which the kernel lets go when its container ends, however it does; the next one goes on with that node.
"""

import fcntl
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

NAME_FILE = Path(tempfile.gettempdir()) / "sapo-node"
"""Says inside the container which node it runs; read by health.py."""


def claim(home: Path, names: list[str]) -> str | None:
    """The first free name, held until this process ends or what it becomes does; None where all are held."""
    places = home.parent / "names"
    places.mkdir(exist_ok=True)
    for name in names:
        descriptor = os.open(places / name, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            continue
        os.set_inheritable(descriptor, True)
        return name
    return None


def names_of(environment: Mapping[str, str]) -> list[str]:
    """The names of this site's nodes."""
    return [f"{environment['SITE']}{number}" for number in range(int(environment["NODES"]))]


def main() -> NoReturn:
    """Become `sapo node NAME`."""
    names = names_of(os.environ)
    name = claim(Path(os.environ["SAPO_HOME"]), names)
    if name is None:
        sys.exit(f"error: {', '.join(names)} run already; for more of them, raise NODES in docker/.env")
    NAME_FILE.write_text(name, encoding="utf-8")
    os.execvp("sapo", ["sapo", "node", name, "--nodes", os.environ["NODES"]])


if __name__ == "__main__":
    main()
