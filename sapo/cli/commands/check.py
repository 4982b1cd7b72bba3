"""`sapo verify` scores texts; `sapo doctor` lists what is installed, reachable and missing."""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sapo.cli.commands.options import HomeOption, JsonOption, find_home, json_object, json_text, print_json
from sapo.core.answer_format import AnswerFormat
from sapo.core.errors import UserError
from sapo.core.unicode import say

if TYPE_CHECKING:
    from sapo.core.config.home import Home
    from sapo.core.types import Recipe

LINE_FIELDS = ("dataset", "config", "seed", "index", "text")


def verify(
    dataset: Annotated[
        str | None, typer.Option(metavar="D", help="A data set, of ReasoningGYM or a package.")
    ] = None,
    config: Annotated[str, typer.Option(metavar="JSON", help="Its parameters, as a JSON object.")] = "{}",
    seed: Annotated[int | None, typer.Option(metavar="S", help="The data set's seed.")] = None,
    index: Annotated[int, typer.Option(metavar="I", help="The item in that data set.")] = 0,
    text: Annotated[str | None, typer.Option(metavar="T", help="The answer; - reads it from stdin.")] = None,
    jsonl: Annotated[
        str | None,
        typer.Option(
            "--jsonl", metavar="FILE", help="Many at once: objects with the fields above; - is stdin."
        ),
    ] = None,
    answer: Annotated[
        AnswerFormat,
        typer.Option(
            metavar="text|tags|boxed", help="Score only what the last <answer>, or \\boxed{}, holds."
        ),
    ] = "text",
    show: Annotated[
        bool, typer.Option("--show", help="Add the question and the data set's own answer to the object.")
    ] = False,
) -> None:
    """Regenerate a task from its recipe and score a text against it.

    Prints one JSON object: {"outcome": "score" | "unscorable", "score": number or null, "reason": ...},
    with --show also "question" and "answer" (null where the data set stores none).
    With --jsonl, one such line for each line of the file, in order; nothing is scored unless all are well
    formed. The text is never evaluated as code.
    """
    if jsonl is not None:
        given = {k: v for k, v in (("dataset", dataset), ("seed", seed), ("text", text)) if v is not None}
        for name, value in given.items():
            remedy = f"leave it out, and name {name} in each line of the file"
            raise UserError(f"--{name}", value, "can't be used together with --jsonl", remedy)
        items = list(read_lines(jsonl))
    else:
        missing = [f"--{k}" for k, v in (("dataset", dataset), ("seed", seed), ("text", text)) if v is None]
        if missing or dataset is None or seed is None or text is None:
            raise UserError(missing[0], None, "is missing", "see `sapo verify --help`")
        text = sys.stdin.read() if text == "-" else text
        items = [(make_recipe("", dataset, config, seed, index), text)]
    for line in score(items, answer, jsonl=jsonl is not None, show=show):
        say(line)


def score(
    items: "list[tuple[Recipe, str]]", answer: AnswerFormat, *, jsonl: bool, show: bool
) -> Iterator[str]:
    """Outcomes of (recipe, text) pairs as JSON lines, in order; `show` adds question and stored answer.
    Raises `UserError` before any is scored."""
    from sapo.core.config.load import Task
    from sapo.tasks.pins import usable
    from sapo.tasks.workers import TaskWorkers

    named = [Task(dataset=name) for name in sorted({recipe.dataset for recipe, _ in items})]
    with TaskWorkers(count=2 if len(items) > 1000 else 1, answer=answer, own=usable(named)) as workers:
        first_use: dict[tuple[str, str], int] = {}
        for i, (recipe, _) in enumerate(items):
            first_use.setdefault((recipe.dataset, recipe.config), i)
        for i in first_use.values():
            recipe = items[i][0]
            try:
                workers.check([Task(dataset=recipe.dataset, config=recipe.params)])
            except UserError as error:
                field = error.field.removeprefix("tasks.0.").removeprefix("tasks.0")
                prefix = f"--jsonl line {i + 1}: " if jsonl else "--"
                raise UserError(
                    prefix + (field or "config"), error.value, error.problem, error.remedy
                ) from None
        for start in range(0, len(items), 1000):
            some = items[start : start + 1000]
            rows = [outcome.model_dump(mode="json") for outcome in workers.score(some)]
            if show:
                recipes = [recipe for recipe, _ in some]
                for row, question, stored in zip(
                    rows, workers.questions(recipes), workers.answers(recipes), strict=True
                ):
                    row |= {"question": getattr(question, "text", None), "answer": stored}
            for row in rows:
                yield json_text(row)


def read_lines(source: str) -> "Iterator[tuple[Recipe, str]]":
    """The (recipe, text) pairs of a JSON-lines file; `UserError` names the first line that is wrong."""
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        lines = raw.decode("utf-8").split("\n")
    except OSError as error:
        raise UserError("--jsonl", source, error.strerror or str(error), "name a readable file") from None
    except UnicodeDecodeError as error:
        raise UserError("--jsonl", source, f"is not UTF-8: {error}", "encode it as UTF-8") from None
    if lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, start=1):
        field = f"--jsonl line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # also numbers of too many digits, and deep nesting
            raise UserError(field, line[:60], f"is not JSON: {error}", "write one object a line") from None
        unknown = set(row) - set(LINE_FIELDS) if isinstance(row, dict) else {"..."}
        if unknown or not {"dataset", "seed", "text"} <= set(row):
            raise UserError(
                field, line[:60], "is not an object of dataset, config, seed, index and text", "correct it"
            )
        if not isinstance(row["text"], str):
            raise UserError(f"{field}: text", row["text"], "is not a string", "answers are text: quote it")
        recipe = make_recipe(
            f"{field}: ", row["dataset"], row.get("config", {}), row["seed"], row.get("index", 0)
        )
        yield recipe, row["text"]


def make_recipe(prefix: str, dataset: Any, config: Any, seed: Any, index: Any) -> "Recipe":
    """A recipe from untrusted parts (`config` as JSON text or object). Raises `UserError`."""
    from pydantic import ValidationError

    from sapo.core.types import Recipe

    params = json_object(f"{prefix}config", config)
    try:
        return Recipe.make(dataset, params, seed, index)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "seed"
        value = first["input"] if first["loc"] else seed
        problem = first["msg"].removeprefix("Value error, ")
        raise UserError(prefix + field, value, problem, "correct the value") from None
    except ValueError as error:
        raise UserError(f"{prefix}config", config, str(error), "give finite numbers only") from None


def doctor(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Say what is installed, reachable and usable here, and what to do about what is not.

    Exits with 1 when something that is needed is missing.
    """
    from sapo.core.terminal import Terminal
    from sapo.ops.doctor import examine, render

    try:
        run: Home | UserError = find_home(home)
    except UserError as error:
        run = error
    with Terminal(stderr=True).status("looking (regenerating every data set twice takes half a minute)"):
        checks = examine(home or Path("."), run)
    ok = all(check.status != "missing" for check in checks)
    if as_json:
        print_json({"ok": ok, "checks": [asdict(check) for check in checks]})
    else:
        render(checks)
    if not ok:
        raise typer.Exit(1)
