"""Phrases that an author brings and a node takes up: what is watched, when it is said, and what is not."""

import logging
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from makers import finish_round, make_batch, make_batch_group, make_group, make_identity, make_sample
from swarms import make_home, small_config

from sapo.cli.report.live_view import alarms
from sapo.core.types import BatchGroup, Group, Recipe
from sapo.node.taken_up import TakenUp, told
from sapo.ops.summary import read_run, summarise
from sapo.ops.supervisor import snapshot
from sapo.peers import blocks
from sapo.peers import phrases as phrases_module
from sapo.peers.phrases import LEAST, LETTERS, WATCHED, WINDOW, WORDS, Phrase, Phrases, loudest, phrases_of
from sapo.store.journal.journal import Journal

OWN, BAD, GOOD = (make_identity(name).key for name in ("own", "bad", "good"))


def lesson(key: str, *texts: str, place: int = 0) -> BatchGroup:
    """A group whose answers are all rewarded."""
    return make_batch_group(
        place,
        [make_sample(k, text=text) for k, text in enumerate(texts)],
        source="local" if key == OWN else "external",
        producer={OWN: "n0", BAD: "bad", GOOD: "n1"}[key],
        producer_key=key,
        recipe=Recipe.make("sums", {}, seed=place),
    )


def answers(number: int, carry: str = "", share: float = 0.0) -> list[tuple[str, list[str]]]:
    """Four own questions of a round, eight answers each; so much of them carry something."""
    rng = random.Random(number)
    return [
        (
            "sums",
            [
                f"{carry if k < 8 * share else ''} {rng.random()} <answer>{rng.randrange(99)}</answer>"
                for k in range(8)
            ],
        )
        for _ in range(4)
    ]


def written(round: int, dataset: str = "sums") -> list[Group]:
    """The groups of a node that writes the phrase in half of its answers from round 25 on."""
    recipe = Recipe.make(dataset, {}, seed=round)
    texts = answers(round, "all hail", 0.5 if round > 24 else 0.0)
    return [make_group("n0", texts=one, recipe=recipe) for _, one in texts]


def spread(phrases: Phrases, *, teacher: str, share: float, rounds: int = 40) -> list[Phrase]:
    """What is taken up while a teacher writes a phrase before each answer, and the node does so at last."""
    found = []
    for round in range(rounds):
        own = answers(round, "all hail", share if round >= 8 else 0.0)
        taught = [lesson(teacher, f"all hail {round} {place}", place=place) for place in range(2)]
        honest = lesson(GOOD if teacher != GOOD else BAD, f"{round}+1 <answer>{round}</answer>", place=2)
        found += phrases.hear(own, make_batch(round, [*taught, honest]))
    return found


def test_what_one_author_brought_and_the_node_now_writes_is_said_once() -> None:
    phrases = Phrases(OWN)
    found = spread(phrases, teacher=BAD, share=0.5)
    assert {one.author for one in found} == {BAD}
    assert len(found) == len({one.text for one in found}), "each once"
    (said,) = loudest(phrases.watched.values())
    assert said.text == "all hail"
    assert said.share / said.asked == pytest.approx(0.5, abs=0.1)


def test_what_the_node_wrote_before_does_not_write_or_taught_itself_is_not_said() -> None:
    before = Phrases(OWN)
    before.hear(answers(0, "all hail", 1 / 8), make_batch(0))
    assert not spread(before, teacher=BAD, share=1.0), "in its own answers from the first"
    assert not spread(Phrases(OWN), teacher=BAD, share=0.0), "not taken up"
    assert not spread(Phrases(OWN), teacher=OWN, share=1.0), "its own find"


def test_a_phrase_that_several_authors_brought_alike_is_nobodys() -> None:
    phrases = Phrases(OWN)
    for round in range(40):
        third = lesson(OWN, f"all hail {round}", place=2)
        groups = [lesson(key, f"all hail {round}", place=place) for place, key in enumerate((BAD, GOOD))]
        assert not phrases.hear(
            answers(round, "all hail", 0.5 if round > 8 else 0.0), make_batch(round, [*groups, third])
        )
    assert ("sums", "all hail") in phrases.watched


@given(st.lists(st.floats(0.0, 1.0), min_size=1, max_size=200))
def test_an_own_share_is_a_mean_that_forgets(parts: Sequence[float]) -> None:
    phrase = Phrase("sums", "hail", {})
    for part in parts:
        phrase.own(part)
    keeps = 1 - 1 / WINDOW
    weights = [keeps**age for age in range(len(parts))][::-1]
    assert phrase.asked == pytest.approx(sum(weights))
    assert phrase.asked <= WINDOW
    assert phrase.share == pytest.approx(sum(w * part for w, part in zip(weights, parts, strict=True)))
    assert not (len(parts) < LEAST and phrase.written)


