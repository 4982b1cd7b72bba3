"""`sapo experiment`: runs, results, page and MLflow; killed and called again it goes on."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient
from mlflow_runs import runs_of

from sapo import cli
from sapo.core.child_process import alive
from sapo.core.config import toml_dump
from sapo.experiments import grid as grids
from sapo.experiments.record import Job, record_path

LIMIT_S = 240.0


def smoke(folder: Path, **changes: Any) -> Path:
    """The shipped grid with other values, as a file."""
    values = grids.read("smoke").model_dump(mode="json", by_alias=True, exclude_none=True)
    path = folder / "grid.toml"
    path.write_text(toml_dump.dumps({**values, **changes}), encoding="utf-8")
    return path


def descendants(process: "subprocess.Popen[bytes]") -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    return []


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an experiment that a first call left half done, killed, and a second ended."""
    folder = tmp_path_factory.mktemp("experiment")
    home = folder / "home"
    command = [sys.executable, "-m", "sapo.cli", "experiment", "smoke", "--home", str(home), "--jobs", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = record_path(home, Job(arm="silo", seed=1)), record_path(home, Job(arm="sharing", seed=1))
    deadline = time.monotonic() + LIMIT_S
    while not any(path.exists() for path in first):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.02)
    children = descendants(process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert children
    while any(alive(pid) for pid in children):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    kept = {path: path.stat().st_mtime_ns for path in first if path.exists()}
    (folder / "kept.json").write_text(json.dumps({str(path): at for path, at in kept.items()}))
    assert cli.invoke(["experiment", "smoke", "--home", str(home), "--jobs", "1"]) == 0
    return home


def test_a_killed_experiment_goes_on_with_the_runs_it_has(done: Path) -> None:
    kept = json.loads((done.parent / "kept.json").read_text())
    assert kept
    assert {path: os.stat(path).st_mtime_ns for path in kept} == kept
    assert not list(done.rglob("*.progress"))
    assert not list(done.rglob("*.home"))


def test_the_results_have_every_arm_and_seed(done: Path) -> None:
    found = json.loads((done / "results.json").read_text())
    assert found["missing"] == []
    assert {arm: one["seeds"] for arm, one in found["arms"].items()} == {"silo": [1, 2], "sharing": [1, 2]}
    assert found["arms"]["silo"]["figures"]["tokens/generated"]["mean"] > 0
    assert found["arms"]["silo"]["figures"]["groups/external"]["mean"] == 0
    assert found["comparisons"][0]["n"] == 2


def test_mlflow_has_a_run_for_each_under_one_parent_and_only_once(done: Path) -> None:
    def runs() -> list[Any]:
        return runs_of(MlflowClient(f"sqlite:///{done / 'mlflow.db'}"), "smoke")

    before = runs()
    nested = [run for run in before if "mlflow.parentRunId" in run.data.tags]
    parents = [run for run in before if "mlflow.parentRunId" not in run.data.tags]
    assert {run.info.run_name for run in nested} == {
        f"{arm} seed {seed}" for arm in ("silo", "sharing") for seed in (1, 2)
    }
    assert [run.info.run_name for run in parents] == ["smoke"]
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parents[0].info.run_id}
    one = nested[0]
    assert one.data.metrics["figure/tokens/generated"] > 0
    assert one.data.params["learn.lr"] == "0.001"
    assert one.info.status == "FINISHED"
    assert cli.invoke(["experiment", "smoke", "--home", str(done)]) == 0
    assert len(runs()) == len(before)


def test_a_run_that_cannot_be_made_is_told_and_the_rest_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")  # away; making a store takes seconds
    values = grids.read("smoke").model_dump(mode="json", by_alias=True, exclude_none=True)
    (folder := tmp_path / "no-model").mkdir()
    (folder / "config.json").write_text("{}")  # refused only where a run loads it
    values["arm"][0]["set"]["model"] = str(folder)
    path = smoke(tmp_path, arm=values["arm"], seeds=1)
    assert cli.invoke(["experiment", str(path), "--home", str(tmp_path / "home")]) == 1
    said = capsys.readouterr().err
    assert "silo seed 1 FAILED" in said
    assert "no-model" in said
    found = json.loads((tmp_path / "home" / "results.json").read_text())
    assert found["missing"] == [{"arm": "silo", "seed": 1}]
    assert list(found["arms"]) == ["sharing"]
