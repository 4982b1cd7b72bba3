"""A run's swarm: nodes of one process in lock-step, on a bus in memory, by a clock that counts rounds.

Nothing here depends on how fast the machine is: ages are in rounds, and no groups wait for verification
time. The controls of an experiment are in here too, so that a node knows nothing of them.
"""

import math
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from sapo.bus.memory import MemoryBus
from sapo.core.atomic_file import write_first
from sapo.core.config.home import Home
from sapo.core.config.load import Config, LearnConfig
from sapo.core.config.manifest import Manifest
from sapo.core.rng import rng
from sapo.core.types import Batch, Outcome, Received, Recipe, RoundResult, SignedGroup
from sapo.core.user_cache import default_cache
from sapo.learn.collate import select
from sapo.node.parts import open_parts
from sapo.node.round import NodeRuntime
from sapo.peers.sampling import sample_self
from sapo.policy import starter
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import PeerGroup, TaskWorkers, Verification

from .grid import Arm, Limit, identity
from .metrics import known_mean
from .planted import Planter

EPOCH = 1_000_000.0
"""The clock before the first round; a round is a second."""
ALL_DEBTS = 2**62
VERDICTS, ANSWERS = 4096, 32_768
"""How many of peers' groups and of nodes' own answers are remembered, the newest."""
KEPT = (
    *("reward/local", "reward/training_set", "reward/external", "tokens/generated", "sampler/external"),
    *("sampler/shortfall", "sampler/verified", "pool/size", "learn/grad_norm", "learn/entropy"),
    *("learn/logprob_foreign", "learn/token_share_external", "learn/truncated", "learn/foreign_credit"),
    "tokens/answer",
)
"""Series of a node that a record keeps as they are, with those of `FAMILIES`."""
FAMILIES = ("reward/local/", "trait/", "gossip/")
HOSTILE = "share/hostile_tokens"
"""Kept of an arm that is attacked: the share of trained tokens that the attacker wrote."""
WIRE, SPREAD = "wire/bytes", "gossip/spread"
"""Kept where a grid's config has a section `gossip`, of arms that don't gossip too."""


class Clock:
    """Rounds instead of seconds."""

    def __init__(self) -> None:
        self.rounds = 0

    def __call__(self) -> float:
        return EPOCH + self.rounds


