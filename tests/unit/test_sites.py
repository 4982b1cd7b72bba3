"""Beginning a swarm, joining it, and which home, name and rules a site may have. No server is started."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from makers import finish_round

from sapo import cli
from sapo.cli.commands import launch
from sapo.core.config.home import Home, read_manifest
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.ops import sites
from sapo.ops.node_pack import mark_moved
from sapo.peers.signing import Identity
from sapo.store.journal.journal import Journal

BUS = ("bus.type=kafka", "bus.servers=broker:9092")
ERROR = re.compile(r"error: \S.*: .+; .+\n")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own for every test, without settings from outside; tasks are checked by one of them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sites, "check_tasks", lambda config: None)
    for name in ("SAPO_HOME", "SAPO_CACHE", "SAPO_KAFKA_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def manifest(elsewhere: Path) -> Path:
    """The manifest of a swarm that site a has begun."""
    return sites.found_swarm("demo", "a", "tiny", BUS, elsewhere).manifest


def changed(path: Path, **fields: Any) -> Path:
    """The same manifest with other fields."""
    found = json.loads(path.read_text())
    path.write_text(json.dumps({**found, **fields}))
    return path


def sapo(*args: str) -> int:
    return cli.invoke(list(args))


def first_round(home: Home, name: str, **metrics: float) -> None:
    """A first round in a node's journal."""
    home.node(name).mkdir(exist_ok=True)
    with Journal(home.journal(name)) as journal:
        finish_round(journal, name, 0, metrics, swarm="demo")


def test_what_is_written_is_for_people_and_holds_no_secret(
    manifest: Path, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAPO_KAFKA_PASSWORD", "hunter2")
    joined = sites.join_swarm(manifest, "b", "tiny", [*BUS, "bus.username=b"], elsewhere, None)
    text = joined.file.read_text()
    assert 'password = "env:SAPO_KAFKA_PASSWORD"' in text
    assert 'topic = "sapo.demo"' in text
    assert text.count("\n# ") >= 4
    written = [path for path in elsewhere.rglob("*") if path.is_file()]
    assert not [path for path in written if b"hunter2" in path.read_bytes()]
    assert not [path for path in written if b"PRIVATE KEY" in path.read_bytes() and path.name != "key.pem"]
    assert manifest.read_text().count("\n") > 10


def test_every_node_of_a_joined_site_has_a_key_and_it_is_the_one_printed(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [word for item in BUS for word in ("--set", item)]
    assert sapo("join", str(manifest), "--site", "b", "--nodes", "2", "--home", "there", *more) == 0
    out = capsys.readouterr().out
    for name in ("b0", "b1"):
        key = Identity.load_or_create(Path("there") / name / "key.pem").key
        assert f"{name}: public key {key}" in out
    assert "swarm --config site-b.toml --home there" in out
    assert "node b0 --config site-b.toml --home there" in out


@pytest.mark.parametrize(
    "args",
    [
        ["init", "--swarm", "demo", "--site", "a1", "--set", BUS[0], "--set", BUS[1]],
        ["init", "--swarm", "../up", "--site", "a", "--set", BUS[0], "--set", BUS[1]],
        ["init", "--swarm", "demo", "--site", "A", "--set", BUS[0], "--set", BUS[1]],
        ["init", "--swarm", "demo", "--site", "a"],
        ["init", "--swarm", "demo", "--site", "a", "--set", "bus.type=memory"],
        ["init", "--swarm", "demo", "--site", "a", "--set", "bus.path=b", "--set", "learn.lrr=1"],
        ["init", "--swarm", "demo", "--site", "a", "--set", "bus.path=b", "--preset", "tinny"],
        ["init", "--swarm", "demo", "--site", "a", "--set", "bus.path=b", "--nodes", "0"],
        ["join", "absent.json", "--site", "b", "--set", "bus.path=b"],
        ["archive"],
        ["pack", "n0"],
        ["unpack", "absent.tar.gz"],
    ],
)
def test_bad_input_is_one_line_with_a_remedy_and_writes_nothing(
    args: list[str], capsys: pytest.CaptureFixture[str], elsewhere: Path
) -> None:
    assert sapo(*args) == 2
    assert ERROR.fullmatch(capsys.readouterr().err)
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("more", "entry"),
    [
        (["bus.type=kafka", "bus.servers=broker:9092"], "invite"),
        (["bus.type=kafka", "bus.servers=127.0.0.1:9092,broker:9092"], "invite"),
        (["bus.type=kafka", "bus.servers=broker:9092", "rules.entry=open"], "open"),
        (["bus.type=kafka", "bus.servers=127.0.0.1:9092,localhost:9093"], "open"),
        (["bus.path=bus.sqlite"], "open"),
    ],
)
def test_a_swarm_that_strangers_reach_is_begun_by_invitation_unless_said(
    more: list[str], entry: str, elsewhere: Path
) -> None:
    made = sites.found_swarm("demo", "a", "tiny", [*more, "swarm.nodes=2"], elsewhere)
    assert read_manifest(made.manifest, "MANIFEST", "").entry == entry
    home = Home.of(None, made.config)
    keys = [Identity.load(home.key(name)).key for name in made.config.nodes] if entry == "invite" else []
    assert list(made.config.rules.members) == keys
    home.prepare(made.config, Manifest.of(made.config))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"schema_version": 5}, "schema version 5"),
        ({"schema_version": 0}, "schema version 0"),
        ({"schema_version": "1"}, "schema version '1'"),
        ({"schema_version": None}, "is no manifest"),
        ({"schema_version": 4, "max_age_s": 60}, "does not know: max_age_s"),
        ({"max_age_s": 60}, "does not know: max_age_s"),
        ({"held_out": "some"}, "held_out"),
        ({"tasks": [{"dataset": "gcd"}]}, "tasks.0.config"),
    ],
)
def test_a_manifest_that_cannot_be_obeyed_is_refused(
    manifest: Path, elsewhere: Path, fields: dict[str, Any], says: str
) -> None:
    changed(manifest, **fields)
    with pytest.raises(UserError, match=re.escape(says)):
        sites.join_swarm(manifest, "b", "tiny", BUS, elsewhere, None)


