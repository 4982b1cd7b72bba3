"""A process that has everything loaded and forks children that run two gossiping nodes; the test kills these.

Each line that it reads names a prepared home. The child runs its nodes in turns, to their end, and says where
it is: its process number, then `node round ends` when gossip has its turn in a round. What became of it comes
last, `done` or `killed`. Clock, keys and incarnations are always the same, so whatever is killed, the nodes
meet the same.
"""

import os
import random
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.append(str(Path(__file__).resolve().parents[1] / "integration"))

from gossiping import deliver, gossip_config, round_of
from nursery import read_away
from shared_workers import shared_workers
from swarms import hand_over, open_node

from sapo.bus.poller import Listener
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.home import Home
from sapo.core.types import Batch, Gossiped
from sapo.node.gossip import Gossip
from sapo.node.round import NodeRuntime
from sapo.tasks.questions import QuestionStream

NOW = 1_000_000.0


def run(home: Home) -> None:
    """Make all rounds; whatever a killed process owed is handed over first."""
    config = home.load_config()
    with ExitStack() as stack:
        bus = SqliteBus(home.bus, clock=lambda: NOW)
        nodes = [
            stack.enter_context(
                open_node(config, home, name, bus=bus, clock=lambda: NOW, deliver=False, timed=False)
            )
            for name in config.nodes
        ]
        for node in nodes:
            node.parts.intake.listener = Listener(bus, patience_s=60.0)  # a busy machine is no outage
            hand_over(node, bus)
            deliver(node)
        say_when()
        while any(not node.finished for node in nodes):
            round_of(behind(nodes), bus)


def behind(nodes: list[NodeRuntime]) -> NodeRuntime:
    """The node that has made fewer rounds, the first of equals."""
    return min(nodes, key=lambda node: node.round)


def say_when() -> None:
    """Say when gossip has its turn in a round, before anything of it is done."""
    end = Gossip.end

    def said(self: Gossip, batch: Batch, rng: random.Random, *, went_back: bool) -> Gossiped | None:
        print(self.author.name, batch.round, int(self.ends(batch.round)), flush=True)
        return end(self, batch, rng, went_back=went_back)

    Gossip.end = said  # type: ignore[method-assign]


def forked(home: Home) -> bool:
    """Run a home in a child; whether it came to its end, and was not killed."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            print(os.getpid(), flush=True)
            run(home)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status == 0 or os.WIFSIGNALED(status)
    return status == 0


if __name__ == "__main__":
    config = gossip_config()
    workers = shared_workers(config)
    # they start when they are first asked: before the first fork, so that all children have the same
    QuestionStream(workers, config.tasks, ("start",), 0, count=1, held_out=config.rules.held_out).result()
    for line in sys.stdin:
        done = forked(Home(Path(line.strip())))
        if not done:
            read_away(workers)
        print("done" if done else "killed", flush=True)
