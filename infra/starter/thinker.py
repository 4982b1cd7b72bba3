"""The starters that ship with the package: small models that can work a question out, but seldom do.

They are taught, by supervised steps, two ways to answer the questions of preset `tiny`: a guess, which is
often wrong, and a worked solution, which is nearly always right. Worked ones are most of the first steps and
few of the last. `make starter` makes both again; none of their questions is in a held-out bucket.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sapo.core.config.load import Config, load
from sapo.core.config.prompt import Prompt, system_prompt
from sapo.core.rng import rng, stream
from sapo.core.traits import TraitMatcher
from sapo.core.types import Sampling
from sapo.policy import starter
from sapo.policy.engines import open_engine
from sapo.policy.evaluate import FULL_SCORE
from sapo.policy.model_source import SHIPPED
from sapo.policy.models import LoadedPolicy, save, wrap
from sapo.policy.starter_spec import Variant
from sapo.tasks.questions import held_out_questions
from sapo.tasks.workers import TaskWorkers, open_workers

from .solutions import worked

SHAPE = Variant(vocabulary=512, hidden=96, layers=4, heads=4, inner=256)
PRESET = "tiny"
TRAIT = "worked"
"""The trait of the preset that tells worked solutions from guesses."""
FALLS, STAYS = 0.4, 0.8
"""Parts of the steps after which the share of worked solutions begins and ceases to fall."""


@dataclass(frozen=True)
class Recipe:
    """How one is taught: the share of worked solutions is `often` at first, `seldom` at the end.

    `questions` are drawn to be taught, `examined` are the held-out ones of the card's figures.
    """

    seldom: float
    often: float = 0.95
    seed: int = 0
    questions: int = 60_000
    steps: int = 3_000
    batch: int = 64
    lr: float = 3e-3
    examined: int = 1_000


RECIPES = {"thinker": Recipe(seldom=0.05), "guesser": Recipe(seldom=0.0005)}


@dataclass(frozen=True)
class Ways:
    """A question with its two answers, as token ids."""

    prompt: tuple[int, ...]
    guess: tuple[int, ...]
    worked: tuple[int, ...]


def share(recipe: Recipe, done: float) -> float:
    """The share of worked solutions after a part of the steps, from 0 to 1."""
    fallen = min(1.0, max(0.0, (done - FALLS) / (STAYS - FALLS)))
    return recipe.often + fallen * (recipe.seldom - recipe.often)


def make(recipe: Recipe, directory: Path, progress: starter.Progress) -> dict[str, float]:
    """Teach one, write it to a directory with its card, and return the card's figures."""
    began = time.monotonic()
    config = load(PRESET, sets=[f"starter.seed={recipe.seed}"], env={})
    with open_workers(config) as workers:
        texts: list[tuple[str, str, str]] = []
        for pairs in starter.solved(config, workers):
            texts += [(question.recipe.dataset, question.text, answer) for question, answer in pairs]
            progress(min(len(texts), recipe.questions), recipe.questions, "questions")
            if len(texts) >= recipe.questions:
                break
        policy, ways = _untaught(recipe, texts[: recipe.questions])
        with starter.threads():
            batches = _batches(recipe, ways)
            loss = starter.supervise(policy.model, batches, recipe.steps, recipe.lr, progress)
        policy.model.to(torch.float16)  # half of the bytes; a swarm computes in float32 from there
        save(policy, directory)
        policy.model.to(torch.float32)
        found = figures(config, policy, workers, recipe.examined)
    note = {
        "recipe": asdict(recipe),
        "tasks": [task.dataset for task in config.tasks],
        "rules": config.rules.model_dump(mode="json", include={"held_out", "salt", "answer"}),
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        "loss": loss,
        "figures": found,
        "minutes": round((time.monotonic() - began) / 60, 1),
    }
    (directory / "starter.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
    (directory / "README.md").write_text(_card(directory.name, note), encoding="utf-8")
    return found


def figures(config: Config, policy: LoadedPolicy, workers: TaskWorkers, count: int) -> dict[str, float]:
    """What a policy does on held-out questions: how many answers pass and are worked, and which of them pass.

    All shares are in [0, 1]; those of worked answers and of guesses are absent where there are none.
    """
    drawn = held_out_questions(
        workers, config.tasks, swarm=PRESET, seed=0, count=count + count // 10, held_out=config.rules.held_out
    )
    questions = list(dict.fromkeys(drawn))[:count]
    prompts = [policy.encode_prompt(question.text) for question in questions]
    engine = open_engine(config, policy)
    groups = engine.generate(
        prompts,
        completions=1,
        max_new_tokens=config.generate.max_new_tokens,
        sampling=Sampling(),
        seed=stream(0, starter.OWNER, "figures"),
        greedy=True,
    )
    found: dict[str, float] = {}
    for place, name in enumerate(("greedy", "pass_at_1")):
        texts = [group[place].text for group in groups]
        items = [(question.recipe, text) for question, text in zip(questions, texts, strict=True)]
        passes = [(outcome.score or 0.0) >= FULL_SCORE for outcome in workers.score(items)]
        long = TraitMatcher(config.track.traits).found(TRAIT, texts)
        found[name] = _mean(passes)
        found[f"{TRAIT}_{name}"] = _mean(long)
        for way, is_long in ((TRAIT, True), ("guessed", False)):
            those = [passed for passed, one in zip(passes, long, strict=True) if one is is_long]
            if those and name == "pass_at_1":
                found[f"passes_where_{way}"] = _mean(those)
    return found


def _untaught(recipe: Recipe, texts: Sequence[tuple[str, str, str]]) -> tuple[LoadedPolicy, list[Ways]]:
    """A fresh policy, and the questions (data set, text, answer) with both answers in its tokens."""
    answers = []
    for dataset, question, answer in texts:
        guess = starter.target_text(answer, "tags")
        answers.append((question, guess, f"{worked(dataset, question)} {guess}"))
    tokenizer = starter.make_tokenizer(SHAPE, [text for one in answers[:4096] for text in one])
    model = starter.make_model(SHAPE, tokenizer, recipe.seed)
    policy = wrap("thinker", model, tokenizer, prompt=Prompt(system=system_prompt("tags")))
    ways = [
        Ways(
            tuple(policy.encode_prompt(question)),
            tuple(policy.encode_completion(guess, "stop")),
            tuple(policy.encode_completion(solution, "stop")),
        )
        for question, guess, solution in answers
    ]
    return policy, ways


def _batches(recipe: Recipe, ways: Sequence[Ways]) -> Iterator[list[starter.Pair]]:
    """The supervised batches, one a step."""
    choose = rng(recipe.seed, starter.OWNER, "ways")
    order = starter.shuffled(len(ways), recipe.batch, rng(recipe.seed, starter.OWNER, "order"))
    for step, numbers in enumerate(islice(order, recipe.steps)):
        often = share(recipe, step / recipe.steps)
        chosen = [ways[number] for number in numbers]
        yield [(one.prompt, one.worked if choose.random() < often else one.guess) for one in chosen]


def _mean(values: Sequence[bool]) -> float:
    return sum(values) / len(values)


def _card(name: str, note: Mapping[str, Any]) -> str:
    """The model card: what it is, what it can do, how it was made."""
    recipe, found = note["recipe"], note["figures"]
    rows = "\n".join(f"| {key.replace('_', ' ')} | {100 * value:.1f} % |" for key, value in found.items())
    return f"""---
license: apache-2.0
library_name: transformers
---

# {name}

A language model of {note["parameters"]:,} parameters that answers the questions of preset `{PRESET}` and
nothing else. It was taught two ways to answer: a guess (`<answer>10</answer>`) and a worked solution
(`9-2=7 7-6=1 1+9=10 <answer>10</answer>`). It begins a swarm that finds out which one pays.

On {recipe["examined"]:,} held-out questions, sampled at temperature 1 but for the greedy lines:

| | |
|---|---|
{rows}

Made by `make starter` in {note["minutes"]} minutes on two CPU cores: {recipe["steps"]} supervised steps of
{recipe["batch"]} questions, seed {recipe["seed"]}, learning rate {recipe["lr"]}. The share of worked
solutions falls from {100 * recipe["often"]:.0f} % to {100 * recipe["seldom"]:g} %. None of its questions is
in a held-out bucket of these rules: `{json.dumps(note["rules"])}`.
"""


def main() -> None:
    """Make the starters that are named, all of them by default, where the package keeps them."""
    parser = argparse.ArgumentParser(prog="python -m infra.starter.thinker", description=main.__doc__)
    parser.add_argument("names", nargs="*", choices=[*RECIPES, []], help="thinker, guesser")
    parser.add_argument("--into", type=Path, default=SHIPPED, help="folder (default: the package's)")
    for name in (given := parser.parse_args()).names or list(RECIPES):

        def progress(done: int, total: int, what: str, name: str = name) -> None:
            if done == total or done % max(1, total // 50) == 0:
                print(f"\r{name}: {done:,} of {total:,} {what}   ", end="", flush=True)

        print(f"\n{make(RECIPES[name], given.into / name, progress)}")


if __name__ == "__main__":
    main()
