"""A model behind an endpoint that speaks OpenAI's API, asked over HTTP, several questions at a time.

Not with the openai package: a body must be bounded in bytes, and a response in its whole time.
"""

import asyncio
import datetime
import email.utils
import functools
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import Any, NoReturn

import httpx

from sapo.core.config.load import Config
from sapo.core.config.members import OpenAIMember
from sapo.core.config.secrets import fetch, public
from sapo.core.errors import Paused, Unavailable, UserError
from sapo.core.types import AuthorKind
from sapo.core.unicode import one_line
from sapo.node.member.answer_book import Answer, AnswerBook, Ask

TRIES = 5
"""Requests in a row that may fail before the endpoint counts as away."""
USELESS = 3
"""Replies in a row that may bring no answer before a question is given up."""
FIRST_WAIT_S, LAST_WAIT_S = 0.5, 60.0
"""Between two tries of a question; no endpoint can ask for more than the latter."""
CONNECT_S = 10.0
GRACE_S = 5.0
"""How long requests under way may take when the member stops."""
POLL_S = 0.1
MAX_BODY = 8_000_000
MAX_TOKENS = 10**9
"""What a reply says it took is believed up to here."""
TEMPLATE_TOKENS = 64
"""What a chat template may add to a prompt, at most."""
MAX_SAID = 200
NEWER_LIMIT = "max_completion_tokens"
"""What newer models call `max_tokens`, which they refuse."""
BUSY = (408, 409, 425, 429)
GAVE_UP = (502, 504)
"""Of a proxy that did not wait for what it had passed on, which may be paid for all the same."""
HEADERS = {"Content-Type": "application/json", "Accept": "application/json", "Accept-Encoding": "identity"}


@dataclass(frozen=True, slots=True)
class Reply:
    """A response as it came; a body of more than `MAX_BODY` bytes is None."""

    status: int
    headers: Mapping[str, str]
    body: bytes | None


@dataclass(frozen=True, slots=True)
class Found:
    """What a reply holds: answers, why others are of no use, and the tokens it says it took."""

    answers: list[Answer]
    useless: list[str]
    prompt_tokens: int | None = None
    answer_tokens: int | None = None


class _Failed(Exception):
    def __init__(self, why: str, *, of_question: bool = False, wait_s: float = 0.0) -> None:
        self.of_question, self.wait_s = of_question, wait_s
        super().__init__(why)


class _Declined(UserError):
    """The endpoint takes this question not at all, or none as they are sent."""


