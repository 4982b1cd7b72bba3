"""What the tests of members that ask an endpoint share."""

import asyncio
import random
import socket
import threading

from endpoints import Request

from sapo.core.config.load import Config, load
from sapo.core.config.members import OpenAIMember
from sapo.node.member.answer_book import AnswerBook
from sapo.node.member.openai import OpenAIBackend

KEY = "sk-very-secret-0123456789"
MANY = 16  # generate.max_new_tokens


class Naps:
    """Waits that are noted and not waited for; after `enough` of them whoever waits waits for good."""

    def __init__(self, enough: int = 1000) -> None:
        self.taken: list[float] = []
        self.enough = enough
        self.reached = threading.Event()

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        if len(self.taken) >= self.enough:
            self.reached.set()
            await asyncio.Event().wait()
        await asyncio.sleep(0)


def config_for(url: str, *sets: str) -> Config:
    member = ["member.type=openai", f"member.url={url}", "member.model=m"]
    return load(sets=[*member, f"generate.max_new_tokens={MANY}", *sets], env={})


def backend_for(url: str, *sets: str, naps: Naps | None = None, now: float = 0.0) -> OpenAIBackend:
    config = config_for(url, *sets)
    assert isinstance(config.member, OpenAIMember)
    return OpenAIBackend(
        config.member, config, jitter=random.Random(1), sleep=naps or Naps(), clock=lambda: now
    )


def texts(book: AnswerBook, place: int = 0) -> list[str]:
    return [one.text for one in book.answers(place)]


def echo(request: Request) -> None:
    """As many answers as were asked for, numbered over all requests."""
    request.answer(*[f"answer {request.number}.{k}" for k in range(request.body["n"])])


def bound(question: str, many: int = 4) -> int:
    return len(f"\n{question}\n") + 64 + many * MANY


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
