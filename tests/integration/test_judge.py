"""The judge over real nodes: each round judged once, at checkpoints that are whole, told to a real MLflow."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow import MlflowClient
from swarms import make_home, open_node, small_config

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import Unavailable
from sapo.flows import evaluate
from sapo.node import probes
from sapo.node.tracked import tracker_of
from sapo.ops.judge import evaluate_swarm, judge_swarm, tell_verdicts
from sapo.ops.judge_store import Verdicts
from sapo.ops.judging import champion_candidates
from sapo.ops.process import Process
from sapo.policy.checkpoint import paths
from sapo.store.journal.journal import Journal
from sapo.store.tracking import model_registry
from sapo.tasks.holdout import bucket

pytestmark = pytest.mark.usefixtures("sharing")

SETS = ("swarm.rounds=20", "checkpoint.every_rounds=2", "batch.external=0")


def run(config: Config, home: Home, name: str, to: int) -> None:
    with open_node(config, home, name, deliver=False) as node:
        while node.round < to:
            node.run_round()


def made(home: Path, sets: Sequence[str] = (), **rounds: int) -> tuple[Config, Home]:
    """A home whose nodes have made so many rounds."""
    config = small_config([*SETS, *sets])
    found = make_home(home, config)
    for name, to in rounds.items():
        run(config, found, name, to)
    return config, found


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """n0 has made four rounds, n1 two: each goes at its own pace."""
    return made(tmp_path_factory.mktemp("judge") / "home", n0=4, n1=2)[1].root


@pytest.fixture
def swarm(template: Path, tmp_path: Path) -> tuple[Config, Home]:
    shutil.copytree(template, tmp_path / "home")
    home = Home(tmp_path / "home")
    return home.load_config(), home


def rounds_of(home: Home) -> dict[str, int]:
    return {name: int(paths(home.checkpoints(name))[-1].name[-6:]) for name in ("n0", "n1")}


def test_every_node_answers_the_same_held_out_question_in_the_round_it_is_in(
    swarm: tuple[Config, Home],
) -> None:
    config, home = swarm
    found = judge_swarm(config, home)
    verdicts = [one.verdict for one in found.standings.values()]
    assert {v.node: v.round for v in verdicts} == rounds_of(home) == {"n0": 4, "n1": 2}
    assert len({(v.question, v.judging) for v in verdicts}) == 1
    assert bucket(verdicts[0].question, config.rules.salt) < config.rules.held_out


def test_a_broken_checkpoint_is_passed_over_for_the_one_before_it(swarm: tuple[Config, Home]) -> None:
    config, home = swarm
    newest = paths(home.checkpoints("n0"))[-1]
    (newest / "optimizer.pt").write_bytes(b"cut off")
    assert judge_swarm(config, home).standings["n0"].verdict.round == 2
    shutil.rmtree(home.checkpoints("n1"))
    found = judge_swarm(config, home)
    assert not found.standings
    assert found.passed_over["n1"] == "has no whole checkpoint yet"


def test_the_full_evaluation_asks_the_probe_again_under_the_same_random_numbers(
    swarm: tuple[Config, Home],
) -> None:
    """So that the end of a run compares with every probe on the way, at no cost."""
    config = small_config([*SETS, "eval.probe_questions=20", "eval.probe_every=2", "eval.samples=2"])
    _, home = swarm
    sweep = evaluate_swarm(config, home)
    n0 = sweep.nodes["n0"]
    assert n0.probe is not None
    assert (n0.round, n0.questions, n0.probe.questions) == (4, 40, 20)
    run(config, home, "n0", 5)
    with Journal.read_only(home.journal("n0")) as journal:
        asked = probes.read(home.probes("n0"), journal.incarnation)
        series = journal.result(4).metrics
    assert [replace(probe, answers={}, questions="") for probe in asked] == [probes.parse(4, n0.probe.passes)]
    assert series["eval/pass_at_1"] == n0.probe.pass_at_1
    assert series["eval/questions"] == 20
    assert [dataset for dataset, _ in sweep.examples] == ["chain_sum"] * 2
    assert len(n0.answers) == len(sweep.baselines["starter"].answers) == 2


def judged(uri: str, node: str = "n0") -> SimpleNamespace:
    """A node's judge series in MLflow, and the state of its run."""
    client = MlflowClient(uri)
    (experiment,) = [e for e in client.search_experiments() if e.name == "test"]
    (found,) = client.search_runs([experiment.experiment_id], f"tags.`sapo.node` = '{node}'")
    series = {
        name: sorted((m.step, m.value) for m in client.get_metric_history(found.info.run_id, f"judge/{name}"))
        for name in ("reward", "cumulative")
    }
    return SimpleNamespace(status=found.info.status, **series)


def test_mlflow_has_every_verdict_once_also_those_made_while_it_was_away(swarm: tuple[Config, Home]) -> None:
    config, home = swarm
    uri = f"sqlite:///{home.mlflow_db}"
    judge_swarm(config, home)
    with pytest.raises(Unavailable):
        tell_verdicts(config, home, "n0", uri="http://127.0.0.1:9")
    run(config, home, "n0", 6)
    judge_swarm(config, home)
    assert tell_verdicts(config, home, "n0", uri=uri) == 2
    assert tell_verdicts(config, home, "n0", uri=uri) == 0
    table = Verdicts(home.verdicts)
    standings = table.standings("n0", f"{0:016x}")
    found = judged(uri)
    assert found.reward == [(one.verdict.round, one.verdict.reward) for one in standings]
    assert found.cumulative == [(one.verdict.round, one.cumulative) for one in standings]
    assert found.status == "KILLED"


def test_the_run_of_a_node_that_has_made_its_last_round_is_marked_as_finished(
    swarm: tuple[Config, Home],
) -> None:
    config, home = swarm
    over = config.model_copy(update={"swarm": config.swarm.model_copy(update={"rounds": 4})})
    uri = f"sqlite:///{home.mlflow_db}"
    judge_swarm(config, home, ["n0"])
    tell_verdicts(over, home, "n0", uri=uri)
    assert judged(uri).status == "FINISHED"


def test_the_champion_is_the_best_of_all_versions_asked_the_same_questions(
    swarm: tuple[Config, Home], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, home = swarm
    uri = f"sqlite:///{home.mlflow_db}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    tracker = tracker_of(config, "n0", home, uri=uri)
    older, newest = paths(home.checkpoints("n0"))[-2:]
    for round, path in ((2, older), (4, newest)):
        model = tmp_path / str(round)
        shutil.copytree(path, model)
        (model / "README.md").write_text("# a node's model\n")  # as the sink's folder has one
        tracker.register(model, round, tags=model_registry.lineage(path))
    shutil.rmtree(older)  # it is in MLflow only
    assert evaluate.sweep(Process.at(str(home.root)), evaluate.held_out.fn, evaluate.champion.fn) == []
    report = home.load_evaluation()
    assert report is not None
    asked = report.nodes["n0"]
    known = model_registry.versions_of(uri, tracker.model_name)
    found = {int(one.tags["sapo.round"]): float(one.tags["sapo.eval.pass_at_1"]) for one in known}
    assert found == {2: asked.earlier[2], 4: asked.pass_at_1}
    best = max(found, key=lambda round: (found[round], round))
    assert [one.tags["sapo.round"] for one in known if "champion" in one.aliases] == [str(best)]
    assert champion_candidates(config, home, "n0", 4, uri, home.root) == {}, "its answers are kept"
    again = evaluate_swarm(config, home, ["n0"], rivals=lambda *_: {4: newest})
    assert again.nodes["n0"].earlier == {4: asked.pass_at_1}, "the same random numbers"
