"""Grids: what may stand in one, what is refused and in which words, and which runs come of it."""

from pathlib import Path
from typing import Any

import pytest
from experiment_support import record

from sapo.core.errors import UserError
from sapo.experiments.grid import Grid, parse_grid, read, run_digest
from sapo.experiments.record import Job, RunRecord, load_record, record_path, save_record
from sapo.experiments.tuning import chosen, report_jobs

LONG = {"swarm": {"nodes": 2}, "track": {"traits": {"long": "...."}}}


def grid(**changes: Any) -> Grid:
    values: dict[str, Any] = {
        "name": "test",
        "about": "for a test",
        "rounds": 10,
        "set": {"swarm": {"nodes": 2}, "batch": {"completions": 4}},
        "arm": [
            {"name": "8/0", "set": {"batch": {"local": 8, "external": 0}}},
            {"name": "4/4", "set": {"batch": {"local": 4, "external": 4}}},
        ],
        "exam": {"every": 4, "questions": 10},
    }
    return parse_grid(values | changes)


def refused(**changes: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        grid(**changes)
    return caught.value


def record_of(one: Grid, job: Job, score: float) -> RunRecord:
    made = record(job.arm, job.seed, local=[[0.5, None]], passes={10: [score]}, digest=run_digest(one, job))
    return made.model_copy(update={"lr": job.lr or 0.0, "tuning": job.tuning})


def test_an_arm_s_settings_lie_over_the_grid_s() -> None:
    config = grid().config(Job(arm="4/4", seed=3))
    assert (config.batch.local, config.batch.external, config.batch.completions) == (4, 4, 4)
    assert (config.swarm.nodes, config.swarm.rounds, config.swarm.seed) == (2, 10, 3)


def test_all_nodes_of_a_run_are_members_of_its_swarm() -> None:
    config = grid().config(Job(arm="4/4", seed=3))
    assert config.rules.entry == "allow-list"
    assert len(set(config.rules.members)) == 2


def test_arms_of_one_seed_have_the_same_keys_and_seeds_have_others() -> None:
    one = grid()
    members = [one.config(Job(arm=arm, seed=seed)).rules.members for arm in one.arms for seed in (1, 2)]
    assert members[0] == members[2]
    assert members[0] != members[1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"ruonds": 3}, "ruonds"),
        ({"exam": {"evry": 3}}, "exam.evry"),
        ({"compare": [{"arm": "4/4", "wiht": "8/0", "what": "?"}]}, "compare.0.wiht"),
        ({"compare": [{"arm": "4/4", "with": "9/0", "what": "?"}]}, "compare.0.with"),
        ({"target": "9/0"}, "target"),
        ({"arm": [{"name": "4/4"}, {"name": "4 4"}]}, "arm"),
        ({"arm": [{"name": "a", "control": "shuffled"}]}, "arm.0"),
        ({"arm": [{"name": "a", "control": "mirror"}]}, "arm.0.control"),
        ({"set": {"learn": {"lrr": 1}}}, "arm 8/0: learn.lrr"),
        ({"set": {"swarm": {"nodes": 1}, "node": {"1": {}}}}, "node"),
        ({"preset": "tinny"}, "preset"),
        ({"tune": {"lr": [0.0001, 0.0002, 0.0001]}}, "tune.lr"),
        ({"tune": {"lr": [0.0001], "beside": {"4/4": [0.0001]}}}, "tune.beside"),
        ({"tune": {"lr": [0.0001], "beside": {"9/0": [0.0002]}}}, "tune.beside"),
        ({"set": {"swarm": {"rounds": 9}}}, "set.swarm.rounds"),
        ({"arm": [{"name": "a", "set": {"generate": {"ahead": 1}}}]}, "arm a: set.generate.ahead"),
        ({"tune": {"lr": [0.0001]}, "set": {"learn": {"lr": 0.001}}}, "set.learn.lr"),
        ({"tune": {"lr": [0.0001]}, "set": {"node": {"1": {"learn": {"lr": 0.001}}}}}, "set.node.1.learn.lr"),
        (
            {"arm": [{"name": "a", "control": "echo", "set": {"batch": {"local": 4, "external": 4}}}]},
            "arm a: batch.questions",
        ),
        (
            {"arm": [{"name": "a", "control": "echo", "set": {"batch": {"external": 0}}}]},
            "arm a: batch.external",
        ),
        ({"spread": {"trait": "worked", "to": [1]}}, "spread.trait"),
        ({"spread": {"trait": "long", "to": [2]}, "set": LONG}, "spread.to"),
        ({"spread": {"trait": "long/gcd", "to": [1]}, "set": LONG}, "spread.trait"),
        ({"arm": [{"name": "a", "attack": "text"}]}, "arm a: attack"),
        ({"arm": [{"name": "a", "attackers": 2}]}, "arm.0"),
        (
            {"compare": [{"arm": "4/4", "with": "8/0", "figure": "spread/pass_at_1", "what": "?"}]},
            "compare.0.figure",
        ),
        (
            {"set": {"swarm": {"nodes": 2}, "node": {"1": {"batch": {"local": 2}}}}}
            | {"arm": [{"name": "a", "control": "same_questions"}]},
            "arm a: node.1",
        ),
    ],
)
def test_what_is_wrong_with_a_grid_is_said_with_its_place_and_a_remedy(
    changes: dict[str, Any], field: str
) -> None:
    error = refused(**changes)
    assert error.field == field
    assert error.remedy