class SharedWorkers(TaskWorkers):
    """Task workers of several nodes: a peer's group is judged once for all of them, an answer scored once.

    Nodes answer an exam with the same random numbers again and again, so many answers are the same. What one
    has begun for later, the next would displace; so nothing is begun.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._judged: dict[PeerGroup, Verification] = {}
        self._scored: dict[tuple[Recipe, str], Outcome] = {}

    def score(self, items: Sequence[tuple[Recipe, str]]) -> list[Outcome]:
        """As `TaskWorkers.score`; only what could not be scored is tried again."""
        fresh = [item for item in dict.fromkeys(items) if item not in self._scored]
        found = dict(zip(fresh, super().score(fresh), strict=True)) if fresh else {}
        known = [found[item] if item in found else self._scored[item] for item in items]
        self._scored |= {item: one for item, one in found.items() if one.score is not None}
        _forget(self._scored, ANSWERS)
        return known

    def judge(self, claims: Sequence[PeerGroup]) -> list[Verification]:
        """As `TaskWorkers.judge`; a claim has one verdict, whoever asks."""
        fresh = [claim for claim in claims if claim not in self._judged]
        found = dict(zip(fresh, super().judge(fresh), strict=True)) if fresh else {}
        known = [found[claim] if claim in found else self._judged[claim] for claim in claims]
        self._judged |= found
        _forget(self._judged, VERDICTS)
        return known

    def begin_questions(self, recipes: Sequence[Recipe]) -> None:
        """Nothing: the call that waits for the answer does it all."""

    def begin_score(self, items: Sequence[tuple[Recipe, str]]) -> None:
        """Nothing: the call that waits for the answer does it all."""


def _forget(known: dict[Any, Any], most: int) -> None:
    """Leave the newest."""
    while len(known) > most:
        del known[next(iter(known))]


class Swarm:
    """An arm's nodes. `round` makes one round of all that are within their limits, where there are any."""

    def __init__(
        self,
        config: Config,
        arm: Arm,
        nodes: Sequence[NodeRuntime],
        bus: MemoryBus,
        clock: Clock,
        limits: Sequence[Limit] = (),
        planters: Sequence[Planter] = (),
    ) -> None:
        self._planters = planters
        self.config, self.nodes = config, list(nodes)
        names = [node.name for node in nodes]
        self._limits = dict(zip(names, limits, strict=True)) if limits else {}
        self._trained = dict.fromkeys(names, 0.0)
        """Tokens that each node has learned from."""
        self._arm, self._bus, self._clock = arm, bus, clock
        self._read = any(node.config.batch.external for node in nodes)
        """Whether groups are published: where nobody takes any, none are sent for nothing."""
        self._held: dict[int, list[SignedGroup]] = {}
        """Shuffled groups, by the round in which they are published."""

    def round(self) -> list[dict[str, float | None]]:
        """One round: everybody answers, publishes, then reads, verifies and learns; each node's series.

        A node that is at its limit does nothing any more, and has no values.
        """
        going = [node for node in self.nodes if self._goes_on(node)]
        if self._arm.control == "same_questions":
            self._ask_the_same(going)
        for node in going:
            node.generate()
            node.publish()
        coming = {node.name: self._published(node) for node in going}
        for planter in self._planters:
            coming[planter.name] = planter.groups(self._clock.rounds, self._clock())
        if self._read and self._arm.control in (None, "shuffled"):
            self._publish([signed for groups in coming.values() for signed in groups])
        found = {node.name: self._learn(node, self._past_the_bus(node, coming)) for node in going}
        for name, values in found.items():
            self._trained[name] += values["learn/tokens"] or 0.0
        self._clock.rounds += 1
        if self.config.gossip is not None:
            self._add_gossip(found, coming)
        return [found.get(node.name, {}) for node in self.nodes]

    def _goes_on(self, node: NodeRuntime) -> bool:
        limit = self._limits.get(node.name)
        return limit is None or (node.round < limit.rounds and self._trained[node.name] < limit.tokens)

    def _add_gossip(
        self, found: dict[str, dict[str, float | None]], coming: dict[str, list[SignedGroup]]
    ) -> None:
        """Add `wire/bytes`, what a node sent and took in of groups and files, and `gossip/spread`."""
        sizes = {name: sum(len(one.payload) for one in coming[name]) * self._read for name in coming}
        spread = weights_spread([node.parts.learner.weights() for node in self.nodes])
        for node in self.nodes:
            if (values := found.get(node.name)) is None:
                continue
            others = sum(sizes.values()) - sizes[node.name] if node.config.batch.external else 0
            files = (values.get("gossip/bytes_out") or 0.0) + (values.get("gossip/bytes_in") or 0.0)
            values[WIRE] = float(sizes[node.name] + others) + files
            if spread is not None:
                values[SPREAD] = spread

    def _ask_the_same(self, going: Sequence[NodeRuntime]) -> None:
        """One stream of questions for all nodes, under no author."""
        config = self.config
        questions = QuestionStream(
            self.nodes[0].parts.workers,
            config.tasks,
            (config.swarm.seed, config.swarm.name),
            self._clock.rounds,
            count=config.batch.b,
            held_out=config.rules.held_out,
        )
        questions.result()
        for node in going:
            node.ask(questions)

    def _published(self, node: NodeRuntime) -> list[SignedGroup]:
        """What a node would publish this round."""
        owed = {item.ref for item in node.journal.owed("publish", 2**31)}
        return [signed for signed in node.journal.groups(node.round) if signed.group_id in owed]

    def _publish(self, groups: Sequence[SignedGroup]) -> None:
        """Put groups on the bus, now or later."""
        now, window = self._clock.rounds, self._arm.window or 0
        for signed in groups:
            delay = rng(self.config.swarm.seed, "shuffled", signed.group_id).randint(0, window)
            self._held.setdefault(now + delay, []).append(signed)
        self._bus.publish(self._held.pop(now, []))
        self._bus.trim(self.config.pool.tail)

    def _past_the_bus(self, node: NodeRuntime, coming: dict[str, list[SignedGroup]]) -> list[Received]:
        """What a control puts into a node's pool: admission would take it for copies."""
        chosen: list[SignedGroup] = []
        if self._arm.control == "same_questions":
            chosen = [signed for name, groups in coming.items() if name != node.name for signed in groups]
        if self._arm.control == "echo":
            own = node.journal.groups(node.round)
            stream = rng(self.config.swarm.seed, node.journal.incarnation, node.round, "self")
            local = set(sample_self(len(own), node.config.batch.local, stream))
            chosen = [signed for place, signed in enumerate(own) if place not in local]
        now = self._clock()
        return [Received(signed=signed, bus_position="", timestamp=now) for signed in chosen]

    def _learn(self, node: NodeRuntime, past_the_bus: Sequence[Received]) -> dict[str, float | None]:
        node.consume_sample(past_the_bus)
        node.verify()
        result, batch = node.grpo_update(), node.batch
        assert batch is not None
        if node.parts.gossip is not None and node.parts.announcer is not None:
            if offered := node.journal.owed("gossip", 1):
                node.parts.announcer.deliver(offered, node.journal)
            node.parts.gossip.kept.prune(node.round)  # nothing is repeated here
        for kind in node.journal.owed_counts():
            node.journal.acknowledge(kind, ALL_DEBTS)
        kept = series_of(batch, result)
        if self._planters:
            kept[HOSTILE] = token_share(batch, node.config.learn, {one.key for one in self._planters})
        return kept


