"""What `sapo swarm` and `sapo node` do around a run: check first, write then, show it, and sum it up."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sapo.cli.commands.checks import check_start
from sapo.cli.commands.options import find_home, program, resolve, typed
from sapo.core.atomic_file import write_atomically
from sapo.core.child_process import tail
from sapo.core.config.advice import describe
from sapo.core.config.home import Home
from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.errors import Unavailable, UserError
from sapo.core.exam_size import exam_size, foretold
from sapo.core.terminal import Terminal
from sapo.core.user_cache import default_cache

if TYPE_CHECKING:
    from sapo.cli.report.live_view import View
    from sapo.core.service_registry import Services
    from sapo.ops.supervisor import NodeStatus, SwarmStatus
    from sapo.tasks.workers import TaskWorkers

News = tuple[tuple[object, ...], str]
"""What tells a line from those that were said before, and the line."""
DONE, FAILED, INTERRUPTED = 0, 1, 130
PHASES = {
    "starting": "starting",
    "archiving": "writing the last rollouts to the history",
    "evaluating": "held-out questions",
    "closing": "stopping the servers",
}
"""Phases in which no rounds are made, in words; what exactly is waited for may follow."""
PAGES_POLL_S = 2.0
"""How often MLflow is asked whether the swarm has an experiment yet."""


def locate(
    preset: str | None,
    file: Path | None,
    sets: Sequence[str] | None,
    *,
    home: Path | None = None,
    resume: bool = False,
) -> tuple[Home, Config]:
    """Home and config of a swarm that is to begin or to go on. Raises `UserError` where it can do neither."""
    from sapo.tasks.pins import with_pins

    if not resume:
        config = with_pins(resolve(preset, file, sets))
        return Home.of(home, config), config
    if home is None and not os.environ.get("SAPO_HOME") and (preset is not None or file is not None):
        home = Home.of(None, resolve(preset, file, sets)).root
    found = find_home(home)
    # the preset is in the home's config already; laid on top, it would undo what was set beside it
    config = resolve(None, file, sets, base=found.load_config())
    return found, with_pins(config)


def locate_one(
    preset: str | None, file: Path | None, sets: Sequence[str] | None, *, home: Path | None = None
) -> tuple[Home, Config]:
    """Home and config of one node, or of a deployed site: a run in that home goes on, under its config."""
    found, config = locate(preset, file, sets, home=home)
    if found.manifest.exists() and (file is None or found.node_names()):
        return locate(preset, file, sets, home=found.root, resume=True)
    return found, config


def pick_node(config: Config, home: Home, name: str | None, option: str = "NAME") -> str:
    """The node that a command is for: the one named by `option`, or the only one that lives in this home."""
    if name is not None:
        home.check_node(config, name, option)
        home.refuse_moved(name)
        return name
    names = home.here(config)
    if not names:
        home.refuse_moved(config.nodes[0])
    if len(names) > 1:
        site = f"site {config.swarm.site!r} has {len(names)} nodes here: {', '.join(names)}"
        raise UserError(option, None, site, "name one of them")
    return names[0]


def refuse_moved(config: Config, home: Home) -> None:
    """Raise `UserError` where one of a swarm's nodes lives elsewhere: this machine cannot run all of them."""
    here = home.here(config)
    for name in config.nodes:
        if name not in here:
            remedy = f"run those that are here one by one with `{program()} node NAME`: {', '.join(here)}"
            raise UserError("swarm.nodes", config.swarm.nodes, f"{name} lives elsewhere", remedy)


def refuse_second_start(home: Home) -> None:
    """Raise `UserError` when a home already holds a run: it is gone on with, or left alone."""
    if home.manifest.exists() and home.node_names():
        remedy = f"go on with `{typed(home, 'swarm', '--resume')}`, or start afresh with another --home"
        raise UserError("--home", home.shown, "holds a run already", remedy)


