"""Our side of benchmarks/round.py: a node as `sapo swarm` opens it, in silo, with its deliverer beside it.

Where a stand-in scores, the verifier works all the same and its outcomes are replaced.
"""

import time
from collections.abc import Sequence
from pathlib import Path

from baselines.child import Requests, Scores, Work, stand_in
from sapo.core.atomic_file import write_first
from sapo.core.config.home import Home
from sapo.core.config.load import parse
from sapo.core.config.manifest import Manifest
from sapo.core.types import Group, Outcome
from sapo.experiments.grid import identity
from sapo.node import round
from sapo.node.parts import open_parts
from sapo.node.scoring import score_groups
from sapo.tasks.workers import TaskWorkers

STAGES = ("time/generate", "time/generate_ahead", "time/consume", "time/verify", "time/update")


def main() -> None:
    """Make rounds until no more are asked for."""
    requests, work = Requests(), Work.read()
    config, home = parse(work.config), Home(Path(work.folder) / "home")
    home.prepare(config, Manifest.of(config))
    home.make_node("n0")  # whose questions follow from its key
    write_first(home.key("n0"), identity(config.swarm.seed, 0).to_pem())
    scores: Scores = "verifier"

    def scored(workers: TaskWorkers, groups: Sequence[Group]) -> list[tuple[Outcome, ...]]:
        found = score_groups(workers, groups)
        if scores == "verifier":
            return found
        return [
            tuple(Outcome.scored(stand_in(scores, number, k)) for k in range(len(group.completions)))
            for number, group in enumerate(groups)
        ]

    round.score_groups = scored
    with round.NodeRuntime.open(open_parts(config, "n0", home, incarnation=work.incarnation)) as runtime:
        while (asked := requests.next()) is not None:
            scores = asked
            began = time.perf_counter()
            result = runtime.run_round()
            seconds = time.perf_counter() - began
            found = result.metrics
            stages = {name.removeprefix("time/"): took for name, took in found.items() if name in STAGES}
            trained = not result.skipped
            requests.answer(seconds, found["reward/local"], trained, found["tokens/generated"], stages)


if __name__ == "__main__":
    main()