def weights_spread(nodes: Sequence[Sequence[torch.Tensor]]) -> float | None:
    """Standard deviation of a weight between nodes: the root of the mean variance over all trained weights.

    None where nodes train weights of other shapes.
    """
    if len({tuple(one.shape for one in weights) for weights in nodes}) > 1:
        return None
    stacks = (torch.stack(same) for same in zip(*nodes, strict=True))
    squares = [float(stack.var(0, correction=0).sum(dtype=torch.float64)) for stack in stacks]
    return math.sqrt(math.fsum(squares) / sum(one.numel() for one in nodes[0]))


def series_of(batch: Batch, result: RoundResult) -> dict[str, float | None]:
    """What a record keeps of a node's round."""
    metrics = result.metrics
    kept: dict[str, float | None] = {name: metrics.get(name) for name in KEPT}
    kept |= {name: value for name, value in metrics.items() if name.startswith(FAMILIES)}
    own = [group for group in batch.groups if group.source == "local"]
    ages = [float(batch.round - g.producer_version) for g in batch.groups if g.source == "external"]
    for task in {group.recipe.dataset for group in own}:
        lengths = [sum(one.loss_mask) for g in own if g.recipe.dataset == task for one in g.samples]
        kept[f"tokens/answer/{task}"] = known_mean([float(length) for length in lengths])
    kept["share/zero_advantage"] = known_mean([float(not group.informative) for group in own])
    kept["staleness/rounds"] = known_mean(ages)
    kept["learn/tokens"] = 0.0 if result.skipped else metrics.get("learn/tokens", 0.0)
    return kept


def token_share(batch: Batch, learn: LearnConfig, keys: Container[str]) -> float:
    """The share of trained tokens that authors with such keys wrote."""
    tokens = {True: 0, False: 0}
    for row in select(batch, learn).rows:
        tokens[batch.groups[row.group].producer_key in keys] += sum(row.loss_mask)
    return tokens[True] / max(1, sum(tokens.values()))


def from_one_start(config: Config, workers: TaskWorkers) -> Config:
    """The config with nodes that have tasks of their own beginning from the starter of the swarm's tasks."""
    nodes = {}
    for number, over in config.node.items():
        whole = config.model_copy(update={"model": over.get("model", config.model)})
        if "tasks" in over and whole.model.startswith("starter"):
            over = over | {"model": str(starter.prepare(whole, workers, cache=default_cache()))}
        nodes[number] = over
    return config.model_copy(update={"node": nodes})


@contextmanager
def opened(
    config: Config,
    arm: Arm,
    folder: Path,
    workers: TaskWorkers,
    limits: Sequence[Limit] = (),
) -> Iterator[Swarm]:
    """An arm's swarm in a home of its own, made in a folder where there is none."""
    home = Home(folder)
    config = from_one_start(config, workers)
    for number, name in enumerate(config.nodes):
        home.make_node(name)
        write_first(home.key(name), identity(config.swarm.seed, number).to_pem())
    home.prepare(config, Manifest.of(config))
    clock = Clock()
    bus = MemoryBus(clock=clock)
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(
                NodeRuntime.open(
                    open_parts(
                        config,
                        name,
                        home,
                        clock=clock,
                        bus=bus,
                        incarnation=f"{config.swarm.seed:08x}{number:08x}",
                        deliver=False,
                        workers=workers,
                        timed=False,
                    )
                )
            )
            for number, name in enumerate(config.nodes)
        ]
        planters = []
        if arm.attack is not None:
            for number in range(arm.attackers):
                key = identity(config.swarm.seed, config.swarm.nodes + number)
                planters.append(Planter(arm.attack, config, key, workers, number))
        yield Swarm(config, arm, nodes, bus, clock, limits, planters)
