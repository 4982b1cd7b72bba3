"""Payloads for every data set come over the bus to a real node: nothing is run."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import payloads
import pytest
from makers import make_signed
from payloads import SECRET, Lures
from readings import literally
from swarms import make_home, open_node, small_config

from sapo.bus.memory import MemoryBus
from sapo.core.config.load import Config, Task
from sapo.core.types import Outcome, Question, Recipe, canonical
from sapo.node.round import NodeRuntime
from sapo.peers.pool import Entry, Verdict
from sapo.tasks.holdout import is_held_out
from sapo.tasks.questions import sample_tasks
from sapo.tasks.workers import TaskWorkers

SMALLER = {"rectangle_count": {"width": 20, "height": 20}}
"""Parameters of data sets whose questions are longer than the test's model reads."""
MOST_CHARS, MOST_ASKED = 400, 3600
"""Longest payload and question, in characters."""
ODD_ONES = 12


@dataclass(frozen=True)
class Sent:
    """A question and the texts published as answers to it; the last is right, where one is known."""

    question: Question
    texts: tuple[str, ...]


@pytest.fixture
def lures(tmp_path: Path) -> Iterator[Lures]:
    lures = Lures.lay(tmp_path / "lures")
    with lures.listener:
        yield lures


def open_config() -> Config:
    """A swarm whose manifest allows every data set, with nothing in the way of a newcomer."""
    with TaskWorkers() as workers:
        tasks = sample_tasks(workers.datasets())
    every = [{"dataset": task.dataset, "config": SMALLER.get(task.dataset, task.config)} for task in tasks]
    return small_config(
        [
            *("batch.local=1", "batch.external=500", "pool.max_groups=500", "pool.tail=500"),
            *("pool.newcomer_share=1.0", "pool.max_peer_share=1.0", "pool.newcomer_groups=1000"),
            "pool.verify_share=1000.0",
            "workers.foreign_limit_s=20.0",
            "generate.max_new_tokens=20_000",  # no group is too long or costly to be learned from
            f"node.1.tasks={_toml(every)}",
        ]
    )


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return canonical(value)


def hostile_groups(config: Config, workers: TaskWorkers, lures: Lures) -> list[Sent]:
    """For each data set a question that nobody holds out, and payloads as answers."""
    sent = []
    for turn, task in enumerate(config.for_node("n1").tasks):
        question = open_question(config, workers, task, 1000 * turn)
        right = workers.answers([question.recipe])[0] or "7"
        texts = list(payloads.selection(lures, right, turn, ways=1))
        codes = len(lures.actions()) + len(payloads.CHEATS)
        short = [text for text in texts if len(text) <= MOST_CHARS and text.isprintable()]
        chosen = dict.fromkeys([*short[:codes], *short[codes:][:ODD_ONES], "neither", right])
        sent.append(Sent(question, tuple(chosen)[-config.rules.max_completions :]))
    return sent


def open_question(config: Config, workers: TaskWorkers, task: Task, seed: int) -> Question:
    """The first question from this seed on that may be trained on and that the test's model can read."""
    while True:
        [question] = workers.questions([Recipe.make(task.dataset, task.config, seed)])
        assert isinstance(question, Question)
        if len(question.text) < MOST_ASKED and not is_held_out(question, config.rules.held_out):
            return question
        seed += 1


def test_no_payload_is_run_by_a_node_that_receives_it(
    lures: Lures, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SECRET, lures.mark)
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)
    config, bus = open_config(), MemoryBus()
    home = make_home(tmp_path / "home", config)
    with open_node(config, home, "n0", bus=bus, deliver=False) as node:
        sent = hostile_groups(config, node.parts.workers, lures)
        publish(bus, sent)
        verdicts = receive_and_verify(node)
        assert len(verdicts) == len(sent) == 106
        assert lures.taken() == set()
        assert list(empty.iterdir()) == []
        scores = check_verdicts(sent, verdicts, tmp_path)
        again = node.parts.workers.score([(s.question.recipe, s.texts[-1]) for s in sent])
        assert [outcome.score for outcome in again] == scores


def publish(bus: MemoryBus, sent: list[Sent]) -> None:
    """What the hostile authors write: a valid, signed group each."""
    bus.publish(
        [
            make_signed(
                f"mallory{number}",
                swarm="test",
                recipe=one.question.recipe,
                question=one.question.text,
                texts=one.texts,
            )
            for number, one in enumerate(sent)
        ]
    )


def receive_and_verify(node: NodeRuntime) -> dict[str, tuple[Entry, Verdict]]:
    """The stages of a round up to the batch; by data set what came in and what was found of it."""
    node.generate()
    node.publish()
    # seconds of own work, which looks at so many groups and their verification are paid from
    node.parts.intake.quotas.earn(1000.0)
    node.consume_sample()
    node.verify()
    draw = node._now.draw
    assert draw is not None
    return {
        entry.group.recipe.dataset: (entry, entry.verdict)
        for entry in draw.verified
        if entry.verdict is not None
    }


def check_verdicts(
    sent: list[Sent], verdicts: dict[str, tuple[Entry, Verdict]], folder: Path
) -> list[float | None]:
    """No text scored more than its literal reading; returns the scores of the last texts."""
    rows: list[dict[str, Any]] = []
    outcomes: list[Outcome] = []
    last: list[float | None] = []
    for one in sent:
        recipe = one.question.recipe
        _, verdict = verdicts[recipe.dataset]
        assert verdict.reason in (None, "substandard"), (recipe.dataset, verdict.reason)
        row = {"dataset": recipe.dataset, "config": recipe.params, "seed": recipe.seed}
        rows += [{**row, "text": text} for text in one.texts]
        outcomes += verdict.outcomes
        last.append(verdict.outcomes[-1].score)
    literal = literally(rows, folder)
    more = [
        (row, outcome, score)
        for row, outcome, score in zip(rows, outcomes, literal, strict=True)
        if outcome.score is not None and not (isinstance(score, float) and outcome.score <= score)
    ]
    assert more == []
    return last
