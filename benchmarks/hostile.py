"""What hostile peers cost a swarm: held-out pass@1 and rounds per minute of honest nodes, with and without.

Half of all peers are hostile, the whole zoo (benchmarks/animals) dealt out over them; one of them is two
thousand identities. A pair is the same honest nodes with the same seeds and streams, alone and among hostile
peers; all take turns, half a round each, in one process. Preset `starter` has batches of 8 own groups and 8
foreign, `tiny` is as it is, but for checkpoints and probes; hostile peers come in the first round, to another
swarm of `tiny` in round 20, when honest nodes know each other. Then the animals visit a small swarm, one by
one. They ask what their keys draw, as the rules want it.

    nice -n 15 python benchmarks/hostile.py --jobs 1 --keep FOLDER --json FILE

goes on where it was stopped: pairs that are done are in FOLDER.

Defences and zoo were settled on other seeds (11 to 14, 21 to 25, 101, 102), which have no part in the result;
of its own, 31 to 34 were measured under earlier rules, too. A spammer and a crowd of padders are
poisoning by many names, and cost more (docs/threat-model.md). Here they crowd out; padding is the padder's.
"""

import functools
import gc
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

from common import STARTER_ROUND, Report, benchmark, parser

if __name__ == "__main__":
    OPTIONS = parser(__doc__)
    OPTIONS.add_argument("--jobs", type=int, metavar="N", help="pairs at a time; else one per core")
    OPTIONS.add_argument("--keep", type=Path, metavar="FOLDER", help="keep finished pairs, run none again")
    # answers --help before what follows is loaded, which takes seconds
    GIVEN = OPTIONS.parse_args()

from animals import ZOO
from hostile_swarm import Arm, Attack, arm, grounds_of, side_by_side
from scipy.stats import t as student

from sapo.core.config.load import Config, load
from sapo.core.machine import usable
from sapo.core.user_cache import default_cache
from sapo.policy.evaluate import Evaluation, answer, held_out_set
from sapo.policy.starter import prepare
from sapo.tasks.workers import TaskWorkers, open_workers

PACKAGES = ("torch", "transformers", "reasoning-gym", "pydantic", "cryptography")
MOST_LOST = 0.01
"""The lower bound of the difference in pass@1 must lie above minus this."""
LEAST_PACE = 0.85
"""Honest nodes must keep this share of their rounds per minute."""
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Sizes:
    """How much is done. `seeds` were chosen beforehand; `samples` completions per held-out question."""

    seeds: tuple[int, ...]
    """Two swarms differ by 0.7 to 0.8 points whatever attacks them (standard deviation). More nodes do not
    help, for they learn from each other. With eight pairs half an interval is about 0.6 points; with five
    it would be one point."""
    honest: int
    rounds: int
    questions: int
    samples: int
    warm: int
    """Rounds a small swarm makes before animals visit it, one after the other, for `visit` rounds each."""
    visit: int
    starter_steps: int


FULL = Sizes(tuple(range(31, 39)), 4, 120, 2_000, 2, 12, 8, 600)
QUICK = Sizes((11, 12), 2, 3, 20, 1, 1, 1, 20)
TINY_ROUNDS = 100
"""As many as the preset has."""
KNOWN = 20
"""Rounds after which honest nodes of preset tiny know each other."""


@dataclass(frozen=True)
class Setting:
    """A preset, its rounds, and the round in which hostile peers come."""

    preset: str
    rounds: int
    since: int

    @property
    def name(self) -> str:
        """In a word or two."""
        return self.preset if not self.since else f"{self.preset} from round {self.since} on"


def settings(sizes: Sizes) -> list[list[Setting]]:
    """What pairs are run under, those together that have the swarm without an attack in common."""
    tiny = min(sizes.rounds, TINY_ROUNDS)
    return [
        [Setting("tiny", tiny, since) for since in (0, min(KNOWN, tiny - 1))],
        [Setting("starter", sizes.rounds, 0)],
    ]


@dataclass(frozen=True)
class Pair:
    """One seed: an attack-free run and an attacked one. pass@1 is the mean over honest nodes, in [0, 1]."""

    setting: Setting
    seed: int
    quiet: float
    attacked: float
    reward_quiet: float
    reward_attacked: float
    """Of own answers, mean over rounds: who learns later has less of it."""
    pace_quiet: float
    pace_attacked: float
    cpu_ratio: float
    """CPU time of the attacked nodes' rounds over that of the others, since the attack."""
    hostile_share: float
    """Of the foreign groups that honest nodes learned from, how many were hostile peers'."""
    external_quiet: float
    external_attacked: float
    """Foreign groups of honest nodes in a batch, on average."""

    @property
    def difference(self) -> float:
        """What the attack changed in pass@1."""
        return self.attacked - self.quiet

    @property
    def pace(self) -> float:
        """Rounds per minute under attack over those without."""
        return self.pace_attacked / self.pace_quiet