def test_sites_have_homes_of_their_own(elsewhere: Path, manifest: Path) -> None:
    config = load(None, elsewhere / "site-a.toml", env={})
    assert Home.of(None, config).root == elsewhere / "runs" / "demo-a"
    assert Home.of("x", config).root == elsewhere / "x"
    assert Home.of(None, load("tiny", env={})).root == elsewhere / "runs" / "tiny"
    other = load(base=config, sets=["swarm.site=b"], env={})
    home = Home.of(None, config)
    home.prepare(config, Manifest.of(config))
    with pytest.raises(UserError, match="home of site 'a'"):
        home.prepare(other, Manifest.of(other))


def test_a_home_in_the_making_is_no_strangers_folder(tmp_path: Path) -> None:
    """Two nodes of a site begin at once: one finds what the other has written before the manifest."""
    config, home = load("tiny", env={}), Home(tmp_path / "home")
    home.prepare(config, Manifest.of(config))
    home.manifest.unlink()
    home.prepare(config, Manifest.of(config))
    assert home.load_manifest() == Manifest.of(config)
    home.manifest.unlink()
    home.config.write_text('{"architectures": ["LlamaForCausalLM"]}')
    with pytest.raises(UserError, match="is not empty and holds no swarm"):
        home.prepare(config, Manifest.of(config))


def test_a_joined_home_is_begun_and_then_gone_on_with(manifest: Path, elsewhere: Path) -> None:
    joined = sites.join_swarm(manifest, "b", "tiny", BUS, elsewhere, None)
    launch.refuse_second_start(joined.home)
    first_round(joined.home, "b0")
    with pytest.raises(UserError, match="holds a run already"):
        launch.refuse_second_start(joined.home)


def test_a_node_that_lives_elsewhere_does_not_start(
    manifest: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sites.join_swarm(manifest, "b", "tiny", [*BUS, "swarm.nodes=2"], elsewhere, None)
    home = Home(elsewhere / "runs" / "demo-b")
    mark_moved(home, "b1", "was packed into b1.tar.gz")
    assert sapo("node", "b1", "--config", "site-b.toml") == 2
    err = capsys.readouterr().err
    assert ERROR.fullmatch(err)
    assert f"delete {home.moved('b1')}" in err
    assert sapo("swarm", "--config", "site-b.toml") == 2
    assert "one by one with `sapo node NAME`: b0" in capsys.readouterr().err
    assert sapo("node", "--config", "site-b.toml", "--dry-run") == 0
    home.moved("b1").unlink()
    home.refuse_moved("b1")


def test_no_node_leaves_while_its_swarm_runs(
    manifest: Path, elsewhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = sites.join_swarm(manifest, "b", "tiny", BUS, elsewhere, None).home
    first_round(home, "b0")
    with NodeLock(home.root):
        assert sapo("pack", "b0") == 2
    assert "sapo stop" in capsys.readouterr().err
    home.refuse_moved("b0")
