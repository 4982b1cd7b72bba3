"""The example programs run as they are."""

import runpy
from pathlib import Path

from history_samples import deliver

from sapo.core.config.load import load
from sapo.store.history.tables import Store

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_algorithm_1_in_one_file_learns_from_foreign_groups() -> None:
    lines = [*runpy.run_path(str(EXAMPLES / "one_round.py"))["run"](1)]
    assert len(lines) == 2
    assert all("own reward" in line and "0 foreign" not in line for line in lines)


def test_a_task_of_ones_own_scores_its_answers() -> None:
    task = runpy.run_path(str(EXAMPLES / "own_task.py"))["Doubling"](largest=9)
    entry = task.entry(3)
    assert task.entry(3) == entry
    assert (task.score(entry.answer, entry), task.score("no", entry), task.score(None, entry)) == (1, 0, 0)


def test_a_model_and_data_of_ones_own_are_the_settings_of_the_readme() -> None:
    text = (EXAMPLES / "own_model.toml").read_text(encoding="utf-8")
    config = load(None, EXAMPLES / "own_model.toml", env={})
    assert (config.swarm.nodes, config.tasks[0].file) == (2, "word-problems.jsonl")
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    assert all(line in readme for line in text.splitlines()[1:])


def test_the_history_is_read_with_duckdb_alone(tmp_path: Path) -> None:
    deliver(Store(str(tmp_path / "history")), 0)
    taught, best = runpy.run_path(str(EXAMPLES / "read_history.py"))["read"](str(tmp_path))
    assert taught[0].startswith("learner, author")
    assert {row[0] for row in taught[1]} == {"n0"}
    assert best[1]