def configured(sizes: Sizes, seed: int, nodes: int, preset: str = "starter") -> Config:
    """A preset with this many nodes."""
    sets = [
        *(STARTER_ROUND if preset == "starter" else ()),
        f"swarm.seed={seed}",
        f"swarm.nodes={nodes}",
        f"swarm.rounds={max(sizes.rounds, 100_000)}",
        f"eval.questions={sizes.questions}",
        "eval.probe_questions=0",
        "checkpoint.every_rounds=1_000_000",
        "checkpoint.every_seconds=1e9",
        "checkpoint.weight_digest_every=1_000_000",
        f"starter.steps={sizes.starter_steps}",
    ]
    return load(preset, sets=sets, env={})


def own_keys(config: Config, folder: Path, seed: int) -> AbstractContextManager[Arm]:
    """An arm that keeps its keys to itself: else one with the same keys is refused as its copy."""
    os.environ["SAPO_KEYS"] = str(folder / "keys")
    return arm(config, folder, seed)


def pairs_of(seed: int, sizes: Sizes, folder: Path, alike: Sequence[Setting]) -> list[Pair]:
    """Run swarms of one seed side by side, one without an attack and one for each setting, and examine their
    nodes. Hostile peers are as many as honest ones."""
    preset, rounds = alike[0].preset, alike[0].rounds
    config = configured(sizes, seed, sizes.honest, preset)
    place = folder / f"{preset}{seed}"
    with ExitStack() as stack:
        quiet = stack.enter_context(own_keys(config, place / "quiet", seed))
        attacked = [stack.enter_context(own_keys(config, place / f"from{one.since}", seed)) for one in alike]
        workers = stack.enter_context(TaskWorkers(salt=config.rules.salt))
        gc.freeze()  # as flow `node` does: else each pass of the collector goes over the nodes of all arms
        for round in range(rounds):
            for one, setting in zip(attacked, alike, strict=True):
                if round == setting.since:
                    one.attack = Attack.of(ZOO, sizes.honest, grounds_of(one, workers), seed)
            side_by_side([quiet, *attacked], 1)
        alone = examined(quiet, sizes)
        return [
            compared(setting, seed, quiet, one, alone, examined(one, sizes))
            for setting, one in zip(alike, attacked, strict=True)
        ]


def compared(setting: Setting, seed: int, quiet: Arm, attacked: Arm, alone: float, among: float) -> Pair:
    """A pair of finished swarms with their pass@1."""
    honest = {node.parts.maker.own.identity.key for node in attacked.nodes}
    trained = attacked.trained_on()
    hostile = sum(count for key, count in trained.items() if key not in honest)
    made = setting.rounds * len(attacked.nodes)
    return Pair(
        setting,
        seed,
        alone,
        among,
        quiet.reward,
        attacked.reward,
        quiet.per_minute(setting.since),
        attacked.per_minute(setting.since),
        attacked.cpu_from(setting.since) / quiet.cpu_from(setting.since),
        hostile / max(1, trained.total()),
        quiet.trained_on().total() / made,
        (trained.total() - hostile) / made,
    )


def examined(one: Arm, sizes: Sizes) -> float:
    """Mean pass@1 of an arm's nodes on the swarm's held-out questions."""
    questions = held_out_set(one.config, one.home, one.nodes[0].parts.workers)
    return statistics.fmean(
        Evaluation.of(
            questions,
            answer(
                node.parts.policy,
                node.parts.rollouts.engine,
                node.parts.workers,
                questions,
                max_new_tokens=one.config.generate.max_new_tokens,
                samples=sizes.samples,
                seed=one.config.swarm.seed,
            ),
        ).pass_at_1
        for node in one.nodes
    )


def lower_bound(differences: Sequence[float]) -> float:
    """Lower end of the two-sided 95 % t-interval of their mean. Raises `ValueError` for fewer than two."""
    if len(differences) < 2:
        raise ValueError("an interval needs two differences")
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    quantile = float(student.ppf((1 + CONFIDENCE) / 2, len(differences) - 1))
    return statistics.fmean(differences) - quantile * error


def told(one: Pair) -> str:
    """A pair in a line."""
    return (
        f"{one.setting.name}, seed {one.seed}: pass@1 {one.quiet:.4f} alone, {one.attacked:.4f} attacked "
        f"({100 * one.difference:+.2f} points); own reward "
        f"{one.reward_quiet:.3f} and {one.reward_attacked:.3f}; "
        f"{one.pace_quiet:.0f} and {one.pace_attacked:.0f} rounds a minute ({one.pace:.3f}; CPU "
        f"{one.cpu_ratio:.3f}); foreign groups a batch from honest nodes {one.external_quiet:.2f} and "
        f"{one.external_attacked:.2f}, {one.hostile_share:.0%} hostile"
    )


