"""An error inside MLflow's own code stops no round: it is told, and what it held up is delivered later."""

import json
import os
from pathlib import Path

import pytest
from commands import running, sapo, until
from finished import ENV
from mlflow import MlflowClient
from swarms import small_config

from sapo.core.config import toml_dump
from sapo.core.config.home import Home
from sapo.store.journal.journal import Journal, rounds_made

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
NODE, ROUNDS = "n0", 60
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


def test_a_swarm_whose_models_cannot_be_saved_makes_its_rounds_and_delivers_later(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BREAK)
    flag = tmp_path / "broken"
    flag.touch()
    env = {**ENV, "PYTHONPATH": str(tmp_path), "BROKEN": str(flag)}
    home = Home(tmp_path / "home")
    log = home.logs / f"{NODE}.log"
    sets = ["swarm.nodes=1", f"swarm.rounds={ROUNDS}", f"track.register_every={ROUNDS // 2}"]
    config = small_config([*sets, "eval.questions=20"]).model_dump(mode="json", exclude_none=True)
    (tmp_path / "swarm.toml").write_text(toml_dump.dumps(config))

    with running("swarm", "--config", "swarm.toml", "--home", "home", place=tmp_path, env=env) as swarm:
        until(lambda: log.exists() and "ALARM: version fails" in log.read_text(), swarm)
        # after the last round a node waits a minute for its deliveries
        until(lambda: rounds_made(home.journal(NODE)) == ROUNDS, swarm)
        shown = json.loads(sapo("status", "--json", "--home", "home", place=tmp_path, env=env))
        assert shown["owed"][NODE]["version"] > 0
        os.remove(flag)
        assert swarm.wait(300) == 0

    assert log.read_text().count("ALARM: version fails") == 1
    assert PROBLEM in log.read_text()
    with Journal.read_only(home.journal(NODE)) as journal:
        assert (journal.finished_rounds(), journal.owed_counts()) == (ROUNDS, {})
    client = MlflowClient(f"sqlite:///{home.mlflow_db}")
    assert len(client.search_model_versions(f"name = 'test.{NODE}'")) == 2
