"""What the flows do without a server: go on when Prefect is away, tell its faults from their own."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from swarms import make_home, small_config

from sapo.core.errors import Unavailable
from sapo.flows import node
from sapo.flows.common import here
from sapo.flows.orchestrator import Orchestrator
from sapo.ops.archive import Archive
from sapo.ops.process import Process


@pytest.fixture
def process(tmp_path: Path) -> Process:
    return Process.at(str(make_home(tmp_path / "home", small_config()).root))


def test_without_prefect_there_is_nothing_to_record(process: Process) -> None:
    orchestrator = Orchestrator(process, None)
    assert orchestrator.run(lambda: "flow", lambda: "plain") == "plain"
    assert orchestrator.unrecorded == 0


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
