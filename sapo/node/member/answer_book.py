"""What a member has been answered, and what that has cost: one SQLite file beside its journal.

An answer is written down the moment it comes, so a member that is killed asks for none of them again. A
request that may cost something is written down before it is sent. One that was under way when the member was
killed may have been paid for, so its question is given up, not asked once more.
"""

import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sapo.core.errors import Paused
from sapo.core.types import FinishReason, Question

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    round INTEGER NOT NULL, place INTEGER NOT NULL, k INTEGER NOT NULL, text TEXT NOT NULL,
    finish_reason TEXT NOT NULL, author TEXT NOT NULL, at REAL NOT NULL, PRIMARY KEY (round, place, k));
CREATE TABLE IF NOT EXISTS sent (
    id INTEGER PRIMARY KEY AUTOINCREMENT, round INTEGER NOT NULL, place INTEGER NOT NULL,
    tokens INTEGER NOT NULL, cost REAL NOT NULL);
CREATE TABLE IF NOT EXISTS questions (
    round INTEGER NOT NULL, place INTEGER NOT NULL, recipe TEXT NOT NULL, PRIMARY KEY (round, place));
CREATE TABLE IF NOT EXISTS given_up (
    round INTEGER NOT NULL, place INTEGER NOT NULL, why TEXT NOT NULL, PRIMARY KEY (round, place));
