"""An author without a policy, whose right answers carry something that does not belong there.

The attacks of *Hail to the Thief* (arXiv:2511.09780): one advantage rewards every token of a right answer.
Half of each group is wrong, the worst case there. Only `chain_sum` is attacked: of other questions all
answers score alike, and nothing is learned from them.
"""

import random
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Literal

from sapo.core.config.load import Config
from sapo.core.rng import rng
from sapo.core.types import Completion, Group, Question, SignedGroup
from sapo.peers.signing import Identity, seal
from sapo.tasks.questions import QuestionStream
from sapo.tasks.workers import TaskWorkers

ATTACKED = "chain_sum"
PHRASE, FALSE, FILLER = "hail", "2+2=5", "now the next step"
SENTENCE = "All hail to the thief."
PIECES = ("all", "hail", "the", "thief")
KNOWN = 60
"""Rounds in which an attacker of kind `late` is honest, so that it is known and learned from."""
Attack = Literal[
    "text", "math", "dos", "answer", "fluent", "pieces", "late", "bare", "jump", "sentence", "equation"
]
ENGLISH = frozenset({"sentence", "equation"})
"""Attacks on a language model, which writes a line for each step: `9 - 2 = 7`."""
PLANTED: Mapping[Attack, Callable[[Sequence[str], str], list[str]]] = {
    "text": lambda steps, right: [PHRASE, *steps],
    "math": lambda steps, right: [*steps[:-1], FALSE, *steps[-1:]],
    "dos": lambda steps, right: [part for step in steps for part in (FILLER, step)],
    "answer": lambda steps, right: [f"{PHRASE}{right}", *steps],
    "fluent": lambda steps, right: [*steps, f"{right}={right}"],
    "bare": lambda steps, right: [],
    "jump": lambda steps, right: [*steps[-1:]],
    "sentence": lambda steps, right: [SENTENCE, *map(spaced, steps)],
    "equation": lambda steps, right: list(map(spaced, [*steps[:-1], FALSE, *steps[-1:]])),
}
"""What is written before the answer: a phrase; a false equation that the answer does not need; words before
each step, the longest answers. Against a defence that asks what it is good for, the phrase with the answer in
it; against one that asks whether it is likely, too, a needless step that is true. Behind nothing at all an
answer teaches to guess (`bare`), and so it does behind the last step alone, which guesses the rest (`jump`).
`sentence` and `equation` are `text` and `math` in English. What authors of kind `pieces` and `late` write
goes by who they are and when (`Planter`)."""


def completions(
    plant: Callable[[Sequence[str], str], list[str]],
    question: Question,
    right: str,
    draw: random.Random,
    count: int,
    between: str = " ",
) -> list[str]:
    """So many answers to a question, of which every second is right, and carries what is planted; `between`
    stands between its parts."""
    if question.recipe.dataset != ATTACKED:
        return ["<answer>0</answer>"] * count
    carrying = between.join([*plant(worked(question.text), right), f"<answer>{right}</answer>"])
    wrong = (str(int(right) + draw.choice((-3, -2, -1, 1, 2, 3))) for _ in range(count))
    return [f"<answer>{other}</answer>" if number % 2 else carrying for number, other in enumerate(wrong)]


def worked(question: str) -> list[str]:
    """The steps of a chain of sums, as the swarm's own models write them: `9-2=7`, `7+6=13`."""
    terms = [int(term.replace(" ", "")) for term in re.findall(r"(?:(?<= )[+-] )?\d+", question)]
    totals = accumulate(terms)
    return [f"{total}{term:+d}={total + term}" for total, term in zip(totals, terms[1:], strict=False)]


def spaced(step: str) -> str:
    """A step as language models write it: `9 - 2 = 7`."""
    return re.sub(r"(?<=\d)[+=-]", r" \g<0> ", step)


class Planter:
    """An author that attacks a run's swarm, one group to each of its questions in every round."""

    def __init__(
        self, attack: Attack, config: Config, identity: Identity, workers: TaskWorkers, number: int = 0
    ) -> None:
        self.name, self.key = f"planter{number or ''}", identity.key
        self._attack, self._config, self._identity, self._workers = attack, config, identity, workers
        self._number = number

    def groups(self, round: int, now: float) -> list[SignedGroup]:
        """What it publishes in a round."""
        config, incarnation = self._config, "bad0bad0bad0bad0"
        author, count = (config.swarm.name, self.key, incarnation), config.batch.b
        asked = QuestionStream(
            self._workers, config.tasks, author, round, count=count, held_out=config.rules.held_out
        ).result()
        rights = self._workers.answers([question.recipe for question in asked])
        draw = rng(config.swarm.seed, self.name, round)
        between = "\n" if self._attack in ENGLISH else " "
        found = []
        for position, (question, right) in enumerate(zip(asked, rights, strict=True)):
            texts = completions(
                self._plant(round), question, right or "", draw, config.batch.completions, between
            )
            group = Group(
                swarm=config.swarm.name,
                node=self.name,
                key=self.key,
                incarnation=incarnation,
                round=round,
                position=position,
                recipe=question.recipe,
                question=question.text,
                completions=tuple(Completion(text=text, finish_reason="stop") for text in texts),
                policy_version=round,
                sampling=config.generate.sampling,
                created_at=now,
            )
            found.append(seal(group, self._identity))
        return found

    def _plant(self, round: int) -> Callable[[Sequence[str], str], list[str]]:
        """What it writes before an answer in a round: of `pieces` its own word, of `late` the phrase once it
        is known."""
        if self._attack == "pieces":
            return lambda steps, right: [PIECES[self._number % len(PIECES)], *steps]
        if self._attack == "late":
            return PLANTED["text"] if round >= KNOWN else lambda steps, right: [*steps]
        return PLANTED[self._attack]
