"""All sources of questions inside a worker process: ReasoningGYM's data sets, and those of other packages."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from sapo.core.errors import UserError, described
from sapo.core.own_code import Missing
from sapo.tasks import gym
from sapo.tasks.holdout import bucket
from sapo.tasks.pins import load, name_of
from sapo.tasks.rows import Rows
from sapo.tasks.source import Entry, TaskSource
from sapo.tasks.verifier import guard_scorers

Made = tuple[Any, dict[str, Any]]
"""What scores a text by `score_answer(text, entry)`, and the entry."""


class Scorer:
    """An own source as the verifier calls it: as a data set of the library."""

    def __init__(self, source: TaskSource, made: Entry) -> None:
        self._source, self._made = source, made

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        """The source's score of an answer; the entry is the one it made."""
        return self._source.score(answer, self._made)


class Sources:
    """Makes entries of every source that a swarm's tasks name. Imports the own ones, `own`, by name.

    One that cannot be imported is an error of the tasks that name it, and of nothing else.
    """

    def __init__(self, own: Sequence[str] = ()) -> None:
        guard_scorers()
        self._classes: dict[str, Callable[..., TaskSource]] = {}
        self._broken: dict[str, str] = {}
        self._unread: dict[str, Callable[[], Callable[..., TaskSource]]] = {}
        for one in own:
            with self._noting(name_of(one)):
                self._unread[name_of(one)] = load(one)
        self._made: dict[tuple[str, str], TaskSource] = {}
        self.entry = lru_cache(maxsize=256)(self._entry)
        """Scorer and entry of a recipe, as `_entry` makes them; keeps the last ones."""

    def read(self) -> None:
        """Look at what was loaded: once, when the walls stand."""
        for name, looked_at in self._unread.items():
            with self._noting(name):
                self._classes[name] = looked_at()
        self._unread.clear()

    @contextmanager
    def _noting(self, name: str) -> Iterator[None]:
        try:
            yield
        except Missing as missing:
            self._broken[name] = str(missing)
        except Exception as error:  # importing may raise anything
            self._broken[name] = f"cannot be loaded: {described(error)}"

    def _entry(self, dataset: str, config: str, seed: int, index: int) -> Made:
        """Scorer and entry of a recipe; raises `UserError` and whatever the source raises."""
        if dataset not in self._classes and dataset not in self._broken:
            return gym.entry(dataset, config, seed, index)
        return self._own(dataset, config, seed, index)

    def check(self, dataset: str, config: str, seed: int, index: int) -> None:
        """Raise `UserError` for a task that cannot be."""
        if dataset not in self._classes and dataset not in self._broken:
            gym.construct(dataset, json.loads(config), seed, index)
            return
        if dataset in gym.DATASETS:
            problem = "is an entry point of sapo.tasks and a data set of ReasoningGYM"
            raise UserError("dataset", dataset, problem, "name the class as module:Class")
        self._source(dataset, config)

    def training_rows(self, dataset: str, config: str, salt: str, held_out: str) -> list[int]:
        """The rows of a file that are not held out; raises `UserError`."""
        source = self._source(dataset, config)
        assert isinstance(source, Rows)
        share = float(held_out)
        return [row for row, text in enumerate(source.questions) if bucket(text, salt) >= share]

    def _source(self, dataset: str, config: str) -> TaskSource:
        if dataset in self._broken:
            raise UserError("dataset", dataset, self._broken[dataset], "mend the package")
        if (dataset, config) not in self._made:
            params = json.loads(config)
            try:
                self._made[dataset, config] = self._classes[dataset](**params)
            except (ValueError, TypeError) as error:
                raise UserError("config", params, str(error), "correct it, or leave it out") from error
        return self._made[dataset, config]

    def _own(self, dataset: str, config: str, seed: int, index: int) -> Made:
        if index:
            raise ValueError(f"a source of a package has no index {index}")
        gym.seed_globals((dataset, config, seed, index))
        source = self._source(dataset, config)
        made = source.entry(seed)
        if not isinstance(made, Entry):
            raise TypeError(f"entry gave {type(made).__name__}, not sapo.tasks.source.Entry")
        return Scorer(source, made), dataclasses.asdict(made)
