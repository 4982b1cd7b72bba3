"""Search for data sets whose scorer gives full marks to answers that solve nothing.

    python benchmarks/unearned.py [--questions N] [DATASET ...]

Asks a few questions of every data set, with default parameters, and answers them with constants, with the
right answer of another question, and with the right answer shuffled or changed a little. Prints each kind of
answer that has full marks on three of four questions where it differs from the right one, with an example.
Some of it is meant (an order that does not matter, a rounding), which only reading the scorer shows; the rest
is listed in `sapo.tasks.unearned`.
"""

import random
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterator, Mapping

from sapo.core.types import Recipe
from sapo.tasks.questions import sample_tasks
from sapo.tasks.workers import TaskWorkers

SEED = 31_337
ENOUGH = 0.75
CONSTANTS = (
    *(" ", ".", "0", "1", "2", "-1", "10", "0.5", "1/2", "6*4*1*1", "1e308", "inf", "i", "x", "x**2", "1,1"),
    *(
        "True",
        "False",
        "true",
        "Yes",
        "No",
        "yes",
        "None",
        "null",
        "nothing",
        "unknown",
        "the",
        "a",
        "A",
        "C",
        "aa",
    ),
    *(
        "[]",
        "{}",
        "[[]]",
        "()",
        "''",
        "[1]",
        "0 0 0",
        "1 1\n1 1",
        "0,0",
        "D4",
        "Q",
        "R",
        "U",
        "UDLR",
        "12:00",
    ),
    *("P ∨ ¬P", "(A → A)", "((A ∨ B) ∨ ¬A)", "0 days", "Monday", "north", "red", "knight", "ABC" * 20),
)
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def changed(by: Callable[[float], float]) -> Callable[[str, random.Random], str]:
    """Every number of a text made another."""
    return lambda text, rng: NUMBER.sub(lambda found: f"{by(float(found[0])):g}", text)


def shuffled(separator: str) -> Callable[[str, random.Random], str]:
    """A text with its parts in another order."""

    def shuffle(text: str, rng: random.Random) -> str:
        parts = list(text) if not separator else text.split(separator)
        return separator.join(rng.sample(parts, len(parts)))

    return shuffle


NEAR: Mapping[str, Callable[[str, random.Random], str]] = {
    "numbers + 0.9": changed(lambda value: value + 0.9),
    "numbers + 1": changed(lambda value: value + 1),
    "numbers * 1.01": changed(lambda value: value * 1.01),
    "numbers negated": changed(lambda value: -value),
    "letters shuffled": shuffled(""),
    "words shuffled": shuffled(" "),
    "lines shuffled": shuffled("\n"),
    "items shuffled": shuffled(", "),
    "first half": lambda text, rng: text[: len(text) // 2],
    "last half": lambda text, rng: text[len(text) // 2 :],
    "first letter": lambda text, rng: text[:1],
    "twice": lambda text, rng: f"{text}\n{text}",
    "other letters": lambda text, rng: re.sub(r"[a-z]", "z", text),
    "brackets": lambda text, rng: f"[{text}]",
}


def answers(right: list[str], rng: random.Random) -> Iterator[tuple[str, list[str]]]:
    """Kinds of answers, and the answer to each question, whose right ones are given."""
    for constant in CONSTANTS:
        yield f"constant {constant!r}", [constant] * len(right)
    yield "answer of another question", right[1:] + right[:1]
    for name, change in NEAR.items():
        yield name, [change(text, rng) for text in right]


def search(workers: TaskWorkers, recipes: list[Recipe]) -> Iterator[str]:
    """The kinds of answers with full marks on most of the questions that they do not answer rightly."""
    right = [answer or "" for answer in workers.answers(recipes)]
    kinds = dict(answers(right, random.Random(SEED)))
    items = [(recipe, texts[n]) for texts in kinds.values() for n, recipe in enumerate(recipes)]
    outcomes = iter(workers.score(items))
    for name, texts in kinds.items():
        scores = [next(outcomes).score for _ in texts]
        wrong = [n for n, text in enumerate(texts) if text != right[n]]
        full = [n for n in wrong if scores[n] == 1.0]
        if len(full) > 1 and len(full) >= ENOUGH * len(wrong):
            example = f"{texts[full[0]]!r:.60} for {right[full[0]]!r:.60}"
            yield f"{name}: {len(full)} of {len(wrong)}, such as {example}"


def main() -> None:
    """Print what is found, data set by data set."""
    options = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    options.add_argument(
        "--questions", type=int, default=6, metavar="N", help="of each data set [default: 6]"
    )
    options.add_argument("datasets", nargs="*", metavar="DATASET", help="[default: all]")
    given = options.parse_args()
    with TaskWorkers(time_limit_s=60, memory_mb=3000) as workers:
        for task in sample_tasks(given.datasets or workers.datasets()):
            seeds = range(SEED, SEED + 101 * given.questions, 101)
            for line in search(workers, [Recipe.make(task.dataset, task.config, seed) for seed in seeds]):
                print(f"{task.dataset}: {line}", flush=True)


if __name__ == "__main__":
    main()
