"""Sites of a swarm that asks what a package or a file brings: those that have it, and those that do not."""

from pathlib import Path

import pytest
from packages import installed

from sapo import cli
from sapo.core.config.home import read_manifest
from sapo.core.config.load import load
from sapo.core.config.manifest import Manifest

BUS = ("--set", "bus.type=kafka", "--set", "bus.servers=127.0.0.1:9092")
CONFIG = """
model = "starter"

[[tasks]]
dataset = "chain_sum"

[[tasks]]
dataset = "doubling"
config = { largest = 500 }

[[tasks]]
file = "towns.csv"
config = { scorer = "exact" }
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the config and the file of a swarm's first site, begun there."""
    monkeypatch.chdir(tmp_path)
    Path("swarm.toml").write_text(CONFIG)
    Path("towns.csv").write_text("question,answer\n" + "".join(f"Town {n}?,{n}\n" for n in range(300)))
    with installed(tmp_path / "packages", monkeypatch):
        assert cli.invoke(["init", "--swarm", "demo", "--site", "a", "--config", "swarm.toml", *BUS]) == 0
    return tmp_path


def manifest(site: Path) -> Manifest:
    path = site / "demo.manifest.json"
    return read_manifest(path, "MANIFEST", str(path))


def test_what_a_site_begins_is_pinned_and_its_own_file_says_where_the_rows_are(site: Path) -> None:
    tasks = {task.dataset: task for task in manifest(site).tasks}
    assert tasks.keys() == {"chain_sum", "doubling", "file:towns"}
    assert tasks["doubling"].pin is not None
    assert '"rows":300' in tasks["file:towns"].config
    assert str(site) not in (site / "demo.manifest.json").read_text()
    own = load(file=site / "site-a.toml", env={})
    assert own.tasks[2].file == str(site / "towns.csv")
    assert Manifest.of(own).tasks == manifest(site).tasks


def test_a_site_that_has_neither_is_told_so_and_asks_the_rest(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert cli.invoke(["join", "demo.manifest.json", "--site", "b", *BUS]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "doubling: the package sapo-demo is not installed" in said
    assert "file:towns: its file is not here" in said
    own = load(file=site / "site-b.toml", env={})
    assert {task.dataset: task.weight for task in own.tasks} == {
        "chain_sum": 1.0,
        "doubling": 0.0,
        "file:towns": 0.0,
    }
    assert Manifest.of(own).tasks == manifest(site).tasks


def test_a_site_that_has_both_asks_all(
    site: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with installed(site / "packages", monkeypatch):
        assert cli.invoke(["join", "demo.manifest.json", "--site", "b", *BUS]) == 0
        text = (site / "site-b.toml").read_text()
        assert 'dataset = "file:towns"' in text
        where = f'dataset = "file:towns"\nfile = "{site / "towns.csv"}"'
        (site / "site-b.toml").write_text(
            text.replace('dataset = "file:towns"', where).replace("weight = 0.0", "")
        )
        capsys.readouterr()
        assert cli.invoke(["swarm", "--config", "site-b.toml", "--dry-run"]) == 0
        assert "weight = 0" not in capsys.readouterr().out


def test_a_manifest_none_of_whose_tasks_can_be_asked_is_refused(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = site / "demo.manifest.json"
    found = manifest(site)
    poor = found.model_copy(update={"tasks": tuple(task for task in found.tasks if task.pin is not None)})
    path.write_text(poor.model_dump_json())
    assert cli.invoke(["join", "demo.manifest.json", "--site", "b", *BUS]) == 2
    assert "none of its tasks can be asked here" in capsys.readouterr().err
