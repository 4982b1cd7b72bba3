"""Any sequence of operations, reopenings, crashes and interruptions leaves the journal equal to its model."""

import itertools
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from journal_model import (
    KINDS,
    NOW,
    Model,
    batch_of,
    make_checkpoint,
    make_result,
    make_row,
    own_groups,
    snapshot,
)
from makers import INCARNATION
from searches import searching

from sapo.core.types import Gossiped
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import Event, JournalError

ROWS = [make_row(90, position) for position in range(12)]
VERDICTS = st.sampled_from(['{"scores":[0.0,1.0]}', '{"reason":"timeout"}'])
PLACES = st.integers(0, len(ROWS) - 1)


class JournalMachine(RuleBasedStateMachine):
    """Runs every operation on a journal and on the model; both must refuse alike and show the same."""

    @initialize()
    def start(self) -> None:
        root = Path("/dev/shm")
        self.root = Path(tempfile.mkdtemp(dir=root if root.is_dir() else None))
        self.model = Model()
        self.journal = self.open()

    def open(self) -> Journal:
        return Journal(self.root / "journal.sqlite", clock=lambda: NOW, incarnation=INCARNATION)

    def both(self, operation: Callable[[Any], Any]) -> None:
        """The same result, or the same refusal, from both."""
        outcomes = []
        for side in (self.model, self.journal):
            try:
                outcomes.append(operation(side))
            except JournalError:
                outcomes.append(JournalError)
        assert outcomes[0] == outcomes[1]

    def following(self, wrong: bool, after: str, ahead: int) -> int:
        """The round whose turn it is, or, when `wrong`, one that may be out of turn."""
        at = self.model.stage()
        if at is None:
            return 0
        return at[0] + ahead if wrong else at[0] + (after == "result")

    @rule(
        count=st.integers(0, 3),
        publish=st.sets(st.integers(0, 3)),
        wrong=st.booleans(),
        ahead=st.integers(-1, 2),
    )
    def commit_groups(self, count: int, publish: set[int], wrong: bool, ahead: int) -> None:
        round = max(0, self.following(wrong, "result", ahead))
        groups = own_groups(round, count)
        chosen = [group.group_id for place, group in enumerate(own_groups(round, 4)) if place in publish]
        if not wrong:
            chosen = [group_id for group_id in chosen if group_id in {group.group_id for group in groups}]
        self.both(lambda side: side.commit_groups(round, groups, chosen))

    @rule(
        added=st.lists(PLACES, max_size=4, unique=True),
        removed=st.sets(PLACES, max_size=4),
        judged=st.dictionaries(PLACES, VERDICTS, max_size=3),
        drawn=st.sets(PLACES, max_size=2),
        rejected=st.dictionaries(PLACES, st.sampled_from(["uninformative", "unscorable"]), max_size=2),
        local=st.integers(0, 2),
        positions=st.dictionaries(st.sampled_from("pqr"), st.integers(0, 9)),
        owed=st.booleans(),
        wrong=st.booleans(),
        ahead=st.integers(-1, 1),
    )
    def commit_batch(
        self,
        added: list[int],
        removed: set[int],
        judged: dict[int, str],
        drawn: set[int],
        rejected: dict[int, Event],
        local: int,
        positions: dict[str, int],
        owed: bool,
        wrong: bool,
        ahead: int,
    ) -> None:
        round = max(0, self.following(wrong, "groups", ahead))
        new = [ROWS[place] for place in added]
        held = {row.group_id for row in self.model.pool}
        if not wrong:
            new = [row for row in new if row.group_id not in held]
        held |= {row.group_id for row in new}
        leaving = {ROWS[place].group_id for place in removed}
        verdicts = {ROWS[place].group_id: verdict for place, verdict in judged.items()}
        if not wrong:
            leaving &= held
            verdicts = {group_id: verdict for group_id, verdict in verdicts.items() if group_id in held}
        foreign = [ROWS[place].received.signed for place in sorted(drawn - rejected.keys())]
        batch = batch_of(round, [*own_groups(round, local), *foreign])
        self.both(
            lambda side: side.commit_batch(
                batch,
                positions=positions,
                pool_added=new,
                pool_removed=leaving,
                verdicts=verdicts,
                rejected={ROWS[place].group_id: event for place, event in rejected.items()},
                training_owed=owed,
            )
        )

    @rule(wrong=st.booleans(), ahead=st.integers(-1, 1), own=st.booleans())
    def replace_batch(self, wrong: bool, ahead: int, own: bool) -> None:
        """A batch without foreign groups, or without any."""
        round = max(0, self.following(wrong, "batch", ahead))
        batch = batch_of(round, own_groups(round, 2) if own else ())
        self.both(lambda side: side.replace_batch(batch))

    @rule(wrong=st.booleans(), ahead=st.integers(-1, 1), offered=st.none() | st.just("ab" * 32))
    def commit_result(self, wrong: bool, ahead: int, offered: str | None) -> None:
        gossip = Gossiped(alpha=0.5, beta=0.5, gamma=0.5, offered=offered)
        result = make_result(max(0, self.following(wrong, "batch", ahead)), gossip=gossip)
        self.both(lambda side: side.commit_result(result))

    @rule(count=st.integers(1, 3), place=PLACES, checkpoints=st.booleans())
    def whole_rounds(self, count: int, place: int, checkpoints: bool) -> None:
        """Finish the round in hand, then make `count` more as a node does: a draw from the pool each."""
        for _ in range(3 * count):
            round, stage = self.model.stage() or (-1, "result")
            held = {row.group_id for row in self.model.pool}
            row = ROWS[(place + round) % len(ROWS)]
            if stage == "result":
                groups = own_groups(round + 1, 2)
                self.commit_all("commit_groups", round + 1, groups, [groups[0].group_id])
            elif stage == "groups":
                self.commit_all(
                    "commit_batch",
                    batch_of(round, own_groups(round, 2)),
                    positions={"p": round},
                    pool_added=[] if row.group_id in held else [row],
                    pool_removed=sorted(held)[:1],
                    verdicts={row.group_id: "{}"},
                )
            else:
                self.commit_all("commit_result", make_result(round))
                if checkpoints:
                    self.commit_all("record_checkpoint", make_checkpoint(self.root, round + 1))

    def commit_all(self, name: str, *args: Any, **kwargs: Any) -> None:
        """An operation that neither side may refuse."""
        getattr(self.model, name)(*args, **kwargs)
        getattr(self.journal, name)(*args, **kwargs)

    @rule()
    def deliver_everything(self) -> None:
        for kind in KINDS:
            self.both(methodcaller("acknowledge", kind, self.model.last_seq))

    @rule(kind=st.sampled_from(KINDS), back=st.integers(0, 8))
    def acknowledge(self, kind: str, back: int) -> None:
        through = self.model.last_seq - back
        self.both(lambda side: side.acknowledge(kind, through))

    @rule(kind=st.sampled_from(KINDS), limit=st.integers(0, 3))
    def owed_oldest_first(self, kind: str, limit: int) -> None:
        expected = [owed for owed in self.model.outbox if owed.kind == kind]
        assert self.journal.owed(kind, limit) == expected[:limit]

    @rule(ahead=st.integers(-3, 1), owe_version=st.booleans())
    def record_checkpoint(self, ahead: int, owe_version: bool) -> None:
        at = self.model.stage()
        checkpoint = make_checkpoint(self.root, max(0, (at[0] if at else 0) + ahead))
        self.both(lambda side: side.record_checkpoint(checkpoint, owe_version=owe_version))

    @precondition(lambda self: self.model.checkpoints)
    @rule(which=st.integers(0, 5))
    def lose_a_checkpoint(self, which: int) -> None:
        lost = sorted(self.model.checkpoints)[which : which + 1]
        for round in lost:
            shutil.rmtree(self.model.checkpoints[round].path, ignore_errors=True)

    @rule()
    def prune(self) -> None:
        self.both(lambda side: side.prune())

    @rule(back=st.integers(-1, 4))
    def forget(self, back: int) -> None:
        at = self.model.stage()
        self.both(lambda side: side.forget((at[0] if at else 0) - back))

    @rule()
    def reopen(self) -> None:
        self.journal.close()
        self.journal = self.open()

    @rule(torn=st.booleans())
    def crash(self, torn: bool) -> None:
        """Go on from a copy of the files as a killed process leaves them, perhaps amid a transaction."""
        left = {}
        if torn:
            self.journal._connection.execute("BEGIN IMMEDIATE")
            self.journal._connection.execute("DELETE FROM outbox")
        for name in ("journal.sqlite", "journal.sqlite-wal"):
            left[name] = (self.root / name).read_bytes()
        if torn:
            self.journal._connection.execute("ROLLBACK")
        self.journal.close()
        (self.root / "journal.sqlite-shm").unlink(missing_ok=True)
        for name, content in left.items():
            (self.root / name).write_bytes(content)
        self.journal = self.open()

    @rule(after=st.integers(1, 400))
    def interrupted(self, after: int) -> None:
        """A transaction that SQLite gives up after so many instructions happens whole or not at all.

        Whole, too, where an error is raised: SQLite may be interrupted when the commit is already durable. A
        node that ends of it reads its journal again.
        """
        before = snapshot(self.journal)
        round, stage = self.model.stage() or (-1, "result")
        everyone = [row.group_id for row in self.model.pool]

        def operation(side: Any) -> None:
            if stage == "result":
                side.commit_groups(round + 1, own_groups(round + 1, 3), [])
            elif stage == "groups":
                changes = {"pool_added": [], "pool_removed": everyone, "verdicts": {}}
                side.commit_batch(batch_of(round), positions={"z": 1}, **changes)
            else:
                side.commit_result(make_result(round))

        asked = itertools.count()
        connection = self.journal._connection
        connection.set_progress_handler(lambda: int(next(asked) == 0), after)
        try:
            operation(self.journal)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
                raise
        finally:
            connection.set_progress_handler(None, 0)
        if snapshot(self.journal) != before:
            operation(self.model)

    @invariant()
    def the_same_as_the_model(self) -> None:
        shown = self.model.snapshot()
        shown["checkpoints"] = [entry for entry in shown["checkpoints"] if entry.path.is_dir()]
        assert snapshot(self.journal) == shown
        counts = {kind: len(owed) for kind, owed in shown["owed"].items() if owed}
        assert self.journal.owed_counts() == counts
        assert self.journal.pinned_checkpoints() == {Path(owed.ref) for owed in shown["owed"]["version"]}
        payloads = [len(g.payload) for groups in shown["groups"].values() for g in groups]
        assert 0 <= self.journal.owed_bytes() <= sum(payloads) + 4096 * sum(counts.values())

    def teardown(self) -> None:
        self.journal.close()
        shutil.rmtree(self.root)


