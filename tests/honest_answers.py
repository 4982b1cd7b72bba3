"""Answers as models write them, and what ReasoningGYM's own scorers say of them.

Run as a program, in a process of its own with PYTHONHASHSEED=0: `honest_answers.py PART PARTS SEEDS TEXTS`
prints one JSON object a line. Here the scorers are the library's, evaluators and all: honest text only.
"""

import contextlib
import json
import os
import random
import re
import string
import sys
from collections.abc import Iterator
from typing import Any

from library_scores import right_answer, score

from sapo.tasks import gym
from sapo.tasks.questions import sample_tasks

STRIDE, FIRST = 1_000_003, 17
"""How far apart the seeds are, and the first."""

STRAY = (
    "", "0", "1", "-1", "7", "42", "3.5", "1/2", "No", "yes", "True", "A", "C4", "x", "the", "[]",
    "[[]]", "{}", "[1, 2]", "[[0, 1], [1, 0]]", '["a"]', '{"0": 1}', "I do not know.", "1 2 3", "A, B",
    "R U F",
    "12:30", "3 days, 10:00", "x**2 + C", "2*(3 + 4)", "(1 + 2)*8*1", "Move disk 1 from Peg 1 to Peg 2",
)  # fmt: skip
"""What a model says that has lost its thread, or answers another kind of question."""


def near(text: str, rng: random.Random) -> str:
    """`text` with one letter or digit taken for another, or with two neighbours changed over."""
    places = [i for i, c in enumerate(text) if c.isascii() and c.isalnum()]
    if not places:
        return text + "1"
    place = rng.choice(places)
    if place + 1 < len(text) and rng.random() < 0.25:
        return text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    family = string.digits if text[place].isdigit() else string.ascii_letters
    return text[:place] + rng.choice(family) + text[place + 1 :]


def as_lists(text: str) -> list[str]:
    """A grid or row as Python writes lists of it: numbers, words, letters."""
    rows = [line.split() for line in text.splitlines()]
    numbers = [[int(c) if re.fullmatch(r"-?\d{1,9}", c) else c for c in row] for row in rows]
    flat = numbers[0] if len(numbers) == 1 else numbers
    return [repr(flat), repr(rows), repr(list(text)), json.dumps(flat), repr(tuple(flat)), repr(text)]


def forms(right: str, other: str, rng: random.Random) -> list[str]:
    """Ways to say something right, half right or wrong: the first four first, the others in any order."""
    first = [right, f"I think so. <answer>\n{right} </answer>", near(right, rng), other]
    lines, words = right.splitlines(), right.split()
    shuffled = rng.sample(words, len(words))
    more = [
        f"The answer is {right}.", f"<answer>{other}</answer> or <answer>{right}</answer>", f" {right}\n",
        f"<answer>{near(right, rng)}</answer>", f"**{right}**", f"${right}$", f"\\boxed{{{right}}}",
        right + ".", f'"{right}"', right.upper(), right.lower(), right[: len(right) // 2], right + right,
        " ".join(shuffled), ", ".join(words), "".join(words), " ".join(words), "\n".join(lines[::-1]),
        "\n".join(lines[:-1]), right.replace("**", "^"), right.replace("*", " * "),
        right.replace("^", "**"), right.replace(" + C", ""), right.replace("log", "ln"),
        "F(x) = " + right, right + " = 24", right.replace("-", "+"),
        right.replace("'", '"'), right.replace('"', "'"), right.replace(",", ""), right.replace("i", "j"),
        f"({right})", right + " # sure", right + "\n\nThat is all.", right.replace(".", ","), "0" + right,
        *as_lists(right), *rng.sample(STRAY, 8),
    ]  # fmt: skip
    rng.shuffle(more)
    return list(dict.fromkeys([*first, *more]))


def rows(names: list[str], seeds: int, texts: int) -> Iterator[dict[str, Any]]:
    """`texts` answers to each of `seeds` questions of every data set named, with the library's scores."""
    for task in sample_tasks(names):
        config = json.dumps(task.config)
        made = [gym.entry(task.dataset, config, STRIDE * k + FIRST, 0) for k in range(seeds + 1)]
        rng = random.Random(task.dataset)
        right = [right_answer(task.dataset, entry) for _, entry in made]
        for k in range(seeds):
            # made again: objects of the costly data sets are shared, and stand at the last seed
            source, entry = gym.entry(task.dataset, config, STRIDE * k + FIRST, 0)
            for text in forms(right[k], right[k + 1], rng)[:texts]:
                recipe = {"dataset": task.dataset, "config": task.config, "seed": STRIDE * k + FIRST}
                yield {**recipe, "text": text, "score": score(source, entry, text)}


if __name__ == "__main__":
    part, parts, seeds, texts = map(int, sys.argv[1:])
    names = sorted(gym.DATASETS)[part::parts]
    said = sys.__stdout__
    assert said is not None
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        for row in rows(names, seeds, texts):  # what the library prints is no row
            said.write(json.dumps(row) + "\n")
