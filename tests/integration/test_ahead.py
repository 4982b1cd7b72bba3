"""Generation beside the update of the round before: off by one, said truly, gone without a trace."""

import copy
import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from swarms import make_home, open_node, small_config, trade

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.figures import PROBE
from sapo.core.rng import stream
from sapo.core.types import Completion, Group
from sapo.core.user_cache import default_cache
from sapo.node.round import NodeRuntime
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.evaluate import Evaluation, answer
from sapo.policy.models import LoadedPolicy, load_policy
from sapo.provenance.check import check
from sapo.provenance.replay import opened

pytestmark = [pytest.mark.usefixtures("sharing"), pytest.mark.timeout(600)]

AHEAD = ("generate.ahead=1", "batch.external=0", "swarm.nodes=1", "guard.max_engine_gap=1000")
Weights = dict[str, torch.Tensor]


class Broken(Exception):
    """What an engine raises here."""


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    yield
    assert not sampling()


def sampling() -> list[str]:
    """Threads that sample ahead now."""
    return [thread.name for thread in threading.enumerate() if thread.name == "ahead"]


def groups_of(node: NodeRuntime, round: int) -> list[Group]:
    return [Group.model_validate_json(signed.payload) for signed in node.journal.groups(round)]


def versions(node: NodeRuntime, round: int) -> set[int]:
    return {group.policy_version for group in groups_of(node, round)}


def weights_of(node: NodeRuntime) -> Weights:
    return copy.deepcopy(node.parts.policy.model.state_dict())


def policy_with(config: Config, weights: Mapping[str, torch.Tensor]) -> LoadedPolicy:
    policy = load_policy(config.model, config=config, cache=default_cache())
    policy.model.load_state_dict(weights)
    return policy


def to_the_update(node: NodeRuntime) -> None:
    """A round up to its update."""
    node.generate()
    node.publish()
    node.consume_sample()
    node.verify()


def written_by(config: Config, weights: Weights, groups: list[Group]) -> list[list[Completion]]:
    """What an engine over these weights writes in the round of these groups, with nothing beside it."""
    policy, first = policy_with(config, weights), groups[0]
    return TransformersEngine(policy).generate(
        [policy.encode_prompt(group.question) for group in groups],
        completions=config.batch.completions,
        max_new_tokens=config.generate.max_new_tokens,
        sampling=config.generate.sampling,
        seed=stream(config.swarm.seed, first.incarnation, first.round, "generate"),
    )


def test_what_is_sampled_ahead_is_what_the_weights_before_the_update_write(tmp_path: Path) -> None:
    config = small_config([*AHEAD, "swarm.rounds=5", "learn.lr=1e-2"])
    before: list[Weights] = []
    with open_node(config, make_home(tmp_path / "home", config), deliver=False) as node:
        while not node.finished:
            to_the_update(node)
            before.append(weights_of(node))
            node.grpo_update()
        rounds = [groups_of(node, round) for round in range(5)]
        metrics = [result.metrics for result in node.journal.results()]
    assert [{group.policy_version for group in groups} for groups in rounds] == [{0}, {0}, {1}, {2}, {3}]
    assert [values["staleness/own_rounds"] for values in metrics] == [0, 1, 1, 1, 1]
    assert ["time/generate_ahead" in values for values in metrics] == [False, True, True, True, True]
    moved = 0
    for groups in rounds:
        wrote, now = before[groups[0].policy_version], before[groups[0].round]
        written = written_by(config, wrote, groups)
        assert [list(group.completions) for group in groups] == written
        moved += written_by(config, now, groups) != written
    assert moved, "the updates changed nothing that could be told"


def test_questions_and_draws_are_those_of_the_round_whether_ahead_or_not(tmp_path: Path) -> None:
    asked = []
    for name, setting in (("ahead", "1"), ("plain", "0")):
        config = small_config([*AHEAD, f"generate.ahead={setting}", "swarm.rounds=3", "learn.lr=1e-30"])
        with open_node(config, make_home(tmp_path / name, config), deliver=False) as node:
            while not node.finished:
                node.run_round()
            rounds = [groups_of(node, round) for round in range(3)]
            last = node.journal.result(2).metrics
        asked.append([[(g.question, g.completions) for g in groups] for groups in rounds])
        assert ("staleness/own_rounds" in last, "time/generate_ahead" in last) == (name == "ahead",) * 2
    assert asked[0] == asked[1]  # with a learning rate that moves nothing all versions write alike


