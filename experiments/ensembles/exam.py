"""Held-out questions asked of several models at once, and of every way in which they may answer as one.

All ways are judged on the same questions, and those at answer level on the very same answers, so that their
differences are paired. The prior is measured on questions that may be trained on, never on these.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sapo.core.answer_format import AnswerFormat
from sapo.core.config.load import Config
from sapo.core.rng import stream
from sapo.core.types import Question
from sapo.policy.engines.base import Engine
from sapo.policy.engines.hf import TransformersEngine
from sapo.policy.evaluate import Answer, Answers, Evaluation, Progress, answer, gain
from sapo.policy.models import LoadedPolicy
from sapo.tasks.questions import QuestionStream
from sapo.tasks.verifier import extract_answer
from sapo.tasks.workers import TaskWorkers

from . import combine
from .mixture import log_likelihood, mixed, one_vocabulary

Way = Literal[
    "mixture", "vote", "route", "uniform_vote", "majority", "average", "oracle_by_task", "oracle_by_question"
]
OWNER = "*ensemble*"
"""Names the stream of questions that priors are measured on; no node or swarm can be called so."""
PRIOR_QUESTIONS = 200


@dataclass(frozen=True, slots=True)
class Expert:
    """A model of an ensemble, with what samples from it."""

    name: str
    policy: LoadedPolicy
    engine: Engine
    max_new_tokens: int


@dataclass(frozen=True, slots=True)
class EnsembleExam:
    """What experts alone, and all ways of theirs, did on the same questions.

    `unit` is what the likelihood of a question is averaged over, `routed` the share of each data set's
    questions that `route` sends to each expert, `best` the expert with the highest pass@1 here.
    """

    prior: dict[str, float]
    unit: Literal["token", "byte"]
    best: str
    routed: dict[str, dict[str, float]]
    singles: dict[str, Evaluation]
    ways: dict[Way, Evaluation]
    costs: dict[Way, int]
    """Answers that a way samples for each of its own; a mixture's token costs one of every expert."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        best = self.singles[self.best].sampled
        return {
            "prior": self.prior,
            "unit": self.unit,
            "best": self.best,
            "routed": self.routed,
            "experts": {name: _figures(one, best, 1) for name, one in self.singles.items()},
            "ways": {way: _figures(one, best, self.costs[way]) for way, one in self.ways.items()},
        }


def _figures(one: Evaluation, best: Sequence[float], cost: int) -> dict[str, Any]:
    """Figures of a way; `against_best` is paired by question with the best expert's."""
    asked = list(zip(one.tasks, one.sampled, strict=True))
    passes = {task: [passed for at, passed in asked if at == task] for task in sorted(set(one.tasks))}
    return {
        "answers": cost,
        "pass_at_1": one.pass_at_1,
        "effective": one.effective,
        "interval": one.interval.half,
        "greedy": one.greedy_pass if one.greedy else None,
        "against_best": gain({"best": best}, {"best": one.sampled}, one.asked).written(),
        "per_task": {task: statistics.fmean(of) for task, of in passes.items()},
    }


def training_questions(workers: TaskWorkers, config: Config, count: int) -> list[Question]:
    """Questions that may be trained on, never held-out ones, drawn by the tasks' weights."""
    author, held_out = (config.swarm.seed, OWNER, OWNER, ""), config.rules.held_out
    return QuestionStream(
        workers, config.manifest_tasks(), author, 0, count=count, held_out=held_out
    ).result()


def likelihoods(policies: Sequence[LoadedPolicy], questions: Sequence[str]) -> tuple[Tensor, Tensor]:
    """log p_j of each whole question, as each policy reads it, and its mean over the question's units.

    Both are [questions, K], in nats. A unit is a token where the policies share a vocabulary, else a byte of
    the question: tokens of different vocabularies do not compare. Of a question that is longer than its
    context a policy reads as much as there is room for.
    """
    prompts = [[policy.encode_prompt(text)[: policy.max_length] for text in questions] for policy in policies]
    whole = torch.stack(
        [log_likelihood(policy.model, ids) for policy, ids in zip(policies, prompts, strict=True)], dim=-1
    )
    if one_vocabulary(policies):
        units = [[len(ids) - 1 for ids in own] for own in prompts]
    else:
        units = [[len(text.encode()) for text in questions]]
    return whole, whole / torch.tensor(units).clamp(min=1).T


def prior_of(
    experts: Sequence[Expert], workers: TaskWorkers, config: Config, count: int = PRIOR_QUESTIONS
) -> Tensor:
    """log P(D=j) [K]: the mean posterior of training questions, by what each expert makes of them."""
    texts = [question.text for question in training_questions(workers, config, count)]
    return combine.measured_prior(likelihoods([one.policy for one in experts], texts)[0])


