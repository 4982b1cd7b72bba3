"""How many bits models need for the reference answers, each alone and as a mixture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from sapo.core.answer_format import AnswerFormat
from sapo.core.types import Question
from sapo.policy.models import LoadedPolicy
from sapo.policy.starter import target_text
from sapo.tasks.workers import TaskWorkers

from .combine import posterior
from .mixture import log_likelihood, one_vocabulary

MIXTURE = "mixture"


@dataclass(frozen=True, slots=True)
class ReferenceBits:
    """Bits of each question's reference answer by who answers, and the answers' bytes.

    A question whose data set stores no answer has none of either, nor one that a policy has no room for.
    """

    bits: dict[str, list[float]]
    bytes: list[int]

    def per_byte(self, who: str, places: slice = slice(None)) -> float | None:
        """-Σ log2 p(answer | question) over the answers' bytes, of some questions; None without a byte."""
        size = sum(self.bytes[places])
        return sum(self.bits[who][places]) / size if size else None


def reference_bits(
    named: Sequence[tuple[str, LoadedPolicy]],
    log_prior: Tensor,
    log_context: Tensor,
    workers: TaskWorkers,
    questions: Sequence[Question],
    form: AnswerFormat,
) -> ReferenceBits:
    """What the stored answers cost each policy, its end among them, and their mixture where tokens mix.

    `log_context` [questions, K] is log p_j of each whole question (`exam.likelihoods`). A mixture's
    tokens multiply to Σ_j P(D=j|question) p_j(answer|question), so nothing is asked again.
    """
    stored = workers.answers([question.recipe for question in questions])
    texts = [None if answer is None else target_text(answer, form) for answer in stored]
    known = [(place, text) for place, text in enumerate(texts) if text is not None]
    read = [
        [
            (*policy.encode_prompt(questions[place].text), *policy.encode_completion(text, "stop"))
            for place, text in known
        ]
        for _, policy in named
    ]
    fit = [
        all(len(own[i]) <= policy.max_length for own, (_, policy) in zip(read, named, strict=True))
        for i in range(len(known))
    ]
    known = list(compress(known, fit))
    context = log_context[[place for place, _ in known]]
    answers = {}
    for column, (name, policy) in enumerate(named):
        answers[name] = log_likelihood(policy.model, list(compress(read[column], fit))) - context[:, column]
    if one_vocabulary([policy for _, policy in named]):
        whose = posterior(log_prior, context)
        answers[MIXTURE] = torch.logsumexp(whose + torch.stack(list(answers.values()), dim=-1), dim=-1)
    sizes = [0] * len(questions)
    for place, text in known:
        sizes[place] = len(text.encode())
    bits = {}
    for name, values in answers.items():
        bits[name] = [0.0] * len(questions)
        for (place, _), value in zip(known, values.tolist(), strict=True):
            bits[name][place] = -value / math.log(2)
    return ReferenceBits(bits, sizes)
