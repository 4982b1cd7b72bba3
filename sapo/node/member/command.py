"""A program of one's own answers: it reads questions and writes answers, as JSON lines.

A line has `id`, `question`, `system` (what to know beside it), `answers` and `max_chars`, one at a
time. It writes `{"id": ..., "answer": ...}` as often as `answers` says, and ends when its input ends.
"""

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from sapo.core.child_process import has_exited
from sapo.core.config.load import Config
from sapo.core.config.members import CommandMember
from sapo.core.config.prompt import system_prompt
from sapo.core.errors import Unavailable, UserError
from sapo.core.types import AuthorKind
from sapo.node.member.answer_book import Answer, AnswerBook, Ask

WAITS_S = (0.5, 1.0)
"""Before the second and the third try of a question."""
POLL_S = 0.1
LEAVE_S = 1.0
"""How long the program may take to end by itself when the member does."""
READ_BYTES = 65_536
CHAR_BYTES = 12
"""What one character may take in JSON, at most: two escapes."""
NO_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.ENOEXEC, errno.E2BIG)
REMEDY = "name a program that can be run, and its arguments"


class _Failed(Exception):
    """The program ended, or took too long."""


class CommandBackend:
    """Asks one program, which is started once, and again when it ends or takes too long."""

    kind: AuthorKind = "command"
    address: str | None = None

    def __init__(
        self,
        member: CommandMember,
        config: Config,
        *,
        waits_s: Sequence[float] = WAITS_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Look for the program. Raises `UserError` where there is none that can be run."""
        self._member, self._max_chars = member, config.rules.max_text_chars
        self._system = system_prompt(config.rules.answer)
        self._waits_s, self._clock = waits_s, clock
        self._program: _Program | None = None
        self._asked = 0
        if "\0" in "".join(member.run) or shutil.which(member.run[0]) is None:
            raise UserError("member.run", member.run[0], "there is no such program", REMEDY)

    def answer(self, asks: Sequence[Ask], book: AnswerBook, stopping: Callable[[], bool]) -> None:
        """Ask until every question has its answers; see `Backend.answer`. A question that the program fails
        at again and again is given up where it answers the next one."""
        failed: dict[int, str] = {}
        answered = any(not book.missing(ask) and book.answers(ask.place) for ask in asks)
        for ask in asks:
            if not book.missing(ask) or stopping():
                continue
            try:
                self._fill(ask, book, stopping)
            except _Failed as error:
                failed[ask.place] = str(error)
                if len(failed) > 1:
                    raise Unavailable(self._away(str(error))) from None
                continue
            if not book.missing(ask):
                answered = True
                _give_up(failed, book)
        if failed and not answered:
            raise Unavailable(self._away(next(iter(failed.values()))))
        _give_up(failed, book)

    def close(self) -> None:
        """End the program. Closing twice is harmless."""
        if self._program is not None:
            self._program.close(LEAVE_S)
            self._program = None

    def _away(self, why: str) -> str:
        return f"member.run = {self._member.run[0]}: {why}, {len(self._waits_s) + 1} times in a row"

    def _fill(self, ask: Ask, book: AnswerBook, stopping: Callable[[], bool]) -> None:
        """Ask one question until it has its answers or the member stops; start the program where needed.
        Raises `_Failed` after the last try."""
        for wait in (*self._waits_s, None):
            try:
                self._ask(ask, book, stopping)
                return
            except _Failed:
                assert self._program is not None
                self._program.close(0.0)
                self._program = None
                if wait is None:
                    raise
            until = self._clock() + wait
            while self._clock() < until and not stopping():
                time.sleep(min(POLL_S, wait))
            if stopping():
                return

    def _ask(self, ask: Ask, book: AnswerBook, stopping: Callable[[], bool]) -> None:
        if self._program is not None and self._program.has_exited():
            self.close()
        if self._program is None:
            self._program = _Program(self._member.run, CHAR_BYTES * self._max_chars + 1024)
        self._asked += 1
        asked, until = str(self._asked), self._clock() + self._member.timeout_s
        question = {
            "id": asked,
            "question": ask.question.text,
            "system": self._system,
            "answers": book.missing(ask),
            "max_chars": self._max_chars,
        }
        self._program.say(json.dumps(question).encode() + b"\n")
        garbage = 0
        try:
            while book.missing(ask) and not stopping():
                left = until - self._clock()
                if left <= 0:
                    raise _Failed(f"it took more than {self._member.timeout_s:g} s for a question")
                for line in self._program.hear(min(POLL_S, left)):
                    text = self._read(line, asked)
                    garbage += text is None
                    if text:
                        book.keep(ask.place, text, wanted=ask.wanted)
        finally:
            if garbage:
                book.note_garbage(garbage)

    def _read(self, line: bytes | None, asked: str) -> list[Answer] | None:
        """The answer in a line; none in one that comes late, None for one of no use."""
        try:
            said = json.loads(line or b"")
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict):
            return None
        number, text = said.get("id"), said.get("answer")
        if not isinstance(number, str) or not isinstance(text, str) or len(text) > self._max_chars:
            return None
        if number == asked:
            return [Answer(text.encode("utf-8", "replace").decode())]
        return [] if self._was_asked(number) else None

    def _was_asked(self, number: str) -> bool:
        return number.isascii() and number.isdecimal() and 0 < int(number[:18]) < self._asked


class _Program:
    def __init__(self, run: Sequence[str], longest: int) -> None:
        """Start it, as a session of its own. Raises `UserError` where it cannot be started."""
        self._longest, self._unsaid, self._heard, self._skipping = longest, b"", b"", False
        try:
            self._process = subprocess.Popen(
                run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
            )
        except OSError as error:
            if error.errno in NO_PROGRAM:
                raise UserError("member.run", run[0], str(error.strerror), REMEDY) from None
            raise Unavailable(f"member.run = {run[0]}: cannot be started: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._in, self._out = self._process.stdin, self._process.stdout
        os.set_blocking(self._in.fileno(), False)

    def say(self, line: bytes) -> None:
        self._unsaid += line

    def hear(self, timeout_s: float) -> list[bytes | None]:
        """Lines that came within `timeout_s`, None for one too long. Raises `_Failed` when it has ended."""
        poll = select.poll()
        poll.register(self._out, select.POLLIN)
        if self._unsaid:
            poll.register(self._in, select.POLLOUT)
        ready = [number for number, _ in poll.poll(1000.0 * timeout_s)]
        if self._in.fileno() in ready:
            self._write()
        if self._out.fileno() not in ready:
            return []
        part = os.read(self._out.fileno(), READ_BYTES)
        if not part:
            raise _Failed("it ended before it had answered")
        return self._lines(part)

    def close(self, leave_s: float) -> None:
        self._in.close()
        until = time.monotonic() + leave_s
        while not self.has_exited() and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._out.close()

    def has_exited(self) -> bool:
        return has_exited(self._process.pid)

    def _write(self) -> None:
        try:
            self._unsaid = self._unsaid[os.write(self._in.fileno(), self._unsaid[:READ_BYTES]) :]
        except BlockingIOError:
            pass
        except OSError:
            self._unsaid = b""  # it reads no more; it may have written before

    def _lines(self, part: bytes) -> list[bytes | None]:
        *whole, rest = (self._heard + part).split(b"\n")
        lines: list[bytes | None] = []
        for line in whole:
            lines.append(None if self._skipping or len(line) > self._longest else line)
            self._skipping = False
        self._skipping = self._skipping or len(rest) > self._longest
        self._heard = b"" if self._skipping else rest
        return lines


def _give_up(failed: dict[int, str], book: AnswerBook) -> None:
    for place, why in failed.items():
        book.give_up(place, f"the program answers others, but to this {why}")
    failed.clear()
