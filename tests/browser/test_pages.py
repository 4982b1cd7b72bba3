"""What people see: the pages that `sapo ui` opens on a real swarm that has finished, in a real browser.

And what others don't: accounts of the machine that lack the password, and pages of other sites.
"""

import json
import signal
import sqlite3
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from finished import ENV, NODES, FinishedSwarm
from foreign_page import FETCH, SUBMIT, other_site
from mlflow import MlflowClient
from mlflow_runs import runs_of
from playwright.sync_api import Browser, Page, Response, expect

from infra.browser.session import browser
from sapo.core import service_registry
from sapo.core.child_process import alive
from sapo.core.config.home import Home
from sapo.core.service_registry import Service, Services
from sapo.ops.gate import basic

pytestmark = [pytest.mark.browser, pytest.mark.services, pytest.mark.timeout(900)]

PATIENCE_MS = 60_000
"""A page may load as slowly as a busy machine makes it."""
HARMLESS = ("mlflow/users/current",)
"""What MLflow's pages ask for and do without."""
TRIFLES = ("Failed to load resource", "ResizeObserver loop")
"""What is said of answers that are looked at by themselves, and of a layout that takes one more frame."""
CURVES = """() => [...document.querySelectorAll('.js-plotly-plot')].flatMap(
    plot => plot.data.map(line => [line.name, line.x ? line.x.length : 0]))"""


@dataclass
class Site:
    """A swarm that has run, and what `sapo ui` prints: the pages that show it."""

    home: Home
    pages: dict[str, str]
    found: Services

    @property
    def mlflow(self) -> str:
        return self.pages["MLflow"].partition("/#")[0]

    @property
    def prefect(self) -> str:
        return self.pages["Prefect"].removesuffix("/runs")

    def run(self, name: str) -> Any:
        client = MlflowClient(self.found.mlflow.url)
        (found,) = runs_of(client, "tiny", f"attributes.run_name = '{name}'")
        return found

    def flow_runs(self) -> dict[str, str]:
        """Ids by name, the oldest first."""
        database = f"{(self.home.prefect / 'prefect.db').as_uri()}?mode=ro"
        with closing(sqlite3.connect(database, uri=True)) as connection:
            return dict(connection.execute("SELECT name, id FROM flow_run ORDER BY start_time"))


@dataclass
class Watched:
    """A page, and what went wrong in it."""

    page: Page
    wrong: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        page.on("pageerror", lambda error: self._note(str(error)))
        page.on("console", lambda said: self._note(said.text) if said.type == "error" else None)
        page.on("response", self._response)

    def _note(self, text: str) -> None:
        if not any(trifle in text for trifle in TRIFLES):
            self.wrong.append(text)

    def _response(self, response: Response) -> None:
        if response.status >= 400 and not any(part in response.url for part in HARMLESS):
            self.wrong.append(f"{response.status} {response.url}")


@pytest.fixture(scope="module")
def site(finished_swarm: FinishedSwarm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    home = finished_swarm.copy(tmp_path_factory.mktemp("pages")).home
    with opened(home) as pages, pytest.MonkeyPatch.context() as patch:
        found = service_registry.read(home)
        assert found is not None
        for name, value in found.mlflow.credentials().items():
            patch.setenv(name, value)
        yield Site(home, pages, found)


@contextmanager
def opened(home: Home) -> Iterator[dict[str, str]]:
    """The links that `sapo ui` prints, until it is ended as Ctrl-C ends it; its servers end with it."""
    command = [sys.executable, "-m", "sapo.cli", "ui", "--home", str(home.root)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield dict(process.stdout.readline().split() for _ in range(2))
            found = service_registry.read(home)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
    assert found is not None
    for one in (found.mlflow, found.prefect):
        assert one.pid is not None
        assert not alive(one.pid)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as started:
        yield started


@pytest.fixture
def watched(chromium: Browser) -> Iterator[Watched]:
    """A page whose test fails if anything goes wrong in it, whatever else it shows."""
    context = chromium.new_context(viewport={"width": 1400, "height": 1000}, locale="en-US")
    context.set_default_timeout(PATIENCE_MS)
    page = Watched(context.new_page())
    context.on("page", page.watch)
    page.watch(page.page)
    yield page
    context.close()
    assert not page.wrong, page.wrong


def curves(page: Page, wanted: int) -> list[tuple[str, int]]:
    """Names and numbers of points of the lines drawn, once there are as many as wanted."""
    page.wait_for_function(f"() => ({CURVES})().length >= {wanted}", timeout=PATIENCE_MS)
    return [(name, points) for name, points in page.evaluate(CURVES)]


def followed(page: Page, link: str) -> Page:
    """The page a link of a description opens beside this one."""
    with page.context.expect_page() as opened:
        page.get_by_role("link", name=link, exact=True).first.click()
    return opened.value


def test_charts_show_the_curves_of_all_nodes_at_once(site: Site, watched: Watched) -> None:
    watched.page.goto(site.pages["MLflow"])
    names = {name for name, _ in curves(watched.page, len(NODES))}
    for chart in ("reward/local", "reward/training_set"):
        expect(watched.page.get_by_text(chart, exact=True).first).to_be_visible()
    expect(watched.page.get_by_text("Step", exact=True).first).to_be_visible()
    for node in NODES:
        expect(watched.page.get_by_role("link", name=node, exact=True)).to_be_visible()
        assert any(name.startswith(node) for name in names)


def test_prefects_pages_show_the_flow_runs_of_all_nodes(site: Site, watched: Watched) -> None:
    watched.page.goto(site.pages["Prefect"])
    names = site.flow_runs()
    assert len(names) >= len(NODES)
    for name in sorted(names):
        expect(watched.page.get_by_text(name, exact=True).first).to_be_visible()


# -- who is not let in --------------------------------------------------------------------------------------

NOTHING: dict[str, Any] = {}
MLFLOW = "/api/2.0/mlflow"
PLACED = {"name": "theirs", "artifact_location": "/tmp/theirs"}
ASKED: list[tuple[str, str, dict[str, Any] | None]] = [
    ("prefect", "/runs", None),
    ("prefect", "/api/admin/settings", None),
    ("prefect", "/api/flow_runs/filter", NOTHING),
    ("prefect", "/api/flows/", {"name": "theirs"}),
    ("prefect", "/api/work_pools/", {"name": "theirs", "type": "process"}),
    ("prefect", "/api/block_documents/filter", {"include_secrets": True}),
    ("mlflow", "/", None),
    ("mlflow", f"{MLFLOW}/experiments/search?max_results=9", None),
    ("mlflow", "/get-artifact?run_uuid=RUN&path=rollouts.json", None),
    ("mlflow", f"{MLFLOW}/experiments/create", PLACED),
    ("mlflow", "/ajax-api/2.0/mlflow/experiments/create", PLACED),
    ("mlflow", f"{MLFLOW}/experiments/delete", {"experiment_id": "1"}),
]
"""A server, a path, and what is posted there; None gets it."""


def origin(service: Service) -> str:
    return service.url.removesuffix("/api")


def request_of(site: Site, server: str, path: str, body: dict[str, Any] | None) -> urllib.request.Request:
    url = f"{origin(getattr(site.found, server))}{path.replace('RUN', site.run('n0').info.run_id)}"
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})


