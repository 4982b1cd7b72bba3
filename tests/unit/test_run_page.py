"""How a run's page opens: what it came to, how a trait spread, one question over the rounds."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sapo.cli.report.run_page import course, page
from sapo.core.config.home import Home
from sapo.core.config.load import load
from sapo.core.config.prompt import Prompt
from sapo.core.figures import Sweep
from sapo.node.probes import Probe
from sapo.ops.summary import Run, summarise

CONFIG = load(sets=["swarm.name=demo", "swarm.nodes=2", 'track.traits={worked="="}'], env={})
FIRST, SECOND = "What is 1 + 2?", "What is 3 - 9?"


def evaluation(*answers: list[Any]) -> Sweep:
    """Two nodes that went from a fifth to three fifths; n0's answers to the two questions."""
    figures = {"pass_at_1": 0.6, "greedy": 0.7, "interval": 0.02, "answers": [*answers]}
    start = {"pass_at_1": 0.2, "greedy": 0.5, "answers": [["3", 1.0], ["6", 0.0]]}
    return Sweep.model_validate(
        {
            "questions": 200,
            "examples": [["sums", FIRST], ["sums", SECOND]],
            "baselines": {"starter": start},
            "nodes": {name: figures | {"baseline": "starter"} for name in ("n0", "n1")},
        }
    )


def probe(round: int, first: tuple[str, int], second: tuple[str, int]) -> Probe:
    return Probe(round, (), (), {FIRST: first, SECOND: second})


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run of twenty rounds in which answers come to be worked out."""
    shares = [(float(i), i / 20) for i in range(20)]
    curves: dict[str, Any] = {"n0": {"trait/worked": shares}, "n1": {"trait/worked": shares}}
    asked = [probe(0, ("3", 1), ("6", 0)), probe(10, ("1+2=3", 1), ("6", 0))]
    return Run(
        Home(tmp_path / "demo"),
        CONFIG,
        curves,
        evaluation(["1+2=3", 1.0], ["3-9=-6", 1.0]),
        probes={"n0": asked},
    )


def test_a_question_whose_answer_became_right_is_shown_over_the_rounds(run: Run) -> None:
    assert course(run) == (
        "n0",
        SECOND,
        [("after 0 rounds", "6", False), ("after 10 rounds", "6", False), ("at the end", "3-9=-6", True)],
    )


def test_the_page_says_how_answers_were_sampled_and_under_which_prompt(run: Run) -> None:
    prompt = Prompt(system="Add <it>.", examples=(("1 + 2", "3"),), template={"think": False})
    config = run.config.model_copy(update={"prompt": prompt})
    text = page(replace(run, config=config), summarise(run), [])
    for part in ("temperature 1, at most", "Add &lt;it&gt;.", "1 + 2 → 3", "think"):
        assert part in text
