"""`sapo deploy`: a site for weeks, as deployments of a Prefect server that workers run."""

import os
import subprocess
from pathlib import Path

import typer

from sapo.cli.commands.options import ConfigOption, HomeOption, PresetOption, SetOption, typed, warn
from sapo.core.unicode import say


def deploy(
    preset: PresetOption = None, config: ConfigOption = None, sets: SetOption = None, home: HomeOption = None
) -> None:
    """Register a site with the Prefect server at PREFECT_API_URL, to run for weeks.

    Each node, the archive, the evaluation and maintenance become deployments that any worker of the pool
    runs on a schedule; a node's run makes some rounds, and the next goes on. Automations mark runs that were
    killed, and raise an event when a node stands still.

    Called again it changes what differs, and removes nodes that left. In a home that holds a run, the site
    goes on under that run's config; what --config and --set name is changed.
    """
    from sapo.cli.commands import checks, launch
    from sapo.cli.report.live_view import open_view
    from sapo.ops import deployments

    url = deployments.refuse_without_server(os.environ)
    found, settings = launch.locate_one(preset, config, sets, home=home)
    checks.refuse_running(found, "swarm")
    folder = str(Path.cwd())
    names = [
        resource["prefect.resource.name"] for resource in deployments.plan(settings, found, folder).nodes
    ]
    settings = checks.check_start(settings, found, names)
    with open_view(settings.swarm.name) as view:
        launch.prepare(settings, found, view, names)
    found.stop_flag.unlink(missing_ok=True)
    code = subprocess.run(deployments.command(found, folder), check=False).returncode
    if code:
        raise typer.Exit(code)
    if deployments.answers_anybody(url):
        warn(
            f"{url} asks for no password: accounts of its machine, and pages in browsers there, may run "
            "commands on workers; set PREFECT_SERVER_API_AUTH_STRING for it, and for workers and here "
            "PREFECT_API_AUTH_STRING"
        )
    if settings.track.uri is None and "MLFLOW_TRACKING_URI" not in os.environ:
        warn("track.uri and MLFLOW_TRACKING_URI are unset: metrics wait in journals unless the worker has it")
    say(f"\nits runs: {url.rstrip('/').removesuffix('/api')}/deployments")
    say("start a worker, here or on any machine that sees the home at the same place:")
    say(f"  PREFECT_API_URL={url} prefect worker start --pool {settings.deploy.pool}")
    given = ["--set", "KEY=VALUE"] if config is None else ["--config", str(config)]
    say(f"after a change of the config: {typed(found, 'deploy', *given)}")
