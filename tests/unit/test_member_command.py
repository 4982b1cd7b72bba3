"""Members whose answers a program writes, with real programs that do all that programs do."""

import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from asks import ask, asks, never

from sapo.core.child_process import alive
from sapo.core.config.load import load
from sapo.core.config.members import CommandMember
from sapo.core.errors import Unavailable, UserError
from sapo.node.member.answer_book import Answer, AnswerBook
from sapo.node.member.command import WAITS_S, CommandBackend

START = """
import json, os, pathlib, sys, time
def say(**what): print(json.dumps(what), flush=True)
def starts():
    with open("starts", "a") as file: print(os.getpid(), file=file)
    return len(open("starts").readlines())
number = starts()
def asked():
    for line in sys.stdin: yield json.loads(line)
"""
Opens = Callable[..., CommandBackend]


@pytest.fixture
def opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    """Opens backends whose program is Python text."""
    monkeypatch.chdir(tmp_path)
    opened: list[CommandBackend] = []

    def run(program: str, *sets: str, **how: Any) -> CommandBackend:
        (tmp_path / "program.py").write_text(START + textwrap.dedent(program))
        command = CommandMember(run=[sys.executable, "-S", "program.py"], timeout_s=how.pop("timeout_s", 60))
        opened.append(CommandBackend(command, load(sets=sets, env={}), **{"waits_s": (0.0, 0.0)} | how))
        return opened[-1]

    yield run
    for one in opened:
        one.close()


def starts(path: Path) -> list[int]:
    """Process ids of the programs that were started."""
    return [int(line) for line in (path / "starts").read_text().split()]


def wait_for_end(pids: Sequence[int]) -> None:
    """The kernel may take a moment to end what was killed."""
    deadline = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def texts(book: AnswerBook, place: int = 0) -> list[str]:
    return [one.text for one in book.answers(place)]


ECHO = """
for one in asked():
    for k in range(one["answers"]): say(id=one["id"], answer=f"{one['question']}: {k}")
"""


def test_one_program_answers_all_questions(opens: Opens, book: AnswerBook, tmp_path: Path) -> None:
    backend = opens(ECHO)
    backend.answer(asks(3), book, never)
    backend.answer([ask(3)], book, never)
    assert texts(book, 1) == ["question 1: 0", "question 1: 1"]
    assert [len(texts(book, place)) for place in range(4)] == [2, 2, 2, 4]
    assert len(starts(tmp_path)) == 1
    assert book.totals()["garbage"] == 0


def test_garbage_lines_are_counted_and_skipped(opens: Opens, book: AnswerBook) -> None:
    program = """
    for one in asked():
        print("Loading model..."); print(); print("[" * 50_000); print("9" * 5_000); print("{}")
        say(id=one["id"]); say(id=one["id"], answer=5); say(id=int(one["id"]), answer="a")
        say(id="17", answer="a"); say(id=one["id"], answer="a" * 20_000); say(id="9" * 6_000, answer="a")
        sys.stdout.buffer.write(b"\\xff\\xfe\\n" + b"x" * 1_000_000 + b"\\n")
        sys.stdout.flush()
        say(id=one["id"], answer="good")
    """
    opens(program).answer([ask(wanted=1)], book, never)
    assert texts(book) == ["good"]
    assert book.totals()["garbage"] == 13


def test_late_answers_to_a_question_before_are_dropped(opens: Opens, book: AnswerBook) -> None:
    program = """
    last = None
    for one in asked():
        if last: say(id=last, answer="late")
        last = one["id"]
        for k in range(5): say(id=one["id"], answer=one["question"])
    """
    opens(program).answer(asks(3), book, never)
    assert [texts(book, place) for place in range(3)] == [[f"question {place}"] * 2 for place in range(3)]
    assert book.totals()["garbage"] == 0


def test_no_more_answers_are_kept_than_are_wanted(book: AnswerBook) -> None:
    kept = [book.keep(0, [Answer("a")] * 3, wanted=2), book.keep(0, [Answer("b")], wanted=2)]
    assert kept == [2, 0]


def test_a_program_that_ends_is_started_again_for_the_answers_that_are_missing(
    opens: Opens, book: AnswerBook, tmp_path: Path
) -> None:
    program = """
    for one in asked():
        say(id=one["id"], answer=f"{number} of {one['answers']}")
        sys.exit(3)
    """
    opens(program).answer([ask(wanted=3)], book, never)
    assert texts(book) == ["1 of 3", "2 of 2", "3 of 1"]
    assert len(starts(tmp_path)) == 3


def test_a_program_that_takes_too_long_is_ended_with_all_it_has_started(
    opens: Opens, book: AnswerBook, tmp_path: Path
) -> None:
    program = """
    child = os.fork()
    if child == 0: number = starts()
    for one in asked(): time.sleep(1000)
    time.sleep(1000)
    """
    clock = Clock(tmp_path)
    with pytest.raises(Unavailable, match="more than 30 s for a question, 3 times in a row"):
        opens(program, timeout_s=30, clock=clock).answer([ask()], book, never)
    assert len(clock.pids) == 6
    wait_for_end(clock.pids)


class Clock:
    """A clock by which time passes only once a program and its child run: two processes a start."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._now, self._due = folder, 0.0, 2
        self.pids: list[int] = []

    def __call__(self) -> float:
        path = self._folder / "starts"
        self.pids = starts(self._folder) if path.exists() else []
        if len(self.pids) == self._due:
            self._now, self._due = self._now + 31.0, self._due + 2
        return self._now


@pytest.mark.parametrize(
    "program", ["sys.exit(1)", "os.close(1); time.sleep(1000)", "os.close(0); sys.exit(0)"]
)
def test_a_program_that_always_ends_is_unavailable(
    opens: Opens, book: AnswerBook, tmp_path: Path, program: str
) -> None:
    with pytest.raises(Unavailable, match="it ended before it had answered, 3 times in a row"):
        opens(program).answer([ask()], book, never)
    assert len(starts(tmp_path)) == 1 + len(WAITS_S)
    assert not book.given_up()


@pytest.mark.parametrize("what", ["missing", "folder", "plain", "binary"])
def test_what_cannot_be_started_is_an_error_of_the_config(
    book: AnswerBook, tmp_path: Path, what: str
) -> None:
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what != "missing":
        path.write_bytes(b"\x00\x01")
        path.chmod(0o755 if what == "binary" else 0o644)
    with pytest.raises(UserError) as raised:
        CommandBackend(CommandMember(run=[str(path)]), load(env={})).answer([ask()], book, never)
    assert raised.value.field == "member.run"
    assert raised.value.value == str(path)


def test_closing_ends_the_program_and_all_it_has_started(
    opens: Opens, book: AnswerBook, tmp_path: Path
) -> None:
    program = """
    if os.fork() == 0:
        number = starts()
        time.sleep(1000)
    while len(open("starts").readlines()) < 2: time.sleep(0.01)
    for one in asked(): say(id=one["id"], answer="a")
    pathlib.Path("ended").touch()
    """
    backend = opens(program)
    backend.answer([ask(wanted=1)], book, never)
    backend.close()
    backend.close()
    assert (tmp_path / "ended").exists(), "it is given the time to end by itself"
    assert len(starts(tmp_path)) == 2
    wait_for_end(starts(tmp_path))