def examine(
    experts: Sequence[Expert],
    workers: TaskWorkers,
    questions: Sequence[Question],
    *,
    log_prior: Tensor,
    form: AnswerFormat,
    samples: int,
    seed: int,
    greedy: bool = True,
    each: int = 1,
    progress: Progress | None = None,
) -> EnsembleExam:
    """Ask every expert, and every way, the same questions: `samples` times, and greedily if `greedy`.

    A vote hears `each` answers of every expert, so an ensemble of one is the majority of one model. The first
    expert and the ways that are models of their own have the random numbers of `answer`, the other experts
    others: under equal ones, models that are nearly equal would all cast the same vote. `form` says which
    part of a text is the answer.
    """
    policies = [one.policy for one in experts]

    def ask(expert: Expert, label: str, samples: int, greedy: bool, seed: int = seed) -> Answers:
        return answer(
            expert.policy,
            expert.engine,
            workers,
            questions,
            max_new_tokens=expert.max_new_tokens,
            samples=samples,
            seed=seed,
            greedy=greedy,
            progress=None if progress is None else partial(progress, label),
        )

    own = [
        ask(one, one.name, samples * each, greedy, stream(seed, "expert", place) if place else seed)
        for place, one in enumerate(experts)
    ]
    singles = [Evaluation.of(questions, one) for one in own]
    best = combine.route([one.pass_at_1 for one in singles])
    _, mean_questions = likelihoods(policies, [question.text for question in questions])
    weights: list[list[float]] = combine.question_weights(log_prior, mean_questions).tolist()
    even = [[1.0] * len(experts)] * len(questions)
    experts_of = _best_by_task(singles)
    joint = each * len(experts)
    by_task = [[float(j == experts_of[q.recipe.dataset]) for j in range(len(experts))] for q in questions]
    most = ask(experts[best], f"{experts[best].name} x {joint}", samples * joint, False)
    found: dict[Way, Answers] = {
        "vote": _each_trial(own, weights, each, partial(_voted, form)),
        "route": _each_trial(own, weights, each, _routed),
        "uniform_vote": _each_trial(own, even, each, partial(_voted, form)),
        "majority": _each_trial([most], [[1.0]] * len(questions), joint, partial(_voted, form)),
        "oracle_by_task": _each_trial(own, by_task, each, _routed),
        "oracle_by_question": _each_trial(own, even, each, _any),
    }
    costs: dict[Way, int] = dict.fromkeys(found, joint) | {"route": 1, "oracle_by_task": 1}
    if one_vocabulary(policies):
        room = max(one.max_new_tokens for one in experts)
        whole = replace(experts[0], name="mixture", policy=mixed(policies, log_prior), max_new_tokens=room)
        found["mixture"], costs["mixture"] = _apart(ask, whole, samples, greedy), len(experts)
        mean = combine.average([dict(one.model.named_parameters()) for one in policies])
        # the mean of adapters' factors is not the mean of what they add
        if mean is not None and not any(one.lora for one in policies):
            whole = replace(whole, name="average", policy=_with(policies[0], mean))
            found["average"], costs["average"] = _apart(ask, whole, samples, greedy), 1
    names = [one.name for one in experts]
    return EnsembleExam(
        prior=dict(zip(names, log_prior.exp().tolist(), strict=True)),
        unit="token" if one_vocabulary(policies) else "byte",
        best=names[best],
        routed=_destinations(names, questions, weights),
        singles=dict(zip(names, singles, strict=True)),
        ways={way: Evaluation.of(questions, one) for way, one in found.items()},
        costs=costs,
    )


def _apart(ask: Callable[..., Answers], expert: Expert, samples: int, greedy: bool) -> Answers:
    """Ask a model that is made for this alone."""
    with closing(TransformersEngine(expert.policy)) as engine:
        return ask(replace(expert, engine=engine), expert.name, samples, greedy)


def _with(policy: LoadedPolicy, parameters: dict[str, Tensor]) -> LoadedPolicy:
    """The policy with a copy of its model that has these parameters."""
    model = copy.deepcopy(policy.model)
    with torch.no_grad():
        for name, own in model.named_parameters():
            own.copy_(parameters[name])
    return replace(policy, model=model)


Pick = Callable[[Sequence[float], Sequence[Answer]], Answer]
"""From the weights of answers, and these, to the one that is given."""


def _each_trial(own: Sequence[Answers], weights: Sequence[Sequence[float]], each: int, pick: Pick) -> Answers:
    """What a way makes of its experts' answers: `each` of every expert make one of its own."""
    sampled = []
    for place, row in enumerate(weights):
        spread = [weight for weight in row for _ in range(each)]
        trials = range(0, len(own[0].sampled[place]), each)
        heard = [[a for one in own for a in one.sampled[place][at : at + each]] for at in trials]
        sampled.append([pick(spread, answers) for answers in heard])
    greedy = []
    if all(one.greedy for one in own):
        greedy = [pick(row, [one.greedy[place] for one in own]) for place, row in enumerate(weights)]
    return Answers(sampled, greedy)


def _voted(form: AnswerFormat, weights: Sequence[float], answers: Sequence[Answer]) -> Answer:
    return answers[combine.vote(weights, [said(one.text, form) for one in answers])]


def said(text: str, form: AnswerFormat) -> str | None:
    """What a vote takes a text for: the part that is scored, without white space round it; None for none."""
    part = extract_answer(text, form)
    return None if part is None else part.strip()


def _routed(weights: Sequence[float], answers: Sequence[Answer]) -> Answer:
    return answers[combine.route(weights)]


def _any(weights: Sequence[float], answers: Sequence[Answer]) -> Answer:
    return max(answers, key=lambda one: one.passed)


def _best_by_task(singles: Sequence[Evaluation]) -> dict[str, int]:
    """By data set the expert that passes most of its questions."""
    best = {}
    for task in set(singles[0].tasks):
        at = [place for place, name in enumerate(singles[0].tasks) if name == task]
        best[task] = combine.route([sum(one.sampled[place] for place in at) for one in singles])
    return best


def _destinations(
    names: Sequence[str], questions: Sequence[Question], weights: Sequence[Sequence[float]]
) -> dict[str, dict[str, float]]:
    by_task: dict[str, list[int]] = {}
    for question, row in zip(questions, weights, strict=True):
        by_task.setdefault(question.recipe.dataset, []).append(combine.route(row))
    return {
        task: {name: went.count(place) / len(went) for place, name in enumerate(names)}
        for task, went in sorted(by_task.items())
    }
