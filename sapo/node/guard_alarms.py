"""What a guard found, in the log: once, and then by count while it finds the same each round."""

import logging

log = logging.getLogger(__name__)


class GuardAlarms:
    """Hears the alarm of every round, and says it in the first round of a row of its kind, the 10th, the
    100th and so on."""

    def __init__(self, name: str) -> None:
        self._name, self._kind, self._times = name, "", 0

    def hear(self, round: int, alarm: str | None) -> None:
        """Take the alarm of a round that has ended, None if it had none."""
        kind = alarm.partition(" ")[0] if alarm else ""  # what follows are figures
        self._times = self._times + 1 if kind == self._kind else 1
        self._kind = kind
        if alarm and str(self._times).rstrip("0") == "1":
            often = f" ({self._times} rounds in a row)" if self._times > 1 else ""
            log.warning("%s: round %d: %s%s", self._name, round, alarm, often)