@dataclass(slots=True)
class _Call:
    book: AnswerBook
    client: httpx.AsyncClient
    slots: asyncio.Semaphore
    stopping: Callable[[], bool]
    over: bool = False
    """Nothing more is sent."""
    answered: int = 0
    """Requests that brought something."""
    under_way: set["asyncio.Task[None]"] = field(default_factory=set)
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced, whenever a request has ended."""
    declined: dict[int, UserError] = field(default_factory=dict)
    useless: dict[int, str] = field(default_factory=dict)
    """Why the replies to a question held no answer."""
    elsewhere: bool = False
    """Other questions of the round were answered before this call."""

    def answers_others(self) -> bool:
        return self.answered > 0 or self.elsewhere

    def done(self) -> bool:
        self.over = self.over or self.stopping()
        return self.over

    def land(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.under_way.discard(task)
        self.landed.set()
        self.landed = asyncio.Event()


class OpenAIBackend:
    """Asks one endpoint: a request for all answers that a question still needs, `concurrency` at a time."""

    kind: AuthorKind = "api"
    address: str | None = None

    def __init__(
        self,
        member: OpenAIMember,
        config: Config,
        *,
        jitter: random.Random | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Fetch the key. Raises `UserError` for one that cannot be sent and a bad URL, and what
        `secrets.fetch` raises."""
        self._member, self._how, self._max_chars = member, config.generate, config.rules.max_text_chars
        self._jitter, self._sleep, self._clock = jitter or random.Random(), sleep, clock
        self._key = _key_of(member)
        self._url, self._public = _endpoint(member)
        self._single = False
        """It refuses to give several answers at once."""
        self._limit = "max_tokens"
        self._left_out: set[str] = set()
        """Parameters that are 1, which it refuses to be told."""

    def answer(self, asks: Sequence[Ask], book: AnswerBook, stopping: Callable[[], bool]) -> None:
        """Ask until every question has its answers; see `Backend.answer`."""

        def ask() -> None:  # in a thread of its own: the caller's may have a loop that runs
            loop = asyncio.new_event_loop()
            try:
                loop.run_until_complete(self._answer(asks, book, stopping))
            finally:
                loop.close()

        with ThreadPoolExecutor(1, thread_name_prefix="member") as thread:
            thread.submit(ask).result()

    def close(self) -> None:
        """Do nothing: every call of `answer` ends what it opened."""

    # -- all questions -------------------------------------------------------------------------------------

    async def _answer(self, asks: Sequence[Ask], book: AnswerBook, stopping: Callable[[], bool]) -> None:
        auth = self._authorise if self._key is not None else None
        timeout = httpx.Timeout(None, connect=min(CONNECT_S, self._member.timeout_s))
        async with httpx.AsyncClient(
            auth=auth, timeout=timeout, verify=_trusted(), follow_redirects=False, cookies=_no_cookies()
        ) as client:
            call = _Call(book, client, asyncio.Semaphore(self._member.concurrency), stopping)
            call.elsewhere = any(not book.missing(ask) and book.answers(ask.place) for ask in asks)
            tasks = {asyncio.create_task(self._fill(ask, call)) for ask in asks}
            try:
                await self._see_to(tasks, call)
            finally:
                await _cancel(tasks)
        self._judge_unanswered(call, alone=len(asks) == 1)

    def _authorise(self, request: httpx.Request) -> httpx.Request:
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    async def _see_to(self, tasks: Collection["asyncio.Task[None]"], call: _Call) -> None:
        """Wait for all; after an error or when the member stops, only for requests that are under way. Raises
        the first error."""
        waiting, errors = set(tasks), list[BaseException]()
        stopped_at: float | None = None
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
            errors += [error for task in done if not task.cancelled() and (error := task.exception())]
            call.over = call.over or bool(errors)
            if not call.done():
                continue
            if stopped_at is None and call.stopping():
                stopped_at = time.monotonic()
            late = stopped_at is not None and time.monotonic() - stopped_at > GRACE_S
            for task in waiting - (set() if late else call.under_way):
                task.cancel()
        if errors:
            raise errors[0]

    def _judge_unanswered(self, call: _Call, *, alone: bool) -> None:
        """Give up questions without answers where the endpoint answers others; raise where it answers none. A
        round of one question has no others: what was ever answered counts then."""
        before = alone and call.book.totals()["answers"] > 0
        if call.over and not call.answers_others():
            return
        if call.declined and not (call.answers_others() or before):
            raise next(iter(call.declined.values()))
        if call.useless and not call.answers_others():
            raise Unavailable(f"{self._public}: {next(iter(call.useless.values()))}")
        for place, error in call.declined.items():
            call.book.give_up(place, error.problem)
        for place, why in call.useless.items():
            call.book.give_up(place, why)

    # -- one question --------------------------------------------------------------------------------------

    async def _fill(self, ask: Ask, call: _Call) -> None:
        """Ask one question until it has its answers, is given up or declined."""
        useless, single = 0, self._single
        tries = 0  # in a row that brought no response
        while (many := call.book.missing(ask)) and not call.done():
            many = 1 if single or self._single else many
            try:
                async with call.slots:
                    if call.done():
                        return
                    tries += 1
                    kept, why = await self._request(ask, many, call)
            except _Declined as declined:
                if many == 1:
                    call.declined[ask.place] = declined
                    return
                single, tries = True, 0
                continue
            except _Failed as failed:
                if not await self._wait_after(failed, tries, ask, call):
                    return
                continue
            tries, useless = 0, 0 if kept else useless + 1
            self._single = self._single or (single and kept > 0)
            if useless == USELESS:
                call.useless[ask.place] = f"{USELESS} replies in a row held no answer: {why}"
                return

    async def _wait_after(self, failed: _Failed, tries: int, ask: Ask, call: _Call) -> bool:
        """Wait before the next try; False where the question is given up instead.

        That is where others of the round were answered. Raises `Unavailable` where none was.
        """
        if tries >= TRIES:
            if failed.of_question and call.answers_others():
                call.book.give_up(ask.place, f"the endpoint answers others, but to this: {failed}")
                return False
            raise Unavailable(f"{self._public}: {failed}, {tries} times in a row") from None
        backoff = FIRST_WAIT_S * 2 ** (tries - 1) * self._jitter.uniform(0.5, 1.0)
        await self._sleep(min(LAST_WAIT_S, max(backoff, failed.wait_s)))
        return True

    async def _request(self, ask: Ask, many: int, call: _Call) -> tuple[int, str]:
        """Send one request and keep what it brings: how many answers, and why others are of no use."""
        prompt = self._prompt_bytes(ask.question.text) + TEMPLATE_TOKENS
        most = (prompt, many * self._how.max_new_tokens)
        ticket = await self._ticket(ask.place, most, call)
        try:
            sent = self._body(ask.question.text, many)
            reply = await self._post(json.dumps(sent).encode(), ticket, call)
        finally:
            call.land()
        if reply.status != 200:
            call.book.withdraw(ticket, charged=reply.status in GAVE_UP)
            self._refused(reply, sent)
        found = read_reply(reply.body, chat=self._member.api == "chat", max_chars=self._max_chars)
        took = (
            most[0] if found.prompt_tokens is None else found.prompt_tokens,
            most[1] if found.answer_tokens is None else found.answer_tokens,
        )
        kept = call.book.settle(
            ticket, found.answers, wanted=ask.wanted, tokens=sum(took), cost=self._price(took)
        )
        if found.useless:
            call.book.note_garbage(len(found.useless))
        call.answered += kept > 0
        return kept, found.useless[0] if found.useless else "there is no text in them"

    async def _ticket(self, place: int, most: tuple[int, int], call: _Call) -> int:
        """Note a request in the book. What is under way may turn out cheaper: the budget ends after it."""
        task = asyncio.current_task()
        assert task is not None
        while True:
            try:
                ticket = call.book.send(place, tokens=sum(most), cost=self._price(most))
            except Paused:
                if not call.under_way:
                    raise
                await call.landed.wait()
            else:
                call.under_way.add(task)
                return ticket

    async def _post(self, body: bytes, ticket: int, call: _Call) -> Reply:
        try:
            async with (
                asyncio.timeout(self._member.timeout_s),
                call.client.stream("POST", self._url, content=body, headers=HEADERS) as response,
            ):
                return Reply(response.status_code, response.headers, await _read(response))
        except TimeoutError:
            call.book.withdraw(ticket, charged=True)
            why = f"no whole response within {self._member.timeout_s:g} s"
            raise _Failed(why, of_question=True) from None
        except httpx.HTTPError as error:
            # an endpoint may have worked for a response that never came; one that was not reached has not
            reached = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
            call.book.withdraw(ticket, charged=reached)
            raise _Failed(self._clean(str(error)) or type(error).__name__, of_question=reached) from None

    def _refused(self, reply: Reply, sent: Mapping[str, Any]) -> NoReturn:
        status, said = reply.status, self._clean(_message(reply.body))
        told = f"({status}): {said}" if said else f"({status})"
        model, url, key = self._member.model, self._public, self._member.api_key
        if status in BUSY or status >= 500:
            wait = _retry_after(reply.headers.get("retry-after", ""), self._clock())
            raise _Failed(f"it answers {told}", of_question=status == 500, wait_s=wait)
        if status in (401, 403):
            problem = f"the endpoint {'refuses it' if key else 'wants one'} ({status})"
            raise UserError("member.api_key", key, problem, "give the key of an account that may ask")
        if status == 402:
            problem = "the endpoint wants to be paid (402)"
            raise UserError("member.api_key", key, problem, "pay, or name another endpoint")
        if status == 404 and said:
            raise UserError("member.model", model, f"the endpoint does not know it {told}", "name one it has")
        if status < 400 or status in (404, 405):
            problem = f"nothing answers there as OpenAI's API does {told}"
            raise UserError("member.url", url, problem, "name the address that ends before /chat/completions")
        if self._comes_round(said, sent):
            raise _Failed(f"it refuses a parameter {told}")
        problem = f"the endpoint refuses the request {told}"
        raise _Declined("member.model", model, problem, "change what it asks for, or the model")

    def _comes_round(self, said: str, sent: Mapping[str, Any]) -> bool:
        """Whether the next request is another than the one `sent`: under a newer name, or without what may be
        left out."""
        if NEWER_LIMIT in said and NEWER_LIMIT not in sent:
            self._limit = NEWER_LIMIT
            return True
        for name, value in (("temperature", self._how.temperature), ("top_p", self._how.top_p)):
            if name in said and value == 1.0 and name in sent:
                self._left_out.add(name)
                return True
        return False

    # -- what is sent --------------------------------------------------------------------------------------

    def _body(self, question: str, many: int) -> dict[str, Any]:
        how, member = self._how, self._member
        content: dict[str, Any]
        if member.api == "chat":
            messages = [{"role": "user", "content": question}]
            if member.system:
                messages.insert(0, {"role": "system", "content": member.system})
            content = {"messages": messages}
        else:
            content = {"prompt": f"{member.system}\n{question}\n" if member.system else f"{question}\n"}
        content |= {"model": member.model, "n": many, self._limit: how.max_new_tokens}
        shares = {"temperature": how.temperature, "top_p": how.top_p}
        content |= {name: value for name, value in shares.items() if name not in self._left_out}
        return content

    def _prompt_bytes(self, question: str) -> int:
        return len(f"{self._member.system or ''}\n{question}\n".encode("utf-8", "replace"))

    def _price(self, tokens: tuple[int, int]) -> float:
        return (tokens[0] * self._member.price_in + tokens[1] * self._member.price_out) / 1e6

    def _clean(self, text: str) -> str:
        """One short printable line of somebody else's text, without the key."""
        if self._key is not None:
            text = text.replace(self._key, "***")
        return one_line(text, MAX_SAID)


