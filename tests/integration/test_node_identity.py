"""Real nodes and who may publish: members, the invited, other holders of a node's key, a lost journal."""

import logging
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from makers import make_group, make_identity
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.base import Limits
from sapo.bus.memory import MemoryBus
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import UserError
from sapo.core.types import Group, RoundResult, SignedGroup
from sapo.node import parts
from sapo.node.round import NodeRuntime
from sapo.peers import keyring
from sapo.peers.keyring import KeyAndCard
from sapo.peers.membership import invite
from sapo.peers.signing import seal

DAY_S = 86_400
SOON = int(time.time()) + DAY_S


def keys_of(folder: Path) -> tuple[Home, dict[str, KeyAndCard]]:
    """A folder that is to be a home, with keys for n0 and n1."""
    home = Home(folder)
    for name in ("n0", "n1"):
        home.node(name).mkdir(parents=True)
    return home, {name: keyring.take(home, "test", name, time.time()) for name in ("n0", "n1")}


def begun(home: Home, entry: str, *members: KeyAndCard) -> Config:
    """The config of a swarm with a way of entry, whose home has begun."""
    listed = [member.identity.key for member in members]
    config = small_config([f'rules.entry="{entry}"', f"rules.members={listed}", "swarm.rounds=40"])
    make_home(home.root, config)
    return config


def test_a_node_that_is_on_no_list_does_not_start_and_loads_no_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, keys = keys_of(tmp_path / "home")
    config = begun(home, "allow-list", keys["n0"])
    monkeypatch.setattr(parts, "load_initial", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(UserError, match="n1 may not publish") as error:
        open_node(config, home, "n1", bus=MemoryBus())
    assert error.value.value == keys["n1"].identity.key
    assert not home.journal("n1").exists()


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[NodeRuntime, RoundResult]]:
    """A member after the round in which it met an invited node's groups, and those of nobody's guests."""
    home, keys = keys_of(tmp_path_factory.mktemp("invite") / "home")
    config, bus = begun(home, "invite", keys["n0"]), MemoryBus()
    member, guest = keys["n0"].identity, keys["n1"]
    with pytest.raises(UserError, match="has no invitation"):
        open_node(config, home, "n1", bus=MemoryBus())
    invitation = invite(member, "test", guest.identity.key, SOON)
    keyring.note(home, KeyAndCard(guest.identity, guest.card.model_copy(update={"invitation": invitation})))
    with (
        open_node(config, home, "n0", bus=bus, deliver=False) as first,
        open_node(config, home, "n1", bus=bus, deliver=False) as second,
    ):
        second.run_round()
        hand_over(second, bus)
        late = invite(member, "test", make_identity("late").key, 5)
        forged = invite(make_identity("liar"), "test", make_identity("liar").key, SOON)
        for author, shown in (("stranger", None), ("late", late), ("liar", forged), ("thief", invitation)):
            group = make_group(author, swarm="test", invitation=shown)
            bus.publish([seal(group, make_identity(author))])
        yield first, first.run_round()


def test_the_invited_are_heard(heard: tuple[NodeRuntime, RoundResult]) -> None:
    _, result = heard
    assert result.metrics["pool/size"] > 0


def test_who_is_not_invited_is_refused_by_name(heard: tuple[NodeRuntime, RoundResult]) -> None:
    node, result = heard
    codes = {"not_member": 1.0, "invitation_expired": 1.0, "bad_invitation": 2.0}
    assert (
        codes.items() <= {name.removeprefix("pool/refused/"): n for name, n in result.metrics.items()}.items()
    )
    assert {entry.group.node for entry in node.parts.intake.pool.entries()} <= {"n1"}


@dataclass
class Twice:
    """Rounds of a node before and after it lost its journal, while others sign with its key, too."""

    alarmed: RoundResult
    after: RoundResult
    calm: RoundResult
    log: str


def signed_elsewhere(node: NodeRuntime, **changes: object) -> SignedGroup:
    """What another holder of a node's key would publish."""
    own = Group.model_validate_json(node.journal.groups(0)[0].payload)
    return seal(own.model_copy(update=changes), node.parts.maker.own.identity)


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Twice:
    folder = tmp_path_factory.mktemp("twice")
    config, path = small_config(["swarm.rounds=40"]), folder / "bus.sqlite"
    home, bus, log = make_home(folder / "home", config), SqliteBus(path), Lines()
    logging.getLogger("sapo").addHandler(log)
    with open_node(config, home, "n0", bus=SqliteBus(path), deliver=False) as node:
        node.run_round()
        hand_over(node, bus)
        old = [received.signed for received in bus.poll({}, Limits(), random.Random(0)).received]
        bus.publish(old)
        bus.publish([signed_elsewhere(node, round=7), signed_elsewhere(node, incarnation="f" * 16)])
        bus.publish([signed_elsewhere(node, question="another?")])
        alarmed, after = node.run_round(), node.run_round()
    for path_ in home.node("n0").glob("journal.sqlite*"):
        path_.unlink()
    with open_node(config, home, bus=SqliteBus(path), deliver=False, incarnation="e" * 16) as node:
        node.run_round()
        hand_over(node, bus)
        bus.publish(old)  # as anybody may who kept them
        calm = node.run_round()
    logging.getLogger("sapo").removeHandler(log)
    return Twice(alarmed, after, calm, log.text)


class Lines(logging.Handler):
    """Keeps warnings, for fixtures that outlive a test's `caplog`."""

    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += self.format(record) + "\n"


def test_groups_that_another_holder_of_the_key_signed_are_counted_and_told_once(twice: Twice) -> None:
    assert twice.alarmed.metrics["pool/refused/own_key"] == 3.0
    assert twice.alarmed.metrics["identity/own_key_elsewhere"] == 3.0
    assert twice.after.metrics["identity/own_key_elsewhere"] == 3.0
    assert "pool/refused/own_key" not in twice.after.metrics
    assert twice.log.count("somebody else publishes with the key of this node") == 1


def test_own_groups_that_are_sent_again_are_no_alarm(twice: Twice) -> None:
    assert twice.alarmed.metrics["pool/refused/own_echo"] == 6.0


def test_a_journal_that_was_lost_is_no_alarm(twice: Twice) -> None:
    assert "pool/refused/own_key" not in twice.calm.metrics
    assert twice.calm.metrics["pool/refused/own_echo"] == 6.0
