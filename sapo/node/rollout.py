"""Generation: what the policy answers to a round's questions, and the groups made of it."""

from dataclasses import dataclass

from sapo.core.rng import stream
from sapo.core.types import Completion, Group, Question
from sapo.node.group_maker import GroupMaker
from sapo.policy.engines.base import Engine
from sapo.policy.models import LoadedPolicy
from sapo.tasks.questions import QuestionStream

Completions = list[list[Completion]]


@dataclass(frozen=True)
class Request:
    """A round's questions as its engine is asked them, and the version of the policy that answers."""

    round: int
    policy_version: int
    questions: tuple[Question, ...]
    prompts: tuple[tuple[int, ...], ...]
    seed: int
    too_long: int = 0
    """Questions that were left out, as the model's context has no room for an answer to them."""


@dataclass
class RolloutMaker:
    """Has a node's engine answer its questions, and makes groups of the answers."""

    maker: GroupMaker
    policy: LoadedPolicy
    engine: Engine

    def request(self, round: int, policy_version: int, begun: QuestionStream | None = None) -> Request:
        """Draw the questions of a round, as far as `begun` has not, and have the engine take over the weights
        as they are now."""
        drawn = begun or self.maker.question_stream(round)
        questions = drawn.result()
        self.engine.update_weights()
        return Request(
            round=round,
            policy_version=policy_version,
            questions=tuple(questions),
            prompts=tuple(self.policy.encode_prompt(question.text) for question in questions),
            seed=stream(self.maker.own.config.swarm.seed, self.maker.own.incarnation, round, "generate"),
            too_long=drawn.too_long,
        )

    def answer(self, request: Request) -> Completions:
        """L completions of each question. Reads nothing that an update changes if the engine has a copy."""
        config = self.maker.own.config
        return self.engine.generate(
            request.prompts,
            completions=config.batch.completions,
            max_new_tokens=config.generate.max_new_tokens,
            sampling=config.generate.sampling,
            seed=request.seed,
        )

    def groups(self, request: Request, answers: Completions) -> list[Group]:
        """The groups, in the questions' order, as they are to be signed."""
        created = self.maker.clock()
        return [
            self.maker.group(request.round, position, request.policy_version, question, completions, created)
            for position, (question, completions) in enumerate(zip(request.questions, answers, strict=True))
        ]
