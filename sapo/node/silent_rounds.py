"""What a node counts of its own answers each round, and the alarm when its rounds teach it nothing."""

import logging
from collections import deque
from collections.abc import Mapping, Sequence

from sapo.core import silence
from sapo.core.config.load import Config
from sapo.core.types import Batch, Completion, Group, Outcome
from sapo.learn.advantage import informative
from sapo.learn.batch_metrics import reward_means
from sapo.policy.evaluate import FULL_SCORE
from sapo.tasks.verifier import AnswerFormat, extract_answer

log = logging.getLogger(__name__)


def series(
    config: Config, batch: Batch, groups: Sequence[Group], outcomes: Sequence[Sequence[Outcome]]
) -> dict[str, float]:
    """Series of own answers: their length and form, how many are right, how many groups score alike, and
    `reward/local` where not all of them are in the batch."""
    answers = [completion for group in groups for completion in group.completions]
    scores = [[outcome.score for outcome in row] for row in outcomes]
    right = sum((score or 0.0) >= FULL_SCORE for row in scores for score in row)
    alike = sum(not informative(row, config.learn.zero_tolerance) for row in scores)
    found = {"share/right": right / len(answers), "share/alike": alike / len(groups)}
    if config.rules.answer != "text":
        formed = sum(has_form(one, config.rules.answer) for one in answers)
        found["share/form"] = formed / len(answers)
    lengths = [len(one.token_ids) for one in answers if one.token_ids is not None]
    if lengths:
        found["tokens/answer"] = sum(lengths) / len(lengths)
    if sum(group.source == "local" for group in batch.groups) == len(groups):
        return found
    pairs = zip(groups, scores, strict=True)
    return found | reward_means("reward/local", ((g.recipe.dataset, s) for g, row in pairs for s in row))


def texts_by_task(groups: Sequence[Group]) -> dict[str, list[str]]:
    """The answers as texts, by task."""
    found: dict[str, list[str]] = {}
    for group in groups:
        found.setdefault(group.recipe.dataset, []).extend(one.text for one in group.completions)
    return found


def has_form(answer: Completion, form: AnswerFormat) -> bool:
    """Whether an answer has the part that `rules.answer` scores."""
    return extract_answer(answer.text, form) is not None


class SilentRounds:
    """Raises an alarm once when a node's newest rounds taught it nothing, and again for another cause."""

    def __init__(self, config: Config, name: str, before: Sequence[Mapping[str, float]] = ()) -> None:
        self._name, self._total, self._told = name, config.swarm.rounds, ""
        self._rounds = deque(before, maxlen=silence.ROUNDS)

    def hear(self, round: Mapping[str, float]) -> None:
        """Take the series of a round that has ended."""
        self._rounds.append(round)
        found = silence.of_rounds([*self._rounds], self._total)
        if found is not None and found.cause != self._told:
            log.warning("ALARM: %s learned nothing in the last rounds: %s", self._name, found)
        self._told = "" if found is None else found.cause
