"""An error inside MLflow's own code stops no round: it is told, and what it held up is delivered later."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from finished import COMMAND, ENV
from mlflow import MlflowClient
from swarms import SMALL

from sapo.core.config.home import Home
from sapo.store.journal.journal import Journal

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
NODES, ROUNDS = ("n0",), 6
PROBLEM = "'str' object has no attribute '__name__'"
BREAK = f'''
"""Loaded by each Python that has this folder on its path: save_model raises while a file is there."""
import importlib.abc, importlib.util, os, sys


class Breaker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "mlflow.transformers":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def broken(module):
            load(module)
            save = module.save_model

            def save_model(*given, **named):
                if os.path.exists(os.environ["BROKEN"]):
                    raise AttributeError({PROBLEM!r})
                return save(*given, **named)

            module.save_model = save_model

        spec.loader.exec_module = broken
        return spec


sys.meta_path.insert(0, Breaker())
'''


def owed(home: Home) -> dict[str, dict[str, int]]:
    found = {}
    for name in NODES:
        with Journal.read_only(home.journal(name)) as journal:
            assert journal.finished_rounds() == ROUNDS
            found[name] = journal.owed_counts()
    return found


def test_a_swarm_whose_models_cannot_be_saved_makes_its_rounds_and_delivers_later(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAK)
    flag = tmp_path / "broken"
    flag.touch()
    env = {**ENV, "PYTHONPATH": str(tmp_path), "BROKEN": str(flag)}
    home = Home(tmp_path / "home")
    sets = ["swarm.nodes=1", f"swarm.rounds={ROUNDS}", "track.register_every=3", "eval.questions=20"]
    words = [word for one in (*SMALL, *sets) for word in ("--set", one)]

    def sapo(*given: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *given, "--home", str(home.root)]
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)

    begun = sapo("swarm", *words)
    assert begun.returncode == 4, begun.stdout + begun.stderr
    assert "still owes 2 version" in " ".join(begun.stdout.split())
    for name in NODES:
        log = (home.logs / f"{name}.log").read_text()
        assert log.count("ALARM: version fails") == 1
        assert PROBLEM in log
    assert {frozenset(counts) for counts in owed(home).values()} == {frozenset({"version"})}
    shown = json.loads(sapo("status", "--json").stdout)
    assert all(counts["version"] > 0 for counts in shown["owed"].values())

    os.remove(flag)
    again = sapo("swarm", "--resume")
    assert again.returncode == 0, again.stdout + again.stderr
    assert owed(home) == {name: {} for name in NODES}
    client = MlflowClient(f"sqlite:///{home.mlflow_db}")
    for name in NODES:
        assert len(client.search_model_versions(f"name = 'test.{name}'")) == 2
