"""From groups to a batch: token ids under the receiver's vocabulary, advantages."""

from collections.abc import Collection, Iterator, Sequence
from typing import Literal

from sapo.core.config.load import LearnConfig
from sapo.core.types import Batch, BatchGroup, Group, Outcome, Sample, SignedGroup, Source
from sapo.learn.advantage import group_advantages
from sapo.learn.update import StepResult
from sapo.policy.models import LoadedPolicy
from sapo.policy.tokenise import Tokens


def version_seen(group: Group, stamp: float, round: int, ends: Collection[float], ahead: int) -> int:
    """The policy version of a foreign group that the bus had at `stamp`: its author's word, and no later than
    the own rounds that had ended by then, of which `ends` are the last. One that is more than `ahead` rounds
    ahead of the own ones stays as it is, and so is late (`LearnConfig.admits`)."""
    if group.policy_version > round + ahead:
        return group.policy_version
    return min(group.policy_version, round - sum(end > stamp for end in ends))


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

    A foreign author's log-probabilities are kept if it is `believed` (`sapo.peers.keyring`) and the mode uses
    them. Own groups carry the engine's log-probabilities too, from which the learner measures how far engine
    and learner are apart.
    """
    tokens = tokens or Tokens.of(policy, group)
    prompt = tokens.prompt
    scores = [outcome.score for outcome in outcomes]
    reasons = [c.finish_reason for c in group.completions]
    advantages = group_advantages(scores, reasons, learn, own=source == "local")
    told = source == "local" or (believed and learn.believes)
    samples = []
    for k, (completion, outcome, advantage, (ids, retokenised)) in enumerate(
        zip(group.completions, outcomes, advantages, tokens.completions, strict=True)
    ):
        usable = told and not retokenised and group.sampling.whole_support
        mask: list[Literal[0, 1]] = [0] * len(prompt)
        mask += [1] * len(ids)
        samples.append(
            Sample(
                k=k,
                token_ids=prompt + ids,
                loss_mask=tuple(mask),
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


def foreign_gaps(batch: Batch, step: StepResult) -> Iterator[tuple[str, float]]:
    """Author of each foreign group, and how much less probable its tokens were than own ones, in nats."""
    own = step.metrics.get("learn/logprob_local")
    for group in batch.groups:
        if own is not None and group.source == "external" and group.position in step.logprobs:
            yield group.producer_key, own - step.logprobs[group.position]
