"""A process that runs a member of a prepared home until its rounds are over; the test kills it."""

import sys
from pathlib import Path

from sapo.core.config.home import Home
from sapo.node.member.runtime import MemberRuntime


def main() -> None:
    """Make all rounds, and deliver what they owe to the bus."""
    home = Home(Path(sys.argv[1]))
    with MemberRuntime.open(home.load_config(), "m0", home) as member:
        while not member.finished:
            member.run_round()
        owed = member.journal.owed
        while owed("publish", 1):
            member.drain(1.0)


if __name__ == "__main__":
    main()
