"""Why rounds teach nothing: the cause that shares of answers show, and where it is said."""

import logging
from pathlib import Path

import pytest
from swarms import make_home, open_node, small_config

from sapo.core.silence import Cause, of_rounds, silence
from sapo.ops.supervisor import snapshot


@pytest.mark.parametrize(
    ("form", "cut", "right", "reward", "alike", "cause"),
    [
        (0.0, 0.6, 0.0, 0.0, 1.0, "no form"),  # SmolLM2 without an example: what ends has no tags either
        (0.03, 0.97, 0.0, 0.0, 1.0, "cut off"),  # six tokens an answer
        (None, 0.9, 0.0, 0.0, 1.0, "cut off"),
        (0.9, 0.05, 0.0, 0.01, 1.0, "all wrong"),
        (0.67, 0.0, 0.0, 0.0, 1.0, "all wrong"),
        (None, 0.0, 0.02, 0.02, 1.0, "all wrong"),
        (1.0, 1.0, 1.0, 1.0, 1.0, "all right"),
        (1.0, 0.0, 0.5, 0.5, 1.0, "alike"),
        (1.0, 0.0, 0.0, 0.4, 1.0, "alike"),  # partial credit, the same for every answer
        (0.9, 0.8, 0.3, 0.3, 0.6, "cut off"),  # learn.truncated = "mask" left the answers out that differ
    ],
)
def test_shares_have_a_cause(
    form: float | None, cut: float, right: float, reward: float, alike: float, cause: Cause
) -> None:
    found = silence(form, cut, right, reward, alike)
    assert found.cause == cause
    assert str(found).endswith(found.remedy)


def test_rounds_are_silent_once_five_in_a_row_taught_nothing() -> None:
    silent = {"learn/sequences": 0.0, "share/right": 0.0, "share/alike": 1.0, "learn/truncated": 0.0}
    taught = silent | {"learn/sequences": 4.0}
    assert of_rounds([taught, *[silent] * 4], 100) is None
    assert str(of_rounds([taught, *[silent] * 5], 100)).startswith(
        "100 % of the answers are wrong; ask easier"
    )
    assert of_rounds([*[silent] * 5, taught], 100) is None
    assert of_rounds([silent] * 2, 2) is not None, "a run that has no more rounds"
    assert of_rounds([{"learn/sequences": 0.0}] * 5, 100) is None, "a release that counted no answers"
    assert of_rounds([{"member/answers": 3.0}] * 5, 100) is None


def test_a_node_says_once_why_it_learns_nothing_and_its_status_says_it_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hard = "min_terms = 2, max_terms = 2, min_digits = 5, max_digits = 5"
    tasks = f'tasks = [{{dataset = "products", config = {{{hard}}}}}]'
    sets = ["model=thinker", "swarm.rounds=7", "batch.external=0", "generate.max_new_tokens=1"]
    config = small_config([tasks, *sets])
    home = make_home(tmp_path / "home", config)
    with caplog.at_level(logging.WARNING), open_node(config, home, "n0", deliver=False) as node:
        while not node.finished:
            series = node.run_round().metrics
    assert (series["tokens/answer"], series["share/right"], series["share/alike"]) == (1.0, 0.0, 1.0)
    alarms = [record.getMessage() for record in caplog.records if "ALARM" in record.getMessage()]
    assert len(alarms) == 1
    (status, *_) = snapshot(config, home).nodes
    assert status.alarm == "100 % of the answers are cut off; raise generate.max_new_tokens"
    assert alarms[0].endswith(status.alarm)