CREATE TABLE IF NOT EXISTS totals (name TEXT PRIMARY KEY, amount REAL NOT NULL);
"""
TOTALS = ("answers", "tokens", "cost", "requests", "retries", "garbage", "lost")
"""What is counted over a member's whole life: answers kept, tokens and money spent, requests sent, those sent
again, replies that were of no use, and requests that were under way when the member was killed."""


@dataclass(frozen=True, slots=True)
class Ask:
    """A question that needs answers: its place in the round, and how many make a group."""

    place: int
    question: Question
    wanted: int


@dataclass(frozen=True, slots=True)
class Answer:
    """One text as it came. `author` tells persons apart; it stays in the book."""

    text: str
    finish_reason: FinishReason = "stop"
    author: str = ""


class AnswerBook:
    """The answers of the round in hand, and totals of all rounds. Safe to share between threads.

    `max_tokens` and `max_cost` bound what a member may spend in its life; None is no bound. Raises
    `sqlite3.DatabaseError` for a file that is damaged.
    """

    def __init__(
        self,
        path: Path,
        max_tokens: int | None = None,
        max_cost: float | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._max_tokens, self._max_cost, self._clock, self._round = max_tokens, max_cost, clock, -1
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.executescript(_SCHEMA)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        with self._lock:
            self._db.close()

    def begin(self, round: int, recipes: Sequence[str] = ()) -> int:
        """Take up a round; forget all others. Returns how many requests a kill has left unanswered.

        Their questions are given up, and what they may have cost counts as spent. `recipes` name the round's
        questions by place: answers to another question, asked under other settings, are forgotten.
        """
        with self._transaction():
            self._round = round
            self._forget_others(recipes)
            lost = self._db.execute("SELECT round, place, tokens, cost FROM sent").fetchall()
            for of_round, place, tokens, cost in lost:
                self._add({"tokens": tokens, "cost": cost, "lost": 1})
                if of_round == round:
                    self._give_up(place, "a request was under way when the member was killed")
            self._db.execute("DELETE FROM sent")
            for table in ("answers", "given_up", "questions"):
                self._db.execute(f"DELETE FROM {table} WHERE round <> ?", (round,))
        return len(lost)

    # -- asking --------------------------------------------------------------------------------------------

    def missing(self, ask: Ask) -> int:
        """How many answers a question still needs; 0 if it was given up."""
        with self._lock:
            if self._given_up(ask.place):
                return 0
            return max(0, ask.wanted - self._count(ask.place))

    def send(self, place: int, *, tokens: int = 0, cost: float = 0.0) -> int:
        """Note a request before it is sent; `tokens` and `cost` are the most it may take. Returns its ticket.

        Raises `Paused` where that could exceed the budget.
        """
        with self._transaction():
            under_way = self._db.execute(
                "SELECT coalesce(sum(tokens), 0), coalesce(sum(cost), 0) FROM sent"
            ).fetchone()
            spent = self.totals()
            for name, bound, more, waiting in (
                ("tokens", self._max_tokens, tokens, under_way[0]),
                ("cost", self._max_cost, cost, under_way[1]),
            ):
                if bound is not None and spent[name] + waiting + more > bound:
                    raise Paused(
                        f"member.max_{name} = {_amount(bound)}: {_amount(spent[name])} are spent, and the "
                        f"next question may take {_amount(more)} more; raise it to go on"
                    )
            self._add({"requests": 1})
            values = (self._round, place, tokens, cost)
            sql = "INSERT INTO sent (round, place, tokens, cost) VALUES (?, ?, ?, ?)"
            return int(self._db.execute(sql, values).lastrowid or 0)

    def settle(
        self, ticket: int, answers: Sequence[Answer], *, wanted: int, tokens: int = 0, cost: float = 0.0
    ) -> int:
        """Keep what a request brought, and what it took, in one piece; returns how many answers were kept. No
        question gets more than `wanted`."""
        with self._transaction():
            row = self._db.execute("SELECT place FROM sent WHERE id = ?", (ticket,)).fetchone()
            self._db.execute("DELETE FROM sent WHERE id = ?", (ticket,))
            self._add({"tokens": tokens, "cost": cost})
            return self._keep(row[0], answers, wanted)

    def withdraw(self, ticket: int, *, charged: bool) -> None:
        """Note that a request brought nothing and may be sent again; `charged` counts the most it may have
        cost as spent."""
        with self._transaction():
            tokens, cost = self._db.execute(
                "SELECT tokens, cost FROM sent WHERE id = ?", (ticket,)
            ).fetchone()
            self._db.execute("DELETE FROM sent WHERE id = ?", (ticket,))
            spent: dict[str, float] = {"tokens": tokens, "cost": cost} if charged else {}
            self._add({**spent, "retries": 1})

    def keep(self, place: int, answers: Sequence[Answer], *, wanted: int) -> int:
        """Keep answers that cost nothing, up to `wanted` of a question; returns how many were kept."""
        with self._transaction():
            return 0 if self._given_up(place) else self._keep(place, answers, wanted)

    def note_garbage(self, many: int = 1) -> None:
        """Count replies that were of no use."""
        with self._transaction():
            self._add({"garbage": many})

    def give_up(self, place: int, why: str) -> None:
        """Ask a question no more; it makes no group."""
        with self._transaction():
            self._give_up(place, why)

    # -- reading -------------------------------------------------------------------------------------------

    def answers(self, place: int) -> list[Answer]:
        """The answers to a question of the round in hand, as they came."""
        sql = "SELECT text, finish_reason, author FROM answers WHERE round = ? AND place = ? ORDER BY k"
        with self._lock:
            return [Answer(*row) for row in self._db.execute(sql, (self._round, place))]

    def given_up(self) -> dict[int, str]:
        """Why questions of the round in hand make no group, by place."""
        sql = "SELECT place, why FROM given_up WHERE round = ? ORDER BY place"
        with self._lock:
            return dict(self._db.execute(sql, (self._round,)).fetchall())

    def totals(self) -> dict[str, float]:
        """What was counted over the member's whole life, by the names of `TOTALS`."""
        with self._lock:
            found: dict[str, float] = dict(self._db.execute("SELECT name, amount FROM totals").fetchall())
        return {name: found.get(name, 0.0) for name in TOTALS}

    # -- inside --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._lock, self._db:  # commits, or rolls back
            self._db.execute("BEGIN IMMEDIATE")
            yield

    def _forget_others(self, recipes: Sequence[str]) -> None:
        """Forget answers of this round whose question is another now."""
        sql = "SELECT place, recipe FROM questions WHERE round = ?"
        known = dict(self._db.execute(sql, (self._round,)).fetchall())
        for place, recipe in enumerate(recipes):
            if known.get(place, recipe) != recipe:
                for table in ("answers", "given_up"):
                    self._db.execute(
                        f"DELETE FROM {table} WHERE round = ? AND place = ?", (self._round, place)
                    )
            sql = "INSERT OR REPLACE INTO questions VALUES (?, ?, ?)"
            self._db.execute(sql, (self._round, place, recipe))

    def _keep(self, place: int, answers: Sequence[Answer], wanted: int) -> int:
        have = self._count(place)
        kept = answers[: max(0, wanted - have)]
        rows = [
            (self._round, place, have + number, one.text, one.finish_reason, one.author, self._clock())
            for number, one in enumerate(kept)
        ]
        self._db.executemany("INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        self._add({"answers": len(kept)})
        return len(kept)

    def _count(self, place: int) -> int:
        sql = "SELECT count(*) FROM answers WHERE round = ? AND place = ?"
        return int(self._db.execute(sql, (self._round, place)).fetchone()[0])

    def _given_up(self, place: int) -> bool:
        sql = "SELECT 1 FROM given_up WHERE round = ? AND place = ?"
        return self._db.execute(sql, (self._round, place)).fetchone() is not None

    def _give_up(self, place: int, why: str) -> None:
        sql = "INSERT OR IGNORE INTO given_up VALUES (?, ?, ?)"
        self._db.execute(sql, (self._round, place, why))

    def _add(self, amounts: Mapping[str, float]) -> None:
        sql = (
            "INSERT INTO totals VALUES (?, ?) "
            "ON CONFLICT (name) DO UPDATE SET amount = amount + excluded.amount"
        )
        self._db.executemany(sql, [(name, amount) for name, amount in amounts.items() if amount])


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) else f"{value:.6g}"
