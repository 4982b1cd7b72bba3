"""Flow `node`: Algorithm 1 as Prefect tasks. One flow run is a bounded number of rounds of one node.

The model lives in the process's `NodeRuntime`. What goes through Prefect are ids and counts (TRAPS 42): the
runtime reaches the tasks through a context variable, because an argument would be copied and recorded.
"""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass, field

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.futures import PrefectConcurrentFuture, PrefectFuture
from prefect.runtime import flow_run

from flows.common import NETWORK, SMALL, Process, here, parser, run_process
from flows.orchestrator import Orchestrator, at_work, count_tasks
from sapo.crew import OWING, PAUSED
from sapo.errors import Paused
from sapo.journal import Journal
from sapo.node import NodeRuntime
from sapo.processes import stopping_on_signals
from sapo.records import RoundResult
from sapo.tracked import open_tracked

log = logging.getLogger(__name__)

PUBLISH_WAIT_S = 5.0
PLAIN_SECONDS = 5.0
"""How long rounds go on without Prefect before it is looked for again."""
STOP_DRAIN_S = 2.0
LAST_DRAIN_S = 60.0
"""How long a finished node waits for a service that is away, to give it what is owed."""
TASKS = 5
"""Of a round."""
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
    runtime: NodeRuntime
    results: list[RoundResult] = field(default_factory=list)

    def over(self) -> bool:
        """Whether no further round is to be begun."""
        return self.runtime.finished or self.process.stopping()

    def plain_round(self) -> None:
        """One round without tasks."""
        with self.process.own():
            self.results.append(self.runtime.run_round())


SESSION: ContextVar[Session] = ContextVar("session")


@task(name="generate", task_run_name="{node} · round {round} · generate", **SMALL)
def generate(node: str, round: int) -> list[str]:
    """Ask fresh questions and answer them; returns the ids of the groups."""
    session = SESSION.get()
    with session.process.own():
        return list(session.runtime.generate())


@task(name="publish", task_run_name="{node} · round {round} · publish", **NETWORK)
def publish(node: str, round: int) -> int:
    """Hand the round's groups to the deliverer and wait until the bus has them; returns how many it got.

    Runs beside the rest of the round. What the bus does not take now stays owed and is delivered later: 0.
    """
    session = SESSION.get()
    journal = session.runtime.journal
    owed = len([item for item in journal.owed("publish", 10_000) if item.round == round])
    session.runtime.publish()
    deadline = time.monotonic() + PUBLISH_WAIT_S
    while any(item.round <= round for item in journal.owed("publish", 1)) and not session.process.stopping():
        if time.monotonic() > deadline or "outage/bus" in session.runtime.outages():
            return 0  # the deliverer tries again, and has said so
        time.sleep(0.02)
    return owed


@task(name="consume_sample", task_run_name="{node} · round {round} · consume_sample", **NETWORK)
def consume_sample(node: str, round: int) -> int:
    """Read what others published; returns the size of the pool."""
    session = SESSION.get()
    with session.process.own():
        return int(session.runtime.consume_sample())


@task(name="verify", task_run_name="{node} · round {round} · verify", **SMALL)
def verify(node: str, round: int) -> int:
    """Draw foreign groups, verify, and commit the batch; returns its number of groups."""
    session = SESSION.get()
    with session.process.own():
        return int(session.runtime.verify())


@task(name="grpo_update", task_run_name="{node} · round {round} · grpo_update", **SMALL)
def grpo_update(node: str, round: int) -> dict[str, float]:
    """One policy gradient step; returns the round's rewards."""
    session = SESSION.get()
    with session.process.own():
        result = session.runtime.grpo_update()
    session.results.append(result)
    return {name: value for name, value in result.metrics.items() if name.startswith("reward/")}


def orchestrated_round(node: str, round: int) -> PrefectFuture[int]:
    """One round as tasks; returns the publishing that may still be under way."""
    count_tasks(TASKS)
    generate(node, round)
    published = publish.submit(node, round)
    consume_sample(node, round)
    verify(node, round)
    grpo_update(node, round)
    return published


def _has_ended(future: PrefectFuture[int]) -> bool:
    """Whether a task has ended; `future.state` would ask the server, which may hang."""
    return isinstance(future, PrefectConcurrentFuture) and future.wrapped_future.done()


