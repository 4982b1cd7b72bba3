"""What people see of a run: charts, summary, page, views, TOML."""

import math
from pathlib import Path
from typing import Any

import pytest
from history_samples import INCARNATION, batch, deliver
from makers import finish_round
from mlflow import MlflowClient
from mlflow.entities import Metric

from sapo.cli.report.example_groups import ExampleGroup
from sapo.cli.report.run_page import page
from sapo.core.config import toml_dump
from sapo.core.config.home import Home
from sapo.core.config.load import Config, load
from sapo.core.config.manifest import Manifest
from sapo.core.errors import UserError
from sapo.core.exam_size import sized
from sapo.core.figures import RunFigures, Sweep
from sapo.learn.batch_metrics import reward_metrics, source_metrics
from sapo.ops import peaks
from sapo.ops.summary import Run, gain_sentence, read_run, summarise
from sapo.store.history.tables import Store
from sapo.store.journal.journal import Journal

EVALUATION: dict[str, Any] = {
    "questions": 2000,
    "samples": 1,
    "starter": {
        "pass_at_1": 0.30,
        "interval": 0.02,
        "greedy": 0.40,
        "per_task": {"gcd": {"pass_at_1": 0.30}},
    },
    "baselines": {
        "starter": {"pass_at_1": 0.30, "greedy": 0.40, "per_task": {"gcd": {"pass_at_1": 0.30}}},
        "starter:bytes": {"pass_at_1": 0.10, "greedy": 0.15, "per_task": {"gcd": {"pass_at_1": 0.10}}},
    },
    "nodes": {
        "n0": {
            "pass_at_1": 0.34,
            "interval": 0.02,
            "greedy": 0.42,
            "model": "starter",
            "per_task": {"gcd": {"pass_at_1": 0.34}},
        },
        "n1": {
            "pass_at_1": 0.12,
            "interval": 0.01,
            "greedy": 0.16,
            "model": "starter:bytes",
            "per_task": {"gcd": {"pass_at_1": 0.12}},
        },
    },
    "gain": {"mean": 0.03, "low": 0.02, "high": 0.04},
    "gain_greedy": {"mean": 0.015, "low": -0.001, "high": 0.031},
}


DEMO = load(
    None, None, ["swarm.name=demo", "swarm.nodes=2", "swarm.rounds=40", "node.1.model=starter:bytes"], env={}
)


def make_run(home: Home, evaluation: dict[str, Any] | None = None) -> Run:
    """Two nodes of forty rounds whose rewards differ, so that mixing them up shows."""
    curves = {
        node: {
            "reward/local": {float(i): 0.2 + i / 100 for i in range(40)},
            "reward/training_set": {float(i): 0.6 + i / 100 for i in range(40)},
            "eval/pass_at_1": {0.0: 0.31, 25.0: 0.36},
            "tokens/generated": {float(i): 10.0 for i in range(40)},
            "learn/tokens": {float(i): 7.0 for i in range(40)},
            "share/external": {float(i): 0.5 for i in range(40)},
        }
        for node in ("n0", "n1")
    }
    lines = {node: {name: list(line.items()) for name, line in own.items()} for node, own in curves.items()}
    sweep = Sweep.model_validate(evaluation or {"nodes": {}})
    exams = {node: peaks.exams(curves[node], [], sweep.nodes.get(node), every=25) for node in curves}
    return Run(home, DEMO, lines, sweep, exams)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "demo")


def test_the_three_rewards_are_never_mixed(home: Home) -> None:
    node = summarise(make_run(home, EVALUATION)).written()["nodes"]["n0"]
    assert node["reward/local"]["first"] == pytest.approx(0.215)
    assert node["reward/training_set"]["first"] == pytest.approx(0.615)
    assert node["eval/pass_at_1"]["end"] == 0.34


def test_a_node_is_compared_with_the_model_it_started_from(home: Home) -> None:
    nodes = summarise(make_run(home, EVALUATION)).written()["nodes"]
    assert nodes["n0"]["eval/pass_at_1"]["start"] == 0.30
    assert nodes["n1"]["eval/pass_at_1"]["start"] == 0.10
    assert nodes["n1"]["eval/pass_at_1"]["per_task"] == {"gcd": {"start": 0.10, "end": 0.12}}


@pytest.mark.parametrize(
    ("low", "high", "begins"),
    [(0.02, 0.04, "The nodes learned"), (-0.04, -0.02, "The nodes got worse"), (-0.01, 0.01, "No gain")],
)
def test_the_sentence_claims_no_more_than_the_interval(
    home: Home, low: float, high: float, begins: str
) -> None:
    gain = {"mean": (low + high) / 2, "low": low, "high": high}
    sentence = gain_sentence(summarise(make_run(home, {**EVALUATION, "gain": gain})))
    assert sentence.startswith(begins)
    assert f"{100 * low:+.1f} to {100 * high:+.1f}" in sentence
    assert "2,000 held-out questions" in sentence


