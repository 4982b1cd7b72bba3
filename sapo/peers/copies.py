"""Who copied whom, of two groups that answer one question in the same words: one function.

The earlier by the bus's clock is the original, unless the later one answers a question that its author was to
draw (`sapo.tasks.questions.drawn_by`): an attacker who can compute an author's next question could publish
the likely answers first, so that the author's real group looks like the copy.
"""

from dataclasses import dataclass
from typing import Literal

Fate = Literal["stays", "copy", "proven"]
"""A copy is refused; a `proven` one counts against its author, too."""


@dataclass(frozen=True, slots=True)
class Fates:
    """The fate of the arriving group, and of the earlier one with the same content."""

    arrives: Fate
    met: Fate


def decide(*, met_first: bool, arrives_drawn: bool, met_drawn: bool, same_author: bool) -> Fates:
    """Decide between two groups that say the same.

    `met_first` is whether the known one is earlier by the bus's clock; own groups always are. `..._drawn` is
    whether a group's question was its author's own to draw; own groups' are. Of a group that has left the
    pool that is not known, and False.

    | met first | arrives drawn | met drawn | arrives | met |
    |---|---|---|---|---|
    | yes | yes | any | stays | stays |
    | yes | no | yes | proven | stays |
    | yes | no | no | copy | stays |
    | no | any | yes | stays | stays |
    | no | yes | no | stays | proven |
    | no | no | no | stays | copy |

    An author cannot copy from itself: for one author, `proven` is `copy`.
    """
    if met_first:
        fate: Fate = "stays" if arrives_drawn else _copy(met_drawn and not same_author)
        return Fates(fate, "stays")
    return Fates("stays", "stays" if met_drawn else _copy(arrives_drawn and not same_author))


def _copy(proven: bool) -> Fate:
    return "proven" if proven else "copy"
