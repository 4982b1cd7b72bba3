"""A process of a swarm: where it works, whether it is asked to stop, and what its own work raised."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from sapo.core.config.home import Home
from sapo.core.config.load import Config


@dataclass
class Process:
    """This process's part in a swarm: where it works, and whether it is asked to stop."""

    home: Home
    config: Config
    stop: threading.Event
    failure: BaseException | None = None
    """What the process's own work raised last; anything else that a flow run raises is Prefect's."""

    @classmethod
    def at(cls, home: str, stop: threading.Event | None = None) -> Self:
        """Work in an existing home. Raises `UserError` where it holds no swarm."""
        here = Home(Path(home).absolute())
        return cls(here, here.load_config(), stop or threading.Event())

    def tracking_uri(self) -> str | None:
        """MLflow's address, if there is one."""
        return self.config.track.uri or os.environ.get("MLFLOW_TRACKING_URI")

    def stopping(self) -> bool:
        """Whether this process, or the whole swarm, is asked to stop."""
        if not self.stop.is_set() and self.home.stop_flag.exists():
            self.stop.set()
        return self.stop.is_set()

    @contextmanager
    def own(self) -> Iterator[None]:
        """Marks what is raised inside as this process's own."""
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise
        self.failure = None
