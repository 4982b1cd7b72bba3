"""Algorithm 1 of arXiv:2509.08721 with two nodes, in one process: no journal, no services, no network.

    python examples/one_round.py 30

Two nodes of half a million parameters answer questions, publish what they wrote as signed bytes, sample what
the other published, score all of it themselves, and make a GRPO update. A line per node and round goes out:
the mean score of its own answers, and how many foreign groups it learned from. `sapo/node/round.py` is the
same round with what a long run needs beside it: a journal, so that nothing is lost or done twice, bounds on
what peers may send, and a history from which every update can be made again.
"""

import secrets
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from sapo.core.config.load import Config, load
from sapo.core.rng import rng, stream
from sapo.core.types import Batch, Group, Outcome, Received, SignedGroup, canonical
from sapo.core.user_cache import default_cache
from sapo.learn.update import Learner
from sapo.node.batch import batch_group
from sapo.node.scoring import score_groups
from sapo.peers import sampling
from sapo.peers.pool import Entry, Verdict
from sapo.peers.signing import Identity, seal, unseal
from sapo.policy.engines import open_engine
from sapo.policy.initial import load_initial
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import PeerGroup, TaskWorkers, open_workers

SETTINGS = ("swarm.nodes=2", "batch.local=4", "batch.external=4")
Scored = tuple[Group, SignedGroup, tuple[Outcome, ...]]
"""A group as its author wrote it and as it was published, with the receiver's own outcomes."""


@dataclass
class Node:
    """One node: its model, its key, and its pool of what others published."""

    config: Config
    name: str
    workers: TaskWorkers
    pool: dict[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config = self.config
        self.identity, self.incarnation = Identity.new(), secrets.token_hex(8)
        self.policy = load_initial(config, self.workers, default_cache())
        self.engine = open_engine(config, self.policy)
        self.learner = Learner(self.policy.model, config.learn, temperature=config.generate.temperature)

    def generate(self, round: int) -> list[Scored]:
        """SampleBatch: B fresh questions with L answers each; signed, and scored by itself."""
        config = self.config
        author = (config.swarm.seed, config.swarm.name, self.identity.key, self.incarnation)
        size, held_out = config.batch.b, config.rules.held_out
        drawn = QuestionStream(self.workers, config.tasks, author, round, count=size, held_out=held_out)
        questions = drawn.result()
        answers = self.engine.generate(
            [self.policy.encode_prompt(question.text) for question in questions],
            completions=config.batch.completions,
            max_new_tokens=config.generate.max_new_tokens,
            sampling=config.generate.sampling,
            seed=stream(*author, round),
        )
        groups = [
            Group(
                swarm=config.swarm.name,
                node=self.name,
                key=self.identity.key,
                incarnation=self.incarnation,
                round=round,
                position=position,
                recipe=question.recipe,
                question=question.text,
                completions=tuple(completions),
                policy_version=round,
                tokenizer=self.policy.fingerprint,
                created_at=time.time(),
            )
            for position, (question, completions) in enumerate(zip(questions, answers, strict=True))
        ]
        scored = score_groups(self.workers, groups)
        return [(group, seal(group, self.identity), some) for group, some in zip(groups, scored, strict=True)]

    def receive(self, published: Sequence[SignedGroup]) -> None:
        """Put others' groups into the pool; `unseal` raises for one that its key did not sign."""
        for signed in published:
            now = time.time()
            received = Received(signed=signed, bus_position=f"list:{len(self.pool)}", timestamp=now)
            self.pool[signed.group_id] = Entry(received, unseal(signed), now)

    def sample_external(self, round: int, own: Sequence[Scored]) -> list[Scored]:
        """J groups of the pool: a random order, verified along it until J of them are informative."""
        tolerance = self.config.learn.zero_tolerance
        draw = sampling.sample_external(
            sampling.walk([*self.pool.values()], rng(self.name, "external", round)),
            self.config.batch.external,
            self.verify,
            tolerance=tolerance,
            share=sampling.informative_share([[one.score for one in some] for _, _, some in own], tolerance),
        )
        for group_id in draw.leaving:
            del self.pool[group_id]
        return [(one.group, one.received.signed, one.verdict.outcomes) for one in draw.chosen if one.verdict]

    def verify(self, entries: Sequence[Entry]) -> list[Entry]:
        """Make each question again from its recipe and score every answer: nobody's word counts."""
        groups = [entry.group for entry in entries]
        claims = [PeerGroup(g.recipe, g.question, tuple(c.text for c in g.completions)) for g in groups]
        return [
            replace(entry, verdict=Verdict(outcomes=found.outcomes, reason=found.reason))
            for entry, found in zip(entries, self.workers.judge(claims), strict=True)
        ]

    def update(self, round: int, own: Sequence[Scored], foreign: Sequence[Scored]) -> bool:
        """SampleSelf and PolicyGradient: I own and J foreign groups; whether there was a step to make."""
        places = sampling.sample_self(len(own), self.config.batch.local, rng(self.name, "self", round))
        batch = Batch(
            swarm=self.config.swarm.name,
            node=self.name,
            incarnation=self.incarnation,
            round=round,
            policy_version=round,
            learn=canonical(self.config.learn.model_dump(mode="json")),
            guard=canonical(self.config.guard.model_dump(mode="json")),
            temperature=self.config.generate.temperature,
            groups=tuple(
                batch_group(
                    self.policy,
                    self.config.learn,
                    group,
                    signed,
                    outcomes,
                    source="local" if position < len(places) else "external",
                    position=position,
                    age_s=0.0,
                )
                for position, (group, signed, outcomes) in enumerate([*(own[p] for p in places), *foreign])
            ),
        )
        steps = self.learner.step(batch).metrics["learn/steps"]
        self.engine.update_weights()
        return steps > 0


def run(rounds: int) -> Iterator[str]:
    """What becomes of each round, a line each."""
    config = load("tiny", sets=SETTINGS)
    with open_workers(config) as workers:
        nodes = [Node(config.for_node(name), name, workers) for name in config.nodes]
        for round in range(rounds):
            written = [node.generate(round) for node in nodes]
            for node, own in zip(nodes, written, strict=True):
                others = [theirs for theirs in written if theirs is not own]
                node.receive([signed for theirs in others for _, signed, _ in theirs])
                foreign = node.sample_external(round, own)
                stepped = node.update(round, own, foreign)
                reward = statistics.fmean(one.score or 0.0 for _, _, some in own for one in some)
                yield (
                    f"round {round} {node.name}: own reward {reward:.2f}, {len(foreign)} foreign groups"
                    f"{'' if stepped else ', nothing to learn'}"
                )


if __name__ == "__main__":
    for line in run(int(sys.argv[1]) if len(sys.argv) > 1 else 1):
        print(line)
