"""What the judge found, kept in the home: one verdict per node and round, however often it is asked again.

The cumulative reward is summed from the table; verdicts that are not `told` yet are logged to MLflow.
"""

import contextlib
import sqlite3
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from sapo.core.errors import UserError

_BUSY_S = 30.0
_SCHEMA = """
CREATE TABLE IF NOT EXISTS verdicts (
    judging INTEGER NOT NULL, node TEXT NOT NULL, incarnation TEXT NOT NULL, round INTEGER NOT NULL,
    dataset TEXT NOT NULL, question TEXT NOT NULL, answer TEXT NOT NULL, score REAL, at REAL NOT NULL,
    told INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (node, incarnation, round))
"""
_COLUMNS = "judging, node, incarnation, round, dataset, question, answer, score, at"
_STANDINGS = f"""
SELECT {_COLUMNS}, count(*) OVER past, total(score) OVER past, told FROM verdicts
WHERE (node, incarnation) = (?, ?) WINDOW past AS (ORDER BY round) ORDER BY round
"""
_CURVES = """
WITH newest AS (SELECT node, incarnation, max(judging) FROM verdicts GROUP BY node)
SELECT node, count(*) OVER past, total(score) OVER past FROM verdicts JOIN newest USING (node, incarnation)
WINDOW past AS (PARTITION BY node ORDER BY round) ORDER BY node, round
"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """One answer of a node: `round` counts the rounds its policy has seen, `judging` the judge's questions.
    `score` is the verifier's, None where it could give none. `at` is in seconds since 1970."""

    judging: int
    node: str
    incarnation: str
    round: int
    dataset: str
    question: str
    answer: str
    score: float | None
    at: float

    @property
    def reward(self) -> float:
        """What is summed: the verifier's score, partial credit included; nothing where there is none."""
        return self.score or 0.0


@dataclass(frozen=True, slots=True)
class Standing:
    """A verdict, how many its node has with it, and the sum of their rewards."""

    verdict: Verdict
    judged: int
    cumulative: float


class Verdicts:
    """The table in a home's `judge.sqlite`; made where there is none. Several processes may judge at once.
    Raises `UserError` where the file cannot be made or written, or is damaged."""

    def __init__(self, path: Path) -> None:
        try:
            self._connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
            self._connection.execute("PRAGMA synchronous=FULL")
            self._connection.execute(_SCHEMA)
        except sqlite3.DatabaseError as error:
            writable = isinstance(error, sqlite3.OperationalError)
            remedy = (
                "choose a --home that can be written"
                if writable
                else "move the file away; judging begins anew"
            )
            raise UserError("--home", str(path.parent), f"{path.name}: {error}", remedy) from None

    def close(self) -> None:
        """Release the file."""
        self._connection.close()

    def next_judging(self) -> int:
        """The number of the question that is due: one more than any that was answered."""
        sql = "SELECT coalesce(max(judging), -1) + 1 FROM verdicts"
        return int(self._connection.execute(sql).fetchone()[0])

    def last_round(self, node: str, incarnation: str) -> int:
        """The newest round at which a node was judged; -1 where it never was."""
        sql = "SELECT coalesce(max(round), -1) FROM verdicts WHERE (node, incarnation) = (?, ?)"
        return int(self._connection.execute(sql, (node, incarnation)).fetchone()[0])

    def add(self, verdict: Verdict) -> bool:
        """Keep a verdict; False, and nothing changed, where its node was judged at this round before."""
        sql = f"INSERT OR IGNORE INTO verdicts ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
        return self._connection.execute(sql, astuple(verdict)).rowcount == 1

    def standings(self, node: str, incarnation: str, *, untold: bool = False) -> list[Standing]:
        """All verdicts of a node's incarnation, by round; or those not logged to MLflow yet."""
        rows = self._connection.execute(_STANDINGS, (node, incarnation))
        return [
            Standing(Verdict(*row), judged, cumulative)
            for *row, judged, cumulative, told in rows
            if not (untold and told)
        ]

    def acknowledge(self, standings: Sequence[Standing]) -> None:
        """Mark these as logged to MLflow."""
        keys = [(one.verdict.node, one.verdict.incarnation, one.verdict.round) for one in standings]
        sql = "UPDATE verdicts SET told = 1 WHERE (node, incarnation, round) = (?, ?, ?)"
        self._connection.executemany(sql, keys)


def curves(path: Path) -> dict[str, list[tuple[float, float]]]:
    """(judged rounds, cumulative reward) of each node's newest incarnation; empty if none was judged.
    Reads only: a missing file is not made."""
    if not path.exists():
        return {}
    lines: dict[str, list[tuple[float, float]]] = {}
    uri = f"{path.absolute().as_uri()}?mode=ro"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_S)) as database:
        for node, judged, cumulative in database.execute(_CURVES):
            lines.setdefault(node, []).append((float(judged), cumulative))
    return lines
