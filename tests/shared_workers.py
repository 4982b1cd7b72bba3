"""Task workers that the nodes of a test process share, as starting one imports ReasoningGYM for seconds."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from sapo.core.config.load import Config, Task
from sapo.tasks.workers import TaskWorkers


class SharedWorkers(TaskWorkers):
    """Task workers that outlive the nodes which use them."""

    def close(self) -> None:
        """Leave the processes to the next node, with nothing begun."""
        with self._lock:
            self._settle()
            self._ahead = None

    def end(self) -> None:
        """End the processes."""
        super().close()


_SHARED: dict[str, SharedWorkers] = {}
"""By the settings that decide how they are started."""


def shared_workers(config: Config) -> SharedWorkers:
    """The test run's task workers for a config; a process of theirs that was killed is started again."""
    from sapo.tasks.workers import open_workers

    kind = repr((config.workers, config.rules.salt, config.rules.answer))
    if kind not in _SHARED:
        opened = open_workers(config, SharedWorkers)
        assert isinstance(opened, SharedWorkers)
        _SHARED[kind] = opened
    return _SHARED[kind]


def rest_workers() -> None:
    """Have the shared workers forget what a test began and did not ask for."""
    for workers in _SHARED.values():
        workers.close()


def end_workers() -> None:
    """End the shared workers' processes."""
    for workers in _SHARED.values():
        workers.end()


@contextmanager
def sharing_workers() -> Iterator[None]:
    """Whatever opens task workers in the block, such as a replay or a judge, gets the shared ones."""
    from sapo.experiments.ensembles import evaluate
    from sapo.node import parts
    from sapo.ops import judge
    from sapo.provenance import whatif

    started = parts.open_workers

    def opened(
        config: Config, kind: type[TaskWorkers] = TaskWorkers, tasks: Sequence[Task] | None = None
    ) -> TaskWorkers:
        return shared_workers(config) if kind is TaskWorkers else started(config, kind, tasks)

    with pytest.MonkeyPatch.context() as patch:
        for module in (evaluate, judge, parts, whatif):
            patch.setattr(module, "open_workers", opened)
        yield
