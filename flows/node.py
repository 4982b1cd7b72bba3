"""Flow `node`: Algorithm 1 as Prefect tasks. One flow run is a bounded number of rounds of one node.

The model lives in the process's `NodeRuntime`. What goes through Prefect are ids and counts: the
runtime reaches the tasks through a context variable, because an argument would be copied and recorded.
"""

import gc
import logging
import math
import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated

from prefect import State, flow, get_run_logger, task
from prefect.artifacts import create_link_artifact, create_markdown_artifact
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.runtime import flow_run
from prefect.states import Completed
from pydantic import Field

from sapo.core.child_process import stopping_on_signals
from sapo.core.errors import Paused, SapoError
from sapo.core.types import RoundResult
from sapo.node.member.runtime import MemberRuntime
from sapo.node.round import NodeRuntime
from sapo.node.tracked import open_tracked
from sapo.ops.process import Process
from sapo.ops.process_group import OWING, PAUSED
from sapo.store.journal.journal import rounds_made

from . import deployed
from .common import NETWORK, SMALL, here, parser, run_process
from .deployed import HomePath, NodeName
from .orchestrator import Orchestrator, at_work, count_tasks

log = logging.getLogger(__name__)

PUBLISH_WAIT_S = 5.0
PLAIN_SECONDS = 5.0
"""How long rounds go on without Prefect before it is looked for again."""
STOP_DRAIN_S = 2.0
LAST_DRAIN_S, LONGEST_DRAIN_S = 60.0, 600.0
"""How long a node that ends goes on to deliver while deliveries fail, and while none does."""
TASKS, MEMBER_TASKS = 5, 2
"""Of a round, and of one of a member that only answers."""
TABLE_ROWS = 50
COLUMNS = (
    ("reward/local", ".3f"),
    ("reward/training_set", ".3f"),
    ("eval/pass_at_1", ".3f"),
    ("pool/size", ".0f"),
    ("share/external", ".0%"),
    ("tokens/per_second", ",.0f"),
    ("learn/loss", ".4f"),
    ("time/round", ".2f"),
)


@dataclass
class Session:
    """A node at work in this process, and what its flow runs have to tell."""

    process: Process
    runtime: NodeRuntime | MemberRuntime
    results: list[RoundResult] = field(default_factory=list)
    first: int = 0
    end: int = 0
    """The flow run at hand: its first round, and the one after its last."""
    until: float = math.inf
    """When it begins no further round."""

    def take_up(self, rounds: int) -> "Session":
        """Begin so many rounds, which are to be one flow run."""
        self.first, self.end, self.results = self.runtime.round, self.runtime.round + rounds, []
        return self

    def over(self) -> bool:
        """Whether no further round is to be begun."""
        return self.runtime.finished or self.process.stopping() or time.monotonic() > self.until

    def plain_round(self) -> None:
        """One round without tasks."""
        with self.process.own():
            self.results.append(self.runtime.run_round())

    def go_on(self) -> bool:
        """A round without tasks while Prefect is slow to begin a flow run; whether there are more."""
        if not self.over():
            self.plain_round()
        return not self.over()


SESSION: ContextVar[Session] = ContextVar("session")


@task(name="generate", task_run_name="{node} · round {round} · generate", **SMALL)
def generate(node: str, round: int) -> list[str]:
    """Ask fresh questions and answer them; returns the ids of the groups."""
    session = SESSION.get()
    with session.process.own():
        return list(session.runtime.generate())


@task(name="publish", task_run_name="{node} · round {round} · publish", **NETWORK)
def publish(node: str, round: int) -> int:
    """Wait until the bus has the round's groups, which are journalled; returns how many it got.

    Runs beside the rest of the round. What the bus does not take now stays owed and is delivered later: 0.
    """
    session = SESSION.get()
    journal = session.runtime.journal
    owed = len([item for item in journal.owed("publish", 10_000) if item.round == round])
    deadline = time.monotonic() + PUBLISH_WAIT_S
    while any(item.round <= round for item in journal.owed("publish", 1)) and not session.process.stopping():
        if time.monotonic() > deadline or "outage/bus" in session.runtime.outages():
            return 0  # the deliverer tries again, and has said so
        time.sleep(0.02)
    return owed


@task(name="consume_sample", task_run_name="{node} · round {round} · consume_sample", **NETWORK)
def consume_sample(node: str, round: int) -> int:
    """Read what others published and draw the order in which it is verified; returns the size of the pool."""
    session = SESSION.get()
    with session.process.own():
        return int(learning(session).consume_sample())


@task(name="verify", task_run_name="{node} · round {round} · verify", **SMALL)
def verify(node: str, round: int) -> int:
    """Verify foreign groups until enough are informative; returns how many groups the round learns from."""
    session = SESSION.get()
    with session.process.own():
        return int(learning(session).verify())


