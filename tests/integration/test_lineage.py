"""Who taught a checkpoint and where a group ended up, asked of a real swarm's history and MLflow store."""

import json
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from deltalake import DeltaTable
from makers import make_group, make_identity
from swarms import make_home, small_config
from tampering import Row, copied, cover_up, rewrite, rows_of

from sapo import cli
from sapo.bus import open_bus
from sapo.core.atomic_file import write_first
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.types import Recipe, RoundResult
from sapo.node.tracked import open_tracked, tracker_of
from sapo.ops.archiver import Archiver
from sapo.peers.signing import seal
from sapo.provenance import group_lineage, model_lineage
from sapo.store.history import open_store
from sapo.store.history.tables import Store
from sapo.store.journal.journal import Journal

pytestmark = pytest.mark.usefixtures("sharing")

ROUNDS, EVERY = 6, 3
BACK, SKIPPED = ("n1", 4), ("n2", 1)
"""Node and round that went back to the checkpoint of round 3, and that made no step."""
HOSTILE = '<script>alert(1)</script>\x1b[2J"'
FIELDS = ("tokens", "completions", "informative", "groups")
KEYS = {
    "peers": ("source", "producer", "producer_key"),
    "tasks": ("source", "dataset"),
    "flows": ("source", "producer", "producer_key", "dataset"),
}


@dataclass(frozen=True)
class Ended:
    """A swarm that has ended; `stray` was read by nobody, `refused` is in quarantine."""

    home: Home
    config: Config
    store: Store
    uri: str
    results: dict[str, list[RoundResult]]
    stray: str
    refused: str

    def rows(self, table: str) -> list[Row]:
        found: list[Row] = DeltaTable(f"{self.home.history}/{table}").to_pyarrow_table().to_pylist()
        return found

    def teachers(self, what: str, store: Store | None = None) -> dict[str, Any]:
        subject = model_lineage.version_subject(self.uri, what)
        return model_lineage.teachers(store or self.store, subject)

    def journey(self, group_id: str, uri: str | None = None) -> dict[str, Any]:
        found = group_lineage.find(self.store, group_id)
        return group_lineage.journey(self.store, *found, "test", uri or self.uri)


def run_round(runtime: Any) -> RoundResult:
    """A round whose groups are on the bus when it returns."""
    place = (runtime.name, runtime.round)
    if runtime.round == ROUNDS - 1:  # the last version knows the history that all rounds before it made
        assert runtime.drain(60)
    before = runtime.config
    if place in (BACK, SKIPPED):
        guard = before.guard.model_copy(update={"min_entropy": 99.0})
        runtime.config = before.model_copy(update={"guard": guard})
    result: RoundResult = runtime.run_round()
    runtime.config = before
    with closing(open_bus(runtime.config, runtime.parts.home)) as bus:
        bus.publish(runtime.journal.groups(result.round))
    return result


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    sets = ["swarm.nodes=3", f"swarm.rounds={ROUNDS}", f"track.register_every={EVERY}"]
    sets += ["checkpoint.every_rounds=100", "node.1.guard.action=rollback"]
    sets += ['track.traits={two="2", never="zebra"}']
    config = small_config(sets)
    home = make_home(tmp_path_factory.mktemp("lineage") / "home", config)
    uri = f"sqlite:///{home.mlflow_db}"
    for number, name in enumerate(config.nodes):
        home.node(name).mkdir()
        write_first(home.key(name), make_identity(name).to_pem())  # questions follow from keys
        Journal(home.journal(name), incarnation=f"{number:016x}").close()
    results: dict[str, list[RoundResult]] = {name: [] for name in config.nodes}
    with ExitStack() as stack:
        nodes = [stack.enter_context(open_tracked(config, name, home, uri=uri)) for name in config.nodes]
        for _ in range(ROUNDS):
            for node in nodes:
                results[node.name].append(run_round(node))
        assert all(node.drain(60) for node in nodes)
    tracker_of(config, "n0", home, uri=uri).set_champion({ROUNDS: 0.5}, "these")
    recipe = Recipe.make("chain_sum", config.tasks[0].config, seed=0)
    hostile = make_group(swarm="test", texts=(HOSTILE, "2"), question=f"{HOSTILE}?", recipe=recipe)
    stray, refused = (seal(group, make_identity("peer")) for group in (hostile, make_group(round=1)))
    bus, store = open_bus(config, home), open_store(config, home)
    bus.publish([stray, refused])
    Archiver(bus, store, home.load_manifest()).run()
    bus.close()
    return Ended(home, config, store, uri, results, stray.group_id, refused.group_id)


