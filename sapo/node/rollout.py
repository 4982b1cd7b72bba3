"""SampleBatch and generation: a round's questions, what the policy answers, and the groups made of both."""

from collections.abc import Sequence
from dataclasses import dataclass

from sapo.core.rng import rng, stream
from sapo.core.types import Completion, Group, Question, SignedGroup
from sapo.node import probes
from sapo.node.batch import score_groups
from sapo.node.parts import NodeParts
from sapo.peers import sampling
from sapo.peers.group_rules import MAX_QUESTION
from sapo.policy.evaluate import evaluate
from sapo.tasks.questions import Drawing

Completions = list[list[Completion]]


@dataclass(frozen=True)
class Request:
    """A round's questions as its engine is asked them, and the version of the policy that answers."""

    round: int
    policy_version: int
    questions: tuple[Question, ...]
    prompts: tuple[tuple[int, ...], ...]
    seed: int


def drawing(parts: NodeParts, round: int) -> Drawing:
    """The drawing of a round's questions: of the same ones whenever it is made."""
    config = parts.config
    return Drawing(
        parts.workers,
        config.tasks,
        (config.swarm.name, parts.identity.key, parts.journal.incarnation),
        round,
        count=config.batch.b,
        held_out=config.rules.held_out,
    )


def request(parts: NodeParts, round: int, policy_version: int, begun: Drawing | None = None) -> Request:
    """Draw the questions of a round, as far as `begun` has not, and have the engine take over the weights as
    they are now."""
    questions = (begun or drawing(parts, round)).result()
    parts.engine.update_weights()
    return Request(
        round=round,
        policy_version=policy_version,
        questions=tuple(questions),
        prompts=tuple(parts.policy.encode_prompt(question.text) for question in questions),
        seed=stream(parts.config.swarm.seed, parts.journal.incarnation, round, "generate"),
    )


def answer(parts: NodeParts, request: Request) -> Completions:
    """L completions of each question. Reads nothing that an update changes, where the engine has a copy."""
    config = parts.config
    return parts.engine.generate(
        request.prompts,
        completions=config.batch.completions,
        max_new_tokens=config.generate.max_new_tokens,
        sampling=config.generate.sampling,
        seed=request.seed,
    )


def as_groups(parts: NodeParts, request: Request, answers: Completions) -> list[Group]:
    """The groups, in the questions' order, as they are to be signed."""
    config = parts.config
    created = parts.clock()
    keep = {} if config.share.token_ids else {"token_ids": None, "logprobs": None}
    return [
        Group(
            swarm=config.swarm.name,
            node=parts.name,
            key=parts.identity.key,
            incarnation=parts.journal.incarnation,
            round=request.round,
            position=position,
            recipe=question.recipe,
            question=question.text,
            completions=tuple(completion.model_copy(update=keep) for completion in completions),
            policy_version=request.policy_version,
            sampling=config.generate.sampling,
            tokenizer=parts.policy.fingerprint if config.share.token_ids else None,
            created_at=created,
            invitation=parts.invitation,
        )
        for position, (question, completions) in enumerate(zip(request.questions, answers, strict=True))
    ]


def select(parts: NodeParts, round: int, groups: list[Group]) -> tuple[list[Group], list[int]]:
    """SelectSubset: the groups (with claimed scores where they were scored) and the places published."""
    config, scores = parts.config, None
    if config.share.select == "top":
        outcomes = score_groups(parts.workers, groups)
        scores = [[outcome.score for outcome in row] for row in outcomes]
        groups = [_claim(group, row) for group, row in zip(groups, scores, strict=True)]
    draw = rng(config.swarm.seed, parts.journal.incarnation, round, "select")
    return groups, sampling.select_subset(len(groups), config.share, draw, scores)


def within_rules(parts: NodeParts, group: Group, signed: SignedGroup) -> bool:
    """Whether peers may take the group: they refuse what is larger than the manifest allows."""
    rules = parts.manifest
    longest = max(len(completion.text) for completion in group.completions)
    return (
        longest <= rules.max_text_chars
        and len(group.question) <= MAX_QUESTION
        and len(signed.payload) <= rules.max_payload_bytes
    )


def probe(parts: NodeParts, round: int) -> dict[str, float]:
    """Ask the policy some held-out questions when they are due; returns the series, or nothing."""
    config = parts.config
    if not parts.probe or round % config.eval.probe_every:
        return {}
    started = parts.clock()
    parts.engine.update_weights()
    evaluation = evaluate(
        parts.policy,
        parts.engine,
        parts.workers,
        parts.probe,
        max_new_tokens=config.generate.max_new_tokens,
        seed=config.swarm.seed,
    )
    probes.append(parts.home.probes(parts.name), parts.journal.incarnation, round, evaluation)
    return evaluation.metrics() | {"time/probe": parts.clock() - started}


def _claim(group: Group, scores: Sequence[float | None]) -> Group:
    """The group with its author's scores written on the completions."""
    completions = tuple(
        completion.model_copy(update={"claimed_score": score})
        for completion, score in zip(group.completions, scores, strict=True)
    )
    return group.model_copy(update={"completions": completions})
