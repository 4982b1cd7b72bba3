"""Throwaway processes with walls, on machines that refuse some of them: a filter makes chosen calls fail."""

import functools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
NOBODY = 65_534
LIMIT_S = 200.0

BEGIN = """
import json, os, sys
from sapo.tasks.sandbox import escape_attempts as deeds, syscalls as kernel
from sapo.tasks.sandbox import layers as linux, readable_paths as places, self_test as probe, seccomp
places.libraries()  # loads what another user could not, should Python lie in a closed home
answer = os.dup(1)
refused, user = json.loads(sys.argv[1])
if user is not None:
    os.setgroups([]); os.setresgid(user, user, user); os.setresuid(user, user, user)
if refused:
    kernel.no_new_privileges()
    rules = {name: seccomp.REFUSE for name in refused}
    seccomp.Filter(rules, seccomp.ALLOW).install()
def say(found):
    os.write(answer, json.dumps(found).encode())
"""


def run(code: str, *, refused: Sequence[str] = (), user: int | None = None) -> Any:
    """What the code gives to `say`, in a fresh process in which the system calls `refused` fail.

    `user` is the id of the user to run it as; None for this one.
    """
    command = [sys.executable, "-P", "-c", BEGIN + code, json.dumps([list(refused), user])]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, timeout=LIMIT_S, env=environment, check=False)
    assert ended.stdout, ended.stderr.decode()
    return json.loads(ended.stdout)


def standing(found: dict[str, Any]) -> list[str]:
    """Names of the walls that stand, as a probe found them."""
    return [wall["name"] for wall in found["walls"] if wall["stands"]]


@functools.cache
def here(user: int | None = None) -> tuple[str, ...]:
    """Names of the walls that this machine has: a container or a hardened kernel may refuse some."""
    return tuple(standing(run("probe.main()", user=user)))


def needs(wall: str) -> None:
    """Skip the test that asks, where this machine refuses a wall."""
    if wall not in here():
        pytest.skip(f"this machine has no such wall: {wall}")


def in_child(code: str, before: str = "") -> str:
    """Code that runs `code` in a walled child of a walled worker, and `before` just before its walls."""
    inside = f"{before.strip()}\nwalls.around_text()\n{code.strip()}\nos._exit(0)"
    indented = "\n".join(f"    {line}" for line in inside.strip().splitlines())
    return f"""
from sapo.tasks import sandbox as walls
walls.around_worker()
child = os.fork()
if child == 0:
{indented}
status = os.waitpid(child, 0)[1]
"""
