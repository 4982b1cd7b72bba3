"""Benchmark of one node among many publishers: what a round costs it with 8 and with 5,000 of them.

    python benchmarks/scale.py [--json FILE] [--quick]

The node is one of preset starter, in a process of its own with its worker, its journal and an embedded
bus; it makes whole rounds. Publishers have keys of their own and sign every group; its answers are arranged,
its questions real. Eight publishers with eight groups a round each offer as many as the pool has places; more
of them, with one group each, offer up to eighty times that. Once all are members, whom a node knows, once the
swarm is open to strangers, whose groups a node meets as newcomers'. Before the first round each node has met
everybody once, so that what it remembers of others is as much as it ever will be. All nodes take turns, round
by round. Exits 1 where a round's cost is more than `MOST` times that among eight; of newcomers a node reads
on to its tail window, and may read so many times more.
"""

import os
import sqlite3
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from common import STARTER_ROUND, Report, benchmark, parser

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

import psutil

from sapo.bus.sqlite import SqliteBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.core.rng import rng
from sapo.core.types import Completion, Group, Question, Recipe, SignedGroup
from sapo.core.user_cache import default_cache
from sapo.node.parts import open_parts
from sapo.node.round import NodeRuntime
from sapo.peers.signing import Identity, seal
from sapo.policy.starter import prepare
from sapo.tasks.holdout import is_held_out
from sapo.tasks.workers import open_workers

INCARNATION = "0123456789abcdef"

PACKAGES = ("cryptography", "psutil", "pydantic", "reasoning-gym", "torch")
MOST = 1.25
"""What the ratio to the node with eight publishers may be, of processor time, bytes and memory."""
COMPLETIONS, RIGHT = 8, 3
"""Few enough of a group's answers are right that no two groups of one question pass for copies."""


@dataclass(frozen=True)
class Swarm:
    """Who publishes: so many keys, each so many groups a round; members of the swarm, or anybody."""

    publishers: int
    each: int
    members: bool

    @property
    def name(self) -> str:
        """As figures call it."""
        return f"{self.publishers:,} {'members' if self.members else 'strangers'}"


@dataclass(frozen=True)
class Sizes:
    """How much is done. The first swarm of each kind is the baseline of the others."""

    swarms: tuple[Swarm, ...]
    questions: int
    warm: int
    """Rounds until pool and memory are full."""
    block: int
    """Rounds told together: the workers' processor time comes in hundredths of a second."""
    blocks: int
    starter_steps: int


FULL = Sizes(
    (
        Swarm(8, 8, members=True),
        Swarm(100, 1, members=True),
        Swarm(1_000, 1, members=True),
        Swarm(5_000, 1, members=True),
        Swarm(8, 8, members=False),
        Swarm(5_000, 1, members=False),
    ),
    4_000,
    16,
    3,
    3,
    600,
)
QUICK = Sizes((Swarm(2, 8, members=True), Swarm(16, 1, members=True)), 60, 2, 1, 2, 20)


@dataclass(frozen=True)
class Spent:
    """A node's costs since it was opened; memory is what it holds now."""

    consume: float
    """Processor seconds: reading the bus, checking what came, keeping the pool within its bounds."""
    verify: float
    """Processor seconds, workers' included: scoring, the draw, the batch; less `commit`."""
    commit: float
    """Processor seconds of the batch's transaction."""
    read: float
    """Bytes of groups that the bus gave."""
    journal: float
    """Bytes in use in the journal's file."""
    memory: float
    """Bytes of the node's process that no other has (USS)."""
    drawn: float
    """Foreign groups that it learned from."""


UNITS = {
    "consume": ("consume, CPU ms a round", 1e3),
    "verify": ("verify, CPU ms a round", 1e3),
    "commit": ("commit, CPU ms a round", 1e3),
    "read": ("read from the bus, KB a round", 1e-3),
    "journal": ("journal's growth, KB a round", 1e-3),
}
"""Figures of what grows with every round."""


def configured(sizes: Sizes, members: Sequence[str] = ()) -> Config:
    """Preset starter without checkpoints and probes; an allow-list where there are members."""
    keys = ", ".join(f'"{key}"' for key in members)
    entry = ["rules.entry=allow-list", f"rules.members=[{keys}]"] if members else []
    sets = [
        *STARTER_ROUND,
        "swarm.rounds=100_000",
        "eval.probe_questions=0",
        "checkpoint.every_rounds=1_000_000",
        "checkpoint.every_seconds=1e9",
        "checkpoint.weight_digest_every=1_000_000",
        f"starter.steps={sizes.starter_steps}",
        *entry,
    ]
    return load("starter", sets=sets, env={})


