"""What-ifs over a real recorded run: each a run of its own in a real MLflow store, the node is untouched."""

import json
import shutil
import socket
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlflow
import pytest
from mlflow import MlflowClient
from mlflow_runs import runs_of
from swarms import open_node, small_config
from tampering import rewrite, rows_of

from sapo.cli.report.summary import tracked
from sapo.core import service_registry
from sapo.core.config.home import Home
from sapo.core.config.manifest import Manifest
from sapo.core.config.schema import LearnConfig
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import Unavailable, UserError
from sapo.ops import services
from sapo.ops.judge import evaluate_swarm
from sapo.policy.models import weights_sha256
from sapo.provenance.whatif import WhatIf, retrain
from sapo.provenance.whatif_settings import with_advantages
from sapo.store.history.query import Damaged
from sapo.store.history.rounds import RecordedRound, recorded
from sapo.store.history.tables import Store
from sapo.store.tracking.sinks import TrackSink
from sapo.store.tracking.tracker import Tracker
from sapo.store.tracking.uri import tracking_uri

pytestmark = pytest.mark.usefixtures("sharing")

INCARNATION = f"{0:016x}"
BASE = (
    "learn.lr=1e-3",
    # at such a step size "positive" forgets how to stop: then every answer is cut, and none teaches
    "learn.foreign=as_if_own",
    "batch.local=4",
    "batch.external=1",
    "batch.completions=8",
    "pool.newcomer_share=1",
    "pool.newcomer_groups=1",  # n1 is heard to the end
)
PHASES = (
    (),
    ("learn.advantage=mean_std",),
    ("learn.truncated=zero_reward", "generate.max_new_tokens=3"),
    (
        "learn.advantage=mean_std",
        "learn.std_floor=0.4",
        "learn.loss=grpo",
        "learn.epochs=2",
        "learn.foreign=behaviour",
        'learn.trusted_peers=["n1"]',
    ),
)
"""What was changed while the recorded run went on; each phase is the base with these changes."""
EACH = 5
LAST = EACH * len(PHASES) - 1
SAME = ("learn.lr=0.001", "learn.dr_grpo_length=77")
"""A setting as it was recorded, and one that no loss but another looks at."""


@dataclass(frozen=True)
class Recording:
    """A swarm of two nodes that has run, with n0 tracked and evaluated, and what n0's history holds."""

    home: Home
    uri: str
    run: str
    rounds: list[RecordedRound]

    def what_if(self, *sets: str, **more: Any) -> WhatIf:
        return retrain(self.home, "n0", sets, **more)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    home = Home(tmp_path_factory.mktemp("what-if") / "home")
    uri = f"sqlite:///{home.mlflow_db}"
    tracker = Tracker(uri, "test", "n0", INCARNATION, artifacts=home.artifacts)
    # more than n0 needs to its end: not all of it teaches
    config = small_config([*BASE, f"swarm.rounds={3 * LAST}"])
    home.prepare(config, Manifest.of(config))
    with open_node(config, home, "n1") as peer:
        while not peer.finished:
            peer.run_round()
        assert peer.drain(60)
    for number, phase in enumerate(PHASES):
        config = small_config([*BASE, *phase, f"swarm.rounds={EACH * (number + 1)}"])
        home.prepare(config, Manifest.of(config))
        sinks = [TrackSink(tracker)]
        with open_node(config, home, tracking=sinks) as node:
            while not node.finished:
                node.run_round()
            assert node.drain(60)
    tracker.end()
    evaluate_swarm(config, home, ["n0"])
    rounds = list(recorded(Store(str(home.history)), "n0", INCARNATION))
    return Recording(home, uri, str(tracker.found()), rounds)


@pytest.fixture(scope="module")
def other(recording: Recording) -> WhatIf:
    """Another loss and another step size, over all rounds."""
    return recording.what_if("learn.loss=cispo", "learn.lr=1e-5")


def run_of(recording: Recording, made: WhatIf) -> Any:
    return MlflowClient(recording.uri).get_run(made.run_id)


def series(recording: Recording, run: str, name: str) -> dict[int, float]:
    found = MlflowClient(recording.uri).get_metric_history(run, name)
    return {metric.step: metric.value for metric in found}


