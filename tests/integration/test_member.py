"""Members that only answer: their rounds, what they publish, and who learns from it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from shared_workers import shared_workers
from swarms import hand_over, make_home, open_node, small_config

from sapo.bus.memory import MemoryBus
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.errors import Paused, Unavailable, UserError
from sapo.core.types import AuthorKind, Group
from sapo.node.member.answer_book import Answer, AnswerBook, Ask
from sapo.node.member.runtime import MemberRuntime

pytestmark = pytest.mark.core

SETS = ("swarm.site=m", "swarm.nodes=1", "member.type=person", "batch.local=2", "batch.completions=4")


@dataclass
class Teacher:
    """Knows the answers to half of what it is asked, and says so; each question is asked of it in turn."""

    kind: AuthorKind = "person"
    address: str | None = None
    asked: list[str] = field(default_factory=list)
    away: int = 0
    """How often it cannot be reached."""
    most: int = 1000
    """Answers it gives before it wants to stop."""
    bad: str | None = None

    said: Path | None = None
    """Where it is said that it is away."""
    heard: list[str] = field(default_factory=list)

    def answer(self, asks: Sequence[Ask], book: AnswerBook, stopping: Callable[[], bool]) -> None:
        if self.away:
            self.away -= 1
            if self.said is not None and self.said.exists():
                self.heard.append(self.said.read_text())
            raise Unavailable("nobody is there")
        if self.bad:
            raise UserError("member.api_key", "env:KEY", self.bad, "export another")
        for ask in asks:
            while (missing := book.missing(ask)) and self.most:
                self.asked.append(ask.question.text)
                self.most -= 1
                right = str(sum_of(ask.question.text))
                text = right if missing % 2 else "nothing"
                book.keep(ask.place, [Answer(text, author="ada")], wanted=ask.wanted)

    def close(self) -> None:
        """Nothing was started."""


def sum_of(question: str) -> int:
    words = question.removeprefix("State the final answer to the following arithmetic problem:")
    return int(eval("".join(one for one in words if one in "0123456789+-")))


@contextmanager
def member_of(
    home: Home, config: Config, teacher: Teacher, bus: MemoryBus, **how: Any
) -> Iterator[MemberRuntime]:
    workers = shared_workers(config)
    with MemberRuntime.open(
        config, "m0", home, bus=bus, backend=teacher, workers=workers, deliver=False, **how
    ) as member:
        yield member


def groups_of(member: MemberRuntime, round: int) -> list[Group]:
    return [Group.model_validate_json(one.payload) for one in member.journal.groups(round)]


@pytest.fixture
def config() -> Config:
    return small_config(SETS)


@pytest.fixture
def home(config: Config, tmp_path: Path) -> Home:
    return make_home(tmp_path / "member", config)


def test_a_round_is_groups_of_all_answers_that_name_their_kind(config: Config, home: Home) -> None:
    with member_of(home, config, Teacher(), MemoryBus()) as member:
        result = member.run_round()
        groups = groups_of(member, 0)
    assert [group.kind for group in groups] == ["person", "person"]
    assert all(len(group.completions) == 4 and group.tokenizer is None for group in groups)
    assert [group.position for group in groups] == [0, 1]
    assert result.metrics["reward/local"] == 0.5
    assert result.metrics["member/answers"] == 8


def test_a_member_that_was_killed_asks_for_no_answer_that_it_has(config: Config, home: Home) -> None:
    first, second = Teacher(most=5), Teacher()
    with member_of(home, config, first, MemoryBus()) as member:
        asked = member.maker.question_stream(0).result()
        member.book.begin(0)
        first.answer([Ask(n, question, 4) for n, question in enumerate(asked)], member.book, lambda: False)
    with member_of(home, config, second, MemoryBus()) as member:
        member.run_round()
        assert len(groups_of(member, 0)) == 2
    assert len(first.asked) + len(second.asked) == 8


def test_a_kill_between_groups_and_result_publishes_the_same_groups(config: Config, home: Home) -> None:
    bus, teacher = MemoryBus(), Teacher()
    with member_of(home, config, teacher, bus) as member:
        ids = member.generate()
        member.publish()
    with member_of(home, config, teacher, bus) as member:
        assert member.generate() == ids
        member.publish()
        member.finish()
        assert member.round == 1
        assert [item.ref for item in member.journal.owed("publish", 10)] == list(ids)
    assert len(teacher.asked) == 8


def test_what_answers_may_be_away_for_a_while(
    config: Config, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sapo.node.member.runtime.FIRST_WAIT_S", 0.001)
    with member_of(home, config, Teacher(away=3, said=home.waiting("m0")), MemoryBus()) as member:
        member.run_round()
        assert member.round == 1
        assert member.outages() == {}
        assert member.backend.heard == ["nobody is there\n"] * 2  # type: ignore[attr-defined]
        assert not home.waiting("m0").exists()


def test_a_stop_while_answers_are_waited_for_keeps_those_that_came(config: Config, home: Home) -> None:
    stop = threading.Event()
    teacher = Teacher(most=3)
    with member_of(home, config, teacher, MemoryBus(), stop=stop) as member:
        stop.set()
        with pytest.raises(Paused, match="the answers it has are kept"):
            member.run_round()
        assert member.round == 0


def test_what_a_person_must_mend_ends_the_round_and_nothing_is_half_written(
    config: Config, home: Home
) -> None:
    with member_of(home, config, Teacher(bad="is refused"), MemoryBus()) as member:
        with pytest.raises(UserError, match=r"member\.api_key"):
            member.run_round()
        assert member.journal.stage() is None


def test_a_question_that_was_given_up_makes_no_group(config: Config, home: Home) -> None:
    with member_of(home, config, Teacher(), MemoryBus()) as member:
        member.book.begin(0)
        member.book.send(0, tokens=100, cost=0.5)
    with member_of(home, config, Teacher(), MemoryBus()) as member:
        result = member.run_round()
        assert [group.position for group in groups_of(member, 0)] == [1]
    assert result.metrics["member/lost"] == 1
    assert result.metrics["member/tokens"] == 100


def test_top_publishes_the_most_informative_groups(home: Home) -> None:
    config = small_config([*SETS, "share.select=top", "share.fraction=0.5"])
    with member_of(home, config, Teacher(), MemoryBus()) as member:
        member.run_round()
        assert len(member.journal.owed("publish", 10)) == 1
        assert groups_of(member, 0)[0].completions[0].claimed_score is not None


def test_a_node_learns_from_a_member(tmp_path: Path, config: Config, home: Home) -> None:
    bus, learner = MemoryBus(), small_config(["pool.newcomer_share=1.0", "swarm.rounds=40"])
    learners = make_home(tmp_path / "learner", learner)
    with (
        member_of(home, config, Teacher(), bus) as member,
        open_node(learner, learners, bus=bus, deliver=False) as node,
    ):
        while not member.finished:
            member.run_round()
            owed = member.journal.owed("publish", 100)
            bus.publish([member.journal.group(item.ref) for item in owed])
            member.journal.acknowledge("publish", owed[-1].seq)
        taught: set[str] = set()
        while not taught and not node.finished:
            node.run_round()
            hand_over(node)
            batch = node.journal.batch(node.round - 1)
            taught |= {group.producer for group in batch.groups if group.source == "external"}
    assert taught == {"m0"}


def test_a_member_whose_groups_all_would_refuse_does_not_start(tmp_path: Path) -> None:
    config = small_config([*SETS, 'rules.authors=["policy", "api"]'])
    home = make_home(tmp_path / "closed", config)
    with (
        pytest.raises(UserError, match=r"rules\.authors = 'person': the swarm takes no groups of this kind"),
        member_of(home, config, Teacher(), MemoryBus()),
    ):
        pass


def test_a_key_under_a_wrong_name_is_not_repeated() -> None:
    with pytest.raises(UserError) as raised:
        small_config(["member.type=openai", "member.url=http://h", "member.model=m", "member.key=sk-1"])
    assert "sk-1" not in str(raised.value)