def prepare(config: Config, home: Home, view: "View", names: Sequence[str]) -> None:
    """Show what the nodes `names` run, check tasks and models, make what is shared, then write the home.

    `checks.check_start` comes before it. Raises `UserError` for tasks, held-out questions or models that are
    wrong; the home is then as it was.
    """
    from sapo.tasks.workers import open_workers

    for line in describe(config, names):
        view.note(line)
    if config.member is not None:  # it has tasks, and no model, held-out questions or history
        with open_workers(config) as workers:
            check_tasks(config, workers, view)
        write_home(config, home, view)
        return
    view.note(foretold(config))
    loading = "loading torch, transformers and what a node needs"
    view.step(loading, 0, 1)
    from sapo.policy.hf_import import transformers

    transformers.logging.disable_progress_bar()  # it would draw over the view
    from sapo.node.parts import refuse_unwalled
    from sapo.ops.plan import refuse_too_many
    from sapo.policy import malloc

    view.step(loading, 1, 1)
    for line in refuse_too_many(config, home, default_cache()):
        view.note(line)
    with open_workers(config) as workers, tempfile.TemporaryDirectory(prefix="sapo-") as scratch:
        check_tasks(config, workers, view)
        for name in config.nodes:
            refuse_unwalled(config.for_node(name), workers)
        drawn = draw_held_out(config, home, Home(Path(scratch)), workers, view)
        checked: list[Config] = []
        for own in map(config.for_node, config.nodes):
            if own not in checked:
                prepare_model(own, workers, view)
                checked.append(own)
        malloc.give_back()  # the command lives as long as its swarm, and needs no model
        write_home(config, home, view)
        write_atomically(home.held_out, drawn)
        prepare_history(config, home, view)


def check_tasks(config: Config, workers: "TaskWorkers", view: "View") -> None:
    """Raise `UserError` for a task that cannot be asked."""
    view.step("checking the tasks", 0, 1)
    workers.check(config.manifest_tasks())
    view.step("checking the tasks", 1, 1)


def write_home(config: Config, home: Home, view: "View") -> None:
    """Write config and manifest into the home, with a warning where other users may enter it."""
    home.prepare(config, Manifest.of(config))
    if exposed := home.exposed():
        view.note(exposed)


def draw_held_out(config: Config, home: Home, draft: Home, workers: "TaskWorkers", view: "View") -> str:
    """The held-out questions of a home, drawn in `draft` where it has none yet, as the text of their file."""
    from sapo.policy.evaluate import held_out_set

    label, count = "choosing held-out questions", exam_size(config)
    view.step(label, 0, count)
    if home.held_out.exists():
        shutil.copyfile(home.held_out, draft.held_out)
    held_out_set(config, draft, workers, lambda done, total: view.step(label, done, total))
    view.step(label, count, count)
    return draft.held_out.read_text(encoding="utf-8")


def prepare_history(config: Config, home: Home, view: "View") -> None:
    """Make the tables before anybody writes; a store that is away is no reason not to begin."""
    from sapo.store.history import create_tables

    try:
        create_tables(config, home)
    except Unavailable as error:
        view.note(f"{error}; what is owed to it waits")


def prepare_model(config: Config, workers: "TaskWorkers", view: "View") -> None:
    """Make the model that nodes of a config begin with, where it is made here; load it to see that it works,
    and say what peers will refuse."""
    from sapo.policy import initial, models

    cache, label = default_cache(), f"preparing the model {config.model}"
    initial.prepare(
        config,
        workers,
        cache=cache,
        progress=lambda done, total, what: view.step(f"{label}: {what}", done, total),
    )
    policy = models.load_policy(config.model, config=config, cache=cache, threads=config.threads)
    if config.batch.external and (marks := policy.refused_marks()):
        view.note(
            f"the chat template of {config.model} writes {', '.join(marks)} into answers: peers of its "
            "vocabulary refuse them (docs/admission.md, control tokens)"
        )


class Watcher:
    """Shows each snapshot of the supervisor's, and reports once what went wrong with a node. The pages of a
    swarm's own servers are shown once, when there is something on them."""

    def __init__(self, view: "View", swarm: str | None = None, home: Home | None = None) -> None:
        self._view, self._swarm, self._home = view, swarm, home
        self._looked_at = float("-inf")
        self._said: set[tuple[object, ...]] = set()

    def __call__(self, status: "SwarmStatus") -> None:
        self._tell(news(status.nodes, services=status.services), status.stopping)
        self.show_pages(status)
        if status.phase in PHASES:
            what, done, total = status.progress or ("", 0, 1)
            self._view.step(": ".join(filter(None, [PHASES[status.phase], what])), done, total)
        else:
            self._view.nodes(status.nodes)

    def show_pages(self, status: "SwarmStatus") -> None:
        """Show the links of MLflow and Prefect once the swarm has an experiment."""
        from sapo.cli.report.pages import pages_of

        now = time.monotonic()
        if self._swarm is None or status.services is None or now - self._looked_at < PAGES_POLL_S:
            return
        self._looked_at = now
        links, begun = pages_of(status.services, self._swarm)
        if begun:
            self._swarm = None
            for name, link in links.items():
                self._view.link(name, link)

    def node(self, status: "SwarmStatus", name: str) -> None:
        """Show a node that runs without a swarm."""
        node = next(one for one in status.nodes if one.name == name)
        page = None if self._home is None else self._home.page(name)
        link = page.read_text(encoding="utf-8").strip() if page is not None and page.exists() else ""
        if link and self._first("page", link):
            self._view.link("answer here", link)
        self._tell(news([node], home=self._home), status.stopping)
        self._view.nodes([node])

    def _tell(self, found: Iterable[News], stopping: bool) -> None:
        for key, text in found:
            if self._first(*key):
                self._view.note(text)
        if stopping and self._first("stopping"):
            self._view.stopping()

    def _first(self, *what: object) -> bool:
        told = what in self._said
        self._said.add(what)
        return not told


