"""The starter policy: what it is taught, and that it is made once and whole."""

from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from sapo.core.config.load import Config, Rules, Task
from sapo.core.config.schema import Starter
from sapo.core.errors import UserError
from sapo.policy import models, starter
from sapo.tasks.holdout import bucket
from sapo.tasks.workers import TaskWorkers

SUMS = Task(dataset="chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2})


def config(**sections: Any) -> Config:
    """A config whose starter takes a second to make."""
    values: dict[str, Any] = {"tasks": [SUMS], "starter": Starter(steps=4, batch=16)}
    return Config(**(values | sections))


@pytest.fixture(scope="module")
def cache(workers: TaskWorkers, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the starter of `config()`."""
    path = tmp_path_factory.mktemp("cache")
    starter.prepare(config(), workers, cache=path)
    return path


class Refusing:
    """Workers that nobody may ask."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the cached starter needs no workers, yet {name} was used")


def test_a_prepared_starter_is_loaded_by_name_and_found_again_without_work(cache: Path) -> None:
    policy = models.load_policy("starter", config=config(), cache=cache)
    assert policy.encode_completion("7", "stop")[-1] == policy.end_id
    assert policy.end_id in policy.stop_ids
    refusing: Any = Refusing()
    assert starter.prepare(config(), refusing, cache=cache) == starter.location(config(), cache=cache)


def test_an_unprepared_starter_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not been prepared"):
        models.load_policy("starter", config=config(), cache=tmp_path)


def test_the_starter_is_taught_nothing_that_is_held_out(workers: TaskWorkers) -> None:
    chosen = config(rules=Rules(held_out=0.5))
    pairs = list(islice(starter.examples(chosen, workers), 512))
    assert all(bucket(question, "sapo") >= 0.5 for question, _ in pairs)
    assert len({question for question, _ in pairs}) > 300


def test_asked_for_twice_at_once_it_is_made_once(
    workers: TaskWorkers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[Path] = []

    def build(config: Config, workers: TaskWorkers, directory: Path, progress: starter.Progress) -> None:
        built.append(directory)
        (directory / "config.json").write_text("{}")

    monkeypatch.setattr(starter, "_build", build)
    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(starter.prepare, config(), workers, cache=tmp_path) for _ in range(4)]
        found = {future.result() for future in futures}
    assert len(built) == len(found) == 1


def test_the_same_seed_makes_the_same_starter_and_its_loss_falls(workers: TaskWorkers) -> None:
    pairs = list(islice(starter.examples(config(), workers), 64))
    results = []
    for steps in (1, 1, 60):
        tokenizer = starter.make_tokenizer(starter.VARIANTS["small"], [question for question, _ in pairs])
        model = starter.make_model(starter.VARIANTS["small"], tokenizer, 0)
        policy = models.wrap("starter", model, tokenizer)
        encoded = [
            (policy.encode_prompt(question), policy.encode_completion(answer, "stop"))
            for question, answer in pairs
        ]
        batches = ([encoded[n] for n in numbers] for numbers in starter.shuffled(64, 16, Random(0)))
        loss = starter.supervise(model, batches, steps, 3e-3, lambda done, total, what: None)
        results.append((loss, models.weights_sha256(model)))
    assert results[0] == results[1]
    assert results[2][0] < results[0][0] / 2


def test_the_loss_counts_answers_only_whatever_the_padding() -> None:
    tokenizer = starter.make_tokenizer(starter.VARIANTS["bytes"], [])
    model = starter.make_model(starter.VARIANTS["bytes"], tokenizer, 0)
    short, long = ((5, 6), (7, 3)), ((5, 6, 8, 9, 10), (11, 12, 3))
    with torch.no_grad():
        alone = [starter._loss(model, [pair]) for pair in (short, long)]
        together = starter._loss(model, [short, long])
    torch.testing.assert_close(together, (2 * alone[0] + 3 * alone[1]) / 5)