def prepared(home: Home) -> Config:
    config = load(None, None, ["swarm.name=demo"], env={})
    home.prepare(config, Manifest.of(config))
    home.node("n0").mkdir()
    return config


def test_a_run_is_read_from_its_journals(home: Home) -> None:
    prepared(home)
    with Journal(home.journal("n0")) as journal:
        finish_round(journal, "n0", 0, {"reward/local": 0.25}, swarm="demo")
        finish_round(journal, "n0", 1, {"reward/local": 0.5, "eval/greedy": 0.75}, swarm="demo")
    run = read_run(home)
    assert run.curve("n0", "reward/local") == [(0.0, 0.25), (1.0, 0.5)]
    assert run.curve("n0", "eval/greedy") == [(1.0, 0.75)]
    assert run.curve("n0", "reward/training_set") == []


def test_rounds_that_the_journal_has_dropped_come_from_mlflow(home: Home) -> None:
    prepared(home)
    with Journal(home.journal("n0")) as journal:
        finish_round(journal, "n0", 0, {"reward/local": 0.5}, swarm="demo")
    client = MlflowClient(uri := f"sqlite:///{home.mlflow_db}", uri)
    runs = [
        ("demo", {"sapo.node": "n0"}, [("reward/local", 0.125, 7), ("reward/local", math.nan, 8)]),
        ("demo", {"sapo.node": "n0"}, [("eval/greedy", 0.25, 6), ("eval/greedy", 1e300, 8)]),
        ("other", {"sapo.node": "n0"}, [("reward/local", 0.75, 9)]),
        ("demo", {"sapo.replay": "what-if"}, [("reward/local", 1.0, 7)]),
    ]
    made = {name: client.create_experiment(name) for name in ("demo", "other")}
    for swarm, tags, values in runs:
        one = client.create_run(made[swarm], tags=tags).info.run_id
        client.log_batch(one, [Metric(name, value, 5, step) for name, value, step in values])
    run = read_run(home)
    assert run.curve("n0", "reward/local") == [(0.0, 0.5), (7.0, 0.125)]
    assert run.curve("n0", "eval/greedy") == [(6.0, 0.25)], "an earlier release wrote the other"
    assert any("eval/greedy is wrong" in note for note in run.notes)


def unmeasured(home: Home, rounds: int, delivered: int) -> RunFigures:
    """What n0 is said to have done whose metrics are in no MLflow; the history has its first rounds."""
    prepared(home)
    with Journal(home.journal("n0"), incarnation=INCARNATION) as journal:
        for round in range(rounds):
            finish_round(journal, "n0", round, {}, swarm="demo")
    deliver(Store(str(home.history)), *range(delivered))
    return summarise(read_run(home))


def test_rewards_that_mlflow_lacks_come_from_the_history(home: Home) -> None:
    figures = unmeasured(home, 2, 2)
    n0, made = figures.written()["nodes"]["n0"], [batch(round) for round in range(2)]
    for name in ("reward/local", "reward/training_set"):
        first, last = (reward_metrics(one.groups)[name] for one in made)
        assert n0[name] == {"first": pytest.approx(first), "last": pytest.approx(last)}
    assert n0["share/external"] == pytest.approx(source_metrics(made[0])["share/external"])
    own = [s for one in made for group in one.groups if group.source == "local" for s in group.samples]
    assert n0["tokens/generated"] == sum(sum(sample.loss_mask) for sample in own)
    assert n0["tokens/trained"] is None, "the history does not say which tokens were masked"
    assert n0["rounds"] == 2
    assert "MLflow lacks the metrics of 2 of its 2 rounds" in figures.notes[0]


def test_a_broken_evaluation_is_bad_input(home: Home) -> None:
    prepared(home)
    for text in ("{", "[]", "{}"):
        home.evaluation.write_text(text)
        with pytest.raises(UserError, match=r"evaluation\.json"):
            read_run(home)


STORY = ExampleGroup(
    group_id="ab" * 32,
    producer="n1",
    round=3,
    dataset="gcd",
    question="What is gcd(4, 6)? <b>",
    answers=(("2", 1.0, 5), ("<script>alert(1)</script>", 0.0, 2), ("", None, 1)),
    learners=(("n0", 5),),
)


def test_the_page_needs_nothing_from_elsewhere_and_runs_no_script(home: Home) -> None:
    run = make_run(home, EVALUATION)
    text = page(run, summarise(run), [STORY])
    assert "<script" not in text
    addresses = {part.split('"')[0] for part in text.split("http")[1:]}
    assert addresses == {"://www.w3.org/2000/svg"}


@pytest.mark.parametrize("preset", ["tiny", "paper"])
def test_a_config_printed_as_toml_reads_back_as_the_same_config(preset: str, tmp_path: Path) -> None:
    config = sized(load(preset, None, ["node.1.model=starter:bytes", "node.1.batch.local=3"], env={}))
    file = tmp_path / "printed.toml"
    file.write_text(toml_dump.dumps(config.model_dump(mode="json")), encoding="utf-8")
    assert load(None, file, env={}) == config
