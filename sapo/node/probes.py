"""A node's probes question by question: what is needed to compare two of them in pairs.

Kept beside the journal as lines of JSON. The means are in the journal and in MLflow too, so a lost file costs
intervals of differences and nothing else.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sapo.core.intervals import paired_interval
from sapo.core.types import Question, canonical, sha256
from sapo.policy.evaluate import Evaluation, examples


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe after `round` rounds; per question 1 where the answer passes, else 0.

    `answers` are the most probable answers to a few of the questions, and 1 where they pass, by question.
    `asked` tells which entries are the same question, drawn again; None where all differ.
    """

    round: int
    sampled: tuple[int, ...]
    greedy: tuple[int, ...]
    answers: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    asked: tuple[int, ...] | None = None
    questions: str = ""
    """Digest of the questions' texts; empty in files of older releases."""


def append(
    path: Path, incarnation: str, round: int, found: Evaluation, questions: Sequence[Question] = ()
) -> None:
    """Add a probe to a node's file, with the answers to a few of its `questions`. A round that is repeated
    after a crash adds an equal line again."""
    answers = {
        questions[place].text: (found.answers[place], int(found.greedy[place]))
        for place in examples(questions)
    }
    line = {"incarnation": incarnation, "round": round, **bits(found), "answers": answers}
    if questions:
        line["questions"] = sha256(canonical([question.text for question in questions]))[:16]
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps(line)}\n")  # a line that a crash cut short ends here


def go_back(path: Path, incarnation: str, round: int, target: int) -> None:
    """Note that after `round` rounds a node went back to the weights it had after `target`."""
    with path.open("a", encoding="utf-8") as file:
        file.write(f"\n{json.dumps({'incarnation': incarnation, 'went_back': [round, target]})}\n")


def bits(found: Evaluation) -> dict[str, Any]:
    """A probe's passes, a character per question, and which of these are the same where any are."""
    passes = {name: "".join(f"{one:.0f}" for one in getattr(found, name)) for name in ("first", "greedy")}
    return passes if found.asked is None else passes | {"asked": list(found.asked)}


def parse(round: int, kept: Mapping[str, Any]) -> Probe:
    """A probe from what `bits` made of it."""
    sampled, greedy = (tuple(map(int, kept[name])) for name in ("first", "greedy"))
    answers = {question: (text, passed) for question, (text, passed) in kept.get("answers", {}).items()}
    asked = kept.get("asked")
    asked = None if asked is None else tuple(asked)
    return Probe(round, sampled, greedy, answers, asked, kept.get("questions", ""))


def read(path: Path, incarnation: str, *, lasting: float = 0) -> list[Probe]:
    """The probes of an incarnation by round; lines that a crash cut short are left out. So are those of
    weights that the node had given up when `lasting` rounds were done."""
    found: dict[int, Probe] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            kept = json.loads(line)
            if kept["incarnation"] != incarnation:
                continue
            if "went_back" in kept:
                round, target = kept["went_back"]
                given_up = [at for at in found if target < at < round <= lasting]
                for at in given_up:
                    del found[at]
                continue
            found[kept["round"]] = parse(kept["round"], kept)
        except (ValueError, KeyError, TypeError):
            continue
    return [found[round] for round in sorted(found)]


def comparable(found: Sequence[Probe]) -> list[Probe]:
    """The probes that asked the same questions as the newest: `eval.probe_questions` may change mid-run."""
    return [one for one in found if _same_questions(one, found[-1])]


def _same_questions(one: Probe, other: Probe) -> bool:
    known = one.questions and other.questions
    return len(one.sampled) == len(other.sampled) and (not known or one.questions == other.questions)


@dataclass(frozen=True, slots=True)
class Fall:
    """The best probe's round, and what the newest ones lost since, in words."""

    best: int
    alarm: str


def best_of(found: Sequence[Probe]) -> Probe | None:
    """The probe with the highest pass@1, the first of equals; None of none."""
    return max(found, key=lambda probe: (statistics.fmean(probe.sampled), -probe.round), default=None)


def fall(found: Sequence[Probe], many: int) -> Fall | None:
    """Whether the last `many` probes, by round, are each below the best by more than chance.

    Probes of the same questions are compared pair by pair: the lower end of the 95 % interval of what was
    lost lies above 0. None for `many` = 0.
    """
    found = comparable(found)
    best = best_of(found)
    last = [probe for probe in found[-many:] if best is not None and probe.round > best.round] if many else []
    if best is None or not many or len(last) < many:
        return None
    lost = [[a - b for a, b in zip(best.sampled, probe.sampled, strict=True)] for probe in last]
    if min(paired_interval(one, best.asked).low for one in lost) <= 0:
        return None
    alarm = (
        f"eval/pass_at_1 was clearly below its best, that of round {best.round}, in {many} probes in a row; "
        f"now by {100 * statistics.fmean(lost[-1]):.1f} points"
    )
    return Fall(best.round, alarm)
