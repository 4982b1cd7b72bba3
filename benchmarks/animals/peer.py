"""What every hostile peer has: a key, a clock, chance, and honest questions with answers to start from."""

import itertools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from sapo.core.answer_format import AnswerFormat
from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.config.schema import Task
from sapo.core.types import Completion, Group, Question, Recipe, SignedGroup, sha256
from sapo.peers.signing import Identity, seal
from sapo.tasks.holdout import is_held_out
from sapo.tasks.questions import draws
from sapo.tasks.workers import TaskWorkers

INCARNATION = "bad0bad0bad0bad0"
PLACES = 8


@dataclass(frozen=True, slots=True)
class Item:
    """A question of the swarm that anybody may train on, and its right answer."""

    recipe: Recipe
    question: str
    answer: str
    place: int | None = None
    """In the stream of the author whose key draws it, of `PLACES` a round."""


class Grounds:
    """What a hostile peer knows of the swarm it attacks: its rules and its questions.

    `control` is a special token of the nodes' tokenizer, `tokenizer` its fingerprint, `vocabulary` its size.
    """

    def __init__(
        self,
        config: Config,
        workers: TaskWorkers,
        *,
        control: str = "<|end|>",
        tokenizer: str | None = None,
        vocabulary: int = 1024,
    ) -> None:
        self.manifest = Manifest.of(config)
        self.control, self.tokenizer, self.vocabulary = control, tokenizer, vocabulary
        self._asks = workers.questions, workers.answers

    @property
    def datasets(self) -> list[str]:
        """Data sets of the manifest."""
        return sorted({task.dataset for task in self.manifest.tasks})

    def items(self, recipes: Sequence[tuple[int, Recipe]], held_out: bool) -> "list[Item]":
        """Those of the recipes, each with its place, that anybody may train on, or the held-out ones."""
        found = []
        questions, answers = (ask([recipe for _, recipe in recipes]) for ask in self._asks)
        for (place, recipe), question, answer in zip(recipes, questions, answers, strict=True):
            if isinstance(question, Question) and is_held_out(question, self.manifest.held_out) == held_out:
                right = marked(str(answer or "0"), self.manifest.answer)
                found.append(Item(recipe, question.text, right, place))
        return found


def marked(answer: str, form: AnswerFormat) -> str:
    """An answer as the swarm's scorer reads it."""
    return {"text": answer, "tags": f"<answer>{answer}</answer>", "boxed": f"\\boxed{{{answer}}}"}[form]


@dataclass(frozen=True, slots=True)
class Sight:
    """What there is to be seen in a round: what honest nodes published, and what they are about to publish.

    A real peer does not see the second; those who squat and forge are given it, as the worst case.
    """

    seen: Sequence[SignedGroup]
    coming: Sequence[SignedGroup]


@dataclass
class Peer:
    """A hostile peer: its key, name, place in its own stream of groups, chance and clock."""

    identity: Identity
    node: str
    grounds: Grounds
    rng: random.Random
    clock: Callable[[], float]
    incarnation: str = INCARNATION
    places: Iterator[int] = field(default_factory=itertools.count)

    @property
    def key(self) -> str:
        """Its public key."""
        return self.identity.key

    def items(self, count: int, dataset: str = "chain_sum", *, held_out: bool = False) -> list[Item]:
        """New questions as its key draws them, of those anybody may train on or of the held-out ones."""
        rules = self.grounds.manifest
        config = next(task.config for task in rules.tasks if task.dataset == dataset)
        task = Task(dataset=dataset, config=json.loads(config))
        author = rules.swarm, self.key, self.incarnation
        found: list[Item] = []
        while len(found) < count:
            places = list(itertools.islice(self.places, count * (8 if held_out else 1)))
            recipes = [next(draws(author, *divmod(place, PLACES), task)) for place in places]
            found += self.grounds.items(list(zip(places, recipes, strict=True)), held_out)
        return found[:count]

    def group(self, item: Item, texts: Sequence[str], **changes: Any) -> Group:
        """Its next group: `texts` as answers to `item`, in good form unless `changes` say otherwise."""
        round, position = divmod(next(self.places) if item.place is None else item.place, PLACES)
        values: dict[str, Any] = {
            "swarm": self.grounds.manifest.swarm,
            "node": self.node,
            "key": self.key,
            "incarnation": self.incarnation,
            "round": round,
            "position": position,
            "recipe": item.recipe,
            "question": item.question,
            "completions": tuple(Completion(text=text, finish_reason="stop") for text in texts),
            "policy_version": round,
            "created_at": self.clock(),
        }
        return Group(**(values | changes))

    def sign(self, group: Group) -> SignedGroup:
        """The group under the peer's own signature."""
        return seal(group, self.identity)

    def publish(self, item: Item, texts: Sequence[str], **changes: Any) -> SignedGroup:
        """`group`, signed."""
        return self.sign(self.group(item, texts, **changes))

    def envelope(self, payload: bytes, **changes: Any) -> SignedGroup:
        """Any bytes, rightly signed and digested unless `changes` say otherwise."""
        values: dict[str, Any] = {
            "group_id": sha256(payload + b"id"),
            "content_sha256": sha256(payload),
            "key": self.key,
            "signature": self.identity.sign(payload),
            "payload": payload,
        }
        return SignedGroup(**(values | changes))


class Animal(Protocol):
    """What a kind of hostile peer publishes in a round."""

    def __call__(self, peer: Peer, sight: Sight) -> list[SignedGroup]: ...


def mixed(item: Item, count: int = 8) -> list[str]:
    """Answers of which half are right: such a group is informative, as an honest one is now and then."""
    wrong = ["0", "1", "7", "-3"]
    return [item.answer if k % 2 else wrong[k // 2 % 4] for k in range(count)]
