"""An author's side of a round that needs no model: its questions, its groups, what is published of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sapo.core.rng import rng
from sapo.core.types import MAX_QUESTION, AuthorKind, Completion, Group, Question, SignedGroup
from sapo.node.author import Author
from sapo.node.scoring import score_groups
from sapo.peers import sampling
from sapo.peers.signing import seal
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import TaskWorkers


@dataclass
class GroupMaker:
    """Draws an author's questions, and makes signed groups of the answers to them."""

    own: Author
    workers: TaskWorkers
    clock: Callable[[], float]
    tokenizer: str | None = None
    """Fingerprint of the vocabulary of its token ids."""
    kind: AuthorKind | None = None
    """What kind of author the groups name; None is a policy that learns."""
    fits: Callable[[Question], bool] | None = None
    """Whether the author has room for a question; others are left out."""

    def question_stream(self, round: int) -> QuestionStream:
        """The stream of a round's questions, the same ones whenever it is made."""
        config = self.own.config
        return QuestionStream(
            self.workers,
            config.tasks,
            (config.swarm.name, self.own.identity.key, self.own.incarnation),
            round,
            count=config.batch.b,
            held_out=config.rules.held_out,
            fits=self.fits,
        )

    def group(
        self,
        round: int,
        position: int,
        policy_version: int,
        question: Question,
        completions: Sequence[Completion],
        created: float,
    ) -> Group:
        """The group of one question, as it is to be signed; `created` is its time by the author's clock."""
        own, config = self.own, self.own.config
        keep = {} if config.share.token_ids else {"token_ids": None, "logprobs": None}
        return Group(
            swarm=config.swarm.name,
            node=own.name,
            key=own.identity.key,
            incarnation=own.incarnation,
            round=round,
            position=position,
            recipe=question.recipe,
            question=question.text,
            completions=tuple(completion.model_copy(update=keep) for completion in completions),
            policy_version=policy_version,
            sampling=config.generate.sampling,
            tokenizer=self.tokenizer if config.share.token_ids else None,
            created_at=created,
            invitation=own.held.card.invitation,
            author=self.kind,
        )

    def publish(self, round: int, groups: list[Group]) -> tuple[list[Group], list[SignedGroup], int]:
        """SelectSubset and transaction 1: sign and journal the groups; those chosen are owed to the bus.

        Returns the groups (with claimed scores where they were scored), the same signed, and how many of
        those chosen are withheld, as peers would refuse them.
        """
        scores, config = None, self.own.config
        if config.share.select == "top":
            outcomes = score_groups(self.workers, groups)
            scores = [[outcome.score for outcome in row] for row in outcomes]
            groups = [_claim(group, row) for group, row in zip(groups, scores, strict=True)]
        draw = rng(config.swarm.seed, self.own.incarnation, round, "select")
        chosen, signed = sampling.select_subset(len(groups), config.share, draw, scores), self.sign(groups)
        owed = [signed[n].group_id for n in chosen if self._within_rules(groups[n], signed[n])]
        self.own.journal.commit_groups(round, signed, owed)
        return groups, signed, len(chosen) - len(owed)

    def sign(self, groups: Sequence[Group]) -> list[SignedGroup]:
        """The groups under the author's key."""
        return [seal(group, self.own.identity) for group in groups]

    def _within_rules(self, group: Group, signed: SignedGroup) -> bool:
        """Whether peers may take the group: they refuse what is larger than the manifest allows."""
        longest = max(len(completion.text) for completion in group.completions)
        return (
            longest <= self.own.manifest.max_text_chars
            and len(group.question) <= MAX_QUESTION
            and len(signed.payload) <= self.own.manifest.max_payload_bytes
        )


def _claim(group: Group, scores: Sequence[float | None]) -> Group:
    completions = tuple(
        completion.model_copy(update={"claimed_score": score})
        for completion, score in zip(group.completions, scores, strict=True)
    )
    return group.model_copy(update={"completions": completions})
