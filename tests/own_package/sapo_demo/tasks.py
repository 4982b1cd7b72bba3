import random

from sapo.tasks.source import Entry


class Doubling:
    """Asks for the double of a number."""

    def __init__(self, largest: int = 99) -> None:
        if largest < 1:
            raise ValueError("largest must be 1 or more")
        self.largest = largest

    def entry(self, seed: int) -> Entry:
        number = random.Random(seed).randint(1, self.largest)
        return Entry(f"What is twice {number}?", str(2 * number))

    def score(self, answer: str | None, entry: Entry) -> float:
        return float(answer is not None and answer.strip() == entry.answer)