def news(
    nodes: Sequence["NodeStatus"], *, services: "Services | None" = None, home: Home | None = None
) -> Iterator[News]:
    """What is to be said once, by what tells it from what was said before: why a node is not going on, what a
    member waits for, which server has ended or was started again."""
    for node in nodes:
        if node.state in ("restarting", "failed", "paused", "owing"):
            last = node.note.strip().splitlines()[-1:] or ["no message"]
            said = f"{node.name} {node.state} after round {node.rounds}: {last[0]}"
            yield (node.name, node.state, node.restarts), said
        found = node.metrics or {}
        if found.get("identity/own_key_elsewhere"):
            said = f"somebody else publishes with the key of {node.name}: see docs/identity.md"
            yield (node.name, "key"), said
        if found.get("pool/refused/own_name"):
            said = f"another site has a node {node.name}, too: give each its own swarm.site"
            yield (node.name, "name"), said
        waiting = None if home is None else home.waiting(node.name)
        if waiting is not None and waiting.exists() and (text := waiting.read_text(encoding="utf-8").strip()):
            yield ("waits", text), f"waiting for what answers: {text}"
    for server in () if services is None else (services.prefect, services.mlflow):
        what = server.away or ("was started again" if server.restarts else "")
        if what:
            said = f"the {server.name} server {what}; the rounds go on"
            yield (server.name, what, server.restarts), said


def run(config: Config, home: Home) -> int:
    """Run a swarm to its end or its interruption, show it, sum it up; returns the exit code."""
    config = check_start(config, home, config.nodes)

    from sapo.cli.report.live_view import RUN_HINT, open_view

    console = Terminal()
    with open_view(config.swarm.name, console, hint=RUN_HINT) as view:
        from sapo.cli.report.run_page import write_report
        from sapo.cli.report.run_tables import print_summary
        from sapo.ops.process_group import OWING
        from sapo.ops.supervisor import run_swarm

        prepare(config, home, view, config.nodes)
        final = run_swarm(config, home, on_status=Watcher(view, config.swarm.name))
    if any(node.rounds for node in final.nodes):
        print_summary(write_report(home), home, console)
    if final.phase == "finished":
        return DONE
    for line in left_undone(final):
        console.print(line)
    resume = f"`{typed(home, 'swarm', '--resume')}`"
    after = f"{final.phase}; {resume} goes on"
    if final.phase == "owing":
        after = f"all is done, but not all is delivered; {resume} delivers it"
    console.print(f"\n{after}", soft_wrap=True)
    return {"stopped": INTERRUPTED, "owing": OWING}.get(final.phase, FAILED)


def left_undone(final: "SwarmStatus") -> list[str]:
    """What the processes of a swarm said last that could not deliver everything."""
    others = {"archive": final.archive, "evaluate": final.evaluate}
    members = {node.name: node for node in final.nodes} | others
    owing = {name: one.note.strip().splitlines() for name, one in members.items() if one.state == "owing"}
    return [f"{name}: {''.join(lines[-1:])}" for name, lines in owing.items()]


def run_one(config: Config, home: Home, name: str) -> int:
    """Run one node of a swarm, alone in its process; returns the exit code."""
    config = check_start(config, home, [name])

    from sapo.cli.report.live_view import open_view

    console = Terminal()
    hint = f"Ctrl-C stops in good order; the same command goes on with {name}"
    with open_view(config.swarm.name, console, hint=hint) as view:
        from sapo.ops.supervisor import run_node

        prepare(config, home, view, [name])
        watcher = Watcher(view, home=home)
        final = run_node(config, home, name, on_status=lambda status: watcher.node(status, name))
    console.print(f"{name} {final.state} after {final.rounds} of {final.rounds_total} rounds")
    if final.state == "paused":
        console.print(tail(home.logs / f"{name}.log", 1), soft_wrap=True)
    return {"finished": DONE, "stopped": INTERRUPTED}.get(final.state, FAILED)
