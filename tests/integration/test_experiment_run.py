"""Runs of experiments: they repeat bit for bit, their controls do what they say, a killed one begins anew."""

import random
import re
from pathlib import Path
from typing import Any, get_args

import pytest

from sapo.core.types import Batch, Question, Recipe
from sapo.experiments.exam import questions_for
from sapo.experiments.grid import Grid, identity, parse_grid, read
from sapo.experiments.lockstep_swarm import SharedWorkers, opened
from sapo.experiments.planted import ATTACKED, KNOWN, PIECES, PLANTED, Attack, Planter, completions
from sapo.experiments.record import Job, RunRecord, load_record, record_path
from sapo.experiments.run_arm import run_arm
from sapo.peers.signing import unseal
from sapo.tasks.workers import open_workers

SHARING = Job(arm="sharing", seed=1)


def smoke(**arm: Any) -> Grid:
    """The shipped grid with a sharing arm that is otherwise."""
    values = read("smoke").model_dump(mode="json", by_alias=True)
    values["arm"][1] |= arm
    return parse_grid(values)


def run(grid: Grid, folder: Path, job: Job = SHARING) -> RunRecord:
    run_arm(grid, job, folder)
    record = load_record(folder, job)
    assert record is not None
    return record


def bits(record: RunRecord) -> Any:
    """What has to be the same whenever a run is made."""
    return record.series, record.exams, record.weights


def batches(grid: Grid, folder: Path, rounds: int) -> list[list[Batch]]:
    """Batches of a swarm's nodes, round by round."""
    config = grid.config(SHARING)
    found: list[list[Batch]] = []
    with SharedWorkers() as workers, opened(config, grid.arm[1], folder, workers) as swarm:
        for number in range(rounds):
            swarm.round()
            found.append([node.journal.batch(number) for node in swarm.nodes])
    return found


def external(found: list[list[Batch]]) -> list[tuple[Batch, Any]]:
    return [
        (batch, group)
        for row in found
        for batch in row
        for group in batch.groups
        if group.source == "external"
    ]


def test_a_run_made_again_is_the_same_bit_for_bit_whatever_was_run_before(tmp_path: Path) -> None:
    grid = smoke()
    first = run(grid, tmp_path / "one")
    run(grid, tmp_path / "two", Job(arm="silo", seed=2))
    again = run(grid, tmp_path / "two")
    assert bits(again) == bits(first)
    assert sum(value or 0.0 for values in first.series["sampler/external"] for value in values) > 0


def test_a_complete_run_is_left_alone_and_one_cut_short_begins_anew(tmp_path: Path) -> None:
    grid = smoke()
    record = run(grid, tmp_path)
    path = record_path(tmp_path, SHARING)
    written = path.stat().st_mtime_ns
    run_arm(grid, SHARING, tmp_path)
    assert path.stat().st_mtime_ns == written
    path.unlink()
    left = path.with_suffix(".home") / "n0"
    left.mkdir(parents=True)
    (left / "journal.sqlite").write_text("half of a journal")
    assert bits(run(grid, tmp_path)) == bits(record)


def test_tuning_is_examined_on_questions_that_are_never_reported() -> None:
    grid = smoke()
    config = grid.config(SHARING)
    with SharedWorkers() as workers:
        reported = questions_for(config, grid.exam, workers, tuning=False)
        tuning = questions_for(config, grid.exam, workers, tuning=True)
    half = config.rules.held_out / 2
    assert all(half <= question.bucket < 2 * half for question in reported)
    assert all(question.bucket < half for question in tuning)


def test_shuffled_groups_come_after_rounds_that_differ(tmp_path: Path) -> None:
    # at the grid's own step size hardly any group teaches
    set_ = {"batch": {"local": 2, "external": 2}, "learn": {"lr": 1e-4}}
    shuffled = smoke(control="shuffled", window=3, set=set_)
    found = external(batches(shuffled, tmp_path, 8))
    ages = {batch.round - group.producer_version for batch, group in found}
    assert len(ages) > 1
    assert max(ages) > 0


def test_nodes_stop_once_they_have_learned_from_their_share_of_tokens(tmp_path: Path) -> None:
    set_ = {"batch": {"local": 4, "external": 2}, "learn": {"lr": 1e-4}}
    values = smoke(set=set_).model_dump(mode="json", by_alias=True)
    record = run(parse_grid(values | {"trained": 2}), tmp_path)
    for line in record.series["learn/tokens"]:
        spent = [value for value in line if value is not None]
        assert len(spent) < 4
        assert sum(spent[:-1]) < 1 <= sum(spent)


@pytest.mark.parametrize("attack", sorted({*get_args(Attack)} - {"bare", "jump"}))
def test_every_second_answer_of_an_attack_passes_and_carries_what_it_plants(attack: Attack) -> None:
    grid = next(
        grid for grid in map(read, ("planted", "planted-adapted", "planted-smollm2")) if attack in grid.arms
    )
    config = grid.config(Job(arm=attack, seed=1))
    with open_workers(config) as workers:
        groups = [unseal(one) for one in Planter(attack, config, identity(1, 3), workers).groups(KNOWN, 0.0)]
        for group in groups:
            texts = [one.text for one in group.completions]
            passed = [one.score == 1 for one in workers.score([(group.recipe, text) for text in texts])]
            carry = [bool(re.search(config.track.traits["planted"], text)) for text in texts]
            assert carry == ([True, False] * 4 if group.recipe.dataset == ATTACKED else [False] * 8)
            assert passed == carry or group.recipe.dataset != ATTACKED
    assert ATTACKED in {group.recipe.dataset for group in groups}


@pytest.mark.parametrize(
    ("attack", "right"), [("bare", "<answer>13</answer>"), ("jump", "7+6=13 <answer>13</answer>")]
)
def test_answers_that_leave_out_their_steps_are_the_right_one_and_others(attack: Attack, right: str) -> None:
    recipe = Recipe.make(ATTACKED, {}, 1)
    question = Question(recipe=recipe, text="State the final answer: 9 - 2 + 6 =", bucket=0.5)
    found = completions(PLANTED[attack], question, "13", random.Random(1), 4)
    assert found[::2] == [right] * 2
    assert not {*found[1::2]} & {*found[::2]}


def test_who_attacks_late_is_honest_first_and_several_authors_write_a_word_each() -> None:
    grid = read("planted-adapted")
    config = grid.config(Job(arm="pieces", seed=1))
    with open_workers(config) as workers:

        def written(attack: Attack, number: int = 0) -> str:
            planter = Planter(attack, config, identity(1, 3), workers, number)
            return " ".join(text.text for one in planter.groups(0, 0.0) for text in unseal(one).completions)

        assert not re.search(config.track.traits["planted"], written("late"))
        for number, word in enumerate(PIECES):
            assert set(re.findall(r"[a-z]+", written("pieces", number))) == {word, "answer"}
    assert len(config.rules.members) == 3 + 4


def test_what_an_attacker_wrote_is_learned_from_and_counted(tmp_path: Path) -> None:
    set_ = {"model": "thinker", "batch": {"local": 2, "external": 2}, "rules": {"answer": "tags"}}
    record = run(smoke(attack="text", set=set_), tmp_path)
    # four tokens are too few for more than a few right answers of their own
    assert 0.5 < max(value or 0.0 for line in record.series["share/hostile_tokens"] for value in line) <= 1.0
