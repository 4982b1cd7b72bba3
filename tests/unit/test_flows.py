"""What the flows do without a server: go on when Prefect is away, tell its faults from their own."""

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prefect.exceptions import TerminationSignal
from swarms import make_home, small_config

from sapo.core.errors import Unavailable
from sapo.flows import node
from sapo.flows.common import here
from sapo.flows.orchestrator import Orchestrator
from sapo.ops.archive import Archive
from sapo.ops.process import Process


class Switched(http.server.BaseHTTPRequestHandler):
    healthy = True

    def do_GET(self) -> None:
        self.send_response(200 if type(self).healthy else 503)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Switched.healthy = True
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Switched)
    thread = threading.Thread(target=found.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{found.server_address[1]}/api"
    found.shutdown()
    found.server_close()
    thread.join()


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process.at(str(make_home(tmp_path / "home", small_config()).root))


def fails(error: BaseException) -> str:
    raise error


def test_a_flow_is_run_when_prefect_is_there(process: Process, server: str) -> None:
    orchestrator = Orchestrator(process, server)
    assert orchestrator.run(lambda: "flow", lambda: "plain") == "flow"
    assert orchestrator.unrecorded == 0


def test_without_prefect_there_is_nothing_to_record(process: Process) -> None:
    orchestrator = Orchestrator(process, None)
    assert orchestrator.run(lambda: "flow", lambda: "plain") == "plain"
    assert orchestrator.unrecorded == 0


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("refused"), RuntimeError("Failed to reach API"), httpx.ReadTimeout("slow")]
)
def test_work_goes_on_when_prefect_goes_away_under_a_flow(
    process: Process, server: str, error: Exception
) -> None:
    orchestrator = Orchestrator(process, server)
    assert orchestrator.run(lambda: fails(error), lambda: "plain") == "plain"
    assert orchestrator.unrecorded == 1


def test_an_absence_is_said_once_counted_and_its_end_is_said(
    process: Process, server: str, caplog: pytest.LogCaptureFixture
) -> None:
    orchestrator = Orchestrator(process, server)
    Switched.healthy = False
    for _ in range(3):
        assert orchestrator.run(lambda: fails(AssertionError("started")), lambda: "plain") == "plain"
    Switched.healthy = True
    assert orchestrator.run(lambda: "flow", lambda: "plain") == "flow"
    said = [record.getMessage() for record in caplog.records if record.name == "sapo.flows.orchestrator"]
    assert len(said) == 2
    assert "is away" in said[0]
    assert "no record of 3 runs" in said[1]


def test_what_the_work_itself_raises_is_no_fault_of_prefects(process: Process, server: str) -> None:
    def flow() -> str:
        with process.own():
            raise RuntimeError("the loss is not finite")

    with pytest.raises(RuntimeError, match="the loss is not finite"):
        Orchestrator(process, server).run(flow, lambda: "plain")


def test_prefects_own_answer_to_sigterm_is_a_request_to_stop(process: Process, server: str) -> None:
    answer = Orchestrator(process, server).run(lambda: fails(TerminationSignal(15)), lambda: "plain")
    assert answer == "plain"
    assert process.stop.is_set()


def test_a_flow_that_a_deployment_starts_finds_its_home_by_its_argument(process: Process) -> None:
    found = here(str(process.home.root))
    assert found is not process
    assert (found.home, found.config) == (process.home, process.config)


def test_the_stop_flag_of_the_home_stops_a_process(process: Process) -> None:
    assert not process.stopping()
    process.home.stop_flag.touch()
    assert process.stopping()


def test_the_archive_goes_on_after_what_is_unavailable(process: Process) -> None:
    answers: list[object] = [{"rows": 2}, Unavailable("away"), {"rows": 3}]

    def one() -> dict[str, int]:
        answer = answers.pop(0)
        if not answers:
            process.stop.set()
        if isinstance(answer, Unavailable):
            raise answer
        assert isinstance(answer, dict)
        return answer

    assert Archive(process).passes(60.0, one) == 5


@pytest.mark.parametrize(
    ("why", "seconds", "delivered"), [("", 200, True), ("", 900, False), ("away", 200, False)]
)
def test_what_a_large_model_takes_to_be_delivered_is_waited_for_unless_it_fails(
    why: str, seconds: int, delivered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[float] = []

    def drain(timeout: float) -> bool:
        spent.append(timeout)
        return len(spent) >= seconds

    deliverer = SimpleNamespace(why_owing=lambda: why)
    runtime = SimpleNamespace(deliverer=deliverer, drain=drain)
    session: Any = SimpleNamespace(process=SimpleNamespace(stopping=lambda: False), runtime=runtime)
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: sum(spent)))
    assert node.deliver_the_rest(session) == delivered
