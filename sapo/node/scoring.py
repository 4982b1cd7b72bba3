"""Scores of a node's own groups, by its task workers."""

import logging
from collections.abc import Sequence

from sapo.core.types import Group, Outcome, Recipe
from sapo.tasks.workers import TaskWorkers

log = logging.getLogger(__name__)


def score_groups(workers: TaskWorkers, groups: Sequence[Group]) -> list[tuple[Outcome, ...]]:
    """Outcomes of every completion of every group, in one call to the workers. The log says of each task once
    why a text of it has no score."""
    outcomes = iter(workers.score(_answers(groups)))
    found = [tuple(next(outcomes) for _ in group.completions) for group in groups]
    for group, row in zip(groups, found, strict=True):
        task, why = group.recipe.dataset, next((one.reason for one in row if one.score is None), None)
        if why is not None and task not in workers.told:
            workers.told.add(task)
            log.warning("%s: an own text has no score, %s; of further ones see learn/unscorable", task, why)
    return found


def begin_scoring(workers: TaskWorkers, groups: Sequence[Group]) -> None:
    """Have the workers begin to score groups; `score_groups` then has less to wait for."""
    workers.begin_score(_answers(groups))


def _answers(groups: Sequence[Group]) -> list[tuple[Recipe, str]]:
    return [(group.recipe, completion.text) for group in groups for completion in group.completions]