# -- the node, in its own process ------------------------------------------------------------------------


def live(
    pipe: Connection, folder: Path, sizes: Sizes, members: Sequence[str], met: Sequence[SignedGroup]
) -> None:
    """Open a node on the bus in `folder`, and make a round whenever told to; tell what was spent."""
    os.environ["SAPO_KEYS"] = str(folder / "keys")
    home = Home(folder / "home")
    home.node("n0").mkdir(parents=True)
    own = Identity.load_or_create(home.key("n0")).key
    config = configured(sizes, [*members, own] if members else ())
    home.prepare(config, Manifest.of(config))
    parts = open_parts(config, "n0", home, bus=SqliteBus(folder / "bus.db"), deliver=False)
    with NodeRuntime.open(parts) as node:
        for signed in met:
            node.parts.intake.admission.streams.note(Group.model_validate_json(signed.payload), time.time())
            node.parts.intake.quotas.judged(signed.key, 0.0, True)
        meter = Meter(node)
        pipe.send(meter.spent())
        while pipe.recv():
            meter.round()
            pipe.send(meter.spent())


class Meter:
    """A node's rounds, stage by stage."""

    def __init__(self, node: NodeRuntime) -> None:
        self._node = node
        self._consume = self._verify = self._commit = self._read = self._drawn = 0.0
        self._commit_batch, self._poll = node.journal.commit_batch, node.parts.intake.listener.poll
        setattr(node.journal, "commit_batch", self._committed)  # noqa: B010  mypy minds an assignment
        setattr(node.parts.intake.listener, "poll", self._polled)  # noqa: B010
        self._pages = sqlite3.connect(node.parts.home.journal("n0"))

    def round(self) -> None:
        """One whole round."""
        node = self._node
        node.generate()
        node.publish()
        began = time.process_time()
        node.consume_sample()
        self._consume += time.process_time() - began
        began = time.process_time() + self._workers()
        node.verify()
        self._verify += time.process_time() + self._workers() - began
        self._drawn += node.grpo_update().metrics["sampler/external"]

    def spent(self) -> Spent:
        """Everything up to now."""
        pages, free, size = (
            self._pages.execute(f"PRAGMA {what}").fetchone()[0]
            for what in ("page_count", "freelist_count", "page_size")
        )
        journal = size * (pages - free)
        memory = psutil.Process().memory_full_info().uss
        sums = (self._consume, self._verify, self._commit, self._read)
        return Spent(*sums, float(journal), float(memory), self._drawn)

    def _workers(self) -> float:
        found = [psutil.Process(pid).cpu_times() for pid in self._node.parts.workers.pids]
        return sum(t.user + t.system + t.children_user + t.children_system for t in found)

    def _committed(self, *args: Any, **kwargs: Any) -> None:
        began = time.process_time()
        self._commit_batch(*args, **kwargs)
        self._commit += time.process_time() - began

    def _polled(self, *args: Any) -> Any:
        poll = self._poll(*args)
        self._read += sum(len(received.signed.payload) for received in poll.received)
        return poll


# -- the publishers --------------------------------------------------------------------------------------


class Crowd:
    """Publishers' groups, signed: each a question of the swarm's with a few right answers."""

    def __init__(self, config: Config, count: int, questions: int) -> None:
        self.identities = [Identity.new() for _ in range(count)]
        self._chance = rng("scale")
        with open_workers(config) as workers:
            self._items = list(_items(config, workers, questions))

    def groups(self, count: int, each: int, round: int) -> list[SignedGroup]:
        """What the first `count` publish in a round, in any order."""
        made = [self._group(number, round, position) for number in range(count) for position in range(each)]
        self._chance.shuffle(made)
        return made

    def _group(self, number: int, round: int, position: int) -> SignedGroup:
        identity, (recipe, question, answer) = self.identities[number], self._chance.choice(self._items)
        wrong = [f"{self._chance.randrange(10**6)}." for _ in range(COMPLETIONS - RIGHT)]
        texts = [*[answer] * RIGHT, *wrong]
        group = Group(
            swarm="starter",
            node=f"p{number}",
            key=identity.key,
            incarnation=INCARNATION,
            round=round,
            position=position,
            recipe=recipe,
            question=question,
            completions=tuple(Completion(text=text, finish_reason="stop") for text in texts),
            policy_version=round,
            created_at=time.time(),
        )
        return seal(group, identity)


