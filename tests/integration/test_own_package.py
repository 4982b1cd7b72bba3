"""The package of docs/extending.md, installed into an environment of its own, in a swarm over Kafka."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import outside, running, sapo, teachers, until
from packages import OWN_PACKAGE
from swarms import SMALL

from infra.kafka.cluster import Cluster
from sapo.core.config.home import Home
from sapo.store.journal.journal import Journal

pytestmark = [pytest.mark.kafka, pytest.mark.services, pytest.mark.timeout(600)]

TASKS = (
    '[{dataset="doubling", config={largest=30}, weight=3},'
    ' {dataset="chain_sum", config={min_terms=2, max_terms=2, min_digits=1, max_digits=1}}]'
)
OWN = ("learn.loss=sapo_demo.losses:reinforce", "batch.sampler=sapo_demo.samplers:newest_first")
UNAVAILABLE = "doubling: the package sapo-demo is not installed"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a fresh environment with the package; sapo and what it needs come from this one."""
    folder = tmp_path_factory.mktemp("fresh")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "env"], check=True)
    [packages] = (folder / "env" / "lib").glob("python*/site-packages")
    here = Path(pytest.__file__).parents[1]
    (packages / "sapo.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
    shutil.copytree(OWN_PACKAGE, folder / "package")
    fresh = str(folder / "env" / "bin" / "python")
    uv = Path(sys.executable).with_name("uv")
    install = [str(uv), "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--python", fresh]
    subprocess.run([*install, str(folder / "package")], check=True)
    return fresh


def words(*sets: str) -> list[str]:
    return [word for item in sets for word in ("--set", item)]


def rounds_of(home: Home, name: str) -> int:
    if not home.journal(name).exists():
        return 0
    with Journal.read_only(home.journal(name)) as journal:
        return journal.finished_rounds()


def refused(home: Home, name: str) -> set[tuple[str, str]]:
    """Codes and details of what a node has refused."""
    with Journal.read_only(home.journal(name)) as journal:
        rounds = range(journal.finished_rounds())
        return {(one.reason, one.detail) for number in rounds for one in journal.refusals(number)}


def test_its_own_checks_pass(python: str, tmp_path: Path) -> None:
    checks = shutil.copy(OWN_PACKAGE / "checks.py", tmp_path)
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", checks],
        cwd=tmp_path,
        env=outside(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_two_nodes_learn_by_it_and_a_third_that_lacks_it_goes_on(
    kafka: Cluster, python: str, tmp_path: Path
) -> None:
    kafka.create_topic("sapo.own", partitions=1)
    here, there = tmp_path / "a", tmp_path / "b"
    for folder in (here, there):
        folder.mkdir()
    usual = [item for item in SMALL if not item.startswith(("swarm.", "tasks=", "rules."))]
    bus = [f"bus.{key}={value}" for key, value in kafka.bus("sapo.own").items()]
    both = words(*usual, *bus, "swarm.rounds=100000", "checkpoint.every_rounds=5", "eval.questions=10")
    mine = words(f"tasks={TASKS}", "rules.held_out=0.3", "swarm.nodes=2", *OWN)
    begun = sapo(
        *("init", "--swarm", "own", "--site", "a", "--preset", "starter", *both, *mine),
        place=here,
        python=python,
    )
    assert "learn.loss = 'sapo_demo.losses:reinforce' is code of a package" in begun
    shutil.copy(here / "own.manifest.json", there)
    sapo("join", "own.manifest.json", "--site", "b", *both, place=there)
    first, second = Home(here / "runs" / "own-a"), Home(there / "runs" / "own-b")
    with (
        running("node", "a0", "--config", "site-a.toml", place=here, python=python) as one,
        running("node", "a1", "--config", "site-a.toml", place=here, python=python) as other,
        running("node", "--config", "site-b.toml", place=there) as poor,
    ):
        until(
            lambda: (
                "a1" in teachers(first, "a0")
                and "a0" in teachers(first, "a1")
                and rounds_of(second, "b0") > 1
                and ("unavailable", UNAVAILABLE) in refused(second, "b0")
            ),
            *(one, other, poor),
        )
    assert "doubling" not in learned_from(second, "b0")
    sapo("archive", "--once", place=here, python=python)
    for name in ("a0", "a1"):
        assert "doubling" in learned_from(first, name)
    found = json.loads(sapo("replay", "a0", "--json", "--home", str(first.root), place=here, python=python))
    assert found["identical"], found
    with Journal.read_only(first.journal("a0")) as journal:
        record = journal.environment(0) or {}
    assert {key for key in record if key.startswith("code of ")} == {
        "code of sapo_demo.losses:reinforce",
        "code of sapo_demo.samplers:newest_first",
    }


def learned_from(home: Home, name: str) -> set[str]:
    """The data sets of all groups that a node has trained on."""
    with Journal.read_only(home.journal(name)) as journal:
        return {
            group.recipe.dataset
            for number in range(journal.finished_rounds())
            for group in journal.batch(number).groups
        }