def report_pairs(report: Report, pairs: Sequence[Pair], name: str) -> None:
    """The figures and checks of must-show under one setting: what is learned, and how fast."""
    differences = [one.difference for one in pairs]
    spread, low = statistics.stdev(differences), lower_bound(differences)
    attacked, quiet = [one.attacked for one in pairs], [one.quiet for one in pairs]
    report.add(f"{name}: held-out pass@1", statistics.fmean(attacked), statistics.fmean(quiet), spread)
    report.add(f"{name}: lower bound of the difference", low, -MOST_LOST, spread)
    rewards = [one.reward_attacked for one in pairs], [one.reward_quiet for one in pairs]
    report.measured(f"{name}: reward of own answers", *rewards)
    paces = [one.pace for one in pairs]
    report.measured(
        f"{name}: rounds per minute", [one.pace_attacked for one in pairs], [one.pace_quiet for one in pairs]
    )
    mean = statistics.geometric_mean(paces)
    report.add(f"{name}: rounds per minute, paired", mean, 1.0, max(paces) - min(paces))
    cpu = [one.cpu_ratio for one in pairs]
    report.add(f"{name}: CPU time a round, paired", statistics.geometric_mean(cpu), 1.0, max(cpu) - min(cpu))
    share = [one.hostile_share for one in pairs]
    report.add(
        f"{name}: hostile share of foreign groups", statistics.fmean(share), 0.5, statistics.stdev(share)
    )
    external = [one.external_attacked for one in pairs], [one.external_quiet for one in pairs]
    report.measured(f"{name}: honest foreign groups a batch", *external)
    report.check(
        f"{name}: what honest nodes learn",
        low > -MOST_LOST,
        f"pass@1 {100 * statistics.fmean(differences):+.2f} points, lower 95 % bound {100 * low:+.2f} "
        f"(more than {-100 * MOST_LOST:+.0f})",
    )
    report.check(
        f"{name}: honest rounds per minute",
        mean >= LEAST_PACE,
        f"{mean:.3f} of those without (at least {LEAST_PACE})",
    )


def visits(report: Report, sizes: Sizes, folder: Path) -> None:
    """What each animal costs by itself: CPU time of two nodes' rounds, beside two that it never meets."""
    config = configured(sizes, 1, 2)
    with (
        own_keys(config, folder / "calm", 1) as calm,
        own_keys(config, folder / "visited", 1) as visited,
        TaskWorkers(salt=config.rules.salt) as workers,
    ):
        grounds = grounds_of(visited, workers)
        side_by_side([calm, visited], sizes.warm)
        for name, animal in ZOO.items():
            visited.attack = Attack.of({name: animal}, 1, grounds, 1)
            before, sent = calm.rounds, visited.records
            side_by_side([calm, visited], sizes.visit)
            visited.attack = None
            rounds = sizes.visit * len(calm.nodes)
            quiet, loud = calm.cpu_from(before) / rounds, visited.cpu_from(before) / rounds
            records = (visited.records - sent) / sizes.visit
            report.add(f"{name}: CPU ms a round", 1e3 * loud, 1e3 * quiet, records)
            report.say(
                f"{name}: {records:.0f} records a round cost a node {1e3 * (loud - quiet):+.1f} ms of CPU"
            )
            side_by_side([calm, visited], max(1, sizes.visit // 4))  # what it left in the pool goes


class Finished:
    """Pairs of equal sizes that are done, a line of a file each."""

    def __init__(self, folder: Path | None, sizes: Sizes) -> None:
        self._sizes = json.loads(json.dumps(asdict(sizes)))
        self._file = None if folder is None else folder / "pairs.jsonl"
        lines: list[str] = []
        if self._file is not None:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._file.touch()
            lines = self._file.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines]
        pairs = [one["pair"] for one in found if one["sizes"] == self._sizes]
        self.pairs = [Pair(**(one | {"setting": Setting(**one["setting"])})) for one in pairs]

    def note(self, one: Pair) -> None:
        """Take a pair that was run."""
        self.pairs.append(one)
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"sizes": self._sizes, "pair": asdict(one)}) + "\n")


def measure(
    report: Report, quick: bool, folder: Path, *, jobs: int | None = None, keep: Path | None = None
) -> None:
    """All pairs, as many at a time as there are cores, or `jobs`, then the animals one by one."""
    sizes = QUICK if quick else FULL
    config = configured(sizes, 1, 1)
    with open_workers(config) as workers:
        prepare(config, workers, cache=default_cache())
    report.say(
        f"{sizes.honest} honest and {sizes.honest} hostile peers, {sizes.rounds} rounds, a pair of swarms of "
        f"each seed {sizes.seeds}, {sizes.questions} held-out questions, {sizes.samples} samples"
    )
    finished = Finished(keep, sizes)
    done = {(one.setting, one.seed) for one in finished.pairs}
    cores = jobs or max(1, min(len(sizes.seeds), usable().whole_cores))
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        runs = [
            pool.submit(pairs_of, seed, sizes, folder, left)
            for alike in settings(sizes)
            for seed in sizes.seeds
            if (left := [setting for setting in alike if (setting, seed) not in done])
        ]
        for run in as_completed(runs):
            for one in run.result():
                finished.note(one)
                report.say(told(one))
    for setting in itertools.chain.from_iterable(settings(sizes)):
        report_pairs(report, [one for one in finished.pairs if one.setting == setting], setting.name)
    visits(report, sizes, folder)


if __name__ == "__main__":
    work = functools.partial(measure, jobs=GIVEN.jobs, keep=GIVEN.keep)
    sys.exit(benchmark(__doc__, "hostile", PACKAGES, work, OPTIONS))