def _items(config: Config, workers: Any, count: int) -> Iterator[tuple[Recipe, str, str]]:
    chance, found = rng("scale", "questions"), 0
    while found < count:
        recipes = [Recipe.make(t.dataset, t.config, chance.randrange(2**30)) for t in config.tasks * 64]
        for question, answer in zip(workers.questions(recipes), workers.answers(recipes), strict=True):
            if not isinstance(question, Question) or is_held_out(question, config.rules.held_out):
                continue
            if found < count and answer is not None:
                found += 1
                yield question.recipe, question.text, answer


# -- the figures -----------------------------------------------------------------------------------------


def run(sizes: Sizes, folder: Path) -> dict[Swarm, list[Spent]]:
    """All swarms in turns, round by round; what each node had spent after the warm-up and every block."""
    crowd = Crowd(configured(sizes), max(swarm.publishers for swarm in sizes.swarms), sizes.questions)
    context = get_context("spawn")
    with ExitStack() as stack:
        pipes, buses = {}, {}
        for number, swarm in enumerate(sizes.swarms):
            place = folder / str(number)
            place.mkdir()
            keys = [one.key for one in crowd.identities[: swarm.publishers]] if swarm.members else []
            pipes[swarm], theirs = context.Pipe()
            buses[swarm] = SqliteBus(place / "bus.db")
            stack.callback(buses[swarm].close)
            process = context.Process(
                target=live, args=(theirs, place, sizes, keys, crowd.groups(swarm.publishers, 1, 0))
            )
            process.start()
            stack.callback(process.join)
            stack.callback(pipes[swarm].send, False)
            theirs.close()
        for pipe in pipes.values():
            pipe.recv()
        found: dict[Swarm, list[Spent]] = {swarm: [] for swarm in sizes.swarms}
        for round in range(1, 1 + sizes.warm + sizes.block * sizes.blocks):
            made: dict[tuple[int, int], list[SignedGroup]] = {}
            for swarm in sizes.swarms:
                size = (swarm.publishers, swarm.each)
                if size not in made:
                    made[size] = crowd.groups(*size, round)
                buses[swarm].publish(made[size])
                buses[swarm].trim(8 * 256)
                pipes[swarm].send(True)
                spent = pipes[swarm].recv()
                if round >= sizes.warm and (round - sizes.warm) % sizes.block == 0:
                    found[swarm].append(spent)
    return found


def told(report: Report, sizes: Sizes, found: dict[Swarm, list[Spent]]) -> None:
    """Every swarm's figures beside those of the smallest of its kind, and the checks."""
    for swarm in sizes.swarms:
        first = next(one for one in sizes.swarms if one.members == swarm.members)
        if swarm is first:
            continue
        name = f"{swarm.name} (baseline: {first.publishers})"
        for field, (what, unit) in UNITS.items():
            report.measured(
                f"{name}: {what}", *(_grown(found[one], field, unit, sizes) for one in (swarm, first))
            )
        memory = [[1e-6 * spent.memory for spent in found[one]] for one in (swarm, first)]
        report.measured(f"{name}: memory, MB", *memory)
        whole = [
            sum(sum(_grown(found[one], field, 1.0, sizes)) for field in ("consume", "verify", "commit"))
            for one in (swarm, first)
        ]
        report.check(
            f"{name}: processor time",
            whole[0] <= MOST * whole[1],
            f"{whole[0] / whole[1]:.2f} times the baseline's",
        )
        drawn = [sum(_grown(found[one], "drawn", 1.0, sizes)) for one in (swarm, first)]
        report.check(
            f"{name}: others' groups are learned from", min(drawn) > 0, f"{drawn[0]:g}, {drawn[1]:g}"
        )
        pool = load("starter", env={}).pool
        for what in ("read from the bus, KB a round", "journal's growth, KB a round", "memory, MB"):
            ratio = report.figures[f"{name}: {what}"].ratio
            further = pool.tail / pool.max_groups if what.startswith("read") and not swarm.members else 1.0
            report.check(f"{name}: {what}", ratio <= MOST * further, f"{ratio:.2f} times the baseline's")


def _grown(spent: Sequence[Spent], field: str, unit: float, sizes: Sizes) -> list[float]:
    """What a round added to a figure, block by block."""
    values = [unit * getattr(one, field) for one in spent]
    return [(after - before) / sizes.block for before, after in pairwise(values)]


def measure(report: Report, quick: bool, folder: Path) -> None:
    """All swarms."""
    sizes = QUICK if quick else FULL
    config = configured(sizes)
    with open_workers(config) as workers:
        prepare(config, workers, cache=default_cache())
    told(report, sizes, run(sizes, folder))


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "scale", PACKAGES, measure))
