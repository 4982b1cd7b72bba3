"""How many bits models need for the reference answers, each alone and as a mixture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sapo.core.types import Question
from sapo.policy.ensemble import posterior
from sapo.policy.mixture import log_likelihood, one_vocabulary
from sapo.policy.models import LoadedPolicy
from sapo.policy.starter import target_text
from sapo.tasks.verifier import AnswerFormat
from sapo.tasks.workers import TaskWorkers

MIXTURE = "mixture"


@dataclass(frozen=True, slots=True)
class ReferenceBits:
    """Bits of each question's reference answer by who answers, and the answers' bytes.

    A question whose data set stores no answer has none of either.
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
    workers: TaskWorkers,
    questions: Sequence[Question],
    form: AnswerFormat,
) -> ReferenceBits:
    """What the stored answers cost each policy, its end among them, and their mixture where tokens mix.

    A mixture's tokens multiply to Σ_j P(D=j|question) p_j(answer|question), so nothing is asked again.
    """
    stored = workers.answers([question.recipe for question in questions])
    texts = [None if answer is None else target_text(answer, form) for answer in stored]
    known = [(place, text) for place, text in enumerate(texts) if text is not None]
    policies = [policy for _, policy in named]
    context, answers = list[Tensor](), list[Tensor]()
    for policy in policies:
        prompts = [policy.encode_prompt(questions[place].text) for place, _ in known]
        whole = [
            (*prompt, *policy.encode_completion(text, "stop"))
            for prompt, (_, text) in zip(prompts, known, strict=True)
        ]
        context.append(log_likelihood(policy.model, prompts))
        answers.append(log_likelihood(policy.model, whole) - context[-1])
    found = {name: one for (name, _), one in zip(named, answers, strict=True)}
    if one_vocabulary(policies):
        whose = posterior(log_prior, torch.stack(context, dim=-1))
        found[MIXTURE] = torch.logsumexp(whose + torch.stack(answers, dim=-1), dim=-1)
    sizes = [0] * len(questions)
    for place, text in known:
        sizes[place] = len(text.encode())
    bits = {}
    for name, values in found.items():
        bits[name] = [0.0] * len(questions)
        for (place, _), value in zip(known, values.tolist(), strict=True):
            bits[name][place] = -value / math.log(2)
    return ReferenceBits(bits, sizes)
