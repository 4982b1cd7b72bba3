"""MLflow: one run per incarnation, every metric once, however often it is delivered."""

import socket
from pathlib import Path

import pytest
from history_samples import INCARNATION, Books, batch, due, result
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow_runs import runs_of

from sapo.core.config.home import Home
from sapo.core.config.load import Config, load, merge, parse
from sapo.core.errors import SapoError, Unavailable
from sapo.core.types import RoundResult
from sapo.store.tracking.sinks import TrackSink, open_tracking
from sapo.store.tracking.tracker import Tracker, params_of, tags_of


def tracker(uri: str, node: str = "n0", incarnation: str = INCARNATION, **more: object) -> Tracker:
    return Tracker(uri, "tiny", node, incarnation, **more)  # type: ignore[arg-type]


def runs(uri: str) -> list[Run]:
    return runs_of(MlflowClient(uri), "tiny")


def history(uri: str, name: str) -> list[tuple[int, float, int]]:
    """(step, value, time stamp) of a series."""
    client = MlflowClient(uri)
    (run,) = runs(uri)
    found = client.get_metric_history(run.info.run_id, name)
    return sorted((metric.step, metric.value, metric.timestamp) for metric in found)


def test_a_run_is_found_again_after_a_restart(uri: str) -> None:
    first = tracker(uri).start()
    assert tracker(uri).start() == first
    (run,) = runs(uri)
    assert run.info.run_name == "n0"
    assert run.data.tags["sapo.incarnation"] == INCARNATION


def test_nodes_and_incarnations_have_runs_of_their_own(uri: str) -> None:
    ids = {tracker(uri).start(), tracker(uri, node="n1").start(), tracker(uri, incarnation="f" * 16).start()}
    assert len(ids) == 3


def test_a_wrong_figure_in_the_journal_of_an_earlier_release_holds_nothing_up(uri: str) -> None:
    class Kept(Books):
        def result(self, round: int) -> RoundResult:
            metrics = {"reward/local": 0.5, "eval/greedy": 100000.0}
            return super().result(round).model_copy(update={"metrics": metrics})

    TrackSink(tracker(uri)).deliver([due(0)], Kept(batch(0)))
    (run,) = runs(uri)
    assert run.data.metrics == {"reward/local": 0.5}


def test_what_is_added_afterwards_leaves_the_end_of_a_run_alone(uri: str) -> None:
    own = tracker(uri)
    own.start()
    own.end("FINISHED", at=1_700_000_000.0)
    late = tracker(uri, afterwards=True, params={"learn.lr": "0.5"})
    late.log_metrics({"judge/reward": 1.0}, round=3, at=1_800_000_000.0)
    late.close("KILLED", at=1_800_000_000.0)
    (run,) = runs(uri)
    assert run.info.status == "FINISHED"
    assert run.info.end_time == 1_700_000_000_000
    assert history(uri, "judge/reward") == [(3, 1.0, 1_800_000_000_000)]


def test_a_run_that_was_left_open_is_closed_at_the_time_of_its_last_round(uri: str) -> None:
    tracker(uri).start()
    tracker(uri, afterwards=True).close("KILLED", at=1_700_000_000.0)
    (run,) = runs(uri)
    assert run.info.status == "KILLED"
    assert run.info.end_time == 1_700_000_000_000


def test_metrics_carry_round_and_journal_time(uri: str) -> None:
    TrackSink(tracker(uri)).deliver([due(0), due(1)], Books(batch(0), batch(1)))
    stamp = 1_700_000_000_250
    assert history(uri, "reward/local") == [(0, 1 / 3, stamp), (1, 1 / 3, stamp + 1000)]
    assert len(history(uri, "reward/local/chain_sum")) == 2


def test_redelivered_metrics_are_not_doubled(uri: str) -> None:
    books = Books(batch(0), batch(1))
    TrackSink(tracker(uri)).deliver([due(0)], books)
    TrackSink(tracker(uri)).deliver([due(0), due(1)], books)
    assert [step for step, _, _ in history(uri, "learn/loss")] == [0, 1]


def test_more_metrics_than_one_request_takes_are_all_logged(uri: str) -> None:
    wide = [
        RoundResult(
            round=round,
            policy_version=round + 1,
            metrics={f"reward/local/task{i}": i / 700 for i in range(300)},
            finished_at=float(round),
        )
        for round in range(4)
    ]
    tracker(uri).log_rounds(wide)
    assert [value for _, value, _ in history(uri, "reward/local/task299")] == [299 / 700] * 4


def test_params_and_tags_are_logged_and_a_changed_param_becomes_a_tag(uri: str) -> None:
    config = load("paper", env={})
    tracker(uri, params=params_of(config), tags=tags_of(config)).start()
    changed = parse(merge(config.model_dump(mode="json"), {"learn": {"lr": 0.5}}))
    tracker(uri, params=params_of(changed), tags=tags_of(changed)).start()
    (run,) = runs(uri)
    assert run.data.params == {**params_of(config)}
    assert run.data.tags["changed.learn.lr"] == "0.5"
    assert run.data.tags["sapo.config_digest"] == changed.digest()


def test_a_run_deleted_by_hand_is_replaced(uri: str) -> None:
    own = tracker(uri)
    MlflowClient(uri).delete_run(own.start())
    with pytest.raises(Unavailable):
        own.log_rounds([result(0)])
    own.log_rounds([result(0)])
    assert history(uri, "reward/local")[0][0] == 0


def test_mlflow_away_is_unavailable_and_nothing_is_reached_for_before_that(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        _, (track, _) = open_tracking(Config(), "n0", Home(tmp_path), uri=url, incarnation=INCARNATION)
        with pytest.raises(Unavailable, match=f"MLflow at {url}"):
            track.deliver([due(0)], Books(batch(0)))


def test_a_champion_needs_a_version(uri: str) -> None:
    with pytest.raises(SapoError, match="has no version of round 7"):
        tracker(uri).set_champion({7: 0.5}, "these")
