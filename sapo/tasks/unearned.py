"""Data sets whose scorer gives full marks without a solution: what reinforcement learns there is no skill.

Found by `benchmarks/unearned.py`, with default parameters; the scores are the library's own.
"""

from collections.abc import Iterable, Mapping

from sapo.core.config.load import Task

UNEARNED: Mapping[str, str] = {
    "coin_flip": "full marks for a beginning of the right number, so mostly for 0",
    "game_of_life_halting": "full marks for any text that is not empty",
    "number_sorting": "full marks if each number is off by less than 1",
    "puzzle24": "full marks for any four numbers of the range that make 24, whichever were given",
}
"""Why, by data set."""


def unearned(tasks: Iterable[Task]) -> dict[str, str]:
    """Those of the tasks' data sets that are in `UNEARNED`, with why; also as parts of `composite`."""
    asked = {name for task in tasks for name in _parts(task)}
    return {name: why for name, why in UNEARNED.items() if name in asked}


def _parts(task: Task) -> list[str]:
    parts = task.config.get("datasets", []) if task.dataset == "composite" else []
    return [task.dataset, *(str(part.get("name")) for part in parts)]