def read_reply(body: bytes | None, *, chat: bool, max_chars: int) -> Found:
    """Answers in the body of a response, whatever it is."""
    if body is None:
        return Found([], [f"it is longer than {MAX_BODY} bytes"])
    reply = _json(body)
    if not isinstance(reply, dict):
        return Found([], ["it is no JSON object"])
    usage = reply.get("usage")
    took = (_tokens(usage, "prompt_tokens"), _tokens(usage, "completion_tokens"))
    choices = reply.get("choices")
    if not isinstance(choices, list) or not choices:
        return Found([], ["it holds no choices"], *took)
    read = [_read_choice(choice, chat, max_chars) for choice in choices]
    useless = [one for one in read if isinstance(one, str)]
    return Found([one for one in read if isinstance(one, Answer)], useless, *took)


def _read_choice(choice: object, chat: bool, max_chars: int) -> Answer | str:
    holder = choice.get("message") if chat and isinstance(choice, dict) else choice
    text = holder.get("content" if chat else "text") if isinstance(holder, dict) else None
    if not isinstance(choice, dict) or not isinstance(text, str):
        return "a choice holds no text"
    reason = choice.get("finish_reason")
    if reason not in ("stop", "length"):
        return "a choice ended for another reason than stop and length"
    if len(text) > max_chars:
        return f"a text has more than {max_chars} characters"
    return Answer(text.encode("utf-8", "replace").decode(), "stop" if reason == "stop" else "length")


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _tokens(usage: object, name: str) -> int | None:
    found = usage.get(name) if isinstance(usage, dict) else None
    return found if type(found) is int and 0 <= found <= MAX_TOKENS else None


