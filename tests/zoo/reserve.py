"""Two honest nodes on a real bus, and rounds in which a hostile peer publishes before they do."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from animals import Animal, Grounds, Peer, Sight
from makers import make_identity
from swarms import hand_over, make_home, make_starter, open_node, small_config

from sapo.bus.base import Bus
from sapo.bus.sqlite import SqliteBus
from sapo.core.atomic_file import write_first
from sapo.core.config.home import Home
from sapo.core.rng import rng
from sapo.core.types import Batch, BatchGroup, Group, Outcome, Question, Recipe, RoundResult, SignedGroup
from sapo.core.user_cache import default_cache
from sapo.node.round import NodeRuntime
from sapo.peers.rejections import Refusals
from sapo.peers.signing import Identity
from sapo.policy import starter
from sapo.store.history.tables import Store
from sapo.tasks.workers import TaskWorkers, open_workers

CHAIN_SUM = '{dataset="chain_sum", config={min_terms=2, max_terms=2, min_digits=1, max_digits=2}}'
SETTINGS = (
    "swarm.nodes=4",
    "swarm.rounds=10000",
    "checkpoint.every_rounds=10000",
    "pool.newcomer_groups=4",
    "batch.external=9",
    "pool.max_groups=64",
    "rules.max_payload_bytes=200_000",
    "generate.max_new_tokens=512",
    "learn.lr=0",  # what one animal meets does not depend on who came before it
    # nobody runs n3: it is there so that the manifest has data sets whose scorers evaluate or are slow
    f'node.3.tasks=[{CHAIN_SUM}, {{dataset="binary_matrix"}}, {{dataset="intermediate_integration"}}]',
)
MARKED = frozenset({"rambler", "planter", "miscounter", "dawdler"})
"""Animals that have nothing to do where the whole text is the answer."""
REST_S = 100.0
"""Seconds of own work that stand for the time between two animals' visits."""
WARM = 8
"""Rounds after which the honest nodes know each other."""


def marked() -> tuple[str, ...]:
    """Settings of a swarm in which text outside the mark of an answer is free, and questions are drawn.

    Its nodes have the starter that gives bare answers, none of which is right there: to make one that gives
    marks would take a minute.
    """
    make_starter()
    model = starter.location(small_config(), cache=default_cache())
    return ("rules.answer=tags", "rules.questions=drawn", f"model={model}")


@dataclass
class Passage:
    """What some rounds with a hostile peer left behind, over all nodes."""

    peer: Peer
    hostile: list[SignedGroup] = field(default_factory=list)
    honest: list[SignedGroup] = field(default_factory=list)
    results: list[RoundResult] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    entered: dict[str, set[str]] = field(default_factory=dict)
    """By node: the groups that came into its pool."""
    owed: list[dict[str, Any]] = field(default_factory=list)
    """Rows of `quarantine` that the nodes wrote."""

    @property
    def metrics(self) -> Counter[str]:
        """Sums of all series over rounds and nodes."""
        total: Counter[str] = Counter()
        for result in self.results:
            total.update(result.metrics)
        return total

    def refused(self, code: str) -> int:
        """Records refused for this reason."""
        return round(self.metrics[f"pool/refused/{code}"])

    def refused_of(self, key: str) -> int:
        """Records refused of this author."""
        return round(self.metrics[f"peers/refused/{key[:12]}"])

    def trained(self, keys: set[str]) -> list[BatchGroup]:
        """Groups of these authors in batches of others."""
        return [
            group
            for batch in self.batches
            for group in batch.groups
            if group.source == "external" and group.producer_key in keys
        ]

    def quarantined(self, key: str | None = None) -> set[str]:
        """Reasons in `quarantine`, of one author or of all."""
        return {row["reason"] for row in self.owed if key is None or row["key"] == key}


