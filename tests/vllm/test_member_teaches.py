"""A member with vLLM's own OpenAI server behind it teaches a node that alone stands still."""

from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
from shared_workers import shared_workers
from swarms import make_home, open_node

from sapo.bus.memory import MemoryBus
from sapo.core.config.load import Config, load
from sapo.core.types import BatchGroup
from sapo.node.member.runtime import MemberRuntime
from sapo.node.round import NodeRuntime
from sapo.policy.evaluate import Evaluation, answer, held_out_set

if TYPE_CHECKING:
    from conftest import Served

pytestmark = [pytest.mark.soak, pytest.mark.vllm, pytest.mark.timeout(3600)]

MOST_ROUNDS, LEARNED, WINDOW = 240, 0.3, 20
"""Rounds a node gets until that share of its answers, over so many rounds, is worked out."""
WORKED = "trait/worked"
SHARED = ("swarm.name=t", "swarm.nodes=1", "eval.questions=400", "eval.probe_questions=0")


def node_config(external: int) -> Config:
    """A node with the shipped `guesser`, which hardly ever works anything out."""
    sets = ["model=guesser", "learn.lr=2e-4", "pool.newcomer_share=1.0", f"batch.external={external}"]
    return load("tiny", sets=[*SHARED, *sets, f"swarm.rounds={MOST_ROUNDS}"], env={})


def member_config(served: "Served") -> Config:
    sets = ["swarm.site=m", "batch.local=24", f"swarm.rounds={MOST_ROUNDS}", "member.type=openai"]
    return load(
        "tiny", sets=[*SHARED, *sets, f"member.url={served.url}", f"member.model={served.model}"], env={}
    )


def pass_at_1(node: NodeRuntime) -> float:
    """Held-out questions answered in full, sampled once."""
    parts = node.parts
    parts.rollouts.engine.update_weights()
    questions = held_out_set(parts.config, parts.home, parts.workers)
    most = parts.config.generate.max_new_tokens
    found = answer(
        *(parts.policy, parts.rollouts.engine, parts.workers, questions),
        max_new_tokens=most,
        samples=1,
        seed=5,
        greedy=False,
    )
    return fmean(Evaluation.of(questions, found).sampled)


def alone(folder: Path, rounds: int) -> tuple[float, float]:
    """Share of worked answers and pass@1 of the same node after so many rounds in silo."""
    config = node_config(external=0)
    with open_node(config, make_home(folder, config), bus=MemoryBus(), deliver=False) as node:
        shares = [node.run_round().metrics[WORKED] for _ in range(rounds)]
        return fmean(shares[-WINDOW:]), pass_at_1(node)


def test_a_node_that_alone_stands_still_learns_to_work_it_out(
    served_starter: "Served", tmp_path: Path
) -> None:
    answers, learns, bus = member_config(served_starter), node_config(external=24), MemoryBus()
    shares, taught = list[float](), list[BatchGroup]()
    with (
        MemberRuntime.open(
            *(answers, "m0", make_home(tmp_path / "member", answers)),
            bus=bus,
            workers=shared_workers(answers),
            deliver=False,
        ) as member,
        open_node(learns, make_home(tmp_path / "node", learns), bus=bus, deliver=False) as node,
    ):
        start = pass_at_1(node)
        while len(shares) < MOST_ROUNDS and fmean(shares[-WINDOW:] or [0.0]) < LEARNED:
            member.run_round()
            bus.publish(member.journal.groups(member.round - 1))
            shares.append(node.run_round().metrics[WORKED])
            batch = node.journal.batch(node.round - 1)
            taught += [group for group in batch.groups if group.source == "external"]
        end, rounds = pass_at_1(node), len(shares)
    worked, silo = alone(tmp_path / "silo", rounds)
    print(f"{rounds} rounds: worked {fmean(shares[-WINDOW:]):.2f}, alone {worked:.2f}")
    print(f"held-out pass@1 {start:.3f} to {end:.3f}, {silo:.3f} alone")
    assert {group.producer for group in taught} == {"m0"}
    assert fmean(shares[-WINDOW:]) >= LEARNED
    assert worked < 0.05
    assert silo < start + 0.03
    assert end > silo + 0.1
