"""SIGKILL at random instants over a member: nothing is published twice, and no answer is paid for twice."""

import json
import random
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from swarms import make_home, small_config

from sapo.bus import open_bus
from sapo.core.config.home import Home
from sapo.node.member.answer_book import AnswerBook
from sapo.node.member.runtime import BOOK
from sapo.ops.archiver import Archiver
from sapo.store.history import open_store
from sapo.store.history.query import query

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

TOKENS = {"prompt_tokens": 10, "completion_tokens": 20, "total_tokens": 30}
CHILD = Path(__file__).with_name("member_child.py")


@dataclass
class Endpoint:
    """Speaks as much of OpenAI's API as a member needs; kills the member at the requests it was told to."""

    rng: random.Random
    kills: int
    child: subprocess.Popen[bytes] | None = None
    asked: list[str] = field(default_factory=list)
    """Questions, in the order of their requests."""
    unheard: set[str] = field(default_factory=set)
    """Questions whose member was killed before it had the reply."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def reply(self, body: dict[str, Any]) -> bytes | None:
        """A response's body; None where nobody is left to hear it."""
        question = body["messages"][-1]["content"]
        with self.lock:
            self.asked.append(question)
            before = self.kills > 0 and self.rng.random() < 0.5
            if before:
                self._kill()
                self.unheard.add(question)
                return None
        texts = [f"{self.rng.randrange(100)}" for _ in range(body["n"])]
        choices = [
            {"index": n, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}
            for n, text in enumerate(texts)
        ]
        return json.dumps({"object": "chat.completion", "choices": choices, "usage": TOKENS}).encode()

    def after(self) -> None:
        """What may happen once a reply is on its way: a kill while it is read, kept, signed or published."""
        with self.lock:
            if self.kills and self.rng.random() < 0.5:
                threading.Timer(self.rng.random() * 0.05, self._kill_once).start()

    def _kill_once(self) -> None:
        with self.lock:
            if self.kills:
                self._kill()

    def _kill(self) -> None:
        assert self.child is not None
        if self.child.poll() is None:
            self.kills -= 1
            self.child.send_signal(signal.SIGKILL)
            self.child.wait()


@contextmanager
def served(endpoint: Endpoint) -> Iterator[Endpoint]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            length = int(self.headers["content-length"])
            body = self.rfile.read(length)
            if len(body) < length:
                return  # it was killed while it asked
            reply = endpoint.reply(json.loads(body))
            if reply is None:
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            try:
                self.wfile.write(reply)
            except OSError:
                return  # it was killed while it read
            endpoint.after()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    endpoint.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_ten_kills_publish_nothing_twice_and_pay_for_no_answer_twice(tmp_path: Path) -> None:
    kills, rounds = 10, 30  # a kill may cost a round both its questions
    with served(Endpoint(random.Random(11), kills)) as endpoint:
        home = member_home(tmp_path / "home", endpoint.url, rounds)
        starts = 0
        while starts == 0 or endpoint.child is None or endpoint.child.returncode != 0:
            starts += 1
            with endpoint.lock:
                endpoint.child = subprocess.Popen([sys.executable, str(CHILD), str(home.root)])
            assert endpoint.child.wait() in (0, -signal.SIGKILL)
    assert endpoint.kills == 0
    assert starts == kills + 1
    questions = Counter(endpoint.asked)
    assert max(questions.values()) == 1, "a question was paid for twice"
    published = archived(home)
    # a kill between a reply and its way to the disk loses an answer that was paid for; none is asked again
    assert set(published) <= set(endpoint.asked) - endpoint.unheard
    with AnswerBook(home.node("m0") / BOOK) as book:
        totals = book.totals()
    assert totals["requests"] >= len(endpoint.asked)  # some were noted and never left
    assert totals["lost"] == totals["requests"] - len(published)
    assert totals["answers"] == 4 * len(published)
    print(f"{kills} kills in {rounds} rounds: {len(published)} groups, {totals['lost']:.0f} requests lost")


def member_home(path: Path, url: str, rounds: int) -> Home:
    config = small_config(
        [
            'tasks=[{dataset="chain_sum", config={min_digits=6, max_digits=6}}]',  # none comes up twice
            "swarm.site=m",
            "swarm.nodes=1",
            f"swarm.rounds={rounds}",
            "batch.local=2",
            "batch.completions=4",
            "member.type=openai",
            f"member.url={url}",
            "member.model=fake",
            "member.concurrency=2",
        ]
    )
    return make_home(path, config)


def archived(home: Home) -> list[str]:
    """The questions of the groups on the bus, as the history holds them: every completion once."""
    config = home.load_config()
    store = open_store(config, home)
    with closing(open_bus(config, home)) as bus:
        Archiver(bus, store, home.load_manifest()).run()
    rows = query(store, "SELECT group_id, k, question FROM rollouts").to_pylist()
    assert set(Counter((row["group_id"], row["k"]) for row in rows).values()) == {1}
    return [row["question"] for row in rows if row["k"] == 0]
