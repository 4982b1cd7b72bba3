"""`python -m infra.kafka`."""

import signal
import sys
from types import FrameType

from infra.kafka.cli import main


def _end(number: int, frame: FrameType | None) -> None:
    """So that what a command began is cleared away, as it is after Ctrl-C."""
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
