"""Two nodes that gossip: the same bits after replay, whatever a member does, and wherever a round is cut."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from gossiping import ATTACKER, LastingBus, deliver, flat, gossip_config, offered, put, round_of, say
from makers import make_identity
from swarms import make_home, open_node
from torch import Tensor

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import Unavailable
from sapo.core.types import RoundResult, file_sha256
from sapo.node.round import NodeRuntime
from sapo.peers import blocks
from sapo.provenance.check import Differs, check
from sapo.provenance.replay import opened
from sapo.store.journal.journal import Journal

pytestmark = pytest.mark.usefixtures("sharing")
Tensors = dict[str, Tensor]
NOW = 1_000_000.0


@contextmanager
def two_nodes(home: Home, config: Config, bus: LastingBus) -> Iterator[list[NodeRuntime]]:
    with (
        open_node(config, home, "n0", bus=bus, deliver=False) as one,
        open_node(config, home, "n1", bus=bus, deliver=False) as other,
    ):
        yield [one, other]


def trade(nodes: list[NodeRuntime], bus: LastingBus) -> None:
    """Rounds in turns, to the end."""
    while not nodes[0].finished:
        for node in nodes:
            round_of(node, bus)


def results(home: Home, name: str) -> list[RoundResult]:
    with Journal.read_only(home.journal(name)) as journal:
        return journal.results()


# -- two honest nodes ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traded(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home after seven rounds of two nodes: three outer steps, the last round after a checkpoint."""
    config = gossip_config("swarm.rounds=7")
    home, bus = make_home(tmp_path_factory.mktemp("traded") / "home", config), LastingBus()
    with two_nodes(home, config, bus) as nodes:
        trade(nodes, bus)
    return home


def test_every_second_round_ends_with_the_step_and_the_one_before_offers_weights(traded: Home) -> None:
    done = [result.gossip for result in results(traded, "n0")]
    assert [one is not None and one.stepped for one in done] == [False, True] * 3 + [False]
    assert [one is not None and one.offered is not None for one in done] == [True, False] * 3 + [True]
    assert [one is not None and one.begun for one in done] == [True] + [False] * 6
    steps = [one for one in done if one is not None and one.stepped]
    assert len({one.partner for one in steps}) == 1
    assert [one.reason for one in steps] == [None] * 3
    metrics = results(traded, "n0")[1].metrics
    assert metrics["gossip/steps"] == metrics["gossip/partners"] == metrics["gossip/candidates"] == 1.0
    assert 0 < metrics["gossip/distance"] < metrics["gossip/reach"]


def test_in_lock_step_both_average_what_the_other_offered_for_this_very_step(traded: Home) -> None:
    ours, theirs = results(traded, "n0"), results(traded, "n1")
    for round in (1, 3, 5):
        step, offer = ours[round].gossip, theirs[round - 1].gossip
        assert step is not None
        assert offer is not None
        assert step.file == offer.offered


def test_replay_repeats_every_bit_after_the_peers_files_are_gone_everywhere(
    traded: Home, tmp_path: Path
) -> None:
    home = Home(shutil.copytree(traded.root, tmp_path / "home"))
    shutil.rmtree(home.gossip_store)
    shutil.rmtree(home.node("n1"))
    with opened(home, "n0") as replay:
        found = check(replay)
    assert (found.rounds, found.weights, found.begun_at) == (7, 7, 0)
    kept = sorted(home.gossip("n0").glob("0*.safetensors"))
    assert [path.name[:6] for path in kept] == ["000001", "000003", "000005"]
    kept[1].unlink()
    with opened(home, "n0") as replay, pytest.raises(Differs, match="is gone, with which round 3"):
        check(replay)