def test_a_change_without_effect_ends_with_the_recorded_weights_bit_for_bit(recording: Recording) -> None:
    made = recording.what_if(*SAME)
    assert made.weights_sha256 == recording.rounds[-1].weights_sha256 != ""
    assert made.unchanged == ("learn.lr",)
    assert made.rounds == len(recording.rounds)
    assert made.steps == sum(found.skipped is None for found in recording.rounds) > EACH
    assert "they are n0's own, bit for bit: the change made no difference" in made.lines()
    assert "as it was recorded anyway: learn.lr" in made.lines()
    assert made.figures is not None
    assert made.own is not None
    assert made.figures.pass_at_1 == made.own.pass_at_1


def test_advantages_worked_out_from_recorded_scores_are_the_recorded_ones(recording: Recording) -> None:
    modes = set()
    for found in recording.rounds:
        learn = LearnConfig.model_validate(json.loads(found.batch.learn))
        for group in found.batch.groups:
            assert with_advantages(group, learn) == group
            if group.informative:
                modes.add((learn.advantage, learn.truncated, learn.std_floor))
    assert len(modes) == 4, "each way to work them out is in the record"


def test_other_settings_lead_to_other_weights(recording: Recording, other: WhatIf) -> None:
    assert other.weights_sha256 != recording.rounds[-1].weights_sha256 == other.own_weights_sha256
    assert (other.first, other.last, other.rounds) == (0, LAST, len(recording.rounds))
    assert other.changes == {"learn.loss": "cispo", "learn.lr": "1e-05"}
    assert not other.unchanged
    assert json.loads(json.dumps(other.to_json()))["changes"] == other.changes


def test_the_run_lies_below_the_nodes_own_and_says_what_it_is(recording: Recording, other: WhatIf) -> None:
    run = run_of(recording, other)
    tags, params = run.data.tags, run.data.params
    assert run.info.run_name == "n0 · learn.loss=cispo learn.lr=1e-05"
    assert run.info.status == "FINISHED"
    assert (params["learn.loss"], params["learn.lr"], params["batch.local"]) == ("cispo", "1e-05", "4")
    assert tags["mlflow.parentRunId"] == tags["sapo.replay.of"] == recording.run
    said = {name.removeprefix("sapo.replay"): tags[name] for name in tags if name.startswith("sapo.replay")}
    assert said[""] == "what-if"
    assert (said[".node"], said[".incarnation"], said[".rounds"]) == ("n0", INCARNATION, f"0-{LAST}")
    assert said[".changes"] == "learn.loss=cispo learn.lr=1e-05"
    assert said[".weights_sha256"] == other.weights_sha256
    assert said[".chain"] == recording.rounds[-1].chain
    assert not {"sapo.node", "sapo.incarnation"} & tags.keys()


def test_its_series_stand_beside_the_nodes_own(recording: Recording, other: WhatIf) -> None:
    trained = {found.round for found in recording.rounds}
    for name in ("reward/local", "reward/training_set", "reward/local/chain_sum", "share/external"):
        own = series(recording, recording.run, name)
        assert series(recording, other.run_id, name) == {step: own[step] for step in own if step in trained}
    mine, own = (series(recording, run, "learn/loss") for run in (other.run_id, recording.run))
    assert mine.keys() == own.keys()
    assert mine != own
    ends = {
        name: series(recording, other.run_id, name) for name in ("eval/full/pass_at_1", "eval/full/greedy")
    }
    assert other.figures is not None
    assert ends["eval/full/pass_at_1"] == {LAST + 1: other.figures.pass_at_1}
    assert ends["eval/full/greedy"] == {LAST + 1: other.figures.greedy}
    assert series(recording, other.run_id, "eval/full/pass_at_1/chain_sum") == ends["eval/full/pass_at_1"]


def test_a_person_sees_both_policies_beside_each_other(other: WhatIf) -> None:
    lines = other.lines()
    assert lines[0].startswith(
        f"n0 · learn.loss=cispo learn.lr=1e-05: {other.rounds} recorded rounds (0 to {LAST})"
    )
    left_out = other.rounds - other.steps
    reason = f" ({left_out} no informative group)" if left_out else ""
    assert f"steps made: {other.steps}, left out: {left_out}{reason}" in lines
    [line] = [line for line in lines if line.startswith("pass@1: ")]
    assert other.figures is not None
    assert other.own is not None
    assert other.start is not None
    assert f"this {other.figures.pass_at_1:.1%}" in line
    assert f"n0's own after {LAST + 1} rounds {other.own.pass_at_1:.1%}" in line
    assert f"at the start {other.start.pass_at_1:.1%}" in line
    assert lines[-1] == f"model: runs:/{other.run_id}/model"


