"""A probe that falls: by more than chance, and often enough."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from sapo.node import probes
from sapo.node.probes import Probe, best_of, fall

INCARNATION = "ab" * 8


def probe(round: int, right: int, of: int = 400) -> Probe:
    """A probe that passes the first `right` questions."""
    passes = (1,) * right + (0,) * (of - right)
    return Probe(round, passes, passes)


def test_probes_that_stay_clearly_below_the_best_are_a_fall() -> None:
    found = [probe(0, 100), probe(30, 200), probe(60, 150), probe(90, 160)]
    seen = fall(found, 2)
    assert seen is not None
    assert seen.best == 30
    assert "that of round 30, in 2 probes in a row; now by 10.0 points" in seen.alarm


@pytest.mark.parametrize(
    "found",
    [
        [],
        [probe(0, 200)],
        [probe(0, 200), probe(30, 150)],
        [probe(0, 100), probe(30, 110), probe(60, 120)],
        [probe(0, 200), probe(30, 150), probe(60, 198)],
        [probe(0, 200), probe(30, 199), probe(60, 150)],
    ],
    ids=["none", "one", "too few", "rising", "recovered", "only the last"],
)
def test_everything_else_is_none(found: list[Probe]) -> None:
    assert fall(found, 2) is None


def test_nothing_is_looked_at_if_no_number_is_set() -> None:
    assert fall([probe(0, 200), probe(30, 0), probe(60, 0)], 0) is None


def test_probes_of_other_questions_are_not_compared() -> None:
    shorter = [probe(0, 200), probe(30, 0, of=100), probe(60, 0, of=100), probe(90, 0, of=100)]
    assert fall(shorter, 2) is None
    others = [
        replace(probe(0, 200), questions="a"),
        *(replace(probe(30 * k, 0), questions="b") for k in (1, 2)),
    ]
    assert fall(others, 2) is None
    older = [probe(0, 200), *others[1:]]
    assert fall(older, 2) is not None, "files of older releases do not say which questions"


def test_two_questions_lost_among_equal_noise_are_chance() -> None:
    random_ = random.Random(0)
    noise = [tuple(int(random_.random() < 0.5) for _ in range(400)) for _ in range(4)]
    found = [Probe(30 * number, passes, passes) for number, passes in enumerate(noise)]
    assert fall(found, 3) is None


def test_of_equal_probes_the_first_is_the_best() -> None:
    best = best_of([probe(0, 100), probe(30, 200), probe(60, 200)])
    assert best is not None
    assert best.round == 30


def test_probes_of_weights_that_were_given_up_do_not_last(tmp_path: Path) -> None:
    path = tmp_path / "probes.jsonl"
    lines = [(0, "10"), (30, "11"), (60, "00"), (90, "00")]
    for round, passes in lines:
        text = f'{{"incarnation": "{INCARNATION}", "round": {round}, "first": "{passes}", "greedy": "11"}}\n'
        path.write_text((path.read_text() if path.exists() else "") + text)
    probes.go_back(path, INCARNATION, 91, 30)
    probes.go_back(path, "cd" * 8, 91, 0)
    assert [one.round for one in probes.read(path, INCARNATION)] == [0, 30, 60, 90]
    assert [one.round for one in probes.read(path, INCARNATION, lasting=91)] == [0, 30]
    assert len(probes.read(path, INCARNATION, lasting=90)) == 4, "the round that goes back is made again"