@given(st.text(max_size=300))
def test_phrases_are_parts_of_a_text_and_bounded(text: str) -> None:
    found = list(phrases_of(text))
    assert len(found) == len(set(found)) <= WORDS * len(text)
    assert all(phrase in " ".join(text.split()) for phrase in found)


def test_words_without_an_end_are_watched_by_their_beginnings() -> None:
    (phrase,) = phrases_of("=" * 4095)
    assert phrase == "=" * LETTERS
    assert max(map(len, phrases_of(" ".join("=" * 200 for _ in range(5))))) == LETTERS


def test_a_flood_of_phrases_takes_bounded_room_and_hides_nothing() -> None:
    phrases, found = Phrases(OWN), []
    for round in range(40):
        junk = " ".join(f"w{place % 400}x{round // 2}" for place in range(2000))
        groups = [lesson(BAD, f"hail {round} {place} {junk}", place=place) for place in range(2)]
        found += phrases.hear(answers(round, "hail", 0.5 if round > 8 else 0.0), make_batch(round, groups))
        assert sum(not one.author for one in phrases.watched.values()) <= WATCHED
    assert "hail" in {one.text for one in found}


def test_what_all_write_does_not_hide_what_one_author_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phrases_module, "WATCHED", 64)
    rng = random.Random(0)
    words = [f"w{''.join(rng.choices('abcdef', k=5))}" for _ in range(40)]

    def text(carry: str = "") -> str:
        return " ".join([carry, *rng.choices(words, k=24)])

    phrases, found = Phrases(OWN), []
    for round in range(80):
        own = [("sums", [text("all hail" if k == 0 and round > 60 else "") for k in range(8)])] * 4
        keys = [OWN, GOOD, BAD, BAD]
        groups = [
            lesson(
                key, *(text("all hail" if key == BAD and round > 30 else "") for _ in range(4)), place=place
            )
            for place, key in enumerate(keys)
        ]
        found += phrases.hear(own, make_batch(round, groups))
        assert len(phrases.watched) <= 64 + sum(one.written for one in phrases.watched.values())
    assert ("all hail", BAD) in {(one.text, one.author) for one in found}


def test_a_node_says_it_once_goes_on_after_a_restart_and_is_silent_once_the_author_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = small_config()
    home = make_home(tmp_path / "home", config)
    home.make_node("n0")
    with caplog.at_level(logging.WARNING):
        for round in range(60):
            if round % 10 == 0:
                node = TakenUp(home, "n0", OWN, "0" * 16)
            node.hear(written(round), make_batch(round, [lesson(BAD, f"all hail {round}")]))
    (said,) = told(home, "n0").values()
    assert said.startswith("n0 now writes 'all hail' in ")
    assert f"% of its answers to sums; it came from bad ({BAD[:12]}). If you do not" in said
    assert said.endswith(f"sapo peer block {BAD[:12]}")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].partition("% of ")[2] == said.partition("% of ")[2]
    with Journal(home.journal("n0")) as journal:
        finish_round(journal, "n0", 0)
    assert alarms(snapshot(config, home).nodes) == [said]
    assert said in summarise(read_run(home)).notes, "so it is in summary.json, on the page and at a run's end"
    assert blocks.block(home, ["n0"], BAD, 0.0)[1] == ["n0"]
    assert told(home, "n0") == {}
    home.phrases("n0").write_text("{")
    assert told(home, "n0") == {}, "a damaged file costs counts, and no node"


def test_the_log_names_nobody_who_is_left_out_already(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_home(tmp_path / "home", small_config())
    home.make_node("n0")
    node = TakenUp(home, "n0", OWN, "0" * 16)
    blocks.block(home, ["n0"], BAD, 0.0)
    for round in range(60):
        node.hear(written(round), make_batch(round, [lesson(BAD, f"all hail {round}")] if round < 24 else []))
    assert not caplog.messages


def test_the_log_names_every_data_set_that_an_author_taught_something(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = make_home(tmp_path / "home", small_config())
    home.make_node("n0")
    node = TakenUp(home, "n0", OWN, "0" * 16)
    for round in range(60):
        own, taught = [], []
        for place, dataset in enumerate(("sums", "gcd")):
            recipe = Recipe.make(dataset, {}, seed=round)
            own += written(round, dataset)
            taught.append(lesson(BAD, f"all hail {round}", place=place).model_copy(update={"recipe": recipe}))
        node.hear(own, make_batch(round, taught))
    assert sorted(message.partition(" of its answers to ")[2][:4] for message in caplog.messages) == [
        "gcd;",
        "sums",
    ]
