"""Why a node's rounds taught it nothing, from the shares of its own answers: the cause, how much, what to do.

A round teaches something where an answer enters the loss: where the answers to a question differ in their
scores. The same words stand in the log, `sapo status`, the live view, the summary, the report and `sapo try`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Cause = Literal["no form", "cut off", "all wrong", "all right", "alike"]
ROUNDS = 5
"""Rounds without anything to learn after which a node says so."""
MOST, HALF, FEW, SURE = 0.95, 0.5, 0.05, 0.2
FORM, RIGHT, ALIKE = "share/form", "share/right", "share/alike"
"""Series: own answers in the form of `rules.answer`, own answers with the full score, and own groups whose
answers score alike."""
CUT, REWARD, TRAINED = "learn/truncated", "reward/local", "learn/sequences"
READ = (FORM, RIGHT, ALIKE, CUT, REWARD, TRAINED)

WORDS: Mapping[Cause, tuple[str, str]] = {
    "no form": (
        "of the answers are not in the form that rules.answer asks for",
        "show the form in prompt.examples, in more of them where there are some",
    ),
    "cut off": ("of the answers are cut off", "raise generate.max_new_tokens"),
    "all wrong": (
        "of the answers are wrong",
        "ask easier questions ([[tasks]] config), show worked ones in prompt.examples, or take another model",
    ),
    "all right": ("of the answers are right", "ask harder questions ([[tasks]] config)"),
    "alike": (
        "of the questions have answers that score alike",
        "raise generate.temperature or batch.completions",
    ),
}
"""Of each cause, what a share is of, and its remedy."""


@dataclass(frozen=True, slots=True)
class Silence:
    """Why nothing was learned, and the share of answers (`alike`: of questions) that it holds for."""

    cause: Cause
    share: float

    @property
    def remedy(self) -> str:
        """What to change."""
        return WORDS[self.cause][1]

    def __str__(self) -> str:
        return f"{100 * self.share:.0f} % {WORDS[self.cause][0]}; {self.remedy}"


def silence(form: float | None, cut: float, right: float, reward: float, alike: float) -> Silence:
    """Why answers with these shares teach nothing; `reward` is their mean score, `form` None where any text
    has the form.

    An answer that is cut off cannot be blamed for its form. Where answers lack it that ended by themselves,
    longer ones would lack it, too.
    """
    formless = 0.0 if form is None else 1.0 - form
    if right >= MOST:
        return Silence("all right", right)
    if reward > FEW and alike >= MOST:
        return Silence("alike", alike)
    if cut >= HALF and formless - cut < SURE:
        return Silence("cut off", cut)
    if formless >= HALF:
        return Silence("no form", formless)
    return Silence("alike", alike) if right > FEW else Silence("all wrong", 1.0 - right)


def of_rounds(rounds: Sequence[Mapping[str, float]], total: int) -> Silence | None:
    """Why the newest rounds of a node that makes `total` taught it nothing, from their series. None unless
    that holds for `ROUNDS` of them, or for all where there are not to be so many."""
    least = min(ROUNDS, total)
    last = rounds[-least:]
    if len(last) < least or any(taught(one) for one in last):
        return None

    def mean(name: str) -> float:
        return sum(one.get(name, 0.0) for one in last) / len(last)

    form = mean(FORM) if all(FORM in one for one in last) else None
    return silence(form, mean(CUT), mean(RIGHT), mean(REWARD), mean(ALIKE))


def taught(series: Mapping[str, float]) -> bool:
    """Whether a round taught something, as far as its series tell. Those of a member that only answers do
    not, nor those of a release that did not count its answers."""
    return series.get(TRAINED, 1.0) > 0.0 or not {RIGHT, ALIKE} <= series.keys()


def alarm(rounds: Sequence[Mapping[str, float]], total: int) -> str:
    """Why a node's newest rounds taught it nothing, in one line; empty where they did."""
    return str(of_rounds(rounds, total) or "")


def told(alarms: Mapping[str, str]) -> list[str]:
    """The alarms of nodes as sentences, each once; empty ones are none."""
    return [
        f"{', '.join(node for node, own in alarms.items() if own == alarm)} learned nothing in the last "
        f"rounds: {alarm}"
        for alarm in dict.fromkeys(filter(None, alarms.values()))
    ]
