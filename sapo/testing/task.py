"""What a source of questions has to be for a swarm."""

from typing import Any

from sapo.core.config.schema import Task
from sapo.core.own_code import Missing
from sapo.tasks import pins
from sapo.tasks.task_check import check_tasks


def check_task(dataset: str, **config: Any) -> None:
    """Try a task under the name and parameters that `[[tasks]]` has, in task workers behind their walls.
    Raises `AssertionError` with what failed, `UserError` for parameters that the source refuses."""
    task = Task(dataset=dataset, config=config)
    try:
        task = pins.as_asked(task) if pins.is_own(dataset) else task
    except Missing as missing:
        raise AssertionError(str(missing)) from None
    ((_, found),) = check_tasks([task])
    failed = [f"{one.what}: {one.detail}" for one in found if one.status == "failed"]
    assert not failed, "; ".join(failed)
