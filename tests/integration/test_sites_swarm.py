"""Two sites and one swarm: with a home, servers and a release each; a node that moves goes on bit for bit."""

import json
import shutil
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest
from commands import outside, running, sapo, teachers, until
from gossiping import LastingBus
from kafka import KafkaConsumer, TopicPartition
from swarms import SMALL, hand_over, make_home, open_node, small_config

from infra.kafka.cluster import Cluster
from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.types import canonical
from sapo.node.round import NodeRuntime
from sapo.ops.node_pack import pack_node, unpack_node
from sapo.peers import keyring
from sapo.peers.signing import unseal
from sapo.store.history import query
from sapo.store.history.rollout_rows import group_of
from sapo.store.history.tables import Store
from sapo.store.journal.journal import Journal

pytestmark = [pytest.mark.services, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
SETS = [item for item in SMALL if not item.startswith("swarm.")]
"""The small swarm's settings; a site's own are added."""


# -- in one process -----------------------------------------------------------------------------------------


def open_at_rest(config: Config, home: Home, name: str, bus: MemoryBus) -> NodeRuntime:
    """A node whose clock stands still, and which measures no seconds: all that it writes is the same every
    time, as long as nobody is a newcomer."""
    return open_node(config, home, name, bus=bus, deliver=False, clock=lambda: 1e6, timed=False)


def test_a_node_that_moves_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    sets = ["swarm.rounds=16", "swarm.site=a", "checkpoint.every_rounds=4", "batch.completions=8"]
    home, buses = Home(tmp_path / "here"), [LastingBus(clock=lambda: 1e6) for _ in range(2)]
    for name in ("a0", "a1"):
        home.node(name).mkdir(parents=True)
    members = [keyring.take(home, "test", name, 1e6).identity.key for name in ("a0", "a1")]
    config = small_config([*sets, 'rules.entry="allow-list"', f"rules.members={members}"])
    make_home(home.root, config)
    with (
        open_at_rest(config, home, "a0", buses[0]) as node,
        open_at_rest(config, home, "a1", buses[0]) as peer,
    ):
        for _ in range(7):
            peer.run_round()
            hand_over(peer, *buses)
            node.run_round()
        node.generate()
        node.publish()  # the move cuts a round short
        while not peer.finished:
            peer.run_round()
            hand_over(peer, *buses)
    stayed = Home(tmp_path / "stayed")
    shutil.copytree(home.root, stayed.root)
    pack_node(home, "a0", tmp_path / "a0.tar.gz")
    moved = unpack_node(tmp_path / "a0.tar.gz", tmp_path / "there").home
    finished = []
    for place, bus in zip((moved, stayed), buses, strict=True):
        with open_at_rest(config, place, "a0", bus) as node:
            assert node.round == 7
            while not node.finished:
                node.run_round()
            signed = [node.journal.groups(r) for r in range(7, 16)]
            batches = [node.journal.batch(r) for r in range(7, 16)]
            finished.append((node.parts.weights_sha256(), signed, batches, node.journal.positions()))
    assert finished[0] == finished[1]
    learned = {g.producer for batch in finished[0][2] for g in batch.groups if g.source == "external"}
    assert learned == {"a1"}


# -- in many ------------------------------------------------------------------------------------------------


def begin(place: Path, bus: Mapping[str, str], *more: str) -> tuple[Path, Path]:
    """Sites a and b of one swarm, each in a folder of its own, which know nothing of each other's files."""
    here, there = place / "a", place / "b"
    for folder in (here, there):
        folder.mkdir()
    sets = [*SETS, *(f"bus.{key}={value}" for key, value in bus.items()), *more]
    words = [word for item in sets for word in ("--set", item)]
    sapo("init", "--swarm", "duet", "--site", "a", "--preset", "starter", *words, place=here)
    shutil.copy(here / "duet.manifest.json", there)
    own = [word for item in sets if not item.startswith(("tasks=", "rules.")) for word in ("--set", item)]
    sapo("join", "duet.manifest.json", "--site", "b", *own, place=there)
    return here, there


def archived(home: Home) -> dict[str, bytes]:
    """Payloads of all groups in a site's history, rebuilt from their rows, by id."""
    rows = query.query(Store(str(home.history)), "SELECT * FROM rollouts").to_pylist()
    groups: dict[str, list[dict[str, object]]] = {}
    for row in rows:
        groups.setdefault(str(row["group_id"]), []).append(row)
    return {group_id: group_of(own).canonical().encode() for group_id, own in groups.items()}


def on_the_topic(cluster: Cluster, topic: str) -> dict[str, bytes]:
    """Payloads of all groups on a topic, by id, read by kafka-python alone."""
    with closing(KafkaConsumer(bootstrap_servers=cluster.servers, enable_auto_commit=False)) as consumer:
        places = [TopicPartition(topic, number) for number in consumer.partitions_for_topic(topic)]
        consumer.assign(places)
        consumer.seek_to_beginning()
        ends = consumer.end_offsets(places)
        found: dict[str, bytes] = {}
        while any(consumer.position(place) < ends[place] for place in places):
            for records in consumer.poll(timeout_ms=1000).values():
                found |= {record.key.decode(): record.value for record in records}
    return found


def next_release(folder: Path) -> dict[str, str]:
    """A copy of this release that is one schema version further, and the environment that runs it."""
    for source, package in (("sapo", "sapo"), ("flows", "sapo/flows")):
        shutil.copytree(ROOT / source, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    records = folder / "sapo" / "core" / "types.py"
    text = records.read_text()
    changes = {
        "SCHEMA_VERSION = 3\n": "SCHEMA_VERSION = 4\n",
        "    claimed_score: float | None = None\n": "    claimed_score: float | None = None\n"
        '    words: Count = 3\n    ADDED: ClassVar[Mapping[str, int]] = {"words": 4}\n',
        "    created_at: float\n": '    mood: str = "calm"\n    created_at: float\n',
        '= {"invitation": 2, "author": 3}\n': '= {"invitation": 2, "author": 3, "mood": 4}\n',
    }
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    records.write_text(text)
    return outside() | {"PYTHONPATH": str(folder)}


@pytest.mark.soak
@pytest.mark.kafka
def test_a_rolling_upgrade_over_one_schema_version(kafka: Cluster, tmp_path: Path) -> None:
    kafka.create_topic("sapo.upgrade", partitions=4)
    sets = ["swarm.rounds=100000", "checkpoint.every_rounds=1000"]
    here, there = begin(tmp_path, kafka.bus("sapo.upgrade"), *sets)
    first, second = Home(here / "runs" / "duet-a"), Home(there / "runs" / "duet-b")
    newer = next_release(tmp_path / "next")
    with (
        running("node", "--config", "site-a.toml", place=here) as one,
        running("node", "--config", "site-b.toml", place=there, env=newer) as other,
    ):
        until(lambda: teachers(first, "a0") >= {"b0"} and teachers(second, "b0") >= {"a0"}, one, other)
    payloads = on_the_topic(kafka, "sapo.upgrade").values()
    assert {json.loads(payload)["schema_version"] for payload in payloads} == {3, 4}

    # the second site follows, in the home it has
    before = teachers(first, "a0")
    with Journal.read_only(first.journal("a0")) as journal:
        rounds, incarnation = journal.finished_rounds(), journal.incarnation
    total = str(rounds + 2)
    sapo("node", "--config", "site-a.toml", "--rounds", total, place=here, env=newer)
    with Journal.read_only(first.journal("a0")) as journal:
        assert (journal.finished_rounds(), journal.incarnation) == (rounds + 2, incarnation)
        newest = journal.groups(rounds + 1)
    assert {json.loads(signed.payload)["schema_version"] for signed in newest} == {4}
    assert before == {"b0"}

    # the archive of this release holds every group of both, as it was signed
    extra = [unseal(signed).model_extra for signed in newest]
    assert extra == [{"mood": "calm"}] * len(newest)
    sapo("archive", "--once", place=here)
    assert archived(first) == on_the_topic(kafka, "sapo.upgrade")
    sapo("archive", "--once", place=there, env=newer)
    rows = query.query(Store(str(second.history)), "SELECT DISTINCT extra FROM rollouts WHERE k = 1")
    assert set(rows["extra"].to_pylist()) == {None, canonical({"completion": {"words": 3}})}
    for home in (first, second):
        by_archive = "SELECT count(*) AS n FROM quarantine WHERE node IS NULL"
        assert query.query(Store(str(home.history)), by_archive).to_pylist() == [{"n": 0}]


@pytest.mark.soak
@pytest.mark.kafka
def test_two_sites_with_servers_of_their_own_share_one_swarm_over_kafka(
    kafka: Cluster, tmp_path: Path
) -> None:
    kafka.create_topic("sapo.duet", partitions=4)
    rounds = ["swarm.rounds=100000", "eval.questions=20", "flow.every=2", "track.register_every=100000"]
    here, there = begin(tmp_path, kafka.bus("sapo.duet"), *rounds)
    homes = {"a0": Home(here / "runs" / "duet-a"), "b0": Home(there / "runs" / "duet-b")}
    with (
        running("swarm", "--config", "site-a.toml", place=here) as one,
        running("swarm", "--config", "site-b.toml", place=there) as other,
    ):
        until(lambda: all(teachers(home, name) for name, home in homes.items()), one, other)
    everything = []
    for name, home in homes.items():
        sapo("archive", "--once", place=home.root.parent.parent)
        found = query.query(
            Store(str(home.history)),
            "SELECT source, producer, count(DISTINCT node) AS nodes, count(DISTINCT group_id) AS groups"
            " FROM training GROUP BY ALL",
        ).to_pylist()
        peer = ({"a0", "b0"} - {name}).pop()
        assert {(row["source"], row["producer"]) for row in found} == {("local", name), ("external", peer)}
        everything.append(archived(home))
        assert [path.name for path in home.root.glob("*/journal.sqlite")] == ["journal.sqlite"]
        with closing(sqlite3.connect(f"file:{home.mlflow_db}?mode=ro", uri=True)) as db:
            assert {row[0] for row in db.execute("SELECT name FROM runs")} == {"duet", name}
        assert (home.prefect / "prefect.db").exists()
        with Journal.read_only(home.journal(name)) as journal:
            refused = {key for result in journal.results() for key in result.metrics if "refused/" in key}
        assert not {key for key in refused if key.endswith(("own_name", "bad_signature", "malformed"))}
        status = json.loads(sapo("status", "--json", place=home.root.parent.parent))
        assert status["notes"] == []
    assert everything[0] == everything[1]
    assert {json.loads(payload)["node"] for payload in everything[0].values()} == {"a0", "b0"}
