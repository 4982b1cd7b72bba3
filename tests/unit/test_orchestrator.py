"""Flows beside their work: what Prefect does before and after it may hang or fail without holding it up."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prefect.exceptions import TerminationSignal

from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.flows import orchestrator
from sapo.flows.orchestrator import ATTEMPT, Orchestrator, at_work, count_tasks
from sapo.ops.process import Process


def a_process() -> Process:
    return Process(Home(Path("nowhere")), Config(), threading.Event())


class Prefect(http.server.BaseHTTPRequestHandler):
    status = 200
    known_tasks = 0
    hangs = False
    promised = 0
    """Bytes of an answer that never come: the server ends in the middle of it."""

    def do_GET(self) -> None:
        if type(self).hangs:
            time.sleep(1.0)
        self.send_response(type(self).status)
        self.end_headers()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        body = json.dumps(type(self).known_tasks).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + type(self).promised))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Prefect.status, Prefect.known_tasks, Prefect.hangs, Prefect.promised = 200, 0, False, 0
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Prefect)
    thread = threading.Thread(target=found.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{found.server_address[1]}/api"
    found.shutdown()
    found.server_close()
    thread.join()


def fails(error: BaseException) -> str:
    raise error


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), RuntimeError("Failed to reach API"), httpx.ReadTimeout("slow")]
)
def test_work_goes_on_when_prefect_goes_away_under_a_flow(server: str, error: Exception) -> None:
    one = Orchestrator(a_process(), server)
    assert one.run(lambda: fails(error), lambda: "plain") == "plain"
    assert one.unrecorded == 1


def test_runs_while_prefect_is_away_are_counted_and_the_next_is_a_flow_again(server: str) -> None:
    one = Orchestrator(a_process(), server)
    Prefect.status = 503
    for _ in range(3):
        assert one.run(lambda: pytest.fail("started"), lambda: "plain") == "plain"
    assert one.unrecorded == 3
    Prefect.status = 200
    assert one.run(lambda: "flow", lambda: "plain") == "flow"


def test_prefects_own_answer_to_sigterm_is_a_request_to_stop(server: str) -> None:
    worker = a_process()
    assert Orchestrator(worker, server).run(lambda: fails(TerminationSignal(15)), lambda: "plain") == "plain"
    assert worker.stop.is_set()


def test_a_flow_that_does_not_end_is_left_alone_and_counts_until_it_does(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "END_S", 0.05)
    prefect = threading.Event()

    def flow() -> str:
        made = at_work(lambda: "made")
        prefect.wait(20)
        return made

    one = Orchestrator(a_process(), server)
    assert one.run(flow, lambda: "plain") == "made"
    assert one.unrecorded == 1
    assert one.metrics() == {"prefect/unrecorded": 1.0}
    prefect.set()
    one.wait(20)
    assert one.unrecorded == 0
    assert one.metrics() == {}


def test_a_flow_that_cannot_be_ended_was_made_once(server: str) -> None:
    def flow() -> str:
        at_work(lambda: "made")
        raise httpx.ConnectError("refused")

    one = Orchestrator(a_process(), server)
    assert one.run(flow, lambda: "made twice") == "made"
    assert one.unrecorded == 1
    assert one.metrics()["outage/prefect"] == 1.0


def test_the_work_goes_on_while_prefect_is_slow_and_is_the_flows_once_it_begins(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "PROMPT_S", 0.02)
    done: list[tuple[int, str]] = []
    prefect = threading.Event()

    def step() -> bool:
        number = len(done)
        if number == 3:
            prefect.set()  # the flow is ready in the middle of a step, and must wait for its end
        time.sleep(0.02)
        assert len(done) == number
        done.append((number, "meanwhile"))
        return True

    def work() -> str:
        done.append((len(done), "flow"))
        return "made"

    def flow() -> str:
        prefect.wait(20)
        return at_work(work)

    one = Orchestrator(a_process(), server)
    assert one.run(flow, lambda: pytest.fail("plainly"), step) == "made"
    assert [who for _, who in done[:4]] == ["meanwhile"] * 4
    assert [who for _, who in done].count("flow") == 1
    assert done[-1][1] == "flow"
    assert one.metrics() == {}


@pytest.mark.parametrize("ends", [True, False])
def test_what_the_work_raises_is_raised_whether_or_not_the_flow_can_end(
    server: str, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    monkeypatch.setattr(orchestrator, "END_S", 0.05)
    worker, prefect = a_process(), threading.Event()

    def work() -> str:
        worker.failure = RuntimeError("the loss is not finite")
        raise worker.failure

    def flow() -> str:
        try:
            return at_work(work)
        finally:
            if not ends:
                prefect.wait(20)

    with pytest.raises(RuntimeError, match="the loss is not finite"):
        Orchestrator(worker, server).run(flow, lambda: "plain")
    prefect.set()


def test_a_server_that_hangs_is_waited_for_once(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orchestrator, "HEALTH_S", 0.8)
    monkeypatch.setattr(orchestrator, "AWAY_HEALTH_S", 0.02)
    Prefect.hangs = True
    one = Orchestrator(a_process(), server)
    assert one.run(lambda: pytest.fail("started"), lambda: "plain") == "plain"
    started = time.monotonic()
    for _ in range(5):
        assert one.run(lambda: pytest.fail("started"), lambda: "plain") == "plain"
    assert time.monotonic() - started < 0.8
    assert one.unrecorded == 6


def five_tasks() -> str:
    """The work of a flow run of which Prefect knows."""
    count_tasks(5)
    ATTEMPT.get().run_id = "a run of Prefect's"
    return "made"


def test_task_runs_that_prefect_did_not_record_are_counted(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "SETTLED_S", 0.0)
    Prefect.known_tasks = 7

    def work() -> str:
        count_tasks(5)
        return five_tasks()

    one = Orchestrator(a_process(), server)
    for _ in range(3):
        assert one.run(lambda: at_work(work), lambda: "plain") == "made"
    assert one.unrecorded_tasks == 6, "the third is counted later: it may still be written"
    assert one.metrics() == {"prefect/unrecorded_tasks": 6.0}


def test_a_server_that_ends_in_the_middle_of_an_answer_stops_no_work(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orchestrator, "SETTLED_S", 0.0)
    Prefect.promised = 9
    one = Orchestrator(a_process(), server)
    for _ in range(2):
        assert one.run(lambda: at_work(five_tasks), lambda: "plain") == "made"
    assert one.unrecorded_tasks == 0, "not known yet"
