"""SampleBatch and generation: a round's questions, what the policy answers, and the groups made of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.rng import rng, stream
from sapo.core.types import Completion, Group, Invitation, Question, SignedGroup
from sapo.node.batch import score_groups
from sapo.peers import sampling
from sapo.peers.group_rules import MAX_QUESTION
from sapo.peers.signing import Identity, seal
from sapo.policy.engines.base import Engine
from sapo.policy.models import LoadedPolicy
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import TaskWorkers

Completions = list[list[Completion]]


@dataclass(frozen=True)
class Request:
    """A round's questions as its engine is asked them, and the version of the policy that answers."""

    round: int
    policy_version: int
    questions: tuple[Question, ...]
    prompts: tuple[tuple[int, ...], ...]
    seed: int


@dataclass
class RolloutMaker:
    """Makes a node's groups: draws questions, has the engine answer them, signs what came of it."""

    config: Config
    name: str
    identity: Identity
    incarnation: str
    invitation: Invitation | None
    """By which the node may publish, where it is no member."""
    manifest: Manifest
    policy: LoadedPolicy
    engine: Engine
    workers: TaskWorkers
    clock: Callable[[], float]

    def question_stream(self, round: int) -> QuestionStream:
        """The stream of a round's questions, the same ones whenever it is made."""
        config = self.config
        return QuestionStream(
            self.workers,
            config.tasks,
            (config.swarm.name, self.identity.key, self.incarnation),
            round,
            count=config.batch.b,
            held_out=config.rules.held_out,
        )

    def request(self, round: int, policy_version: int, begun: QuestionStream | None = None) -> Request:
        """Draw the questions of a round, as far as `begun` has not, and have the engine take over the weights
        as they are now."""
        questions = (begun or self.question_stream(round)).result()
        self.engine.update_weights()
        return Request(
            round=round,
            policy_version=policy_version,
            questions=tuple(questions),
            prompts=tuple(self.policy.encode_prompt(question.text) for question in questions),
            seed=stream(self.config.swarm.seed, self.incarnation, round, "generate"),
        )

    def answer(self, request: Request) -> Completions:
        """L completions of each question. Reads nothing that an update changes if the engine has a copy."""
        config = self.config
        return self.engine.generate(
            request.prompts,
            completions=config.batch.completions,
            max_new_tokens=config.generate.max_new_tokens,
            sampling=config.generate.sampling,
            seed=request.seed,
        )

    def groups(self, request: Request, answers: Completions) -> list[Group]:
        """The groups, in the questions' order, as they are to be signed."""
        config = self.config
        created = self.clock()
        keep = {} if config.share.token_ids else {"token_ids": None, "logprobs": None}
        return [
            Group(
                swarm=config.swarm.name,
                node=self.name,
                key=self.identity.key,
                incarnation=self.incarnation,
                round=request.round,
                position=position,
                recipe=question.recipe,
                question=question.text,
                completions=tuple(completion.model_copy(update=keep) for completion in completions),
                policy_version=request.policy_version,
                sampling=config.generate.sampling,
                tokenizer=self.policy.fingerprint if config.share.token_ids else None,
                created_at=created,
                invitation=self.invitation,
            )
            for position, (question, completions) in enumerate(zip(request.questions, answers, strict=True))
        ]

    def select(self, round: int, groups: list[Group]) -> tuple[list[Group], list[int]]:
        """SelectSubset: the groups (with claimed scores where they were scored) and the places published."""
        scores = None
        if self.config.share.select == "top":
            outcomes = score_groups(self.workers, groups)
            scores = [[outcome.score for outcome in row] for row in outcomes]
            groups = [_claim(group, row) for group, row in zip(groups, scores, strict=True)]
        draw = rng(self.config.swarm.seed, self.incarnation, round, "select")
        return groups, sampling.select_subset(len(groups), self.config.share, draw, scores)

    def sign(self, groups: Sequence[Group]) -> list[SignedGroup]:
        """The groups under the node's key."""
        return [seal(group, self.identity) for group in groups]

    def within_rules(self, group: Group, signed: SignedGroup) -> bool:
        """Whether peers may take the group: they refuse what is larger than the manifest allows."""
        longest = max(len(completion.text) for completion in group.completions)
        return (
            longest <= self.manifest.max_text_chars
            and len(group.question) <= MAX_QUESTION
            and len(signed.payload) <= self.manifest.max_payload_bytes
        )


def _claim(group: Group, scores: Sequence[float | None]) -> Group:
    """The group with its author's scores written on the completions."""
    completions = tuple(
        completion.model_copy(update={"claimed_score": score})
        for completion, score in zip(group.completions, scores, strict=True)
    )
    return group.model_copy(update={"completions": completions})