def test_a_partners_file_that_was_changed_is_noticed_in_replay(traded: Home, tmp_path: Path) -> None:
    home = Home(shutil.copytree(traded.root, tmp_path / "home"))
    path = next(home.gossip("n0").glob("000003.*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with opened(home, "n0") as replay, pytest.raises(Differs, match="not those that were announced"):
        check(replay)


def test_a_node_goes_on_with_slow_weights_and_momentum_as_they_were(traded: Home, tmp_path: Path) -> None:
    """Resumed from the checkpoint of round 7, and from that of round 0 by repeating all seven."""
    ends = []
    for number, gone in enumerate(([], ["round-000006", "round-000007"])):
        home = Home(shutil.copytree(traded.root, tmp_path / f"home{number}"))
        for name in gone:
            shutil.rmtree(home.checkpoints("n0") / name, ignore_errors=True)
        config = gossip_config("swarm.rounds=8")
        with open_node(config, home, "n0", bus=LastingBus(), deliver=False) as node:
            outer = node.parts.learner.outer
            assert outer is not None
            assert len(outer.lessons) == 3
            ends.append(torch.cat([flat(node), *(one.flatten() for one in (*outer.slow, *outer.momentum))]))
    assert torch.equal(*ends)


def test_a_round_that_goes_back_to_older_weights_makes_no_step_and_is_repeated(tmp_path: Path) -> None:
    """A guard that every update sets off: each round goes back to the checkpoint before."""
    first, bus = gossip_config("swarm.rounds=3", "guard.action=rollback"), LastingBus()
    home = make_home(tmp_path / "home", first)
    always = gossip_config("swarm.rounds=5", "guard.action=rollback", "guard.min_entropy=100")
    for config in (first, always, gossip_config("swarm.rounds=8", "guard.action=rollback")):
        with open_node(config, home, "n0", bus=bus, deliver=False) as node:
            while not node.finished:
                round_of(node, bus)
    done = results(home, "n0")
    assert [result.rolled_back_to is not None for result in done[3:5]] == [True, True]
    steps = [result.round for result in done if result.gossip is not None and result.gossip.stepped]
    assert steps == [1, 5, 7]
    with opened(home, "n0") as replay:
        assert check(replay).weights == 8


# -- members that attack ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home whose only node has made one round: its next ends with an outer step."""
    config = attacked_config()
    home = make_home(tmp_path_factory.mktemp("begun") / "home", config)
    with open_node(config, home, bus=LastingBus(), deliver=False) as node:
        node.run_round()
    return home


def attacked_config() -> Config:
    return gossip_config("swarm.nodes=1", "swarm.rounds=2", members=(ATTACKER.key,))


@contextmanager
def attacked(begun: Home, folder: Path) -> Iterator[tuple[Home, NodeRuntime, LastingBus]]:
    home, bus = Home(shutil.copytree(begun.root, folder / "home")), LastingBus(clock=lambda: NOW)
    with open_node(attacked_config(), home, bus=bus, deliver=False, clock=lambda: NOW) as node:
        yield home, node, bus


@pytest.fixture(scope="module")
def alone(begun: Home, tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    """The node's weights after a step of its own, as nobody offers anything."""
    with attacked(begun, tmp_path_factory.mktemp("alone")) as (_, node, _):
        result = node.run_round()
        assert result.gossip is not None
        assert result.gossip.reason == "nobody"
        return flat(node)


def changed(change: Callable[[Tensor], Tensor], part: str) -> Callable[[Tensors], Tensors]:
    """What a node itself offers, with one of its tensors changed."""

    def change_one(tensors: Tensors) -> Tensors:
        name = next(name for name in sorted(tensors) if name.startswith(part))
        return tensors | {name: change(tensors[name].clone()).contiguous()}

    return change_one


def spoilt(value: float) -> Callable[[Tensor], Tensor]:
    def spoil(tensor: Tensor) -> Tensor:
        tensor.view(-1)[7] = value
        return tensor

    return spoil


FILES: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "NaN in the weights": ("not_finite", changed(spoilt(float("nan")), "slow.")),
    "infinity in the pseudo-gradient": ("not_finite", changed(spoilt(float("-inf")), "delta.")),
    "huge weights": ("too_far", changed(lambda tensor: tensor + 100, "slow.")),
    "a huge pseudo-gradient": ("too_far", changed(lambda tensor: tensor + 100, "delta.")),
    "weights whose squares overflow": ("too_far", changed(spoilt(3e38), "slow.")),
    "another shape": ("bad_shape", changed(lambda tensor: tensor[:-1], "slow.")),
    "the same values in another shape": ("bad_shape", changed(lambda tensor: tensor.reshape(-1), "delta.")),
    "another type": ("bad_shape", changed(lambda tensor: tensor.to(torch.float16), "slow.")),
    "a tensor less": ("bad_shape", lambda tensors: dict(list(tensors.items())[1:])),
    "a tensor more": ("too_large", lambda tensors: tensors | {"more": torch.zeros(2**19)}),
    "no tensors": ("bad_shape", lambda tensors: {}),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_is_no_partners_leaves_the_step_alone(
    kind: str, begun: Home, alone: Tensor, tmp_path: Path
) -> None:
    reason, change = FILES[kind]
    with attacked(begun, tmp_path) as (home, node, bus):
        digest, _ = put(home, change(offered(home)))
        say(bus, node, digest, now=NOW)
        stays_alone(node, reason, alone)


def stays_alone(node: NodeRuntime, reason: str, alone: Tensor) -> None:
    result = node.run_round()
    assert result.gossip is not None
    assert (result.gossip.reason, result.gossip.partner, result.gossip.file) == (reason, None, None)
    assert result.metrics[f"gossip/alone/{reason}"] == result.metrics["gossip/steps"] == 1.0
    assert result.metrics["gossip/partners"] == 0.0
    assert torch.equal(flat(node), alone)
    assert not list(node.parts.home.gossip(node.name).glob("0*"))


def test_bytes_that_are_not_those_announced_leave_it_alone(
    begun: Home, alone: Tensor, tmp_path: Path
) -> None:
    with attacked(begun, tmp_path) as (home, node, bus):
        digest, place = put(home, offered(home))
        place.write_bytes(place.read_bytes()[:-1] + b"\x01")
        say(bus, node, digest, now=NOW)
        stays_alone(node, "bad_digest", alone)


def test_a_file_that_is_no_file_of_tensors_leaves_it_alone(
    begun: Home, alone: Tensor, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    header = json.dumps({"a": {"dtype": "\x1b[31m", "shape": [], "data_offsets": [0, 0]}}).encode()
    with attacked(begun, tmp_path) as (home, node, bus):
        _, place = put(home, {})
        place.write_bytes(len(header).to_bytes(8, "little") + header)
        digest = file_sha256(place)
        place.rename(place.with_name(f"{digest}.safetensors"))
        say(bus, node, digest, now=NOW)
        stays_alone(node, "bad_shape", alone)
    assert "unknown variant" in caplog.text, "the library repeats what it read"
    assert "\x1b" not in caplog.text


def test_anothers_file_leaves_it_alone(begun: Home, alone: Tensor, tmp_path: Path) -> None:
    about = {"key": make_identity("victim").key, "incarnation": "b" * 16, "round": 0}
    with attacked(begun, tmp_path) as (home, node, bus):
        digest, _ = put(home, offered(home), about=about)
        say(bus, node, digest, now=NOW)
        stays_alone(node, "not_its_own", alone)


def test_a_file_that_is_not_there_or_is_a_pipe_is_not_waited_for(
    begun: Home, alone: Tensor, tmp_path: Path
) -> None:
    for number, pipe in enumerate((False, True)):
        with attacked(begun, tmp_path / str(number)) as (home, node, bus):
            if pipe:
                folder = home.gossip_store / ATTACKER.key
                folder.mkdir(parents=True)
                os.mkfifo(folder / f"{'0' * 64}.safetensors")
            say(bus, node, "0" * 64, now=NOW)
            stays_alone(node, "absent", alone)


@pytest.mark.parametrize(
    ("refusal", "changes"),
    [
        ("stale", {"created_at": NOW - 4000}),
        ("another_model", {"model": "0" * 64}),
        ("wrong_swarm", {"swarm": "other"}),
        ("wrong_key", {"key": make_identity("victim").key}),
    ],
)
def test_an_announcement_that_is_refused_offers_nothing(
    refusal: str, changes: dict[str, object], begun: Home, alone: Tensor, tmp_path: Path
) -> None:
    with attacked(begun, tmp_path) as (home, node, bus):
        digest, _ = put(home, offered(home))
        say(bus, node, digest, now=NOW, **changes)
        stays_alone(node, "nobody", alone)
        assert node.journal.result(1).metrics[f"gossip/refused/{refusal}"] == 1.0


@pytest.mark.parametrize("listed", [False, True])
def test_who_is_not_on_the_list_or_left_out_is_not_listened_to(
    listed: bool, begun: Home, alone: Tensor, tmp_path: Path
) -> None:
    members = (ATTACKER.key,) if listed else (make_identity("friend").key,)
    config = gossip_config("swarm.nodes=1", "swarm.rounds=2", members=members)
    home, bus = Home(shutil.copytree(begun.root, tmp_path / "home")), LastingBus(clock=lambda: NOW)
    if listed:
        blocks.block(home, ["n0"], ATTACKER.key, NOW)
    with open_node(config, home, bus=bus, deliver=False, clock=lambda: NOW) as node:
        digest, _ = put(home, offered(home))
        say(bus, node, digest, now=NOW)
        stays_alone(node, "nobody", alone)
        assert node.journal.result(1).metrics["gossip/refused/not_member"] == 1.0


def test_what_came_before_the_last_step_is_stale_and_the_same_again_is_no_news(
    begun: Home, tmp_path: Path
) -> None:
    with attacked(begun, tmp_path) as (home, node, bus):
        digest, _ = put(home, offered(home))
        say(bus, node, digest, now=NOW)
        assert node.run_round().metrics["gossip/partners"] == 1.0
    config = gossip_config("swarm.nodes=1", "swarm.rounds=4", members=(ATTACKER.key,))
    with open_node(config, home, bus=bus, deliver=False, clock=lambda: NOW) as node:
        node.run_round()
        say(bus, node, digest, now=NOW)  # signed by its author, sent again by anybody
        result = node.run_round()
    assert result.metrics["gossip/refused/replayed"] == 1.0
    assert result.metrics["gossip/alone/stale"] == 1.0


@pytest.mark.parametrize("reaches", [0.9, 30.0])
def test_a_member_moves_a_node_no_further_than_the_bound_and_replay_makes_that_step_again(
    reaches: float, begun: Home, alone: Tensor, tmp_path: Path
) -> None:
    """Half of beta and gamma of its reach: what the pair's step differs from the node's own by."""
    with attacked(begun, tmp_path) as (home, node, bus):
        gossip, outer = node.parts.gossip, node.parts.learner.outer
        assert gossip is not None
        assert outer is not None
        outer.travelled = 1e6  # as after many steps: nobody is of another start
        node_reach = gossip.config.max_norm * torch.linalg.vector_norm(
            torch.cat([delta.flatten() for name, delta in offered(home).items() if name.startswith("delta.")])
        )
        push = changed(lambda tensor: tensor + reaches * float(node_reach) / tensor.numel() ** 0.5, "slow.")
        digest, _ = put(home, push(offered(home)))
        say(bus, node, digest, now=NOW)
        result = node.run_round()
        assert result.metrics["gossip/partners"] == 1.0
        moved = float(torch.dist(flat(node), alone))
        bound = 0.5 * (gossip.config.beta + gossip.config.gamma) * result.metrics["gossip/reach"]
        assert 0 < moved <= bound
        assert result.gossip is not None
        assert (result.gossip.share is not None) == (reaches > 1)
        deliver(node)
    with opened(home, "n0") as replay:
        assert check(replay).weights == 2


def test_a_store_that_is_away_is_not_waited_for_and_what_is_offered_is_delivered_later(
    begun: Home, alone: Tensor, tmp_path: Path
) -> None:
    with attacked(begun, tmp_path) as (home, node, bus):
        digest, _ = put(home, offered(home))
        shutil.rmtree(home.gossip_store)
        home.gossip_store.write_text("no folder, as where a mount is broken")
        say(bus, node, digest, now=NOW)
        stays_alone(node, "store_away", alone)
        with pytest.raises(Unavailable, match="gossip"):
            deliver(node)
        home.gossip_store.unlink()
        deliver(node)
        assert len(list(home.gossip_store.glob("*/*.safetensors"))) == 1
        assert node.outages() == {}
