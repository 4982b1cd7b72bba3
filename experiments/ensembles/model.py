"""An ensemble as one model: whole in a folder, and asked by whoever has `sapo` installed.

MLflow loads it as a generic Python model by its loader module, which is this one. Answers are the most
probable ones.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sapo.core.answer_format import AnswerFormat
from sapo.core.config.load import parse
from sapo.core.types import Sampling
from sapo.policy import models
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.models import LoadedPolicy

from . import combine
from .exam import Expert, likelihoods, said
from .mixture import mixed

Answering = Literal["mixture", "vote", "route"]
"""Ways in which a logged ensemble may answer."""
NOTE = "ensemble.json"


def save(
    directory: Path, experts: Sequence[Expert], log_prior: Tensor, *, way: Answering, form: AnswerFormat
) -> None:
    """Write an ensemble: each expert as a Hugging Face directory, and how they answer together."""
    for one in experts:
        models.save(models.merged(one.policy), directory / one.name)
    note = {
        "way": way,
        "answer": form,
        "dtype": str(next(experts[0].policy.model.parameters()).dtype).removeprefix("torch."),
        "experts": [one.name for one in experts],
        "prior": log_prior.exp().tolist(),
        "max_new_tokens": [one.max_new_tokens for one in experts],
    }
    (directory / NOTE).write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")


class Ensemble:
    """An ensemble that `save` wrote, loaded where torch finds the best device."""

    def __init__(self, directory: Path) -> None:
        note = json.loads((directory / NOTE).read_text(encoding="utf-8"))
        self.way: Answering = note["way"]
        self.form: AnswerFormat = note["answer"]
        self._room: list[int] = note["max_new_tokens"]
        self._log_prior = torch.tensor(note["prior"]).log()
        settings = {"dtype": note["dtype"], "rules": {"answer": self.form}}
        self.policies = [_loaded(directory / name, settings) for name in note["experts"]]

    def answers(self, questions: Sequence[str]) -> list[str]:
        """The answer to each question. Raises `UserError` for one that is longer than a model's context."""
        if not questions:
            return []
        if self.way == "mixture":
            return _greedy(self._mixed, questions, max(self._room))
        pairs = zip(self.policies, self._room, strict=True)
        by_expert = [_greedy(policy, questions, room) for policy, room in pairs]
        given = zip(*by_expert, strict=True)
        weights = combine.question_weights(self._log_prior, likelihoods(self.policies, questions)[1])
        return [texts[self._place(row, texts)] for row, texts in zip(weights.tolist(), given, strict=True)]

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """MLflow's call: a list of questions, or a data frame whose first column has them."""
        questions = model_input.iloc[:, 0] if hasattr(model_input, "iloc") else model_input
        return self.answers([str(question) for question in questions])

    @cached_property
    def _mixed(self) -> LoadedPolicy:
        return mixed(self.policies, self._log_prior)

    def _place(self, weights: Sequence[float], texts: Sequence[str]) -> int:
        if self.way == "route":
            return combine.route(weights)
        return combine.vote(weights, [said(text, self.form) for text in texts])


def _load_pyfunc(path: str) -> Ensemble:
    """What MLflow calls with the folder that was logged."""
    return Ensemble(Path(path))


def _loaded(folder: Path, settings: Mapping[str, Any]) -> LoadedPolicy:
    config = parse({"model": str(folder), **settings})
    return models.load_policy(str(folder), config=config, cache=folder, threads=torch.get_num_threads())


def _greedy(policy: LoadedPolicy, questions: Sequence[str], room: int) -> list[str]:
    prompts = [policy.encode_prompt(question) for question in questions]
    with closing(TransformersEngine(policy)) as engine:
        found = engine.generate(
            prompts, completions=0, max_new_tokens=room, sampling=Sampling(), seed=0, greedy=True
        )
    return [completion.text for (completion,) in found]
