"""Grids whose nodes have limits of their own, or are asked together: what is allowed, what comes of it."""

import math
from typing import Any

import pytest
import torch
from experiment_support import GRID, record

from sapo.core.errors import UserError
from sapo.experiments.exam import bits_per_byte
from sapo.experiments.grid import Grid, parse_grid, read, run_digest
from sapo.experiments.metrics import MEANINGS, figures_of
from sapo.experiments.record import Job, Together
from sapo.testing.policies import policy

OWN = {"arm": [{"name": "own", "node_rounds": [6, 10]}]}


def grid(**changes: Any) -> Grid:
    return parse_grid({**GRID, "compare": [], "target": None, **changes})


def limits(one: Grid, job: Job) -> list[tuple[int, float]]:
    return [(limit.rounds, limit.tokens) for limit in one.limits(job, 2)]


def test_a_node_s_own_rounds_are_its_limit_and_the_most_of_them_are_the_run_s() -> None:
    one, job = grid(**OWN), Job(arm="own", seed=1)
    assert one.rounds_of(job) == 10
    assert limits(one, job) == [(6, math.inf), (10, math.inf)]


def test_a_shorter_tuning_run_cuts_all_limits_alike_and_all_arms_in_proportion() -> None:
    shorter: dict[str, Any] = {"trained": 800, "tune": {"lr": [1e-4], "rounds": 2}}
    assert limits(grid(**shorter), Job(arm="8/0", seed=1, tuning=True)) == [(2, 200.0), (2, 200.0)]
    assert limits(grid(**OWN, **shorter), Job(arm="own", seed=1, tuning=True)) == [(3, 150.0), (5, 250.0)]


def test_runs_of_grids_that_ask_for_nothing_new_keep_their_digests() -> None:
    """Or every run that was made before would be made again."""
    assert grid().exam.model_dump() == {"every": 50, "questions": 400, "samples": 1}
    job = Job(arm="8/0", seed=1)
    exams: list[dict[str, Any]] = [{"ensemble": 2}, {"untrained": [{"dataset": "gcd"}]}, {"text": "A ship."}]
    own: list[dict[str, Any]] = [{"exam": one} for one in exams]
    digests = {run_digest(grid(**one), job) for one in ({}, {"trained": 9}, *own)}
    assert len(digests) == 5


def test_what_nodes_do_together_are_figures_of_the_run() -> None:
    made = record().model_copy(
        update={
            "ensemble": {"vote": Together(pass_at_1=0.5, untrained=0.25, tasks={})},
            "exams": [exam.model_copy(update={"untrained": 0.125}) for exam in record().exams],
            "routed": 0.75,
        }
    )
    found = figures_of(made)
    names = ("ensemble/vote", "ensemble/vote/untrained", "ensemble/routed", "pass_at_1/untrained")
    assert [found[name] for name in names] == [0.5, 0.25, 0.75, 0.125]
    assert found.keys() <= MEANINGS.keys()


def test_the_loss_on_a_text_is_a_figure_before_and_after() -> None:
    losses = {0: 0.75, 4: 1.25}
    exams = [exam.model_copy(update={"text_loss": losses[exam.round]}) for exam in record().exams]
    found = figures_of(record().model_copy(update={"exams": exams}))
    assert (found["text_loss/start"], found["text_loss/end"]) == (0.75, 1.25)
    assert "text_loss/end" not in figures_of(record())


def test_to_a_policy_that_foretells_nothing_each_token_of_a_text_costs_the_logarithm_of_the_vocabulary() -> (
    None
):
    even = policy()
    model: Any = even.model
    torch.nn.init.zeros_(model.get_input_embeddings().weight)  # its outputs, too
    text, tokens = "12 + 3 = 15", even.vocabulary
    assert bits_per_byte("n0", even, text) == pytest.approx(10 * math.log2(tokens) / 11)
    with pytest.raises(UserError, match="257 tokens are more than the context of n0, 256"):
        bits_per_byte("n0", even, "7" * 257)


def test_the_arms_of_the_experts_may_learn_from_equally_many_tokens() -> None:
    one = read("experts")
    totals = set()
    for arm in one.arms:
        job = Job(arm=arm, seed=1, lr=1e-4)
        totals.add(round(sum(limit.tokens for limit in one.limits(job, one.config(job).swarm.nodes))))
    assert totals == {one.trained}
