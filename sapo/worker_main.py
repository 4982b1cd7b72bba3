"""The task worker process: reads requests from standard input, answers on standard output, in JSON lines.

Started by `sapo.workers` with PYTHONHASHSEED=0. A request is `[op, dataset, config, seed, index, text]`, a
reply `[kind, value]`. What the libraries print goes nowhere.
"""

import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from typing import Any, TextIO

from sapo.verify import AnswerFormat, score

EXIT_MEMORY = 3


def main(argv: list[str]) -> int:
    """Serve until input closes. Arguments: parent's pid, answer format, time limit, memory in MiB."""
    parent, answer_format, limit, memory = int(argv[0]), argv[1], float(argv[2]), int(argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (memory << 20, memory << 20))
    server = Server(answer_format)  # type: ignore[arg-type]
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    os.dup2(nowhere, 2)
    _send(replies, ["ready", server.versions()])
    return _serve(server, sys.stdin, replies, limit * 1.5 + 5.0)


def _serve(server: "Server", requests: TextIO, replies: int, alarm_s: float) -> int:
    for line in requests:
        # The parent enforces the limit; should it be gone, the kernel ends this process all the same.
        signal.setitimer(signal.ITIMER_REAL, alarm_s)
        try:
            reply = server.handle(json.loads(line))
        except MemoryError as error:
            # A traceback keeps the frames alive, and with them what filled the memory.
            traceback.clear_frames(error.__traceback__)
            _send(replies, ["memory", None])
            return EXIT_MEMORY
        _send(replies, reply)
        signal.setitimer(signal.ITIMER_REAL, 0)
    return 0


def _send(replies: int, reply: list[Any]) -> None:
    data = memoryview(json.dumps(reply).encode() + b"\n")
    while data:
        data = data[os.write(replies, data) :]


def _watch(parent: int) -> None:
    """End this process when its parent has ended."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


class Server:
    """Answers single requests."""

    def __init__(self, answer_format: AnswerFormat) -> None:
        from sapo import gym

        self._gym = gym
        self._items = gym.Gym()
        self._answer_format = answer_format

    def versions(self) -> str:
        """The version of reasoning-gym in this process."""
        from importlib.metadata import version

        return version("reasoning-gym")

    def handle(self, request: list[Any]) -> list[Any]:
        """The reply to one request; raises `MemoryError` only."""
        op, *place, text = request
        if op == "names":
            return ["names", sorted(self._gym.DATASETS)]
        try:
            if op == "check":
                self._gym.construct(place[0], json.loads(place[1]), place[2], place[3])
                return ["ok", None]
            dataset, entry = self._items.entry(*place)
        except self._gym.ParameterError as error:
            if op == "check":
                return ["parameter", [error.field, error.value, error.problem, error.remedy]]
            return ["unscorable", _reason(error)]
        except MemoryError:
            raise
        except Exception as error:  # a generator may raise anything; its message is the reason
            return ["unscorable", _reason(error)]
        return self._answer(op, dataset, entry, text)

    def _answer(self, op: str, dataset: Any, entry: dict[str, Any], text: str) -> list[Any]:
        if op == "score":
            value = score(dataset, entry, text, self._answer_format)
            return ["unscorable", value] if isinstance(value, str) else ["score", value]
        if op == "question":
            question = entry["question"]
            if not isinstance(question, str):
                return ["unscorable", "error: the question is no text"]
            return ["question", question]
        if op == "answer":
            answer = entry["answer"]
            return ["answer", None if answer is None else str(answer)]
        if op == "digest":
            return ["digest", self._gym.digest(entry)]
        return ["unscorable", f"error: unknown request {op!r}"]


def _reason(error: Exception) -> str:
    return f"error: {type(error).__name__}: {error}"[:300]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
