"""Scores of a node's own groups, by its task workers."""

from collections.abc import Sequence

from sapo.core.types import Group, Outcome, Recipe
from sapo.tasks.workers import TaskWorkers


def score_groups(workers: TaskWorkers, groups: Sequence[Group]) -> list[tuple[Outcome, ...]]:
    """Outcomes of every completion of every group, in one call to the workers."""
    outcomes = iter(workers.score(_answers(groups)))
    return [tuple(next(outcomes) for _ in group.completions) for group in groups]


def begin_scoring(workers: TaskWorkers, groups: Sequence[Group]) -> None:
    """Have the workers begin to score groups; `score_groups` then has less to wait for."""
    workers.begin_score(_answers(groups))


def _answers(groups: Sequence[Group]) -> list[tuple[Recipe, str]]:
    return [(group.recipe, completion.text) for group in groups for completion in group.completions]