def lasting(ended: Ended, node: str, count: int) -> set[int]:
    """Rounds whose step is still in the node's weights after `count` rounds, worked out from the results."""
    steps = {r.round for r in ended.results[node][:count] if r.skipped is None}
    for result in ended.results[node][:count]:
        if result.rolled_back_to is not None:
            steps -= set(range(result.rolled_back_to, result.round + 1))
    return steps


def trained(row: dict[str, Any]) -> bool:
    """Whether a completion was trained on under `learn.foreign = "positive"`."""
    return row["advantage"] > 0 or (row["source"] == "local" and row["advantage"] < 0)


def by_hand(
    ended: Ended, node: str, count: int, key: tuple[str, ...]
) -> dict[tuple[str, ...], dict[str, Any]]:
    """What the raw rows of the rounds that last sum up to."""
    sums: dict[tuple[str, ...], dict[str, Any]] = {}
    steps = lasting(ended, node, count)
    for row in ended.rows("training"):
        if row["node"] != node or row["round"] not in steps:
            continue
        one = sums.setdefault(
            tuple(row[name] for name in key),
            {"groups": set(), "taught": {}, "tokens": 0, "completions": 0, "sizes": []},
        )
        one["groups"].add(row["group_id"])
        if trained(row):
            one["taught"][row["group_id"]] = row["age_s"]
            one["tokens"] += sum(row["loss_mask"])
            one["completions"] += 1
            one["sizes"].append(abs(row["advantage"]))
    return sums


@pytest.mark.parametrize(("node", "number"), [("n0", 2), ("n1", 1), ("n1", 2), ("n2", 2)])
def test_figures_are_those_of_the_raw_rows(ended: Ended, node: str, number: int) -> None:
    found = ended.teachers(f"models:/test.{node}/{number}")
    for table, key in KEYS.items():
        sums = by_hand(ended, node, EVERY * number, key)
        total = sum(one["tokens"] for one in sums.values())
        assert total > 0
        assert {tuple(one[name] for name in key) for one in found[table]} == sums.keys()
        for one in found[table]:
            hand = sums[tuple(one[name] for name in key)]
            figures = (hand["tokens"], hand["completions"], len(hand["taught"]), len(hand["groups"]))
            assert tuple(one[name] for name in FIELDS) == figures
            assert one["share"] == pytest.approx(hand["tokens"] / total)
            assert one["advantage"] == near(fmean, hand["sizes"])
            assert one["age_s"] == near(median, hand["taught"].values())


def near(mean: Callable[[Collection[float]], float], values: Collection[float]) -> Any:
    """What is about a mean of these; None of none."""
    return pytest.approx(mean(values)) if values else None


def test_rounds_that_were_rolled_back_or_made_no_step_teach_nothing(ended: Ended) -> None:
    rounds = ended.teachers("models:/test.n1@latest")["rounds"]
    assert rounds["rollbacks"] == [{"round": 4, "to": 3}]
    assert (rounds["count"], rounds["rolled_back"]) == (6, 2)
    skipped = ended.teachers("models:/test.n2@latest")
    assert SKIPPED[1] in skipped["when"]["skipped"]
    assert any("learn/entropy" in why for why in skipped["rounds"]["skipped_because"])
    before = ended.teachers("models:/test.n1/1")["rounds"]
    assert (before["count"], before["rolled_back"]) == (3, 0)


def test_a_sound_versions_links_all_agree(ended: Ended) -> None:
    found = ended.teachers("models:/test.n0@champion")
    assert {link["link"]: link["state"] for link in found["links"]} == {
        "sapo.node": "agrees",
        "sapo.rounds": "agrees",
        "sapo.chain": "agrees",
        "sapo.batches": "agrees",
        "sapo.weights_sha256": "agrees",
    }
    assert (found["problems"], found["notes"]) == ([], [])
    assert found["history"]["registered_version"] in range(found["history"]["version"] + 1)
    assert found["history"]["registered_uri"] == str(ended.home.history)


def altered(ended: Ended, folder: Path) -> tuple[Store, list[Row], list[Row]]:
    """A copy of the history, its rows of n0 to be changed, and all others."""
    shutil.copytree(ended.home.history, folder / "history")
    store = Store(str(folder / "history"))
    rows = copied(rows_of(store))
    return store, [row for row in rows if row["node"] == "n0"], [row for row in rows if row["node"] != "n0"]


def test_a_tampered_chain_is_named(ended: Ended, tmp_path: Path) -> None:
    store, mine, others = altered(ended, tmp_path)
    for row in mine:
        if row["round"] == 2:
            row["chain"] = "f" * 64
    cover_up(mine, 2, batch_too=False)
    rewrite(store, [*mine, *others])
    problems = ended.teachers("models:/test.n0/2", store)["problems"]
    assert problems == ["history of n0, round 2: its batch does not continue the chain of those before it"]


