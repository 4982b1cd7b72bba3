"""The node lock: one process per directory, named when it is in the way, gone when its holder dies."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError

HOLDER = """
import sys
from sapo.core.dir_lock import NodeLock
with NodeLock(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def start_holder(folder: Path) -> subprocess.Popen[str]:
    """A process that holds the directory until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_holder_in_one_process_is_refused(tmp_path: Path) -> None:
    with (
        NodeLock(tmp_path / "n0"),
        pytest.raises(UserError, match=f"pid {os.getpid()}"),
        NodeLock(tmp_path / "n0"),
    ):
        pass


def test_a_directory_in_use_names_the_pid_and_is_free_after_a_kill(tmp_path: Path) -> None:
    with start_holder(tmp_path) as holder:
        with pytest.raises(UserError) as caught, NodeLock(tmp_path):
            pass
        assert str(tmp_path) in str(caught.value)
        assert f"pid {holder.pid}" in str(caught.value)
        assert "\n" not in str(caught.value)
        holder.kill()
        holder.wait()
        with NodeLock(tmp_path):
            pass


def test_a_released_directory_can_be_taken_again(tmp_path: Path) -> None:
    lock = NodeLock(tmp_path)
    for _ in range(2):
        with lock:
            pass
    with start_holder(tmp_path) as holder:
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.wait() == 0
    with lock:
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_child_process_does_not_inherit_the_lock(tmp_path: Path) -> None:
    with NodeLock(tmp_path):
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    with child, NodeLock(tmp_path):
        assert child.stdin is not None
        child.stdin.close()
