"""Makes pictures of a swarm's report and pages in MLflow and Prefect: `python docs/pictures.py --home HOME`.

HOME is that of a swarm that has finished, such as `make swarm` leaves. Its servers run while the pictures are
made. The pictures go to HOME/pictures; those in docs/ are made with `--output docs`. The browser is fetched
once (`infra.browser`).
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from infra.browser.session import browser
from sapo.cli.report.pages import pages_of
from sapo.core.config.home import Home
from sapo.core.errors import SapoError, UserError
from sapo.ops import services
from sapo.store.tracking import parent_run
from sapo.store.tracking.model_registry import load_mlflow

if TYPE_CHECKING:
    from playwright.sync_api import BrowserContext, Page

SIZE = {"width": 1280, "height": 800}
PATIENCE_MS = 60_000
SETTLE_MS = 2000
"""For what moves into place."""
MOST_BYTES = 300_000
"""Of a picture."""
UNPROMPTED = """
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
"""
"""MLflow's assistant for agents stays closed."""
DRAWN = "() => document.querySelectorAll('.js-plotly-plot .scatterlayer .trace').length >= {}"


@dataclass(frozen=True, slots=True)
class Shown:
    """A swarm's servers and what is found there."""

    mlflow: str
    links: dict[str, str]
    swarm: str
    experiment: str
    runs: dict[str, str]
    """Ids by name: the swarm's own and its nodes'."""
    report: Path


def main() -> int:
    """Make all pictures; returns the exit code."""
    parser = argparse.ArgumentParser(prog="docs/pictures.py", description=__doc__)
    parser.add_argument("--home", type=Path, required=True, help="of a swarm that has finished")
    parser.add_argument("--output", type=Path, help="folder for the pictures; HOME/pictures if not given")
    given = parser.parse_args()
    home = Home(given.home.absolute())
    output = given.output or home.root / "pictures"
    try:
        config = home.load_config()
        with browser() as chromium, services.opened(config, home) as running:
            output.mkdir(parents=True, exist_ok=True)
            while not running.up():
                time.sleep(0.1)
            shown = shown_by(running.services, config.swarm.name, home.root / "report.html")
            context = chromium.new_context(viewport=SIZE, locale="en-US")
            context.add_init_script(UNPROMPTED)
            context.set_default_timeout(PATIENCE_MS)
            for name, draw in PICTURES.items():
                save(context, output / name, draw, shown)
    except SapoError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


def shown_by(found: services.Services, swarm: str, report: Path) -> Shown:
    """What the servers have of a swarm."""
    os.environ.update(found.mlflow.credentials())
    client = load_mlflow().MlflowClient(found.mlflow.url)
    experiment = client.get_experiment_by_name(swarm)
    if experiment is None:
        raise SapoError(f"MLflow at {found.mlflow.url} has no experiment {swarm}: the swarm has not run")
    number = experiment.experiment_id
    runs = {run.info.run_name: run.info.run_id for run in client.search_runs([number])}
    links, _ = pages_of(found, swarm)
    return Shown(links["MLflow"].partition("/#")[0], links, swarm, number, runs, report)


def report(page: "Page", shown: Shown) -> None:
    """What a run ends with: the first screen of its report."""
    page.goto(shown.report.as_uri())


def charts(page: "Page", shown: Shown) -> None:
    """All runs of a swarm with their charts, as the experiment's page shows them."""
    page.goto(shown.links["MLflow"])
    page.wait_for_function(DRAWN.format(len(shown.runs) - 1))
    page.get_by_text("reward/local", exact=True).first.scroll_into_view_if_needed()


def rewards(page: "Page", shown: Shown) -> None:
    """The rewards of all nodes, behind the link in the description of the swarm's run."""
    page.goto(f"{shown.mlflow}/{parent_run.link(shown.experiment, shown.runs[shown.swarm])}")
    link = page.get_by_role("link", name="rewards of all nodes").get_attribute("href")
    page.goto(f"{shown.mlflow}/{link}")
    page.wait_for_function(DRAWN.format(2 * (len(shown.runs) - 1)))


def model(page: "Page", shown: Shown) -> None:
    """A node's registered model, with links to its history."""
    page.goto(f"{shown.mlflow}/{parent_run.model_link(f'{shown.swarm}.n0')}")
    page.get_by_text("Version 1", exact=True).first.wait_for()


def flow_runs(page: "Page", shown: Shown) -> None:
    """The flow runs of all nodes, the archive and the evaluation."""
    page.goto(shown.links["Prefect"])
    page.get_by_text("Completed").first.wait_for()


PICTURES: "dict[str, Callable[[Page, Shown], None]]" = {
    "report.png": report,
    "mlflow-charts.png": charts,
    "mlflow-rewards.png": rewards,
    "mlflow-model.png": model,
    "prefect-runs.png": flow_runs,
}


def save(context: "BrowserContext", path: Path, draw: "Callable[[Page, Shown], None]", shown: Shown) -> None:
    """Make one picture. Raises `SapoError` where it is too large for a file in a repository."""
    page = context.new_page()
    draw(page, shown)
    page.wait_for_timeout(SETTLE_MS)
    data = page.screenshot(animations="disabled")
    page.close()
    if len(data) > MOST_BYTES:
        raise SapoError(f"{path.name} has {len(data):,} bytes; at most {MOST_BYTES:,} are wanted")
    path.write_bytes(data)
    print(path)


if __name__ == "__main__":
    sys.exit(main())
