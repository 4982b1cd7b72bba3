"""Samplers, losses, engines and buses of other packages: found, named in records, refused in one line."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from makers import make_entry, make_signed
from packages import OWN_PACKAGE, installed
from swarms import make_home, open_node, small_config

from sapo.bus import open_bus
from sapo.bus.memory import MemoryBus
from sapo.core import own_code
from sapo.core.config.advice import advise, take
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.core.determinism import arithmetic, differences
from sapo.core.errors import UserError
from sapo.ops import sites
from sapo.peers.sampling import Sampler, round_robin, uniform, walk
from sapo.policy.engines.hf import TransformersEngine
from sapo.provenance.check import check
from sapo.provenance.replay import opened
from sapo.testing.engine import check_engine
from sapo.testing.sampler import PROMISES, check_sampler, pool

CODE = """
from sapo.bus.memory import MemoryBus
from sapo.policy.engines.hf import TransformersEngine

OPENED = []
NUMBER = 3


def bus(swarm, partitions):
    OPENED.append((swarm, partitions))
    return MemoryBus(partitions)


def engine(config, policy):
    return TransformersEngine(policy)
""" + "".join((OWN_PACKAGE / "sapo_demo" / name).read_text() for name in ("samplers.py", "losses.py"))
NEWEST = "sapo_demo:newest_first"
REINFORCE = "sapo_demo:reinforce"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with installed(tmp_path / "site", monkeypatch, CODE) as folder:
        yield folder


def settings(*sets: str) -> Config:
    return load("starter", sets=sets, env={})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("learn.loss", "reinforce"),
        ("batch.sampler", "newest first:x"),
        ("generate.engine", ":open"),
        ("bus.open", "sapo_demo"),
    ],
)
def test_a_name_that_is_neither_a_choice_nor_code_says_what_it_may_be(setting: str, value: str) -> None:
    more = ("bus.type=own",) if setting == "bus.open" else ()
    with pytest.raises(UserError, match="module:function of an installed package") as raised:
        settings(*more, f"{setting}={value}")
    assert (raised.value.field, raised.value.value) == (setting, value)


@pytest.mark.parametrize("setting", ["learn.loss", "batch.sampler", "generate.engine", "bus.open"])
def test_code_of_a_package_that_is_not_installed_is_refused_before_anything_is_loaded(setting: str) -> None:
    more = ("bus.type=own",) if setting == "bus.open" else ()
    with pytest.raises(UserError, match="no installed package has a module nowhere") as raised:
        own_code.check(settings(*more, f"{setting}=nowhere:thing"))
    assert (raised.value.field, raised.value.value) == (setting, "nowhere:thing")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("nowhere:thing", "there is no module nowhere"),
        ("sapo_demo:thing", "module sapo_demo has no thing"),
        ("sapo_demo:NUMBER", "cannot be called"),
        ("sapo_demo:MemoryBus", "MemoryBus is not of module sapo_demo's package"),
        ("sapo_demo:MemoryBus.publish", "is not of module sapo_demo's package"),
    ],
)
def test_a_name_that_leads_nowhere_is_refused(name: str, problem: str, package: Path) -> None:
    with pytest.raises(UserError, match=problem):
        own_code.load("learn.loss", name)


def test_a_package_that_lacks_something_itself_is_not_called_missing(package: Path) -> None:
    (package / "sapo_lame.py").write_text("import nothing_of_that_name\n")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        own_code.find("sapo_lame:thing")


# -- samplers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampler", [round_robin, uniform])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_the_samplers_here_keep_what_all_promise(promise: Any, sampler: Sampler) -> None:
    promise(sampler)


def careless(entries: Any, rng: random.Random) -> list[Any]:
    return random.sample(list(entries), len(entries))


def doubling(entries: Any, rng: random.Random) -> list[Any]:
    return [*entries, *entries]


def credulous(entries: Any, rng: random.Random) -> list[Any]:
    """Put first what its author calls new."""
    return sorted(entries, key=lambda entry: -min(entry.group.created_at, 115.0))


@pytest.mark.parametrize("sampler", [careless, doubling, credulous])
def test_a_sampler_that_breaks_a_promise_is_found_out(sampler: Sampler) -> None:
    with pytest.raises(AssertionError):
        check_sampler(sampler)


def test_a_walk_follows_the_sampler_and_leaves_newcomers_to_the_end(package: Path) -> None:
    newest_first = own_code.load("batch.sampler", NEWEST)
    entries = pool()
    known = {entry.group.key for entry in entries if entry.group.node != "peer0"}
    order = walk(entries, random.Random(0), known.__contains__, newest_first)
    assert [entry.group.node == "peer0" for entry in order] == [False] * 15 + [True] * 5
    for part in (order[:15], order[15:]):
        assert [entry.received_at for entry in part] == sorted((e.received_at for e in part), reverse=True)


@pytest.mark.parametrize("sampler", [doubling, lambda entries, rng: [make_entry("stranger", round=99)]])
def test_a_walk_refuses_what_is_not_in_the_pool_once(sampler: Sampler) -> None:
    with pytest.raises(ValueError, match="twice, or one that is not in the pool"):
        walk(pool(), random.Random(0), sampler=sampler)


# -- a node with a loss and a sampler of another package -------------------------------------------------


def test_a_node_learns_by_them_and_its_rounds_repeat_bit_for_bit(package: Path, tmp_path: Path) -> None:
    config = small_config([f"learn.loss={REINFORCE}", f"batch.sampler={NEWEST}", "swarm.nodes=1"])
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, bus=MemoryBus()) as node:
        before = node.parts.weights_sha256()
        while not node.finished:
            node.run_round()
        assert node.parts.weights_sha256() != before
        record = node.journal.environment(0)
        assert node.drain(60)  # replayed is what was delivered
    assert record is not None
    assert {name for name in record if name.startswith(own_code.CODE_OF)} == {
        own_code.CODE_OF + REINFORCE,
        own_code.CODE_OF + NEWEST,
    }
    with opened(home, "n0") as replay:
        assert check(replay).weights == config.swarm.rounds
    values = config.model_dump(mode="json")
    values["learn"]["loss"] = "dapo"
    home.config.write_text(json.dumps(values))
    with opened(home, "n0") as replay, pytest.raises(UserError, match="the config does not"):
        check(replay)  # whoever writes rows names no code


def test_a_package_that_changed_is_named_where_a_record_is_compared(package: Path) -> None:
    record = arithmetic() | own_code.versions([REINFORCE])
    assert differences(record) == ""
    (package / "sapo_demo.py").write_text(CODE + "\nMORE = 1\n")
    changed = differences(record)
    assert changed.startswith(f"{own_code.CODE_OF}{REINFORCE} was sapo-demo 0.1 ")
    assert ", is sapo-demo 0.1 " in changed


def test_a_manifest_advises_no_code_and_no_site_takes_any(package: Path) -> None:
    config = settings(f"learn.loss={REINFORCE}", f"batch.sampler={NEWEST}")
    advice, left = advise(config, "starter")
    assert "loss" not in advice["learn"]
    assert "sampler" not in advice["batch"]
    assert len([text for text in left if "is code of a package" in text]) == 2
    taken = take({"learn": {"loss": "os:system"}, "batch": {"sampler": "os:system"}}, Manifest.of(config))
    assert taken is not None
    assert taken.settings == {}
    assert len(taken.passed_over) == 2


# -- a bus and an engine of another package --------------------------------------------------------------


def test_a_bus_of_another_package_carries_groups(package: Path, tmp_path: Path) -> None:
    config = settings("bus.type=own", "bus.open=sapo_demo:bus", "bus.config.partitions=2", "swarm.name=s")
    bus = open_bus(config, make_home(tmp_path / "home", config))
    bus.publish([make_signed()])
    assert len(bus.end_positions()) == 2
    assert own_code.find("sapo_demo:OPENED") == [("s", 2)]


def test_a_swarm_on_a_bus_of_another_package_is_by_invitation_and_says_how_to_join(
    package: Path, tmp_path: Path
) -> None:
    sets = ["bus.type=own", "bus.open=sapo_demo:bus", "bus.config.partitions=2"]
    begun = sites.found_swarm("s", "a", "starter", sets, tmp_path)
    assert begun.config.rules.entry == "invite"
    others = sites.join_sets(begun.config)
    assert others == ("bus.type=own", "bus.open=sapo_demo:bus", "bus.config.partitions=2")
    assert load(file=begun.file, env={}).bus == begun.config.bus


def test_an_engine_that_repeats_nothing_is_found_out() -> None:
    class Careless(TransformersEngine):
        def generate(self, *args: Any, **how: Any) -> Any:
            return super().generate(*args, **{**how, "seed": int(torch.seed() % 1000)})

    with pytest.raises(AssertionError):
        check_engine(lambda _, policy: Careless(policy))