JournalMachine.TestCase.settings = searching(30, soak=10_000, stateful_step_count=40)
test_any_history_leaves_the_journal_equal_to_its_model = JournalMachine.TestCase

GROUPS = methodcaller("commit_groups", ahead=0, count=0, publish=set(), wrong=False)
OWED_VERSION = methodcaller("record_checkpoint", ahead=0, owe_version=True)
PRUNED = methodcaller("prune")


@pytest.mark.parametrize(
    "history",
    [
        [
            methodcaller("whole_rounds", checkpoints=True, count=1, place=0),
            GROUPS,
            methodcaller("deliver_everything"),
            methodcaller("record_checkpoint", ahead=1, owe_version=False),
            PRUNED,
            methodcaller("whole_rounds", checkpoints=False, count=1, place=0),
        ],
        [OWED_VERSION, methodcaller("lose_a_checkpoint", which=0), GROUPS, PRUNED, OWED_VERSION],
    ],
    ids=["pruned before its first batch is chained", "a lost checkpoint is taken again"],
)
def test_a_history_that_once_differed_from_the_model(history: Sequence[Callable[[Any], None]]) -> None:
    machine = JournalMachine()
    machine.start()
    try:
        for step in history:
            step(machine)
            machine.the_same_as_the_model()
    finally:
        machine.teardown()
