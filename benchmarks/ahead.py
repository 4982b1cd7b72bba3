"""What generation ahead saves: seconds a round with `generate.ahead` over seconds without it.

One node alone makes preset `starter`'s rounds, with its policy and with a larger random one. Both ways
take turns; of each run the median round counts, after some to warm up. Completions are scored as always, but
every other one is then called right, so that all groups teach and both ways do the same work. The learner has
one thread; a core for the other thread has to be there, or nothing can be gained.
"""

import os
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from common import STARTER_ROUND, Report, benchmark, parser, repeat

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.core.types import Outcome, Recipe
from sapo.core.user_cache import default_cache
from sapo.node.round import NodeRuntime
from sapo.policy.models import load_policy, save, wrap
from sapo.policy.starter import Variant, make_model, prepare
from sapo.tasks.workers import TaskWorkers, open_workers

PACKAGES = ("torch", "transformers", "reasoning-gym")
ALONE = (
    *STARTER_ROUND,
    "swarm.nodes=1",
    "batch.external=0",
    "learn.lr=1e-9",
    "checkpoint.every_rounds=1000",
    "checkpoint.weight_digest_every=1000",
    "eval.probe_questions=0",
)
PARTS = ("generate", "generate_ahead", "update")


@dataclass(frozen=True)
class Sizes:
    """How much is done: rounds after those to warm up, and runs of each way."""

    warm: int
    starter: int
    larger: int
    runs: int
    shape: Variant
    sets: tuple[str, ...] = ()


FULL = Sizes(3, 40, 8, 5, Variant(vocabulary=1024, hidden=384, layers=6, heads=6, inner=1024))
QUICK = Sizes(
    1,
    2,
    2,
    1,
    Variant(vocabulary=1024, hidden=64, layers=2, heads=2, inner=128),
    ("batch.local=2", "batch.completions=4", "starter.steps=5"),
)


@dataclass(frozen=True)
class Run:
    """Medians over the rounds of a run, in seconds."""

    round: float
    parts: dict[str, float]


def config_of(sizes: Sizes, *sets: str) -> Config:
    """preset `starter` for a node that is alone."""
    return load(preset="starter", sets=[*ALONE, *sizes.sets, *sets], env={})


def larger_model(sizes: Sizes, folder: Path) -> Path:
    """A directory with random weights of the larger shape, under the starter's tokenizer."""
    config = config_of(sizes)
    with open_workers(config) as workers:
        prepare(config, workers, cache=default_cache())
    tokenizer = load_policy("starter", config=config, cache=default_cache()).tokenizer
    folder.mkdir()
    save(wrap("larger", make_model(sizes.shape, tokenizer, seed=0), tokenizer), folder)
    return folder


def half_right(workers: TaskWorkers) -> None:
    """Have every other completion be right, once the workers have scored it."""
    score = workers.score

    def marked(items: Sequence[tuple[Recipe, str]]) -> list[Outcome]:
        return [Outcome.scored(float(place % 2)) for place, _ in enumerate(score(items))]

    workers.score = marked  # type: ignore[method-assign]


def run(config: Config, folder: Path, warm: int, rounds: int) -> Run:
    """Make some rounds as a new node."""
    home = Home(folder)
    home.prepare(config, Manifest.of(config))
    seconds, parts = [], []
    with ExitStack() as stack:
        node = stack.enter_context(NodeRuntime.open(config, "n0", home, deliver=False, incarnation="0" * 16))
        half_right(node.parts.workers)
        for _ in range(warm + rounds):
            began = time.perf_counter()
            result = node.run_round()
            seconds.append(time.perf_counter() - began)
            parts.append(result.metrics)
            assert result.skipped is None
    return Run(
        statistics.median(seconds[warm:]),
        {
            name: statistics.median(values.get(f"time/{name}", 0.0) for values in parts[warm:])
            for name in PARTS
        },
    )


def compare(report: Report, scale: str, sizes: Sizes, rounds: int, folder: Path, *sets: str) -> None:
    """Add the figures of one scale."""
    count = iter(range(2 * sizes.runs))

    def once(ahead: int) -> Run:
        total = f"swarm.rounds={sizes.warm + rounds}"
        config = config_of(sizes, total, f"generate.ahead={ahead}", *sets)
        return run(config, folder / f"{scale}-{next(count)}", sizes.warm, rounds)

    ours, baseline = repeat(sizes.runs, lambda: once(1), lambda: once(0))
    report.measured(f"{scale}: seconds a round", [one.round for one in ours], [one.round for one in baseline])
    for name in ("generate", "update"):
        what = "of waiting for generation" if name == "generate" else "of the update"
        report.measured(
            f"{scale}: seconds {what}",
            [one.parts[name] for one in ours],
            [one.parts[name] for one in baseline],
        )
    beside = statistics.median(one.parts["generate_ahead"] for one in ours)
    report.say(f"{scale}: sampling beside the update took {beside:.3f} s")


def work(report: Report, quick: bool, folder: Path) -> None:
    """Measure both scales."""
    os.environ["SAPO_KEYS"] = str(folder / "keys")
    sizes = QUICK if quick else FULL
    compare(report, "starter", sizes, sizes.starter, folder)
    model = larger_model(sizes, folder / "model")
    compare(report, "larger", sizes, sizes.larger, folder, f"model={model}")


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "ahead", PACKAGES, work))
