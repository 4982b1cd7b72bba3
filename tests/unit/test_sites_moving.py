"""A node packed, unpacked and marked: whole or not at all, and never in two places by accident."""

import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
from makers import finish_round
from packed_nodes import Members, files_of, indexed, make_node, rewritten, take_checkpoint

from sapo import cli
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.core.config.schema import KafkaBus
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.node import author, parts
from sapo.ops.node_pack import INDEX, mark_moved, pack_node, unpack_node
from sapo.store.journal.journal import Journal


@pytest.fixture
def config() -> Config:
    return load("tiny", None, ["swarm.name=s", "swarm.site=a", "swarm.nodes=2"], env={})


@pytest.fixture
def home(tmp_path: Path, config: Config) -> Home:
    """Site a, whose node a1 has finished two rounds and holds a checkpoint of round 1."""
    home = Home(tmp_path / "old")
    home.prepare(config, Manifest.of(config))
    make_node(home, "a1", rounds=2)
    return home


def test_a_node_comes_out_as_it_went_in(home: Home, tmp_path: Path) -> None:
    before = files_of(home.checkpoints("a1"))
    output = tmp_path / "a1.tar.gz"
    with Journal.read_only(home.journal("a1")) as journal:
        results, incarnation = journal.results(), journal.incarnation
    shown: list[tuple[str, int, int]] = []
    pack = pack_node(home, "a1", output, lambda *step: shown.append(step))
    found = unpack_node(output, tmp_path / "new")
    assert (pack.node, pack.rounds, pack.incarnation) == ("a1", 2, incarnation)
    assert pack.owed == {"training": 2, "track": 2}
    assert found.pack == pack
    assert files_of(found.home.checkpoints("a1")) == before
    assert (found.home.node("a1") / "key.pem").read_bytes() == (home.node("a1") / "key.pem").read_bytes()
    assert (found.home.node("a1") / "key.pem").stat().st_mode & 0o777 == 0o600
    with Journal(found.home.journal("a1")) as journal:
        assert (journal.results(), journal.incarnation) == (results, incarnation)
        assert [kept.round for kept in journal.checkpoints()] == [1]
    assert found.home.load_config() == home.load_config()
    assert found.home.load_manifest() == home.load_manifest()
    assert {label for label, _, _ in shown} == {"reading", "packing"}
    assert all(done <= total for _, done, total in shown)


@pytest.mark.parametrize(
    ("settings", "moved"),
    [
        ({}, [12]),
        ({"uri": "s3://bucket/history"}, [1, 12]),
        ({"uri": "s3://bucket/history", "keep_rounds": 8}, [4, 6, 8, 10, 12]),
    ],
)
def test_a_history_in_reach_of_both_places_takes_the_beginning_of_its_replay_along(
    home: Home, tmp_path: Path, settings: dict[str, Any], moved: list[int]
) -> None:
    """One in the home stays there, and so does what its replay begins at: the next one begins later."""
    values = home.load_config().model_dump(mode="json")
    values["history"] |= settings
    home.config.write_text(json.dumps(values))
    with Journal(home.journal("a1")) as journal:
        for round in range(2, 13):
            finish_round(journal, "a1", round, finished_at=float(round))
            if round in (4, 6, 8, 10, 12):
                take_checkpoint(home, "a1", journal, round)
    pack_node(home, "a1", tmp_path / "a1.tar.gz")
    sets = [f"history.uri={settings['uri']}"] if "uri" in settings else []
    new = unpack_node(tmp_path / "a1.tar.gz", tmp_path / "new", sets).home
    held = sorted(path.name for path in new.checkpoints("a1").iterdir())
    assert held == [f"round-{round:06d}" for round in moved]
    with Journal.read_only(new.journal("a1")) as journal:
        assert [kept.round for kept in journal.checkpoints()] == moved
    assert len(list(home.checkpoints("a1").iterdir())) == 6


def test_the_pack_is_private_and_says_what_it_is(home: Home, tmp_path: Path) -> None:
    output = tmp_path / "a1.tar.gz"
    pack_node(home, "a1", output)
    assert output.stat().st_mode & 0o777 == 0o600
    with tarfile.open(output) as archive:
        names = archive.getnames()
        assert {(info.uid, info.uname, info.mode) for info in archive} == {(0, "", 0o600)}
    assert names[0] == INDEX
    assert {"key.pem", "journal.sqlite"} < set(names)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a1.tar.gz", "old"]


def test_a_packed_node_does_not_start_where_it_was_and_the_others_do(home: Home, tmp_path: Path) -> None:
    output = tmp_path / "a1.tar.gz"
    pack_node(home, "a1", output)
    with pytest.raises(UserError, match=f"was packed into {output}") as error:
        home.refuse_moved("a1")
    assert str(home.moved("a1")) in error.value.remedy
    home.refuse_moved("a0")
    with pytest.raises(UserError, match="was packed"):
        pack_node(home, "a1", tmp_path / "again.tar.gz")
    new = unpack_node(output, tmp_path / "new").home
    assert new.here(new.load_config()) == ["a1"]
    with pytest.raises(UserError, match="stayed where a1 was packed"):
        new.refuse_moved("a0")


