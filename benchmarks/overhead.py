"""The full stack against the bare loop: what a round costs beside generation, scoring and gradient.

Full stack: `sapo swarm` on a terminal, as a user runs it, with servers, archive, journals, checkpoints,
history and tracking. Bare loop: as many processes that generate, score in the same task workers behind the
same walls, and learn, probes included; foreign groups are made beforehand and scored as a draw needs them.
Both take turns. Start-up is left out. The processor time of all processes in the measured rounds counts, that
of the servers too. What a round held is shown beside, for only equal work can be compared.
"""

import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from common import Report, benchmark
from overhead_programs import Cost, bare, full

from sapo.commands.launch import silo_if_alone
from sapo.config import load
from sapo.home import Home

PACKAGES = ("torch", "transformers", "prefect", "mlflow", "deltalake", "reasoning-gym")


@dataclass(frozen=True)
class Case:
    """One comparison: settings beside those of preset `tiny`, rounds left out and measured, times repeated.

    The clock's ratio may be `most`; None where nothing is asked.
    """

    name: str
    sets: tuple[str, ...]
    warm: int
    rounds: int
    turns: int
    most: float | None


STARTER = (
    Case("starter, one node", ("swarm.nodes=1",), 30, 100, 3, 1.25),
    Case("starter, four nodes", ("swarm.nodes=4",), 30, 100, 3, 1.4),
)
QUICK = Case("starter, two nodes", ("swarm.nodes=2", "batch.local=4", "eval.questions=20"), 2, 4, 1, None)


def measure(case: Case, folder: Path) -> tuple[list[Cost], list[Cost]]:
    """Costs of both programs, in turns; the bare loop gets as many foreign groups as the full stack had."""
    config, _ = silo_if_alone(load("tiny", sets=case.sets, env={}))
    options = [
        "--preset",
        "tiny",
        "--rounds",
        "100000",
        *(part for one in case.sets for part in ("--set", one)),
    ]
    ours: list[Cost] = []
    baseline: list[Cost] = []
    for turn in range(case.turns):
        place = folder / f"{config.swarm.nodes}-nodes-{turn}"
        place.mkdir()
        with full(Home(place / "full"), options, config.nodes) as program:
            ours.append(program.cost(case.warm, case.rounds))
        with bare(place / "bare", config, ours[0].work) as program:
            baseline.append(program.cost(case.warm, case.rounds))
    return ours, baseline


def show(report: Report, case: Case, ours: Sequence[Cost], baseline: Sequence[Cost]) -> None:
    """Figures of a case, and where the processor time of a round goes."""
    for what, ms in (("ms", lambda cost: 1e3 * cost.seconds), ("CPU ms", lambda cost: 1e3 * cost.cpu)):
        report.measured(f"{case.name}: {what} a round", list(map(ms, ours)), list(map(ms, baseline)))
    for part in ("informative", "external", "verified"):
        held = [[getattr(cost.work, part) for cost in costs] for costs in (ours, baseline)]
        report.measured(f"{case.name}: groups {part}", *held)
    for role in sorted({role for cost in ours for role in cost.roles}):
        parts = [[1e3 * cost.roles.get(role, 0.0) for cost in costs] for costs in (ours, baseline)]
        report.measured(f"{case.name}: CPU ms of {role}", *parts)
    if case.most is not None:
        ratio = statistics.median(c.seconds for c in ours) / statistics.median(c.seconds for c in baseline)
        what = f"{case.name}: at most {case.most} times the bare loop"
        report.check(what, ratio <= case.most, f"{ratio:.2f} times")


def work(report: Report, quick: bool, folder: Path) -> None:
    """All cases, one after the other."""
    for case in (QUICK,) if quick else STARTER:
        show(report, case, *measure(case, folder))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or the programs would go on without it
    sys.exit(benchmark(__doc__, "overhead", PACKAGES, work))
