"""Real nodes with a real tiny policy: trading, silo, restarts, guards."""

import copy
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.base import Limits, Poll, Positions
from sapo.bus.memory import MemoryBus
from sapo.core.errors import Paused, Unavailable, UserError
from sapo.core.types import Batch, Group, SignedGroup
from sapo.learn.update import Learner, StepResult
from sapo.node import probes
from sapo.node.receive import Intake
from sapo.node.round import NodeRuntime
from sapo.peers import sampling

pytestmark = pytest.mark.core


class AwayBus:
    """A bus that cannot be reached: a real one cannot be made to fail between two polls on demand."""

    def publish(self, groups: Sequence[SignedGroup]) -> None:
        raise Unavailable("no bus")

    def poll(self, positions: Positions, limits: Limits, rng: random.Random) -> Poll:
        raise Unavailable("no bus")

    def end_positions(self) -> Positions:
        raise Unavailable("no bus")

    def close(self) -> None:
        pass


def producers(node: NodeRuntime) -> set[str]:
    """Authors of the foreign groups a node has trained on."""
    batches = [node.journal.batch(r) for r in range(node.round)]
    return {group.producer for batch in batches for group in batch.groups if group.source == "external"}


def test_nodes_train_on_each_others_groups_and_each_keeps_its_own_weights(tmp_path: Path) -> None:
    config = small_config(["swarm.rounds=40"])
    home, bus = make_home(tmp_path / "home", config), MemoryBus()
    with (
        open_node(config, home, "n0", bus=bus, deliver=False) as first,
        open_node(config, home, "n1", bus=bus, deliver=False) as second,
    ):
        # an untrained model's groups are seldom informative, so how soon both find one is a matter of luck
        while not (producers(first) and producers(second)) and not second.finished:
            for node in (first, second):
                node.run_round()
                hand_over(node, bus)
        assert (producers(first), producers(second)) == ({"n1"}, {"n0"})
        assert first.parts.weights_sha256() != second.parts.weights_sha256()
        written = {
            (signed.group_id, signed.content_sha256)
            for r in range(first.round)
            for signed in first.journal.groups(r)
        }
        for r in range(second.round):
            for group in second.journal.batch(r).groups:
                if group.source == "external":
                    assert (group.group_id, group.content_sha256) in written
        first.run_round()
        assert first.journal.positions() == bus.end_positions(), "it has read all, and goes on from there"


def test_a_silo_reads_no_bus_and_trains_on_all_its_local_groups(tmp_path: Path) -> None:
    config = small_config(["batch.external=0", "swarm.rounds=2"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, bus=AwayBus(), deliver=False) as node:
        result = node.run_round()
        batch = node.journal.batch(0)
    assert [group.source for group in batch.groups] == ["local"] * 3
    assert "outage/bus" not in result.metrics


def test_a_node_whose_bus_is_away_goes_on_alone_and_says_so(tmp_path: Path) -> None:
    config = small_config()
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, bus=AwayBus(), deliver=False) as node:
        result = node.run_round()
        assert result.metrics["outage/bus"] == 1.0
        assert result.metrics["sampler/shortfall"] == 3.0
        assert node.journal.owed_counts()["publish"] == 3


