"""From groups to a batch: scores, token ids under the receiver's vocabulary, advantages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final, Literal

from sapo.config import LearnConfig
from sapo.learn.advantage import group_advantages
from sapo.models import LoadedPolicy
from sapo.records import (
    Batch,
    BatchGroup,
    Completion,
    Group,
    Outcome,
    Recipe,
    Sample,
    SignedGroup,
    Source,
)
from sapo.workers import TaskWorkers

ZERO: Final[Literal[0]] = 0
ONE: Final[Literal[1]] = 1


def score_groups(workers: TaskWorkers, groups: Sequence[Group]) -> list[tuple[Outcome, ...]]:
    """Outcomes of every completion of every group, in one call to the workers."""
    outcomes = iter(workers.score(_answers(groups)))
    return [tuple(next(outcomes) for _ in group.completions) for group in groups]


def begin_scoring(workers: TaskWorkers, groups: Sequence[Group]) -> None:
    """Have the workers begin to score groups; `score_groups` then has less to wait for."""
    workers.begin_score(_answers(groups))


def _answers(groups: Sequence[Group]) -> list[tuple[Recipe, str]]:
    return [(group.recipe, completion.text) for group in groups for completion in group.completions]


def own_ids(policy: LoadedPolicy, group: Group, completion: Completion) -> tuple[tuple[int, ...], bool]:
    """The ids to train on and whether the text was re-encoded.

    Sent ids are used only if they are of the same vocabulary, inside it, decode to the text, and hold no
    special token but a final stop where the completion stopped (DESIGN 5). Text decides otherwise.
    """
    ids = completion.token_ids
    if ids is not None and group.tokenizer == policy.fingerprint and _faithful(policy, completion, ids):
        return ids, False
    return policy.encode_completion(completion.text, completion.finish_reason), True


def _faithful(policy: LoadedPolicy, completion: Completion, ids: tuple[int, ...]) -> bool:
    stopped = completion.finish_reason == "stop"
    if stopped and (not ids or ids[-1] not in policy.stop_ids):
        return False
    body = ids[:-1] if stopped else ids
    if any(token >= policy.vocabulary or token in policy.special_ids for token in body):
        return False
    return policy.decode(body) == completion.text


def false_ids(policy: LoadedPolicy, group: Group) -> bool:
    """Whether a completion carries ids of this vocabulary that do not decode to its text: nobody errs so.

    A last id that ends a completion elsewhere, but not here, is no lie.
    """
    if group.tokenizer != policy.fingerprint:
        return False
    return any(_lies(policy, completion) for completion in group.completions)


def _lies(policy: LoadedPolicy, completion: Completion) -> bool:
    ids = completion.token_ids
    if ids is None:
        return False
    if any(token >= policy.vocabulary for token in ids):
        return True
    if policy.decode(ids) == completion.text:
        return False
    return completion.finish_reason == "length" or policy.decode(ids[:-1]) != completion.text


@dataclass(frozen=True, slots=True)
class Tokens:
    """A group's ids under the receiver's vocabulary: of its prompt, and `own_ids` of each completion."""

    prompt: tuple[int, ...]
    completions: list[tuple[tuple[int, ...], bool]]

    @classmethod
    def of(cls, policy: LoadedPolicy, group: Group, prompt: tuple[int, ...] | None = None) -> "Tokens":
        """`prompt` are the question's ids, where they are known."""
        ids = policy.encode_prompt(group.question) if prompt is None else prompt
        return cls(ids, [own_ids(policy, group, completion) for completion in group.completions])

    @property
    def longest(self) -> int:
        """Tokens of the group's longest sequence, prompt included."""
        return len(self.prompt) + max(len(ids) for ids, _ in self.completions)


def batch_group(
    policy: LoadedPolicy,
    learn: LearnConfig,
    group: Group,
    signed: SignedGroup,
    outcomes: Sequence[Outcome],
    *,
    source: Source,
    position: int,
    age_s: float,
    bus_position: str | None = None,
    tokens: Tokens | None = None,
    believed: bool = False,
) -> BatchGroup:
    """A verified group as it enters an update. `outcomes` are the receiver's own, one per completion.

    A foreign author's log-probabilities are kept if it is `believed` (`sapo.trust`) and the mode uses them.
    Own groups carry the engine's log-probabilities too, from which the learner measures how far engine and
    learner are apart (TRAPS 2).
    """
    tokens = tokens or Tokens.of(policy, group)
    prompt = tokens.prompt
    scores = [outcome.score for outcome in outcomes]
    advantages = group_advantages(scores, [c.finish_reason for c in group.completions], learn)
    told = source == "local" or (believed and learn.foreign == "behaviour")
    samples = []
    for k, (completion, outcome, advantage, (ids, retokenised)) in enumerate(
        zip(group.completions, outcomes, advantages, tokens.completions, strict=True)
    ):
        usable = told and not retokenised and group.sampling.whole_support
        samples.append(
            Sample(
                k=k,
                token_ids=prompt + ids,
                loss_mask=(*repeat(ZERO, len(prompt)), *repeat(ONE, len(ids))),
                text=completion.text,
                finish_reason=completion.finish_reason,
                outcome=outcome.outcome,
                score=outcome.score,
                advantage=advantage,
                behaviour_logprobs=completion.logprobs if usable else None,
                retokenised=retokenised,
            )
        )
    return BatchGroup(
        position=position,
        group_id=signed.group_id,
        content_sha256=signed.content_sha256,
        source=source,
        producer=group.node,
        producer_key=group.key,
        producer_version=group.policy_version,
        recipe=group.recipe,
        question=group.question,
        age_s=age_s,
        bus_position=bus_position,
        samples=tuple(samples),
    )


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def reward_metrics(groups: Sequence[BatchGroup]) -> dict[str, float]:
    """`reward/local`, `/external` and `/training_set`, all and per task, on raw scores (DESIGN 13)."""
    metrics: dict[str, float] = {}
    kinds: dict[str, Callable[[BatchGroup], bool]] = {
        "reward/local": lambda group: group.source == "local",
        "reward/external": lambda group: group.source == "external",
        "reward/training_set": lambda group: True,
    }
    for name, wanted in kinds.items():
        by_task: dict[str, list[float]] = {}
        for group in filter(wanted, groups):
            scores = [sample.score for sample in group.samples if sample.score is not None]
            by_task.setdefault(group.recipe.dataset, []).extend(scores)
        total = mean([score for scores in by_task.values() for score in scores])
        if total is not None:
            metrics[name] = total
        for task, scores in by_task.items():
            value = mean(scores)
            if value is not None:
                metrics[f"{name}/{task}"] = value
    return metrics


def source_metrics(batch: Batch) -> dict[str, float]:
    """How much of a batch is foreign, how old that is in seconds, and how much of it was re-encoded."""
    external = [group for group in batch.groups if group.source == "external"]
    metrics = {"sampler/external": float(len(external))}
    if batch.groups:
        metrics["share/external"] = len(external) / len(batch.groups)
    if external:
        metrics["staleness/mean_s"] = sum(group.age_s for group in external) / len(external)
        metrics["staleness/max_s"] = max(group.age_s for group in external)
        samples = [sample for group in external for sample in group.samples]
        metrics["share/retokenised"] = sum(sample.retokenised for sample in samples) / len(samples)
    return metrics