@task(name="grpo_update", task_run_name="{node} · round {round} · grpo_update", **SMALL)
def grpo_update(node: str, round: int) -> dict[str, float]:
    """Advantages and one policy gradient step; returns the round's rewards."""
    session = SESSION.get()
    with session.process.own():
        result = learning(session).grpo_update()
    session.results.append(result)
    return {name: value for name, value in result.metrics.items() if name.startswith("reward/")}


def learning(session: Session) -> NodeRuntime:
    """The node of a session that learns; a member has no such stages."""
    assert isinstance(session.runtime, NodeRuntime)
    return session.runtime


def orchestrated_round(node: str, round: int) -> PrefectFuture[int]:
    """One round as tasks; returns the publishing that may still be under way."""
    session = SESSION.get()
    count_tasks(MEMBER_TASKS if isinstance(session.runtime, MemberRuntime) else TASKS)
    generate(node, round)
    with session.process.own():
        session.runtime.publish()
    published = publish.submit(node, round)
    if isinstance(session.runtime, MemberRuntime):
        with session.process.own():
            session.results.append(session.runtime.finish())
        return published
    consume_sample(node, round)
    verify(node, round)
    grpo_update(node, round)
    return published


def _has_ended(future: PrefectFuture[int]) -> bool:
    """Whether a task has ended; `future.state` would ask the server, which may hang."""
    return isinstance(future, PrefectConcurrentFuture) and future.wrapped_future.done()


def _run_name() -> str:
    """`n2 · rounds 0-49`; the node alone where home or node are wrong, which the run itself will say."""
    parameters = flow_run.parameters
    node, rounds = parameters["node"], parameters["rounds"]
    session = SESSION.get(None)
    try:
        process = here(parameters["home"])
        # rounds may have been made since Prefect was asked for the run
        first = session.take_up(rounds).first if session else rounds_made(process.home.journal(node))
        last = min(first + rounds, process.config.for_node(node).swarm.rounds) - 1
    except SapoError:
        return str(node)
    return f"{node} · rounds {first}-{last}" if last >= first else f"{node} · finished"


@flow(name="node", flow_run_name=_run_name, persist_result=False, validate_parameters=False)
def node_flow(
    home: HomePath,
    node: NodeName,
    rounds: Annotated[int, Field(ge=1)] = 50,
    seconds: Annotated[float, Field(gt=0)] = 3600.0,
) -> int | State[int]:
    """The next rounds of a node; returns how many were made.

    It works on the node that this process has open, or opens it, so that a deployment can run it as it is.

    Args:
        home: The site's home, a folder where the worker runs.
        node: The node's name, such as n0.
        rounds: How many rounds to make, at most.
        seconds: A deployment's run begins no further round after so many.
    """
    session = SESSION.get(None)
    if session is not None:
        return _flow_rounds(session, node)
    process = deployed.by_worker(home)
    if process.home.stop_flag.exists():
        return Completed(message="asked to stop by `sapo stop`; `sapo deploy` lets it go on")
    if deployed.nothing_left(process, node):
        deployed.tell_progress(process, node, 0)
        return Completed(
            message=f"{node} has made all its rounds; a greater swarm.rounds or swarm.seconds lets it go on"
        )
    uri = process.tracking_uri()
    with open_tracked(process.config, node, process.home, uri=uri, stop=process.stop) as runtime:
        session = Session(process, runtime, until=time.monotonic() + seconds).take_up(rounds)
        token = SESSION.set(session)
        try:
            return _deployed_rounds(session, node)
        finally:
            SESSION.reset(token)


def _deployed_rounds(session: Session, node: str) -> int:
    def done() -> float:
        return (session.runtime.round - session.first) / max(1, session.end - session.first)

    def moved() -> None:
        deployed.tell_progress(session.process, node, session.runtime.round - session.first)

    key, what = f"{_key(node)}-progress", f"Rounds of this run of {node}"
    try:
        with deployed.progress_shown(key, what, done, moved):
            made = _flow_rounds(session, node)
    except Paused:
        try:
            _deliver(session, node)  # a person who looks for the reason finds the rounds of the alarm
        finally:
            if not session.process.stopping():  # a member that is stopped while it waits goes on by itself
                deployed.pause_schedule()
        raise
    _deliver(session, node)
    deployed.tell_progress(session.process, node, made)
    for text, link in deployed.links(session.process, node):
        what = text.split()[0].lower()
        create_link_artifact(link, text, key=f"{_key(node)}-{what}", description=f"{text} of {node}")
    return made


def _deliver(session: Session, node: str) -> None:
    if not deliver_the_rest(session):
        log.warning("%s still owes %s; its next run delivers it", node, session.runtime.journal.owed_counts())


def _key(node: str) -> str:
    return f"node-{node}".lower()