def test_its_model_is_loaded_from_the_run(
    recording: Recording, other: WhatIf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", recording.uri)
    assert other.model is not None
    for address in (f"runs:/{other.run_id}/model", other.model):
        assert weights_sha256(mlflow.transformers.load_model(address).model) == other.weights_sha256


def test_it_enters_no_curve_of_the_nodes_own(recording: Recording, other: WhatIf) -> None:
    MlflowClient(recording.uri).set_tag(other.run_id, "mlflow.runName", "n0")
    own = {
        (name, step, value)
        for name in MlflowClient(recording.uri).get_run(recording.run).data.metrics
        for step, value in series(recording, recording.run, name).items()
    }
    for uri in (None, recording.uri):
        found = list(tracked(recording.home, uri, "test"))
        assert {node for node, *_ in found} == {"n0"}
        assert {(name, step, value) for _, name, step, value in found} == own
    assert Tracker(recording.uri, "test", "n0", INCARNATION).found() == recording.run


def test_nothing_of_the_node_is_touched(recording: Recording, other: WhatIf) -> None:
    def state() -> dict[Path, tuple[int, int]]:
        folders = [recording.home.node("n0"), recording.home.node("n1"), recording.home.history]
        paths = [path for folder in folders for path in folder.rglob("*")]
        own = [path for path in paths if path.name not in ("lock", "journal.sqlite-shm")]
        return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in own}

    before, run = state(), MlflowClient(recording.uri).get_run(recording.run).to_dictionary()
    with NodeLock(recording.home.node("n0")):  # as while the node runs
        recording.what_if("learn.loss=dr_grpo", first=LAST - 1)
    assert state() == before
    assert MlflowClient(recording.uri).get_run(recording.run).to_dictionary() == run


def test_rounds_before_the_first_are_repeated_as_they_were(recording: Recording) -> None:
    first, last = EACH + 1, 3 * EACH - 1
    told: list[tuple[str, int, int]] = []
    made = recording.what_if(*SAME, first=first, last=last, progress=lambda *step: told.append(step))
    until = [found for found in recording.rounds if found.round <= last]
    assert made.weights_sha256 == until[-1].weights_sha256
    assert (made.first, made.last) == (first, last)
    assert made.rounds == sum(found.round >= first for found in until)
    assert min(series(recording, made.run_id, "learn/groups")) >= first
    rounds = last - first + 1
    ends = {label: done == total for label, done, total in told}
    assert ends == {"rounds before": True, "rounds": True, "held-out questions": True}
    assert ("rounds", rounds, rounds) in told
    label, done, total = told[-1]
    assert label == "held-out questions"
    assert done == total <= 2 * 40, "answers, sampled and greedy"


def test_behaviour_is_refused_where_the_history_has_no_log_probabilities(recording: Recording) -> None:
    mode = ("learn.foreign=behaviour", 'learn.trusted_peers=["n1"]', "learn.foreign_ratio_cap=1.5")
    with pytest.raises(UserError, match=r"no log-probabilities of n1 in round \d+: "):
        recording.what_if(*mode)
    made = recording.what_if(*mode, first=LAST - EACH + 1)
    assert made.unchanged == ("learn.foreign", "learn.trusted_peers")
    assert made.steps > 0


@pytest.mark.parametrize("odd", ["no JSON", "[1]", '{"lr": -1}'])
def test_recorded_settings_that_are_none_are_damage_not_bad_input(
    recording: Recording, tmp_path: Path, odd: str
) -> None:
    home = Home(tmp_path / "home")
    shutil.copytree(recording.home.root, home.root)
    store = Store(str(home.history))
    rows = rows_of(store)
    next(row for row in rows if (row["node"], row["round"]) == ("n0", 3))["learn"] = odd
    rewrite(store, rows)
    with pytest.raises(Damaged, match=r"history of n0, round 3: its `learn` holds no such settings"):
        retrain(home, "n0", ["learn.lr=1e-5"])


