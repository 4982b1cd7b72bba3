"""Flow `swarm`: nodes beside the archive, a last archive pass, the evaluation.

Nodes, archive and evaluation are processes of their own with flow runs of their own; the tasks here keep them
going (`sapo.ops.process_group`), and last as long as they do.
"""

import os
import time
from contextlib import closing
from contextvars import ContextVar

from prefect import flow, task
from prefect.futures import wait

from sapo.core.child_process import POLL_S, stopping_on_signals
from sapo.core.determinism import thread_settings
from sapo.ops.fork_server import ForkServer
from sapo.ops.process import Process
from sapo.ops.process_group import OWING, ProcessGroup

from .common import SMALL, parser, run_process
from .orchestrator import Orchestrator, at_work

GROUP: ContextVar[ProcessGroup] = ContextVar("process group")


@task(name="node", task_run_name="{name}", **SMALL)
def node(name: str) -> str:
    """Keep a node's process going; returns how it ended."""
    return GROUP.get().run_node(name).state


@task(name="archive", task_run_name="archive", **SMALL)
def archive() -> str:
    """Keep the archive's process going; returns how it ended."""
    return GROUP.get().run_archive().state


@task(name="evaluate", task_run_name="evaluate", **SMALL)
def evaluate() -> str:
    """Have the evaluation made; returns how it ended."""
    return GROUP.get().run_evaluation().state


@flow(name="swarm", flow_run_name="{swarm} · {nodes} nodes", persist_result=False, validate_parameters=False)
def swarm_flow(swarm: str, nodes: int) -> str:
    """Run a swarm's processes to their end; returns how the swarm ended."""
    return at_work(_run)


def _run() -> str:
    group = GROUP.get()
    # inside a flow run Prefect answers SIGTERM by raising; the group has processes to end in good order
    with stopping_on_signals(group.stop):
        archived = archive.submit()
        try:
            wait([node.submit(name) for name in group.config.nodes])
        finally:
            group.finish_archive()
        wait([archived])
        evaluate()
        return group.close().phase


def work(process: Process, orchestrator: Orchestrator) -> int:
    """Run the swarm once; whatever failed is in `swarm.json`."""
    home, config = process.home, process.config
    os.environ.update(thread_settings(config.threads))
    with closing(ForkServer(["sapo.flows.preload"])) as fork_server:
        group = ProcessGroup(process, fork_server=fork_server)
        GROUP.set(group)
        # servers and fork server load side by side; the supervisor ends this process when a server fails
        while not home.services.exists() and not process.stopping():
            time.sleep(POLL_S)
        phase = orchestrator.run(
            lambda: swarm_flow(config.swarm.name, len(config.nodes)), lambda: group.run().phase
        )
    return {"failed": 1, "owing": OWING}.get(phase, 0)


def main() -> None:
    """The process that keeps the swarm's other processes."""
    run_process(work, parser("swarm").parse_args().home)


if __name__ == "__main__":
    main()
