"""What-ifs over a real recorded run: each a run of its own in a real MLflow store, the node is untouched."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from history_samples import recorded
from mlflow import MlflowClient
from swarms import open_node, small_config
from tampering import rewrite, rows_of

from sapo import cli
from sapo.core.config.home import Home
from sapo.core.config.manifest import Manifest
from sapo.core.config.schema import LearnConfig
from sapo.core.dir_lock import NodeLock
from sapo.core.errors import UserError
from sapo.core.user_cache import default_cache
from sapo.ops.judge import evaluate_swarm
from sapo.policy import models
from sapo.provenance.replay import opened
from sapo.provenance.whatif import WhatIf, retrain
from sapo.provenance.whatif_settings import with_advantages
from sapo.store.history.rounds import RecordedRound
from sapo.store.history.tables import Damaged, Store
from sapo.store.tracking.model_registry import LATEST, find
from sapo.store.tracking.sinks import TrackSink
from sapo.store.tracking.tracker import Tracker

pytestmark = pytest.mark.usefixtures("sharing")

INCARNATION = f"{0:016x}"
BASE = (
    # at ten times this step size the policy breaks, and whether a group then teaches is the processor's luck
    "learn.lr=1e-4",
    "learn.foreign=as_if_own",
    "learn.foreign_credit=all",
    "batch.local=4",
    "batch.external=1",
    "batch.completions=8",
    "pool.newcomer_share=1",
    "pool.newcomer_groups=1",  # n1 is heard to the end
)
PHASES = (
    (),
    ("learn.advantage=mean_std", "learn.foreign_credit=useful"),
    ("learn.truncated=zero_reward", "generate.max_new_tokens=3", "learn.foreign_credit=floor"),
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
SAME = ("learn.lr=0.0001", "learn.dr_grpo_length=77")
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

    def authors(self) -> dict[str, str]:
        """Names by key of those who taught n0."""
        groups = [group for found in self.rounds for group in found.batch.groups]
        return {one.producer_key: one.producer for one in groups if one.source == "external"}


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
    rounds = list(recorded(Store(str(home.history)), "n0", INCARNATION, swarm=config.swarm.name))
    return Recording(home, uri, str(tracker.found()), rounds)


@pytest.fixture(scope="module")
def other(recording: Recording) -> WhatIf:
    """Another loss and another step size, over all rounds."""
    return recording.what_if("learn.loss=cispo", "learn.lr=1e-5")


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


def test_a_ratio_is_refused_where_the_history_has_no_log_probabilities(recording: Recording) -> None:
    mode = ("learn.foreign=behaviour", 'learn.trusted_peers=["n1"]', "learn.foreign_ratio_cap=1.5")
    with pytest.raises(UserError, match=r"no log-probabilities of n1 in round \d+: "):
        recording.what_if(*mode)
    made = recording.what_if(*mode, first=LAST - EACH + 1)
    assert made.unchanged == ("learn.foreign", "learn.trusted_peers")
    assert made.steps > 0
    other = ("learn.foreign=f_tis", 'learn.trusted_peers=["n1"]', "learn.foreign_tis_kl=0")
    with pytest.raises(UserError, match=r"f_tis.*no log-probabilities of n1 in round \d+: "):
        recording.what_if(*other)
    successor = recording.what_if(*other, first=LAST - EACH + 1)
    assert successor.steps > 0
    assert successor.weights_sha256 != made.weights_sha256


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


def test_steps_that_would_break_the_model_are_left_out_and_counted(recording: Recording) -> None:
    made = recording.what_if("learn.lr=1e300")
    steps = sum(found.skipped is None for found in recording.rounds)
    assert (made.steps, made.left_out["weights beyond 1e+06"]) == (0, steps)


@pytest.mark.parametrize("first", [None, LAST - EACH])
def test_without_an_author_the_weights_are_those_of_batches_without_its_groups(
    recording: Recording, tmp_path: Path, first: int | None
) -> None:
    (key,) = recording.authors()
    folder = tmp_path / "new" / "clean"
    made = recording.what_if(without=[key[:8]], first=first, folder=folder)
    credits, left_out = set(), 0
    with opened(recording.home, "n0") as replay:
        for found in replay.rounds():
            learned = found.batch
            if found.round >= (first or 0):
                own = tuple(group for group in learned.groups if group.source == "local")
                learned = learned.model_copy(update={"groups": own})
                if len(own) < len(found.batch.groups):
                    left_out += len(found.batch.groups) - len(own)
                    credits.add(json.loads(learned.learn).get("foreign_credit", "all"))
            replay.repeater.repeat(learned, found, found.environment)
            if not left_out:
                assert models.weights_sha256(replay.policy.model) == found.weights_sha256
        assert models.weights_sha256(replay.policy.model) == made.weights_sha256 != made.own_weights_sha256
        written = models.load_policy(str(folder), config=replay.config, cache=default_cache())
        assert models.weights_sha256(written.model) == made.weights_sha256
    assert credits == ({"all", "useful", "floor"} if first is None else {"all", "floor"})
    assert (made.without, made.groups_left_out) == ({key: "n1"}, left_out)
    assert made.own is not None
    assert made.own.round == LAST + 1
    lines = "\n".join(made.lines())
    assert f"groups left out: {left_out} of n1 ({key[:16]})" in lines
    assert "what n0 and others wrote after learning from n1, from round" in lines
    version = find(recording.uri, "test.n0.without", LATEST)
    assert made.model == f"models:/test.n0.without/{version.number}"
    assert version.tags["sapo.replay.without"] == key


def test_an_author_who_taught_nothing_is_refused_and_those_who_did_are_named(
    recording: Recording, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--home", str(recording.home.root), "--to", str(tmp_path / "clean")]
    assert cli.invoke(["replay", "n0", "--without", "mallory", *place]) == 2
    (key,) = recording.authors()
    line = f"taught the node nothing in these rounds; those who did are n1 ({key[:16]})\n"
    assert capsys.readouterr().err.endswith(line)
    assert not list(tmp_path.iterdir())


def test_where_nobody_evaluated_the_node_its_newest_checkpoint_is_asked(
    recording: Recording, tmp_path: Path
) -> None:
    home = Home(tmp_path / "home")
    shutil.copytree(recording.home.root, home.root)
    home.evaluation.unlink()
    made = retrain(home, "n0", without=["n1"])
    known = recording.home.load_evaluation()
    assert made.own is not None
    assert known is not None
    assert (made.own.round, made.own.pass_at_1) == (LAST + 1, known.nodes["n0"].pass_at_1)
