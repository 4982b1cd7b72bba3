"""A swarm whose tasks another package brings: nodes that have it trade, one that lacks it goes on without."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from packages import installed
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.memory import MemoryBus
from sapo.core.config.load import Config, parse
from sapo.core.config.manifest import Manifest
from sapo.core.types import Group
from sapo.node.round import NodeRuntime
from sapo.tasks.pins import left_to_others, with_pins
from sapo.tasks.workers import open_workers

SETS = (
    'tasks=[{dataset="doubling", config={largest=9}, weight=3},'
    ' {dataset="chain_sum", config={min_terms=2, max_terms=2, min_digits=1, max_digits=1}}]',
    "rules.held_out=0.3",
    "eval.questions=3",
)


def without_the_package(config: Config) -> Config:
    """The config of a site where the package is not installed."""
    tasks = [task.model_dump(mode="json") for task in left_to_others(config.tasks)]
    return parse(config.model_dump(mode="json") | {"tasks": tasks})


@contextmanager
def opened(config: Config, folder: Path, name: str, bus: MemoryBus) -> Iterator[NodeRuntime]:
    with open_workers(config) as workers:
        home = make_home(folder / name, config)
        with open_node(config, home, name, bus=bus, deliver=False, workers=workers) as node:
            yield node


def taught_by(node: NodeRuntime) -> set[tuple[str, str]]:
    """Authors and sources of the foreign groups that a node has trained on."""
    groups = [group for r in range(node.round) for group in node.journal.batch(r).groups]
    return {(one.producer, one.recipe.dataset) for one in groups if one.source == "external"}


def refused(node: NodeRuntime) -> set[tuple[str, str]]:
    """Codes and details of what a node has refused."""
    return {(one.reason, one.detail) for r in range(node.round) for one in node.journal.refusals(r)}


@pytest.mark.soak  # over Kafka, with a sampler and a loss besides: test_own_package
def test_two_nodes_trade_a_packages_groups_and_a_third_that_lacks_it_refuses_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bus = MemoryBus()
    with ExitStack() as stack:
        with installed(tmp_path / "site", monkeypatch):
            config = with_pins(small_config([*SETS, "swarm.nodes=3", "swarm.rounds=60"]))
            first, second = (
                stack.enter_context(opened(config, tmp_path, name, bus)) for name in ("n0", "n1")
            )
            for node in (first, second):
                node.run_round()
        poor = without_the_package(config)
        assert Manifest.of(poor) == Manifest.of(config)
        third = stack.enter_context(opened(poor, tmp_path, "n2", bus))
        nodes = (first, second, third)
        while not all(taught_by(node) for node in nodes) and not third.finished:
            for node in nodes:
                node.run_round()
                hand_over(node, bus)
        assert {source for _, source in taught_by(first) | taught_by(second)} >= {"doubling"}
        assert {source for _, source in taught_by(third)} == {"chain_sum"}
        why = "doubling: the package sapo-demo is not installed"
        assert {one for one in refused(third) if one[0] == "unavailable"} == {("unavailable", why)}
        written = [signed for r in range(third.round) for signed in third.journal.groups(r)]
        assert {Group.model_validate_json(one.payload).recipe.dataset for one in written} == {"chain_sum"}
