"""A task of one's own: a class that makes a question from a seed and scores an answer to it.

    python examples/own_task.py

In a package, named as an entry point of the group `sapo.tasks`, it is `dataset = "doubling"` in a config
(docs/extending.md); `sapo task check` then tries all that a swarm relies on.
"""

import random

from sapo.tasks.source import Entry


class Doubling:
    """Asks for the double of a number. Its parameters are those of `config = {...}`."""

    def __init__(self, largest: int = 99) -> None:
        self.largest = largest

    def entry(self, seed: int) -> Entry:
        """A question with its answer; the same for everybody who has the seed."""
        number = random.Random(seed).randint(1, self.largest)
        return Entry(f"What is twice {number}?", str(2 * number))

    def score(self, answer: str | None, entry: Entry) -> float:
        """From 0 to 1. The answer is a stranger's text: compare it, never evaluate it."""
        return float(answer is not None and answer.strip() == entry.answer)


if __name__ == "__main__":
    task = Doubling(largest=9)
    for seed in range(3):
        entry = task.entry(seed)
        print(entry.question, entry.answer, task.score(entry.answer, entry), task.score("no", entry))