def test_updates_have_the_same_bits_with_nothing_beside_them(tmp_path: Path) -> None:
    config = small_config([*AHEAD, "swarm.rounds=8", "checkpoint.every_rounds=100", "learn.lr=1e-3"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        for _ in range(7):
            node.run_round()
        digests = {result.weights_sha256 for result in node.journal.results()}
        weights = node.parts.weights_sha256()
    assert len(digests) > 2
    with open_node(config, home, deliver=False) as node:  # repeats all rounds and compares each digest
        assert (node.round, node.parts.weights_sha256()) == (7, weights)


@pytest.mark.parametrize("cut", [(), ("generate.top_k=5", "generate.top_p=0.9", "generate.min_p=0.01")])
def test_an_update_disturbs_no_sampling_beside_it(tmp_path: Path, cut: tuple[str, ...]) -> None:
    config = small_config([*AHEAD, *cut, "learn.lr=1e-3", "swarm.rounds=1"])
    with open_node(config, make_home(tmp_path / "home", config), deliver=False) as node:
        node.run_round()
        batch, engine = node.journal.batch(0), node.parts.rollouts.engine
        prompts = [node.parts.policy.encode_prompt(group.question) for group in groups_of(node, 0)]
        found: list[Any] = []

        def sample() -> None:
            for seed in range(20):
                found.append(
                    engine.generate(
                        prompts,
                        completions=6,
                        max_new_tokens=6,
                        sampling=config.generate.sampling,
                        seed=seed % 4,
                    )
                )

        sample()
        alone, found = found, []
        thread = threading.Thread(target=sample)
        thread.start()
        steps = 0
        while thread.is_alive():  # each switches to deterministic kernels and back
            steps += node.parts.learner.step(batch).skipped is None
        thread.join()
    assert found == alone
    assert steps


def test_after_a_restart_the_round_is_sampled_afresh_and_says_from_which_weights(tmp_path: Path) -> None:
    config = small_config([*AHEAD, "swarm.rounds=4", "learn.lr=1e-2"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        node.run_round()
        node.run_round()
    with open_node(config, home, deliver=False) as node:
        weights = weights_of(node)
        first, second = node.run_round(), node.run_round()
        assert (versions(node, 2), versions(node, 3)) == ({2}, {2})
        groups = groups_of(node, 2)
        assert [list(group.completions) for group in groups] == written_by(config, weights, groups)
    assert (first.metrics["staleness/own_rounds"], second.metrics["staleness/own_rounds"]) == (0, 1)
    assert "time/generate_ahead" not in first.metrics


def test_stopped_before_its_update_a_round_is_taken_up_with_the_next_one_ahead(tmp_path: Path) -> None:
    config = small_config([*AHEAD, "swarm.rounds=3", "learn.lr=1e-2"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        node.run_round()
        to_the_update(node)
    with open_node(config, home, deliver=False) as node:
        while not node.finished:
            node.run_round()
        stopped = [[g.completions for g in groups_of(node, round)] for round in range(3)]
        assert versions(node, 2) == {1}
    other = make_home(tmp_path / "other", config)
    with open_node(config, other, deliver=False) as node:
        while not node.finished:
            node.run_round()
        assert [[g.completions for g in groups_of(node, round)] for round in range(3)] == stopped


def watched(node: NodeRuntime) -> list[int]:
    """The number of prompts of each call of a node's engine, which must not come two at a time."""
    engine, asked, free = node.parts.rollouts.engine, [], threading.Lock()
    generate = engine.generate

    def alone(prompts: Any, **how: Any) -> Any:
        assert free.acquire(blocking=False), "two threads use the engine"
        try:
            asked.append(len(prompts))
            return generate(prompts, **how)
        finally:
            free.release()

    engine.generate = alone  # type: ignore[method-assign]
    return asked


def test_a_probe_asks_the_present_weights_and_never_beside_the_sampling(tmp_path: Path) -> None:
    probing = ["eval.probe_questions=20", "eval.probe_every=1"]
    config = small_config([*AHEAD, *probing, "swarm.rounds=4", "learn.lr=1e-2"])
    shown, expected = [], []
    with open_node(config, make_home(tmp_path / "home", config), deliver=False) as node:
        watched(node)
        while not node.finished:
            policy = policy_with(config, weights_of(node))
            questions = node.parts.prober.questions
            found = answer(
                policy,
                TransformersEngine(policy),
                node.parts.workers,
                questions,
                max_new_tokens=config.generate.max_new_tokens,
                seed=config.swarm.seed,
            )
            expected.append(Evaluation.of(questions, found).summary().series(PROBE))
            metrics = node.run_round().metrics
            shown.append({name: metrics[name] for name in expected[-1]})
        assert [versions(node, round) for round in range(4)] == [{0}, {0}, {1}, {2}]
    assert shown == expected
    assert len({json.dumps(one) for one in expected}) > 1


def breaking(node: NodeRuntime) -> threading.Event:
    """Have the node's engine fail once the event is set."""
    engine, broken = node.parts.rollouts.engine, threading.Event()
    generate = engine.generate

    def sometimes(prompts: Any, **how: Any) -> Any:
        if broken.is_set():
            raise Broken("no more")
        return generate(prompts, **how)

    engine.generate = sometimes  # type: ignore[method-assign]
    return broken


def test_what_sampling_raises_is_raised_where_its_round_begins(tmp_path: Path) -> None:
    config = small_config([*AHEAD, "swarm.rounds=3"])
    with open_node(config, make_home(tmp_path / "home", config), deliver=False) as node:
        broken = breaking(node)
        to_the_update(node)
        broken.set()
        node.grpo_update()
        with pytest.raises(Broken, match="no more"):
            node.generate()
        assert node.journal.finished_rounds() == 1
        broken.clear()
        node.generate()  # who tries again samples afresh
        node.publish()
        assert versions(node, 1) == {1}


def test_what_weights_wrote_that_were_given_up_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = [*AHEAD, "checkpoint.every_rounds=100", "swarm.rounds=60", "learn.lr=1e-2"]
    home = make_home(tmp_path / "home", small_config(settings))
    with open_node(small_config(settings), home, deliver=False) as node:
        start = node.parts.weights_sha256()
        while node.parts.weights_sha256() == start:
            node.run_round()
    alarmed = small_config([*settings, "guard.min_entropy=50", "guard.action=rollback"])
    with open_node(alarmed, home, deliver=False) as node:
        broken = breaking(node)
        result = node.run_round()
        while result.rolled_back_to is None:
            result = node.run_round()
        assert node.parts.weights_sha256() == start
        weights = weights_of(node)
        to_the_update(node)
        groups = groups_of(node, result.round + 1)
        assert {group.policy_version for group in groups} == {result.round + 1}
        assert [list(group.completions) for group in groups] == written_by(alarmed, weights, groups)
        # and what went wrong in dropped sampling, as it may with broken weights, ends nobody
        broken.set()
        while node.grpo_update().rolled_back_to is None:
            broken.clear()
            to_the_update(node)
            broken.set()
        broken.clear()
        node.generate()
    assert "sampling that was dropped failed: no more" in caplog.text


@pytest.fixture(scope="module")
def traded(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """Two nodes that sampled ahead and learned from each other over a real bus, one of them restarted."""
    config = small_config(["generate.ahead=1", "swarm.rounds=12", "checkpoint.every_rounds=5"])
    return trade(tmp_path_factory.mktemp("traded") / "home", config, restart=7)


@pytest.mark.parametrize("node", ["n0", "n1"])
def test_replay_of_rounds_sampled_ahead_is_bit_exact(traded: Home, node: str) -> None:
    with opened(traded, node) as replay:
        found = check(replay)
    assert (found.rounds, found.weights) == (12, 12)
