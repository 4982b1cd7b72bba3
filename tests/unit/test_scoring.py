"""What a node's log says of texts that have no score."""

import logging
from collections.abc import Sequence

import pytest
from makers import make_group

from sapo.core.types import Outcome, Recipe
from sapo.node.scoring import score_groups
from sapo.tasks.workers import TaskWorkers


class Failing(TaskWorkers):
    """Workers whose every scorer raises."""

    def score(self, items: Sequence[tuple[Recipe, str]]) -> list[Outcome]:
        return [Outcome.unscorable("error: KeyError: 'unit'") for _ in items]


def test_why_a_text_has_no_score_is_said_once_for_each_task(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    with Failing() as workers:
        for _ in range(2):
            score_groups(workers, [make_group(position=0), make_group(position=1)])
    (line,) = caplog.messages
    assert "an own text has no score, error: KeyError: 'unit'" in line