def status(request: urllib.request.Request) -> int:
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def kept(site: Site) -> tuple[list[str], list[str], list[str]]:
    """Names of what the servers hold: experiments that are not deleted, flows, work pools."""
    experiments = [one.name for one in MlflowClient(site.found.mlflow.url).search_experiments()]
    database = f"{(site.home.prefect / 'prefect.db').as_uri()}?mode=ro"
    with closing(sqlite3.connect(database, uri=True)) as connection:
        flows, pools = (
            [name for (name,) in connection.execute(f"SELECT name FROM {table} ORDER BY name")]
            for table in ("flow", "work_pool")
        )
    return experiments, flows, pools


@pytest.mark.parametrize(("server", "path", "body"), ASKED)
def test_who_lacks_the_password_is_refused(
    site: Site, server: str, path: str, body: dict[str, Any] | None
) -> None:
    before, request = kept(site), request_of(site, server, path, body)
    assert status(request) == 401
    request.add_header("Authorization", basic("sapo:guessed"))
    assert status(request) == 401
    assert kept(site) == before


@pytest.fixture(scope="module")
def other_port() -> Iterator[int]:
    """Where another site has a page."""

    with other_site() as port:
        yield port


@pytest.fixture
def let_in(site: Site, chromium: Browser) -> Iterator[Page]:
    """A browser that knows both passwords, for its user has followed both links."""
    context = chromium.new_context()
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    for link in site.pages.values():
        page.goto(link)
    yield page
    context.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_page_of_another_site_reads_and_changes_nothing(
    site: Site, let_in: Page, other_port: int, host: str
) -> None:
    let_in.goto(f"http://{host}:{other_port}/")
    before, answers = kept(site), []
    let_in.on("response", lambda response: answers.append((response.status, response.url)))
    for server, path, body in ASKED:
        request = request_of(site, server, path, body)
        for mode, kind in (("cors", "application/json"), ("no-cors", "text/plain")):
            how: dict[str, Any] = {"mode": mode, "credentials": "include"}
            if body is not None:
                how |= {"method": "POST", "body": json.dumps(body), "headers": {"Content-Type": kind}}
            assert let_in.evaluate(FETCH, [request.full_url, how]) == "not to be read"
    assert len(answers) >= len(ASKED)
    assert {code for code, _ in answers} == {403}, answers
    assert kept(site) == before


@pytest.mark.parametrize(
    ("server", "path"), [("prefect", "/api/flows/"), ("mlflow", f"{MLFLOW}/experiments/create")]
)
def test_a_form_of_another_site_is_refused(
    site: Site, let_in: Page, other_port: int, server: str, path: str
) -> None:
    let_in.goto(f"http://127.0.0.1:{other_port}/")
    before, url = kept(site), f"{origin(getattr(site.found, server))}{path}"
    with let_in.expect_navigation(url=url) as followed:
        let_in.evaluate(SUBMIT, url)
    assert followed.value.status == 403
    assert kept(site) == before