def test_what_lies_in_the_write_ahead_log_goes_too(home: Home, tmp_path: Path) -> None:
    from sapo.store.journal.schema import connect

    reader = connect(home.journal("a1"), read_only=True)
    try:
        reader.execute("BEGIN")
        reader.execute("SELECT count(*) FROM rounds").fetchone()  # holds back the log's checkpoint
        with Journal(home.journal("a1")) as journal:
            finish_round(journal, "a1", 2, finished_at=float(2))
            pack = pack_node(home, "a1", tmp_path / "a1.tar.gz")
    finally:
        reader.close()
    assert pack.rounds == 3
    assert unpack_node(tmp_path / "a1.tar.gz", tmp_path / "new").pack.rounds == 3


def test_a_running_node_is_not_packed(home: Home, tmp_path: Path) -> None:
    with NodeLock(home.node("a1")), pytest.raises(UserError, match="in use"):
        pack_node(home, "a1", tmp_path / "a1.tar.gz")
    assert not home.moved("a1").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


@pytest.mark.parametrize("what", ["unknown", "no key", "no checkpoint", "file exists", "no folder"])
def test_what_cannot_be_packed_is_left_as_it_is(home: Home, tmp_path: Path, what: str) -> None:
    output, node = tmp_path / "a1.tar.gz", "a1"
    if what == "unknown":
        node = "a0"
    elif what == "no key":
        (home.node("a1") / "key.pem").unlink()
    elif what == "no checkpoint":
        (home.checkpoints("a1") / "round-000001" / "model.safetensors").write_bytes(b"damaged")
    elif what == "file exists":
        output.write_bytes(b"mine")
    else:
        output = tmp_path / "none" / "a1.tar.gz"
    before = files_of(tmp_path)
    with pytest.raises(UserError):
        pack_node(home, node, output)
    passing = ("/lock", "-shm", "-wal")
    after = {name: content for name, content in files_of(tmp_path).items() if not name.endswith(passing)}
    assert after == before


def test_a_node_that_lives_in_a_home_is_not_replaced(home: Home, tmp_path: Path) -> None:
    output = tmp_path / "a1.tar.gz"
    pack_node(home, "a1", output)
    unpack_node(output, tmp_path / "new")
    before = files_of(tmp_path / "new")
    with pytest.raises(UserError, match="lives here already"):
        unpack_node(output, tmp_path / "new")
    assert files_of(tmp_path / "new") == before


def test_a_node_may_come_back_but_not_as_it_was_before(home: Home, tmp_path: Path) -> None:
    first, second = tmp_path / "first.tar.gz", tmp_path / "second.tar.gz"
    pack_node(home, "a1", first)
    new = unpack_node(first, tmp_path / "new").home
    with Journal(new.journal("a1")) as journal:
        finish_round(journal, "a1", 2, finished_at=float(2))
    pack_node(new, "a1", second)
    back = unpack_node(second, home.root)
    assert back.pack.rounds == 3
    home.refuse_moved("a1")
    with Journal(home.journal("a1")) as journal:
        finish_round(journal, "a1", 3, finished_at=float(3))
    pack_node(home, "a1", tmp_path / "third.tar.gz")
    with pytest.raises(UserError, match="had 4 rounds here, the pack has 2"):
        unpack_node(first, home.root)


def test_a_round_that_was_begun_is_not_begun_again_from_an_older_pack(home: Home, tmp_path: Path) -> None:
    first = tmp_path / "first.tar.gz"
    pack_node(home, "a1", first)
    home.moved("a1").unlink()
    with Journal(home.journal("a1")) as journal:
        journal.commit_groups(2, [], [])
    pack_node(home, "a1", tmp_path / "second.tar.gz")
    before = files_of(home.root)
    with pytest.raises(UserError, match="had begun round 2 here"):
        unpack_node(first, home.root)
    assert {path: content for path, content in files_of(home.root).items() if "-shm" not in path} == {
        path: content for path, content in before.items() if "-shm" not in path
    }
    unpack_node(tmp_path / "second.tar.gz", home.root)