def _run_name() -> str:
    """`n2 · rounds 0-49`."""
    parameters = flow_run.parameters
    home, node, rounds = here(parameters["home"]).home, parameters["node"], parameters["rounds"]
    first = 0
    if home.journal(node).exists():
        with Journal.read_only(home.journal(node)) as journal:
            stage = journal.stage()
        first = 0 if stage is None else stage[0] + (stage[1] == "result")
    last = min(first + rounds, home.load_config().for_node(node).swarm.rounds) - 1
    return f"{node} · rounds {first}-{last}"


@flow(name="node", flow_run_name=_run_name, persist_result=False, validate_parameters=False)
def node_flow(home: str, node: str, rounds: int) -> int:
    """The next `rounds` rounds of a node; returns how many were made.

    It works on the node that this process has open, or opens it, so that a deployment can run it as it is.
    """
    session = SESSION.get(None)
    if session is not None:
        return _flow_rounds(session, node, rounds)
    process = here(home)
    with open_tracked(process.config, node, process.home, uri=process.tracking_uri()) as runtime:
        token = SESSION.set(Session(process, runtime))
        try:
            made = _flow_rounds(SESSION.get(), node, rounds)
            deliver_the_rest(SESSION.get())
            return made
        finally:
            SESSION.reset(token)


def _flow_rounds(session: Session, node: str, rounds: int) -> int:
    """The rounds of a flow run, and then its last words to Prefect."""
    published: list[PrefectFuture[int]] = []
    results = session.results = []
    made = at_work(lambda: _rounds(session, node, rounds, published))
    table = progress_table(results[:made])
    for future in published:
        future.wait(PUBLISH_WAIT_S)
    create_markdown_artifact(table, key=f"node-{node}".lower(), description=f"Progress of {node}")
    return made


def _rounds(session: Session, node: str, rounds: int, published: list[PrefectFuture[int]]) -> int:
    """So many rounds, or fewer where the work is over; `published` takes what may still be under way."""
    runtime, first = session.runtime, session.runtime.round
    every = runtime.config.flow.every
    # inside a flow run Prefect answers SIGTERM by raising, in the middle of whatever is being done
    with stopping_on_signals(session.process.stop):
        while runtime.round < first + rounds and not session.over():
            if runtime.round % every == 0:
                published[:] = [future for future in published if not _has_ended(future)]
                published.append(orchestrated_round(node, runtime.round))
            else:
                session.plain_round()
    return runtime.round - first


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


def plain_rounds(session: Session, rounds: int) -> int:
    """Rounds without Prefect, for as long as it is away at a time."""
    session.results = []
    first, until = session.runtime.round, time.monotonic() + PLAIN_SECONDS
    while session.runtime.round < first + rounds and time.monotonic() < until and not session.over():
        session.plain_round()
    return session.runtime.round - first


def work(process: Process, orchestrator: Orchestrator, name: str) -> int:
    """Run a node in this process until it has finished or is asked to stop."""
    with open_tracked(process.config, name, process.home, uri=process.tracking_uri()) as runtime:
        session = Session(process, runtime)
        SESSION.set(session)
        runtime.parts.beside = orchestrator.metrics
        rounds, paused = runtime.config.flow.rounds_per_run, False
        while not session.over() and not paused:
            try:
                orchestrator.run(
                    lambda: node_flow(str(process.home.root), name, rounds),
                    lambda: plain_rounds(session, rounds),
                )
            except Paused as error:
                log.warning("%s", error)
                paused = True
        delivered, owed = deliver_the_rest(session), runtime.journal.owed_counts()
        finished = runtime.finished and not process.stopping()
    if not delivered:
        what = ", ".join(f"{count} {kind}" for kind, count in owed.items())
        log.warning("%s still owes %s; `sapo swarm --resume` delivers it", name, what)
        if finished:
            return OWING
    return PAUSED if paused else 0


def deliver_the_rest(session: Session) -> bool:
    """Deliver what is owed, briefly when somebody waits for the end; whether nothing is owed any more."""
    until = time.monotonic() + LAST_DRAIN_S
    while not session.process.stopping() and time.monotonic() < until:
        if session.runtime.drain(1.0):
            return True
    return session.runtime.drain(STOP_DRAIN_S)


def main() -> None:
    """The process of one node."""
    arguments = parser("node")
    arguments.add_argument("--node", required=True, help="n0, n1, ...")
    given = arguments.parse_args()
    run_process(lambda process, orchestrator: work(process, orchestrator, given.node), given.home)


if __name__ == "__main__":
    main()