def test_alarms_leave_their_steps_out_and_are_counted(recording: Recording) -> None:
    made = recording.what_if("guard.min_entropy=50")
    steps = sum(found.skipped is None for found in recording.rounds)
    assert made.left_out["past guard.min_entropy = 50"] == steps - made.steps > EACH
    assert sum(made.left_out.values()) == made.rounds - made.steps
    assert json.loads(run_of(recording, made).data.tags["sapo.replay.left_out"]) == made.left_out
    assert any("past guard.min_entropy = 50" in line for line in made.lines())


def test_steps_that_would_break_the_model_are_left_out_and_counted(recording: Recording) -> None:
    made = recording.what_if("learn.lr=1e300")
    steps = sum(found.skipped is None for found in recording.rounds)
    assert (made.steps, made.left_out["weights beyond 1e+06"]) == (0, steps)


def test_an_interrupted_what_if_is_killed_in_mlflow(recording: Recording) -> None:
    def interrupt(label: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = {run.info.run_id for run in all_runs(recording)}
    with pytest.raises(KeyboardInterrupt):
        recording.what_if(*SAME, progress=interrupt)
    [made] = [run for run in all_runs(recording) if run.info.run_id not in before]
    assert made.info.status == "KILLED"
    assert made.data.metrics["learn/groups"] > 0, "what was done until then can be looked at"


def all_runs(recording: Recording) -> list[Any]:
    return runs_of(MlflowClient(recording.uri), "test")


def test_without_mlflow_the_long_work_does_not_begin(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        monkeypatch.setenv("MLFLOW_TRACKING_URI", url)
        told: list[str] = []
        with pytest.raises(Unavailable, match=f"MLflow at {url}"):
            recording.what_if(*SAME, progress=lambda label, done, total: told.append(label))
    assert not told


def test_adapters_are_trained_again_too_and_recorded_rollbacks_are_not(
    recording: Recording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", recording.uri)
    home, alarming = Home(tmp_path / "home"), ["guard.min_entropy=50", "guard.action=rollback"]
    for rounds, sets in ((4, []), (6, alarming)):
        config = small_config(
            [*BASE, *sets, f"swarm.rounds={rounds}", "batch.external=0", "lora={rank=4}", "eval.questions=20"]
        )
        home.prepare(config, Manifest.of(config))
        with open_node(config, home) as node:
            while not node.finished:
                node.run_round()
            assert node.drain(60)
    own = list(recorded(Store(str(home.history)), "n0", INCARNATION))
    back = sum(found.rolled_back_to is not None for found in own)
    assert back > 0

    same = retrain(home, "n0", SAME, last=3)
    assert same.weights_sha256 == own[3].weights_sha256
    whole = mlflow.transformers.load_model(f"runs:/{same.run_id}/model").model
    assert not [name for name, _ in whole.named_parameters() if "lora" in name], "merged into the weights"
    bold = retrain(home, "n0", ["guard.min_entropy=0"])
    assert (bold.rollbacks, bold.steps > same.steps) == (back, True)
    assert f"recorded rollbacks, not repeated here: {back}" in bold.lines()


@pytest.mark.services
def test_a_swarm_that_ends_meanwhile_with_its_server_breaks_no_what_if(
    recording: Recording, healthy: str
) -> None:
    env = {"PREFECT_API_URL": f"{healthy}/api"}
    with ExitStack() as swarm:
        running = swarm.enter_context(services.running(recording.home.load_config(), recording.home, env=env))
        while not running.up():
            assert service_registry.answers(running.services.prefect)
        made_at: list[str] = []

        def swarm_ends(label: str, done: int, total: int) -> None:
            made_at.append(tracking_uri(recording.home, recording.home.load_config()))
            swarm.close()

        made = recording.what_if(*SAME, last=EACH, progress=swarm_ends)
    assert made_at[0] == running.services.mlflow.url
    assert made.uri == recording.uri
    run = run_of(recording, made)
    assert run.info.status == "FINISHED"
    assert run.data.tags["sapo.replay.weights_sha256"] == made.weights_sha256
    done = {found.round for found in recording.rounds if found.round <= EACH}
    assert series(recording, made.run_id, "learn/groups").keys() == done