def test_a_changed_row_is_named(ended: Ended, tmp_path: Path) -> None:
    store, mine, others = altered(ended, tmp_path)
    mine[-1]["advantage"] += 0.25
    rewrite(store, [*mine, *others])
    (problem,) = ended.teachers("models:/test.n0@champion", store)["problems"]
    assert problem.startswith(f"history of n0, round {mine[-1]['round']}: the row at")
    assert ended.teachers("models:/test.n0/1", store)["problems"] == []


def test_a_history_rewritten_with_all_its_digests_is_told_by_the_versions_chain(
    ended: Ended, tmp_path: Path
) -> None:
    store, mine, others = altered(ended, tmp_path)
    next(row for row in mine if row["round"] == 1)["advantage"] += 0.25
    cover_up(mine, 1, batch_too=True, chain_too=True)
    rewrite(store, [*mine, *others])
    found = ended.teachers("models:/test.n0@champion", store)
    states = {link["link"]: link["state"] for link in found["links"]}
    assert (states["sapo.chain"], states["sapo.batches"]) == ("differs", "agrees")
    (problem,) = found["problems"]
    assert "sapo.chain of test.n0 version 2" in problem
    assert "rewritten" in problem


def shared(ended: Ended) -> list[str]:
    """Groups that their author and another node learned from, most learners first."""
    learners: dict[str, set[str]] = defaultdict(set)
    for row in ended.rows("training"):
        if row["advantage"] != 0:
            learners[row["group_id"]].add(row["node"])
    return sorted((g for g, nodes in learners.items() if len(nodes) > 1), key=lambda g: -len(learners[g]))


def test_a_group_is_followed_from_its_author_to_the_versions(ended: Ended) -> None:
    rows = ended.rows("training")
    for group_id in shared(ended)[:5]:
        mine = [row for row in rows if row["group_id"] == group_id]
        found = ended.journey(group_id)
        author = next(row for row in ended.rows("rollouts") if row["group_id"] == group_id)
        assert found["problems"] == []
        assert found["author"]["node"] == author["node"]
        assert found["published"]["bus_position"] == author["bus_position"]
        assert {(one["node"], one["round"]) for one in found["learned"]} == {
            (row["node"], row["round"]) for row in mine
        }
        for one in found["learned"]:
            own = [row for row in mine if (row["node"], row["round"]) == (one["node"], one["round"])]
            assert [part["advantage"] for part in one["completions"]] == [row["advantage"] for row in own]
            assert one["tokens"] == sum(sum(row["loss_mask"]) for row in own if trained(row))
            assert one["source"] == ("local" if one["node"] == author["node"] else "external")
            counts = [
                EVERY * number
                for number in (1, 2)
                if one["round"] in lasting(ended, one["node"], EVERY * number)
            ]
            first = [version["rounds"] for version in one["versions"] if version["first"]]
            assert first == (counts[:1] if one["tokens"] else [])


def test_the_swarms_table_is_the_sum_of_what_each_node_was_taught(
    ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    """What each author contributed to all, as the raw rows of the steps that last have it."""
    assert cli.invoke(["lineage", "--swarm", "--json", "--home", str(ended.home.root)]) == 0
    found = json.loads(capsys.readouterr().out)
    learned: dict[tuple[str, str], set[str]] = defaultdict(set)
    tokens: dict[tuple[str, str], int] = defaultdict(int)
    weight: dict[str, float] = defaultdict(float)
    for row in ended.rows("training"):
        if row["round"] in lasting(ended, row["node"], ROUNDS):
            pair = row["producer_key"], row["node"]
            learned[pair].add(row["group_id"])
            if trained(row):
                tokens[pair] += sum(row["loss_mask"])
                weight[pair[0]] += abs(row["advantage"]) * sum(row["loss_mask"])
    assert {(one["key"], one["learner"]): (one["learned"], one["tokens"]) for one in found["taught"]} == {
        pair: (len(groups), tokens[pair]) for pair, groups in learned.items()
    }
    authors = {one["key"]: one for one in found["authors"]}
    published = {row["group_id"]: row["key"] for row in ended.rows("rollouts")}
    assert {key: one["published"] for key, one in authors.items()} == Counter(published.values())
    assert sum(one["share_tokens"] for one in authors.values()) == pytest.approx(1)
    for key, one in authors.items():
        assert one["share_gradient"] == pytest.approx(weight[key] / sum(weight.values()))
        assert one["learned"] == sum(len(groups) for pair, groups in learned.items() if pair[0] == key)


def test_what_peers_wrote_steers_neither_page_nor_terminal(
    ended: Ended, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.invoke(["lineage", ended.stray[:12], "--home", str(ended.home.root)]) == 0
    assert "\x1b[2J" not in capsys.readouterr().out
    page = (ended.home.lineage / f"{ended.stray[:16]}.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page
