"""Builds the walls in a throwaway process and tries them from inside: what a text would meet here."""

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass

from sapo.core.errors import SapoError
from sapo.tasks import sandbox as walls
from sapo.tasks.sandbox import escape_attempts as deeds
from sapo.tasks.worker_process import worker_environment

LIMIT_S = 60.0


@dataclass(frozen=True, slots=True)
class Probe:
    """The walls, and what a text could do behind them: each deed, and why it was refused."""

    walls: tuple[walls.Wall, ...]
    deeds: dict[str, str | None]

    @property
    def standing(self) -> tuple[str, ...]:
        return tuple(wall.name for wall in self.walls if wall.stands)

    @property
    def done(self) -> list[str]:
        """The deeds that nothing refused."""
        return [name for name, refusal in self.deeds.items() if refusal is None]


def probe() -> Probe:
    """Run the throwaway process and return its findings. Raises `SapoError` if it prints none."""
    command = [sys.executable, "-P", "-m", __name__]
    environment = worker_environment()
    try:
        ended = subprocess.run(command, capture_output=True, timeout=LIMIT_S, env=environment, check=False)
    except subprocess.TimeoutExpired:
        raise SapoError(f"the walls could not be tried within {LIMIT_S:g} s") from None
    try:
        found = json.loads(ended.stdout)
    except ValueError as error:
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        raise SapoError(
            f"the walls could not be tried: {said[-1] if said else 'nothing was said'}"
        ) from error
    return Probe(tuple(walls.Wall(**wall) for wall in found["walls"]), found["deeds"])


def main() -> None:
    """The throwaway process: say on standard output, which must be a pipe, what stands and what it holds."""
    other = os.getppid()
    built = [asdict(wall) for wall in walls.around_worker()]
    child = os.fork()
    if child == 0:
        try:
            walls.around_text()
            tried = deeds.try_all(other) if sys.platform.startswith("linux") else {}
            os.write(1, json.dumps({"walls": built, "deeds": tried}).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