class Reserve:
    """Nodes n0 and n1, a bus of one file, and all that honest nodes published on it."""

    def __init__(
        self, home: Home, nodes: Sequence[NodeRuntime], bus: Bus, workers: TaskWorkers, grounds: Grounds
    ) -> None:
        self.workers = workers
        self.home, self.nodes, self.bus, self.grounds = home, list(nodes), bus, grounds
        self.seen: list[SignedGroup] = []

    def others(self, passage: "Passage", node: NodeRuntime) -> set[str]:
        """The honest groups that a node must not miss: those of others, unless they spell a control token."""
        taken = node.parts.policy.has_control_tokens
        groups = [Group.model_validate_json(signed.payload) for signed in passage.honest]
        return {
            group.group_id
            for group in groups
            if group.key != node.parts.intake.admission.key
            and not any(taken(c.text) for c in group.completions)
        }

    @property
    def honest(self) -> set[str]:
        """Keys of the honest nodes."""
        return {node.parts.intake.admission.key for node in self.nodes}

    def peer(self, name: str) -> Peer:
        """A hostile peer that nobody has heard of."""
        return Peer(Identity.new(), f"x-{name.replace(' ', '-')}", self.grounds, rng("zoo", name), time.time)

    def introduce(self) -> None:
        """Have the honest nodes know each other, as they would after rounds in which they were right."""
        for node in self.nodes:
            for key in sorted(self.honest) * node.config.pool.newcomer_groups:
                node.parts.intake.quotas.judged(key, 0.0, True)

    def rounds(self, count: int, animal: Animal | None = None, peer: Peer | None = None) -> Passage:
        """`count` rounds of every node; the animal knows what they will publish and is first."""
        passage = Passage(peer or self.peer("nobody"))
        first = {node.name: node.round for node in self.nodes}
        for node in self.nodes:
            # what the last one left behind would be judged in this one's place, on the time it used up,
            # and so many samples of its refusals were kept that none of this one's would be
            node.parts.intake.pool.remove([entry.group_id for entry in node.parts.intake.pool.entries()])
            node.parts.intake.quotas.earn(REST_S)
            node.parts.intake.refusals = node.parts.verifier.refusals = Refusals(node.parts.clock)
        for _ in range(count):
            coming = [signed for node in self.nodes for signed in self._prepare(node)]
            if animal is not None:
                sent = animal(passage.peer, Sight(self.seen, coming))
                self.bus.publish(sent)
                passage.hostile += sent
            for node in self.nodes:
                hand_over(node, self.bus)
            self.seen += coming
            passage.honest += coming
            for node in self.nodes:
                node.consume_sample()
                node.verify()
                passage.results.append(node.grpo_update())
        for node in self.nodes:
            span = range(first[node.name], node.round)
            passage.batches += [node.journal.batch(round) for round in span]
            moved = [move for round in span for move in node.journal.movements(round)]
            passage.entered[node.name] = {move.group_id for move in moved if move.event == "received"}
        passage.owed = [row for row in self._quarantine() if row["round"] >= first[row["node"]]]
        return passage

    def questions(self, recipes: Sequence[Recipe]) -> list[Question | Outcome]:
        """The questions as a worker of the test's own gives them."""
        return self.workers.questions(recipes)

    def scores(self, recipe: Recipe, texts: Sequence[str]) -> list[float | None]:
        """What a worker of the test's own scores: literal reading, nobody else's word."""
        return [outcome.score for outcome in self.workers.score([(recipe, text) for text in texts])]

    def _prepare(self, node: NodeRuntime) -> list[SignedGroup]:
        ids = node.generate()
        node.publish()
        signed = {group.group_id: group for group in node.journal.groups(node.round)}
        return [signed[group_id] for group_id in ids]

    def _quarantine(self) -> list[dict[str, Any]]:
        """The nodes' rows of the table, after they have delivered what they owe it."""
        for node in self.nodes:
            owed = node.journal.owed("training", 10_000)
            if owed:
                node.parts.history.deliver(owed, node.journal)
                node.journal.acknowledge("training", owed[-1].seq)
        table = Store(str(self.home.root / "history")).open("quarantine")
        rows: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
        return rows


@contextmanager
def opened(path: Path, sets: Sequence[str] = (), bus: Bus | None = None) -> Iterator[Reserve]:
    """A reserve in a home of its own; `bus` is one file there unless given."""
    config = small_config([*SETTINGS, *sets])
    home = make_home(path / "home", config)
    own = bus or SqliteBus(path / "bus.sqlite")
    for name in config.nodes[:2]:  # both kinds of reserve are open at once, and a key runs in one place
        home.make_node(name)
        write_first(home.key(name), make_identity(f"{config.rules.answer} {name}").to_pem())
    with ExitStack() as stack:
        nodes = [
            stack.enter_context(open_node(config, home, name, bus=own, deliver=False))
            for name in config.nodes[:2]
        ]
        workers = stack.enter_context(open_workers(config))
        policy = nodes[0].parts.policy
        grounds = Grounds(
            config,
            workers,
            control=policy.control[0],
            tokenizer=policy.fingerprint,
            vocabulary=policy.vocabulary,
        )
        yield Reserve(home, nodes, own, workers, grounds)