def _message(body: bytes | None) -> str:
    reply = _json(body or b"")
    error = reply.get("error") if isinstance(reply, dict) else None
    said = error.get("message") if isinstance(error, dict) else error
    return said if isinstance(said, str) else ""


def _retry_after(text: str, now: float) -> float:
    """Seconds that a `Retry-After` asks for; 0 where it cannot be read."""
    if text.isascii() and text.isdecimal():
        return float(text[:9])
    try:
        date = email.utils.parsedate_to_datetime(text)
        return max(0.0, date.replace(tzinfo=date.tzinfo or datetime.UTC).timestamp() - now)
    except (ValueError, OverflowError):
        return 0.0


async def _read(response: httpx.Response) -> bytes | None:
    """A body, undecoded; None where it is too long."""
    parts, length = [], 0
    async for part in response.aiter_raw():
        length += len(part)
        if length > MAX_BODY:
            return None
        parts.append(part)
    return b"".join(parts)


async def _cancel(tasks: Collection["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _key_of(member: OpenAIMember) -> str | None:
    if member.api_key is None:
        return None
    key = fetch(member.api_key, "member.api_key").strip()
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        problem = "the secret there is no key: a key is one word of plain characters"
        raise UserError("member.api_key", member.api_key, problem, "put the key alone there")
    return key


def _endpoint(member: OpenAIMember) -> tuple[httpx.URL, str]:
    path = "/chat/completions" if member.api == "chat" else "/completions"
    try:
        base = httpx.URL(member.url)
        return base.copy_with(path=base.path.rstrip("/") + path), public(member.url)
    except (httpx.InvalidURL, ValueError) as error:
        raise UserError("member.url", None, str(error), "name the endpoint's address") from None


def _no_cookies() -> CookieJar:
    """A jar that reads no cookie: what Python makes of a strange one is a traceback."""
    return CookieJar(DefaultCookiePolicy(netscape=False, rfc2965=False))


@functools.cache
def _trusted() -> ssl.SSLContext:
    return httpx.create_ssl_context()
