"""A journal killed at every boundary, or torn at any byte, is one of the states between its transactions."""

import os
import random
import signal
import sqlite3
from collections.abc import Callable, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from journal_model import NOW, Model, batch_of, make_checkpoint, make_result, make_row, own_groups, snapshot
from makers import INCARNATION

from sapo.store.journal.journal import Journal

Step = Callable[[Any], object]
"""One operation, on a `Journal` or on the `Model`."""

ENVIRONMENT: dict[str, str | int] = {"torch": "2", "threads": 1}
EVERY = 5
"""Of the statements, before every so-manyth of which it is killed in a short run."""


def script(node: Path) -> list[Step]:
    """Three rounds of single transactions; no crash touches the checkpoints in the node's folder."""
    rows = [make_row(90, position) for position in range(6)]
    steps: list[Step] = []
    for round in range(3):
        groups = own_groups(round, 3)
        published = [group.group_id for group in groups[:2]]
        added, leaving = rows[2 * round : 2 * round + 2], rows[max(0, 2 * round - 1)]
        drawn = {
            "positions": {"p": 10 * round, "q": round},
            "pool_added": added,
            "pool_removed": [leaving.group_id],
            "verdicts": {leaving.group_id: f'{{"round":{round}}}', added[-1].group_id: "{}"},
            "rejected": {leaving.group_id: "uninformative"} if round == 1 else {},
        }
        steps += [
            methodcaller("commit_groups", round=round, groups=groups, publish=published),
            methodcaller("commit_batch", batch=batch_of(round, groups), **drawn),
            methodcaller("acknowledge", kind="publish", through_seq=2 + 4 * round),
            methodcaller("commit_result", result=make_result(round)),
            methodcaller(
                "record_checkpoint", checkpoint=make_checkpoint(node, round + 1), owe_version=round > 0
            ),
            methodcaller("acknowledge", kind="training", through_seq=6 * round),
            methodcaller("acknowledge", kind="track", through_seq=6 * round),
            methodcaller("acknowledge", kind="version", through_seq=9),
            methodcaller("prune"),
        ]
    return steps


def open_journal(folder: Path) -> Journal:
    journal = Journal(folder / "journal.sqlite", clock=lambda: NOW, incarnation=INCARNATION)
    journal.set_environment(ENVIRONMENT)
    return journal


def without_journal(folder: Path) -> None:
    for file in folder.glob("journal.sqlite*"):
        file.unlink()


def states(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """What the plain model shows before the first step and after each of them."""
    model = Model()
    shown = [model.snapshot()]
    for step in steps:
        step(model)
        shown.append(model.snapshot())
    return shown


class Killer:
    """Kills its own process just before the `n`-th SQL statement of all connections made after `install`."""

    def __init__(self, n: int) -> None:
        self.left = n

    def _count(self, statement: str) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def install(self) -> None:
        """Watch every connection from now on; only ever called in a child process."""
        connect = sqlite3.connect

        def watched(*args: Any, **kwargs: Any) -> sqlite3.Connection:
            connection = connect(*args, **kwargs)
            connection.set_trace_callback(self._count)
            return connection

        sqlite3.connect = watched  # type: ignore[assignment]


def run_in_child(folder: Path, steps: Sequence[Step], kill_at: int) -> tuple[bool, int]:
    """Run the steps in a forked process killed at a statement; whether it was, and how many steps it made."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            Killer(kill_at).install()
            journal = open_journal(folder)
            for step in steps:
                step(journal)
                os.write(writer, b".")
            journal.close()
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        done = len(pipe.read())
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status), done


def test_killed_before_a_statement_it_reopens_between_two_steps_and_goes_on(memory: Path) -> None:
    kill_before(memory, every=EVERY)


@pytest.mark.soak
def test_killed_before_any_statement_it_reopens_between_two_steps_and_goes_on(memory: Path) -> None:
    kill_before(memory, every=1)


def kill_before(folder: Path, *, every: int) -> None:
    """Kill a journal before every so-manyth of its statements, and have it go on each time."""
    home = folder / "n0"
    steps = script(home)
    expected = states(steps)
    kill_at, killed = 0, True
    while killed:
        killed, done = run_in_child(home, steps, kill_at)
        with open_journal(home) as journal:
            assert snapshot(journal) == expected[done], f"killed before statement {kill_at}"
            for step in steps[done:]:
                step(journal)
            assert snapshot(journal) == expected[-1]
            assert journal._connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        without_journal(home)
        kill_at += every
    assert done == len(steps)
    assert kill_at > 4 * len(steps)


def test_a_log_torn_at_any_byte_gives_a_state_between_two_transactions(memory: Path) -> None:
    steps = script(memory)
    expected = states(steps)
    with open_journal(memory) as journal:
        for step in steps:
            step(journal)
        path, beside = memory / "journal.sqlite", memory / "journal.sqlite-wal"
        file, log = path.read_bytes(), beside.read_bytes()
    header, frame = 32, 4096 + 24
    rng = random.Random(0)
    cuts = [*range(header, len(log) + 1, frame), *(rng.randrange(len(log)) for _ in range(40))]
    reached = []
    for cut in sorted(cuts):
        without_journal(memory)
        path.write_bytes(file)
        beside.write_bytes(log[:cut])
        with Journal(path) as reopened:
            reached.append(expected.index(snapshot(reopened)))
    assert reached == sorted(reached)
    assert reached[-1] == len(steps)
    assert len(set(reached)) > 0.8 * len(steps)


@pytest.mark.parametrize("suffix", ["", "-wal", "-shm", "-journal"])
def test_a_half_made_journal_of_a_crash_is_removed(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f".journal.sqlite.4711.tmp{suffix}").write_bytes(b"half")
    with open_journal(tmp_path) as journal:
        assert journal.stage() is None
    assert [path.name for path in tmp_path.iterdir()] == ["journal.sqlite"]
