"""A node's course of rounds on which everything that may come happens, as a process that can be killed.

Peers' groups come at the polls at which they are written down, stamped as written down, and the clock is
counted from round and stage: whenever the node is killed and started again, it meets the same. Deliveries
are made by the deliverer's own lanes between the stages, so that a kill in the middle of one is repeatable.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from makers import make_identity
from swarms import open_node, small_config

from sapo.bus.base import Limits, Poll, Positions
from sapo.bus.poller import Listener
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.types import Completion, Group, Question, Received, SignedGroup
from sapo.node.round import NodeRuntime
from sapo.peers.signing import seal
from sapo.policy import models
from sapo.store.history import open_store
from sapo.store.history.training_sink import TrainingSink
from sapo.store.journal.journal import rounds_made
from sapo.store.journal.outbox import FlushPolicy, PublishSink, Sink, SinkWorker
from sapo.store.tracking.sinks import TrackSink, VersionSink
from sapo.store.tracking.tracker import Tracker
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import TaskWorkers

INCARNATION = "0123456789abcdef"
ROUNDS = 6
START_S, ROUND_S, STAGE_S = 1_000_000.0, 100.0, 10.0
CONFIG = (
    f"swarm.rounds={ROUNDS}",
    "batch.local=2",
    "batch.external=2",
    "batch.completions=4",
    "generate.max_new_tokens=12",
    # gibberish is below its group's mean: only so is it trained on, and rolled back
    "learn.foreign=as_if_own",
    # by time alone: every second round, and where the node is to go back to
    "checkpoint.every_rounds=100",
    f"checkpoint.every_seconds={1.5 * ROUND_S}",
    "track.register_every=5",
    "guard.action=rollback",
    "guard.min_foreign_logprob=-9",
    "pool.max_groups=4",
    "pool.max_peer_share=0.75",
    "pool.newcomer_share=1",
    "pool.newcomer_groups=1",
    f"pool.max_age_s={2.5 * ROUND_S}",
    "eval.probe_questions=4",
    "eval.probe_every=3",
)
GIBBERISH = "zqxj kvwz"


def course_config(ahead: bool = False) -> Config:
    """The config of the course, perhaps with each round sampled beside the update before."""
    return small_config([*CONFIG, f"generate.ahead={int(ahead)}"])


@dataclass
class Clock:
    """Seconds since the epoch, as the course says."""

    now: float = START_S

    def __call__(self) -> float:
        return self.now


@dataclass
class Schedule:
    """A bus that gives at each poll what was written down for it, and takes what is published for real."""

    bus: SqliteBus
    polls: Sequence[Sequence[Received]]

    def publish(self, groups: Sequence[SignedGroup]) -> None:
        self.bus.publish(groups)

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        place = positions.get("schedule", 0)
        came = self.polls[place] if place < len(self.polls) else ()
        return Poll(tuple(came), {"schedule": place + 1})

    def end_positions(self) -> Positions:
        return {"schedule": len(self.polls)}

    def close(self) -> None:
        self.bus.close()


def arrivals(workers: TaskWorkers) -> list[list[Received]]:
    """What comes at each poll: groups to use, a useless one, gibberish that sets off the guard, copies and
    late repetitions of what was used rounds ago, and at last more than the pool takes."""
    config = course_config()
    questions = {
        author: QuestionStream(
            workers,
            config.tasks,
            ("test", make_identity(author).key, INCARNATION),
            0,
            count=8,
            held_out=config.rules.held_out,
        ).result()
        for author in ("n1", "m0", "m1")
    }

    def come(poll: int, author: str, place: int, kind: str = "mixed", says: str | None = None) -> Received:
        question = questions[says or author][place]
        group = Group(
            swarm="test",
            node=author,
            key=make_identity(author).key,
            incarnation=INCARNATION,
            round=place,
            position=0,
            recipe=question.recipe,
            question=question.text,
            completions=tuple(_completions(question, kind)),
            policy_version=0,
            created_at=START_S,
        )
        at = START_S + ROUND_S * poll - 5.0 - place
        return Received(
            signed=seal(group, make_identity(author)), bus_position=f"b:{100 * poll + place}", timestamp=at
        )

    first = [come(0, "n1", 0), come(0, "n1", 1), come(0, "m0", 0, "wrong"), come(0, "m0", 1)]
    return [
        [*first, first[0]],
        [],
        [come(2, "m1", 0), come(2, "m0", 2, "wrong")],
        [come(3, "n1", 2, "gibberish"), come(3, "m0", 3, "gibberish")],
        # four are known: sent again, and said again by somebody else; one of the others is left over
        [come(4, "n1", 0), come(4, "n1", 1), come(4, "m0", 1), come(4, "m1", 1, says="n1")]
        + [come(4, "m0", place) for place in (4, 5, 6)],
        [come(5, "n1", place) for place in (4, 5, 6)] + [come(5, author, 7) for author in ("m0", "m1", "n1")],
    ]


def _completions(question: Question, kind: str) -> Iterator[Completion]:
    numbers = re.search(r"(\d+) ([+-]) (\d+)", question.text)
    assert numbers is not None
    a, sign, b = numbers.groups()
    right = int(a) + int(b) if sign == "+" else int(a) - int(b)
    for k in range(4):
        text = str(right if k == 0 and kind != "wrong" else right + 100 + k)
        if kind == "gibberish" and k:
            text = GIBBERISH * k
        yield Completion(text=text, finish_reason="stop")


@dataclass
class Course:
    """One process's way along the course, from wherever the home stands to its end."""

    home: Home
    polls: Sequence[Sequence[Received]]
    versions: bool = False
    """Whether model versions are registered too, which takes longer than all the rest."""
    ahead: bool = False
    clock: Clock = field(default_factory=Clock)

    def run(self) -> None:
        """Open the node and go on with it until it has finished and everything is delivered."""
        self.clock.now = START_S + ROUND_S * self._done()
        with self._opened() as (node, lanes):
            while not node.finished:
                begun = START_S + ROUND_S * node.round
                stages: list[Callable[[], object]]
                stages = [lambda: publish(node), node.consume_sample, node.verify, node.grpo_update]
                for number, stage in enumerate(stages):
                    self.clock.now = begun + STAGE_S * number
                    self._deliver(node, lanes[: 1 if number % 2 else None])
                    stage()
            self._deliver(node, lanes)

    @contextmanager
    def _opened(self) -> Iterator[tuple[NodeRuntime, list[SinkWorker]]]:
        config = course_config(self.ahead)
        bus = Schedule(SqliteBus(self.home.bus, clock=self.clock), self.polls)
        with open_node(
            config, self.home, clock=self.clock, bus=bus, incarnation=INCARNATION, deliver=False
        ) as node:
            node.parts.intake.listener = Listener(bus, patience_s=60.0)  # a busy machine is no outage
            tracker = Tracker(
                f"sqlite:///{self.home.mlflow_db}", "test", "n0", INCARNATION, artifacts=self.home.artifacts
            )
            history = TrainingSink(open_store(config, self.home), "test", "n0", INCARNATION)
            sinks: list[Sink] = [PublishSink(bus), history, TrackSink(tracker)]
            sinks += (
                [VersionSink(tracker, partial(models.export, config=config, cache=self.home.root))]
                if self.versions
                else []
            )
            rng = random.Random(0)
            yield node, [SinkWorker(sink, FlushPolicy(items=3), clock=self.clock, rng=rng) for sink in sinks]

    def _deliver(self, node: NodeRuntime, lanes: Sequence[SinkWorker]) -> None:
        for lane in lanes:
            while lane.step(node.journal) is not None:
                assert lane.state.down_since is None, lane.sink.kind

    def _done(self) -> int:
        return rounds_made(self.home.journal("n0"))


def publish(node: NodeRuntime) -> None:
    """The first two stages of a round."""
    node.generate()
    node.publish()
