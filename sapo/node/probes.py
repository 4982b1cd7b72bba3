"""A node's probes question by question: what is needed to compare two of them in pairs.

Kept beside the journal as lines of JSON. The means are in the journal and in MLflow too, so a lost file costs
intervals of differences and nothing else.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from sapo.policy.evaluate import Evaluation


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe after `round` rounds; per question 1 where the answer passes, else 0."""

    round: int
    sampled: tuple[int, ...]
    greedy: tuple[int, ...]


def append(path: Path, incarnation: str, round: int, found: Evaluation) -> None:
    """Add a probe to a node's file. A round that is repeated after a crash adds an equal line again."""
    line = {"incarnation": incarnation, "round": round, **bits(found)}
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(line)}\n")  # a line that a crash cut short ends here


def bits(found: Evaluation) -> dict[str, str]:
    """A probe's passes, a character per question."""
    return {name: "".join(f"{one:.0f}" for one in getattr(found, name)) for name in ("first", "greedy")}


def parse(round: int, kept: dict[str, str]) -> Probe:
    """A probe from what `bits` made of it."""
    return Probe(round, tuple(map(int, kept["first"])), tuple(map(int, kept["greedy"])))


def read(path: Path, incarnation: str) -> list[Probe]:
    """The probes of an incarnation by round; lines that a crash cut short are left out."""
    found: dict[int, Probe] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            kept = json.loads(line)
            if kept["incarnation"] == incarnation:
                found[kept["round"]] = parse(kept["round"], kept)
        except (ValueError, KeyError, TypeError):
            continue
    return [found[round] for round in sorted(found)]