def test_the_best_rate_of_tuning_is_the_arm_s(tmp_path: Path) -> None:
    one = grid(tune={"lr": [1e-5, 1e-4, 1e-3], "beside": {"8/0": [1e-2]}, "seeds": 1})
    scores = {"8/0": (0.2, 0.3, 0.4, 0.0), "4/4": (0.1, 0.1, 0.5)}
    for job in one.tuning_jobs():
        rates = [1e-5, 1e-4, 1e-3, 1e-2]
        save_record(tmp_path, job, record_of(one, job, scores[job.arm][rates.index(job.lr or 0.0)]))
    found = chosen(one, tmp_path)
    assert {arm: choice.lr for arm, choice in found.items()} == {"8/0": 1e-3, "4/4": 1e-3}
    assert (found["8/0"].at_edge, found["4/4"].at_edge) == (False, True)
    assert {job.lr for job in report_jobs(one, tmp_path) if job.arm == "4/4"} == {1e-3}


def test_a_run_s_digest_changes_with_what_determines_it_and_with_nothing_else() -> None:
    job = Job(arm="4/4", seed=1)
    digest = run_digest(grid(), job)
    assert run_digest(grid(about="in other words", seeds=7), job) == digest
    values = {"swarm": {"nodes": 2}, "batch": {"completions": 4}, "flow": {"every": 7}}
    assert run_digest(grid(set=values), job) == digest
    assert run_digest(grid(preset="tiny"), job) != digest
    assert run_digest(grid(rounds=11), job) != digest
    assert run_digest(grid(exam={"every": 5, "questions": 10}), job) != digest
    assert run_digest(grid(), job.model_copy(update={"seed": 2})) != digest
    assert run_digest(grid(), job.model_copy(update={"lr": 1e-3})) != digest


def test_a_record_comes_back_as_it_was_written_unless_it_is_of_another_run(tmp_path: Path) -> None:
    one, job = grid(), Job(arm="4/4", seed=1)
    made = record_of(one, job, 0.25)
    assert save_record(tmp_path, job, made) == record_path(tmp_path, job)
    assert load_record(tmp_path, job) == made
    assert load_record(tmp_path, job, "another digest") is None
    assert load_record(tmp_path, Job(arm="8/0", seed=1)) is None


def test_controls_are_the_controls_they_claim_to_be() -> None:
    plan = read("controls")
    configs = {name: plan.config(Job(arm=name, seed=1)) for name in plan.arms}
    rounds = {name: plan.rounds_of(Job(arm=name, seed=1)) for name in plan.arms}
    sharer, refilled = configs["4/4"], configs["8/0 refilled"]
    others = (sharer.swarm.nodes - 1) * sharer.batch.b
    assert refilled.batch.b - refilled.batch.local == others  # as many candidates a round
    assert refilled.batch.external == sharer.batch.external
    for name in ("8/0 equal tokens", "8/0 twice"):
        assert rounds[name] * configs[name].batch.b == rounds["4/4"] * sharer.batch.b
    steps = {name: rounds[name] * configs[name].learn.epochs for name in ("4/4", "8/0 twice")}
    assert steps["4/4"] == steps["8/0 twice"]