def test_sample_self_takes_i_of_b_and_all_b_are_shared(tmp_path: Path) -> None:
    config = small_config(["batch.questions=5", "batch.local=2", "batch.external=0"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        node.run_round()
        assert len(node.journal.groups(0)) == 5
        assert len(node.journal.owed("publish", 10)) == 5
        assert len(node.journal.batch(0).groups) == 2


@pytest.mark.parametrize("stopped", [False, True], ids=["at-once", "after-a-restart"])
def test_own_reward_is_over_all_own_completions_whichever_the_batch_chose(
    tmp_path: Path, stopped: bool
) -> None:
    sets = ["batch.questions=8", "batch.local=2", 'batch.choose="informative"', "batch.external=0"]
    config = small_config([*sets, "model=guesser", "share.select=top"])  # `top` journals the scores
    home = make_home(tmp_path / "home", config)
    if stopped:
        with open_node(config, home, deliver=False) as node:
            node.parts.learner.step = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                node.run_round()
    with open_node(config, home, deliver=False) as node:
        metrics = node.run_round().metrics
        groups = [Group.model_validate_json(signed.payload) for signed in node.journal.groups(0)]
    scores = [c.claimed_score for group in groups for c in group.completions if c.claimed_score is not None]
    assert metrics["reward/local"] == pytest.approx(sum(scores) / len(scores))
    assert metrics["reward/local"] < metrics["reward/training_set"]


def test_top_by_information_scores_own_groups_before_it_publishes(tmp_path: Path) -> None:
    config = small_config(["share.select=top", "share.fraction=0.34", "batch.external=0"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        node.run_round()
        groups = [Group.model_validate_json(signed.payload) for signed in node.journal.groups(0)]
        owed = {item.ref for item in node.journal.owed("publish", 10)}
    spread = {g.group_id: len({c.claimed_score for c in g.completions}) for g in groups}
    assert all(c.claimed_score is not None for g in groups for c in g.completions)
    assert len(owed) == 2
    assert min(spread[key] for key in owed) >= max(spread[key] for key in spread.keys() - owed)


def test_what_is_looked_at_and_drawn_follows_from_the_key_and_is_drawn_again_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seed, incarnation and round are public: with another key a node has other dice, reopened the same."""
    dice: list[random.Random] = []

    def noted(function: Callable[..., object], place: int) -> Callable[..., object]:
        def call(*args: Any, **more: Any) -> object:
            dice.append(copy.copy(args[place]))
            return function(*args, **more)

        return call

    monkeypatch.setattr(Intake, "receive", noted(Intake.receive, 1))
    monkeypatch.setattr(sampling, "walk", noted(sampling.walk, 1))
    config = small_config(["swarm.rounds=3"])
    for name in ("one", "other"):
        home = make_home(tmp_path / name, config)
        for _ in range(2):
            with open_node(config, home, deliver=False, bus=MemoryBus(), incarnation="0" * 16) as node:
                node.generate()
                node.publish()
                node.consume_sample()
    rolled = [one.random() for one in dice]
    assert rolled[:2] == rolled[2:4]
    assert rolled[4:6] == rolled[6:]
    assert len(set(rolled)) == 4


@pytest.mark.parametrize(
    "stages", [1, 2, 3, 4, 5], ids=["generate", "publish", "consume", "verify", "update"]
)
def test_a_node_stopped_inside_a_round_takes_it_up_again(tmp_path: Path, stages: int) -> None:
    config = small_config(["swarm.rounds=3"])
    home, bus = make_home(tmp_path / "home", config), MemoryBus()
    with open_node(config, home, bus=bus, deliver=False) as node:
        node.run_round()
        for stage in (node.generate, node.publish, node.consume_sample, node.verify)[:stages]:
            stage()
        if stages == 5:
            node.parts.learner.step = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                node.grpo_update()
        before = node.journal.groups(1) if stages > 1 else None
        batch = node.journal.batch(1) if stages == 5 else None
    with open_node(config, home, bus=bus, deliver=False) as node:
        assert node.round == 1
        node.run_round()
        node.run_round()
        assert before is None or node.journal.groups(1) == before
        assert batch is None or node.journal.batch(1) == batch
        assert [item.round for item in node.journal.owed("training", 10)] == [0, 1, 2]


def interrupted(batch: Batch) -> NoReturn:
    raise KeyboardInterrupt


def test_recovery_repeats_the_rounds_since_the_checkpoint_bit_for_bit(tmp_path: Path) -> None:
    config = small_config(["swarm.rounds=6", "checkpoint.every_rounds=100", "batch.external=0"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        for _ in range(5):
            node.run_round()
        weights = node.parts.weights_sha256()
        moments = node.parts.learner.state_dict()
    with open_node(config, home, deliver=False) as node:
        assert node.round == 5
        assert node.parts.weights_sha256() == weights
        again = node.parts.learner.state_dict()
        assert str(again["optimizer"]["param_groups"]) == str(moments["optimizer"]["param_groups"])


def test_recovery_repeats_each_round_with_the_threads_it_was_made_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["swarm.rounds=6", "checkpoint.every_rounds=100", "batch.external=0"]
    home = make_home(tmp_path / "home", small_config(settings))
    for threads in (1, 2, 1):
        with open_node(small_config([*settings, f"threads={threads}"]), home, deliver=False) as node:
            node.run_round()
            weights = node.parts.weights_sha256()
    seen, step = [], Learner.step

    def watched(learner: Learner, batch: Batch) -> StepResult:
        seen.append(torch.get_num_threads())
        return step(learner, batch)

    monkeypatch.setattr(Learner, "step", watched)
    with open_node(small_config(settings), home, deliver=False) as node:
        assert (seen, torch.get_num_threads()) == ([1, 2, 1], 1)
        assert node.parts.weights_sha256() == weights


def test_a_checkpoint_ahead_of_the_journal_is_not_used(tmp_path: Path) -> None:
    config = small_config(["swarm.rounds=4", "checkpoint.every_rounds=2", "batch.external=0"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        node.run_round()
        weights = node.parts.weights_sha256()
    newest = home.checkpoints("n0") / "round-000000"
    (home.checkpoints("n0") / "round-000003").mkdir()
    for file in newest.iterdir():
        (home.checkpoints("n0") / "round-000003" / file.name).write_bytes(file.read_bytes())
    with open_node(config, home, deliver=False) as node:
        assert node.round == 1
        assert node.parts.weights_sha256() == weights


def test_a_guard_with_action_pause_stops_the_node_after_the_round_is_journalled(tmp_path: Path) -> None:
    config = small_config(["guard.min_entropy=50", "guard.action=pause", "batch.external=0"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        weights = node.parts.weights_sha256()
        with pytest.raises(Paused, match="entropy"):  # noqa: PT012 - which round it is depends on the draw
            for _ in range(4):
                node.run_round()
        stopped = node.round
        assert node.journal.result(stopped - 1).skipped
        assert node.parts.weights_sha256() == weights


def test_a_guard_with_action_rollback_goes_back_to_the_checkpoint_and_recovery_agrees(tmp_path: Path) -> None:
    config = small_config(["checkpoint.every_rounds=100", "batch.external=0", "swarm.rounds=40"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, deliver=False) as node:
        start = node.parts.weights_sha256()
        while node.parts.weights_sha256() == start:
            node.run_round()
        moved = node.round
    settings = ["checkpoint.every_rounds=100", "batch.external=0", "swarm.rounds=40"]
    alarmed = small_config([*settings, "guard.min_entropy=50", "guard.action=rollback"])
    with open_node(alarmed, home, deliver=False) as node:
        result = node.run_round()
        while result.rolled_back_to is None:
            result = node.run_round()
        assert result.rolled_back_to == 0
        assert node.parts.weights_sha256() == start
        done = node.round
    assert done > moved
    with open_node(alarmed, home, deliver=False) as node:
        assert node.round == done
        assert node.parts.weights_sha256() == start


def test_a_node_whose_probes_fall_goes_back_to_the_best_of_them(tmp_path: Path) -> None:
    falling = ("eval.probe_questions=40", "eval.probe_every=2", "guard.falling_probes=2")
    config = small_config(
        [*falling, "guard.action=rollback", "batch.external=0", "swarm.rounds=40", "learn.lr=0.03"]
    )
    home = make_home(tmp_path / "home", config)
    weights = {}
    with open_node(config, home, deliver=False) as node:
        result = node.run_round()
        while result.rolled_back_to is None and node.round < 30:
            weights[node.round] = node.parts.weights_sha256()
            result = node.run_round()
        kept = probes.read(home.probes("n0"), node.journal.incarnation)
        best = max(kept, key=lambda probe: (sum(probe.sampled), -probe.round))
        assert result.rolled_back_to == best.round
        start = node.parts.weights_sha256()
        assert start == weights.get(best.round, start)
        done = node.round
    with open_node(config, home, deliver=False) as node:
        assert (node.round, node.parts.weights_sha256()) == (done, start)
        assert len(probes.read(home.probes("n0"), node.journal.incarnation, lasting=done)) < len(kept)


def test_a_home_of_another_swarm_or_schema_is_refused(tmp_path: Path) -> None:
    config = small_config()
    home = make_home(tmp_path / "home", config)
    with pytest.raises(UserError, match="belongs to swarm"):
        make_home(tmp_path / "home", small_config(["swarm.name=other"]))
    manifest = json.loads(home.manifest.read_text())
    home.manifest.write_text(json.dumps(manifest | {"schema_version": 99}))
    with pytest.raises(UserError, match="schema version 99"):
        make_home(tmp_path / "home", config)


def test_probes_report_held_out_figures_without_disturbing_the_round(tmp_path: Path) -> None:
    plain = small_config(["batch.external=0", "swarm.rounds=1"])
    probing = small_config(["batch.external=0", "swarm.rounds=1", "eval.probe_questions=10"])
    digests = []
    for name, config in (("plain", plain), ("probing", probing)):
        home = make_home(tmp_path / name, config)
        with open_node(config, home, deliver=False) as node:
            result = node.run_round()
            texts = [
                [c.text for c in Group.model_validate_json(s.payload).completions]
                for s in node.journal.groups(0)
            ]
            digests.append((texts, "eval/pass_at_1" in result.metrics))
    # keys differ between the two homes, the question and completion streams do not
    assert digests[0][0] == digests[1][0]
    assert [probed for _, probed in digests] == [False, True]
