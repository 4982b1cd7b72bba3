"""The command line: `sapo …`. Commands import what they need when they run, so `--help` answers at once.

Exit codes: 0 done, 1 something failed or was found wrong, 2 bad input, 130 interrupted.
"""

import errno
import inspect
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from sapo import __version__
from sapo.cli.commands import (
    browse,
    check,
    deploy,
    export,
    keys,
    lineage,
    maintain,
    peer,
    replay,
    run,
    site,
    task,
    try_,
    ui,
)
from sapo.core.errors import SapoError, Unavailable, UserError
from sapo.core.unicode import OneLine, say

FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130

HEADINGS: dict[str, tuple[Callable[..., None], ...]] = {
    "Run a swarm": (
        *(run.swarm, run.node, run.stop, try_.try_),
        *(deploy.deploy, run.evaluate, export.export, maintain.maintain),
    ),
    "Many sites, one swarm": (site.init, site.join, run.member, site.archive, site.pack, site.unpack),
    "Look at a run": (browse.status, ui.ui, browse.rollouts, lineage.lineage, lineage.trait, browse.report),
    "Check": (replay.replay, check.verify, check.doctor),
}
ADDED = "Compare ways to run one"
"""Heading of what packages on top of this one bring, as entry points."""
GROUPS = (
    (
        "keys",
        "Show, back up and restore the keys of nodes; invite others into a swarm.",
        "Many sites, one swarm",
        (keys.show, keys.backup, keys.restore, keys.invite, keys.accept),
    ),
    (
        "peer",
        "Leave an author out of what nodes learn from, while they run.",
        "Many sites, one swarm",
        (peer.block, peer.unblock),
    ),
    ("task", "Try a task, and look at some of its questions.", "Check", (task.check, task.show)),
)
"""Name, help, heading and commands of each group of commands."""


class Grouped(TyperGroup):
    """Commands whose help lists them under their headings, each with the whole first sentence of its own."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section per heading."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            title = getattr(command, "rich_help_panel", None) or "Commands"
            sections.setdefault(title, []).append((name, command.get_short_help_str(1000)))
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _show_help(context: typer.Context, wanted: bool) -> None:
    if wanted:
        say(context.get_help())
        raise typer.Exit


def _show_version(wanted: bool) -> None:
    if wanted:
        say(f"sapo {__version__}")
        raise typer.Exit


# typer's own option of a group loads pydantic when a command follows: 0.2 s that no help needs
HelpOption = Annotated[
    bool, typer.Option("--help", "-h", is_eager=True, callback=_show_help, help="Show this message and exit.")
]
VersionOption = Annotated[
    bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Show the version and exit.")
]


def _before_command(context: typer.Context, version: VersionOption = False, help: HelpOption = False) -> None:
    _before_group(context)


def _before_group(context: typer.Context, help: HelpOption = False) -> None:
    if context.invoked_subcommand is None:
        say(context.get_help())
        raise typer.Exit(BAD_INPUT)


def _group(callback: Callable[..., None], help: str, **settings: Any) -> typer.Typer:
    """A group of commands. Its help has no frames: drawing them takes 0.3 s of imports."""
    group = typer.Typer(
        cls=Grouped,
        help=help,
        add_help_option=False,
        invoke_without_command=True,
        rich_markup_mode=None,
        **settings,
    )
    group.callback()(callback)
    return group


def _offer(group: typer.Typer, command: Callable[..., None], heading: str | None = None) -> None:
    """Make a function a command of the same name, whose help is the function's docstring."""
    # paragraphs as one line each: the help screen folds them to the terminal's width
    paragraphs = inspect.cleandoc(command.__doc__ or "").split("\n\n")
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
    group.command(command.__name__.rstrip("_"), rich_help_panel=heading, help=text)(command)


@cache
def application() -> typer.Typer:
    """All commands, made when they are first needed: those of other packages import this one."""
    app = _group(
        _before_command,
        "Swarm sAmpling Policy Optimization: several nodes, each with its own language model, learn from "
        "each other's completions.\n\n"
        "Begin with `sapo swarm`; `sapo doctor` says what is missing.",
        name="sapo",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: 0 done, 1 failed or found wrong, 2 bad input, 130 interrupted.",
    )
    for title, listed in HEADINGS.items():
        for each in listed:
            _offer(app, each, title)
    for added in entry_points(group="sapo.commands"):
        _offer(app, added.load(), ADDED)
    for name, about, heading, commands in GROUPS:
        group = _group(_before_group, about)
        for each in commands:
            _offer(group, each)
        app.add_typer(group, name=name, rich_help_panel=heading)
    return app


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code that means something; the installed script calls this."""
    sys.exit(invoke(args))


def invoke(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. What a person can act on becomes one line on stderr."""
    _complete_streams()
    try:
        _refuse_deleted_folder()
        result = application()(args=args, prog_name="sapo", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except UserError as error:
        return _say(str(error), BAD_INPUT)
    except typer.TyperException as error:
        return _usage(error)
    except Unavailable as error:
        return _say(f"{error}; sapo doctor says what is reachable", FAILED)
    except SapoError as error:
        say(f"error: {error}", file=sys.stderr)
        return FAILED
    except (KeyboardInterrupt, InterruptedError, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except SystemExit as left:  # typer's answer to the same, in the midst of a command
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        return _reader_left()
    except OSError as error:
        remedy = _REMEDIES.get(error.errno or 0)
        if remedy is None:
            raise
        place = error.filename or "the file system"
        return _say(f"disk = {str(place)!r}: {os.strerror(error.errno or 0)}; {remedy}", BAD_INPUT)


def _complete_streams() -> None:
    """Give a closed stream a place to go, and show what the output's encoding lacks as an escape sequence."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
        elif mode == "w" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if logging.lastResort is not None:  # what prints warnings: they may repeat what others wrote
        logging.lastResort.setFormatter(OneLine())


def _refuse_deleted_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        problem = f"cannot be entered: {os.strerror(error.errno or 0)}"
        raise UserError("current folder", None, problem, "change to a folder that is there (cd)") from None


_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another place",
    errno.EDQUOT: "free some space, or choose another place",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "choose a place that can be written, or correct its permissions",
    errno.ENOTDIR: "choose another place",
    errno.EEXIST: "choose another place",
    errno.ENAMETOOLONG: "choose a shorter name",
}


def _reader_left() -> int:
    """Nobody reads on (`| head`), which is no error; a second flush at exit would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _say(text: str, code: int) -> int:
    say("error: " + " ".join(text.split("\n")), file=sys.stderr)
    return code


def _usage(error: typer.TyperException) -> int:
    shown = getattr(error, "format_message", lambda: str(error))().strip()
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "sapo"
    shown = shown.rstrip(".").replace("Value error, ", "", 1)  # pydantic's words before those of a choice
    return _say(f"{shown}; see `{command} --help`", BAD_INPUT)
