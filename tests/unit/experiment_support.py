"""Runs of experiments, made up: what their figures must be can be worked out in one's head."""

from collections.abc import Mapping, Sequence
from typing import Any

from sapo.experiments.grid import Grid
from sapo.experiments.record import Exam, RunRecord

GRID: dict[str, Any] = {
    "name": "made-up",
    "about": "Made up.",
    "preset": "tiny",
    "rounds": 4,
    "seeds": 3,
    "set": {"swarm": {"nodes": 2}},
    "arm": [
        {"name": "8/0", "about": "nobody shares", "set": {"batch": {"local": 8, "external": 0}}},
        {"name": "4/4", "set": {"batch": {"local": 4, "external": 4}}},
    ],
    "compare": [
        {"arm": "4/4", "with": "8/0", "figure": "pass_at_1", "what": "Does sharing help?"},
        {
            "arm": "4/4",
            "with": "8/0",
            "figure": "reward/training_set",
            "what": "Does the paper's metric rise?",
        },
        {"arm": "4/4", "with": "8/0", "figure": "tokens_to_target", "what": "Is it cheaper?"},
    ],
    "target": "8/0",
}
"""Two arms, two nodes, four rounds."""
MACHINE: dict[str, str | int | float] = {"processor": "abacus", "cores": 2}


def grid(**changes: Any) -> Grid:
    """The grid above with other top-level values."""
    return Grid.model_validate({**GRID, **changes})


def record(
    arm: str = "8/0",
    seed: int = 1,
    *,
    local: Sequence[Sequence[float | None]] = ((0.0, 0.0, 0.5, 0.5), (0.0, 0.0, 0.5, 0.5)),
    training: Sequence[Sequence[float | None]] | None = None,
    passes: Mapping[int, Sequence[float]] | None = None,
    tokens: float = 100.0,
    digest: str = "",
) -> RunRecord:
    """A run of nodes n0, n1, ...: rewards by node and round, pass@1 by rounds learned and node.

    Every node samples `tokens` a round and learns from twice as many.
    """
    nodes, rounds = len(local), len(local[0])
    exams = passes if passes is not None else {0: [0.1] * nodes, rounds: [0.3] * nodes}
    per_round: dict[str, float | None] = {
        "tokens/generated": tokens,
        "learn/tokens": 2 * tokens,
        "share/zero_advantage": 0.75,
        "sampler/external": 0.0,
        "staleness/rounds": None,
    }
    return RunRecord(
        grid="made-up",
        arm=arm,
        seed=seed,
        lr=1e-4,
        tuning=False,
        digest=digest,
        nodes=[f"n{i}" for i in range(nodes)],
        rounds=rounds,
        started_at=1_000_000.0 + seed,
        seconds=60.0,
        exam_seconds=5.0,
        cpu_seconds=50.0,
        config={"learn": {"lr": 1e-4}},
        machine=MACHINE,
        versions={"python": "3.11"},
        series={
            "reward/local": [list(line) for line in local],
            "reward/training_set": [list(line) for line in training or local],
            **{name: [[value] * rounds for _ in range(nodes)] for name, value in per_round.items()},
        },
        exams=[
            Exam(
                round=round,
                node=f"n{i}",
                pass_at_1=value,
                tasks={"chain_sum": value, "gcd": value / 2},
                questions=50,
                samples=1,
            )
            for round, values in exams.items()
            for i, value in enumerate(values)
        ],
    )