def test_a_node_that_is_packed_while_it_starts_does_not_start(
    home: Home, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LateLock(NodeLock):
        def __enter__(self) -> Self:
            mark_moved(home, "a1", "was packed")
            return super().__enter__()

    monkeypatch.setattr(author, "NodeLock", LateLock)
    with pytest.raises(UserError, match="was packed"):
        parts.open_parts(config, "a1", home)
    with NodeLock(home.node("a1")):
        pass  # and holds nothing


HOSTILE: dict[str, tuple[str, Any]] = {
    "bus.open": ("bus", {"type": "own", "open": "torch.hub:load", "config": {"source": "local"}}),
    "bus.servers": ("bus", {"type": "kafka", "servers": "evil.example:9092"}),
    "bus.password": ("bus", {"type": "kafka", "password": "file:/etc/passwd"}),
    "bus.path": ("bus", {"path": "/etc/cron.d/x"}),
    "member.run": ("member", {"type": "command", "run": ["sh", "-c", "id"]}),
    "member.url": ("member", {"type": "openai", "url": "http://evil/v1", "api_key": "file:~/.netrc"}),
    "history.uri": ("history", {"uri": "s3://evil/history"}),
    "track.uri": ("track", {"uri": "http://evil.example/"}),
    "gossip.store": ("gossip", {"every": 2, "store": "/tmp/x"}),
    "deploy.image": ("deploy", {"pool_type": "docker", "image": "evil/image"}),
    "workers.unwalled": ("workers", {"unwalled": True}),
    "workers.count": ("workers", {"count": 10**9}),
    "workers.memory_mb": ("workers", {"memory_mb": "999999999"}),
    "learn.epochs": ("learn", {"epochs": "1_000"}),
    "swarm.nodes": ("swarm", {"nodes": 10_000}),
    "model": ("model", "/somewhere/else"),
    "learn.loss": ("learn", {"loss": "numpy.f2py:main"}),
    "batch.sampler": ("batch", {"sampler": "os:system"}),
    "generate.engine": ("generate", {"engine": "torch.hub:load"}),
    "tasks": ("tasks", [{"dataset": "torch.hub:load"}]),
    "node.1.model": ("node", {"1": {"model": "../model"}}),
    "node.0.model": ("node", {"0": {"model": "Downloads/evil.GGUF"}}),
    "node.0.learn.loss": ("node", {"0": {"learn": {"loss": "numpy.f2py:main"}}}),
}


@pytest.mark.parametrize("named", HOSTILE)
def test_what_a_pack_says_of_code_programs_paths_addresses_and_secrets_is_for_the_site_to_say(
    home: Home, tmp_path: Path, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pack_node(home, "a1", tmp_path / "a1.tar.gz")
    section, more = HOSTILE[named]

    def change(index: dict[str, Any]) -> None:
        before = index["config"].get(section)
        index["config"][section] = before | more if isinstance(before, dict) and section != "bus" else more

    crafted, before = rewritten(tmp_path / "a1.tar.gz", indexed(change)), sorted(tmp_path.iterdir())
    assert cli.invoke(["unpack", str(crafted), "--home", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "its config says what only this site may say" in said
    assert named in said
    assert sorted(tmp_path.iterdir()) == before


def test_what_the_site_says_itself_takes_the_place_of_what_its_pack_says(home: Home, tmp_path: Path) -> None:
    values = home.load_config().model_dump(mode="json")
    values["bus"] = {"type": "kafka", "servers": "here:9092", "topic": "sapo.s", "ca_file": "ca.pem"}
    home.config.write_text(json.dumps(values))
    pack_node(home, "a1", tmp_path / "a1.tar.gz")
    sets = ["bus.servers=there:9092", "bus.ca_file=null"]
    bus = unpack_node(tmp_path / "a1.tar.gz", tmp_path / "new", sets).home.load_config().bus
    assert bus == KafkaBus(servers="there:9092", topic="sapo.s")


BY_NODE: list[Any] = [
    *([1], 1, {"0": 5}, {"0": {"batch": [1]}}),
    *({"9" * 5_000: {"threads": 1}}, {"²": {"threads": 1}}),
]
ODD: list[dict[str, Any]] = [
    *({"batch": []}, {"batch": 1}, {"adaptive": [1]}, {"adaptive": 5}),
    *({"node": value} for value in BY_NODE),
    *({"eta.rl" * 16_000: 1}, {"learn": {"eta.rl" * 16_000: 1}}),
]


def with_config(odd: dict[str, Any]) -> Callable[[Members], Members]:
    return indexed(lambda index: index["config"].update(odd))


def test_a_pack_whose_config_is_of_another_shape_or_without_end_is_refused_in_one_short_line(
    home: Home, tmp_path: Path
) -> None:
    pack = tmp_path / "a1.tar.gz"
    pack_node(home, "a1", pack)
    changes = [with_config(odd) for odd in ODD]
    tasks = indexed(lambda index: index["manifest"]["tasks"][0].update({"k" * 400_000: 1}))
    for change in (*changes, tasks):
        before = time.process_time()
        with pytest.raises(UserError) as caught:
            unpack_node(rewritten(pack, change), tmp_path / "new")
        assert len(str(caught.value)) < 1_200
        assert time.process_time() - before < 2
        assert not (tmp_path / "new").exists()


def test_nodes_beyond_what_a_pack_may_bring_may_be_said_by_the_site(home: Home, tmp_path: Path) -> None:
    pack_node(home, "a1", tmp_path / "a1.tar.gz")
    crafted = rewritten(
        tmp_path / "a1.tar.gz", indexed(lambda index: index["config"]["swarm"].update(nodes=10_000))
    )
    home = unpack_node(crafted, tmp_path / "new", ["swarm.nodes=3"]).home
    assert home.load_config().nodes == ["a0", "a1", "a2"]
