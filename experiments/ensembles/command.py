"""`sapo evaluate --ensemble`: nodes of one home that answer together."""

from typing import TYPE_CHECKING

from sapo.cli.commands.options import print_json

if TYPE_CHECKING:
    from sapo.core.config.home import Home
    from sapo.core.config.load import Config

WAYS = ("mixture", "vote", "route")


def evaluate_together(home: "Home", text: str, log: str | None, as_json: bool) -> None:
    """Ask the nodes that `text` lists, and show what they do alone and together.

    Raises `UserError` for nodes that cannot be asked so.
    """
    from sapo.core.errors import UserError

    config = home.load_config()
    names = _named(home, config, text)
    if log is not None and log not in WAYS:
        raise UserError("--log", log, "an ensemble does not answer so", f"name one of {', '.join(WAYS)}")

    from sapo.cli.report.live_view import open_view
    from sapo.core.terminal import Terminal

    from .table import ensemble_table, notes

    with open_view(config.swarm.name) as view:
        view.step("loading torch", 0, 1)
        from .evaluate import evaluate_ensemble

        view.step("loading the held-out questions", 0, 1)
        body = evaluate_ensemble(
            config,
            home,
            names,
            log=log,  # type: ignore[arg-type]  # it is one of WAYS
            progress=lambda label, done, total: view.step(f"held-out questions: {label}", done, total),
        )
    if as_json:
        print_json(body)
        return
    console = Terminal()
    console.print(ensemble_table(body))
    for text in notes(body):
        console.print(text)
    if "model" in body:
        console.print(f"logged to MLflow as {body['model']}")


def _named(home: "Home", config: "Config", text: str) -> list[str]:
    """The nodes of a list joined by commas."""
    from sapo.core.errors import UserError

    home.choose_nodes(config, None)
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        home.check_node(config, name, "--ensemble")
        home.refuse_moved(name)
        if names.count(name) > 1:
            raise UserError("--ensemble", name, "is named twice", "name each node once")
    if len(names) < 2:
        known = ", ".join(config.nodes)
        raise UserError(
            "--ensemble", text, "takes two nodes or more", f"name some of {known}, joined by commas"
        )
    return names