def _flow_rounds(session: Session, node: str) -> int:
    published: list[PrefectFuture[int]] = []
    results = session.results
    if flow_run.id:
        get_run_logger().info("%s", what_is_shown(session, node))
    made = at_work(lambda: _rounds(session, node, published))
    for future in published:
        future.wait(PUBLISH_WAIT_S)
    table = progress_table(results)
    create_markdown_artifact(table, key=_key(node), description=f"Progress of {node}")
    return made


def what_is_shown(session: Session, node: str) -> str:
    """What a flow run's page shows of its rounds, for those who look at it."""
    config = session.runtime.config
    every, last = config.flow.every, min(session.end, config.swarm.rounds) - 1
    text = f"Rounds {session.first} to {last} of {node}; artifact {_key(node)} has a table of them"
    if every == 1:
        return text
    why = "recording the tasks of a round costs more than a small model's round"
    return f"{text}. Tasks are shown of one round in {every} (flow.every = {every}): {why}"


def _rounds(session: Session, node: str, published: list[PrefectFuture[int]]) -> int:
    """The flow run's rounds, or fewer where the work is over; `published` takes what may be under way."""
    runtime = session.runtime
    every = runtime.config.flow.every
    # inside a flow run Prefect answers SIGTERM by raising, in the middle of whatever is being done
    with stopping_on_signals(session.process.stop):
        while runtime.round < session.end and not session.over():
            if runtime.round % every == 0:
                published[:] = [future for future in published if not _has_ended(future)]
                published.append(orchestrated_round(node, runtime.round))
            else:
                session.plain_round()
    return runtime.round - session.first


def progress_table(results: list[RoundResult]) -> str:
    """The rounds of a flow run as a Markdown table; long runs are thinned to `TABLE_ROWS` rows."""
    step = max(1, -(-len(results) // TABLE_ROWS))
    shown = [result for place, result in enumerate(results) if place % step == 0 or result is results[-1]]
    head = ["round", *(name for name, _ in COLUMNS), "note"]
    lines = [f"| {' | '.join(head)} |", f"|{'---:|' * (len(head) - 1)}---|"]
    for result in shown:
        cells = [
            format(result.metrics[name], form) if name in result.metrics else "" for name, form in COLUMNS
        ]
        lines.append(f"| {' | '.join([str(result.round), *cells, result.skipped or ''])} |")
    return "\n".join(lines)


def plain_rounds(session: Session) -> int:
    """Rounds without Prefect, for as long as it is away at a time."""
    until = time.monotonic() + PLAIN_SECONDS
    while session.runtime.round < session.end and time.monotonic() < until and not session.over():
        session.plain_round()
    return session.runtime.round - session.first


def work(process: Process, orchestrator: Orchestrator, name: str) -> int:
    """Run a node in this process until it has finished or is asked to stop."""
    uri = process.tracking_uri()
    with open_tracked(process.config, name, process.home, uri=uri, stop=process.stop) as runtime:
        session = Session(process, runtime)
        SESSION.set(session)
        runtime.beside = orchestrator.metrics
        gc.freeze()  # a node lasts as long as its process: the collector need not go over it again and again
        rounds, paused = runtime.config.flow.rounds_per_run, False
        while not session.over() and not paused:
            session.take_up(rounds)
            try:
                orchestrator.run(
                    lambda: node_flow(str(process.home.root), name, rounds),
                    lambda: plain_rounds(session),
                    session.go_on,
                )
            except Paused as error:
                log.warning("%s", error)
                paused = True
        delivered, owed = deliver_the_rest(session), runtime.journal.owed_counts()
        why = runtime.deliverer.why_owing()
        finished = runtime.finished and not process.stopping()
    if not delivered:
        what = ", ".join(f"{count} {kind}" for kind, count in owed.items())
        cause = f" ({why})" if why else ""
        log.warning("%s still owes %s%s; `sapo swarm --resume` delivers it", name, what, cause)
        if finished:
            return OWING
    return PAUSED if paused and not process.stopping() else 0


def deliver_the_rest(session: Session) -> bool:
    """Deliver what is owed, briefly if a caller waits for the end or deliveries fail; whether nothing is owed
    any more."""
    deliverer, began = session.runtime.deliverer, time.monotonic()
    until = began + LAST_DRAIN_S
    while not session.process.stopping() and time.monotonic() < until:
        if session.runtime.drain(1.0):
            return True
        if not deliverer.why_owing():  # the version of a large model takes its time
            until = min(time.monotonic(), began + LONGEST_DRAIN_S) + LAST_DRAIN_S
    return session.runtime.drain(STOP_DRAIN_S)


def main() -> None:
    """The process of one node."""
    arguments = parser("node")
    arguments.add_argument("--node", required=True, help="n0, n1, ...")
    given = arguments.parse_args()
    run_process(lambda process, orchestrator: work(process, orchestrator, given.node), given.home)


if __name__ == "__main__":
    main()
