"""Commands that look at a run without touching it: `status`, `rollouts`, `report`."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sapo.commands.options import HomeOption, JsonOption, find_home, print_json, program

if TYPE_CHECKING:
    import pyarrow as pa

    from sapo.home import Home
    from sapo.supervise import SwarmStatus


def rollouts(
    home: HomeOption = None,
    node: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only by this author.")] = None,
    task: Annotated[list[str] | None, typer.Option(metavar="DATASET", help="Only of this data set.")] = None,
    round: Annotated[
        str | None, typer.Option(metavar="N|N..M", help="Only of these rounds of the author.")
    ] = None,
    min_score: Annotated[float | None, typer.Option(help="Verified score at least this.")] = None,
    max_score: Annotated[float | None, typer.Option(help="Verified score at most this.")] = None,
    source: Annotated[
        str | None,
        typer.Option(metavar="local|external", help="Trained on by its author, or by another node."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Occurs in question or answer, whatever its case.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many completions, newest first.")] = 20,
    as_json: JsonOption = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write them as Parquet instead of showing them.")
    ] = None,
) -> None:
    """Browse what was written and how it was scored: one completion a row, newest first.

    Scores are those that learners gave when they trained on a completion; one that nobody used has none.
    """
    from sapo.errors import UserError
    from sapo.history import read
    from sapo.history.tables import Store

    if source not in (None, "local", "external"):
        raise UserError("--source", source, "is neither local nor external", "choose one of them or neither")
    if as_json and parquet is not None:
        raise UserError("--parquet", str(parquet), "goes not with --json", "choose one of them")
    found = find_home(home)
    table = read.rollouts(
        Store(found.load_config().history.uri or str(found.history)),
        nodes=node or (),
        tasks=task or (),
        rounds=parse_rounds(round),
        scores=score_range(min_score, max_score),
        source=narrow(source),
        text=text,
        limit=limit,
    )
    if parquet is not None:
        write_parquet(table, parquet)
    elif as_json:
        print_json(table.to_pylist())
    else:
        show_rollouts(table)


def narrow(source: str | None) -> Literal["local", "external"] | None:
    """The option's value as the history's filter names it."""
    return "local" if source == "local" else "external" if source == "external" else None


def parse_rounds(text: str | None) -> tuple[int, int] | None:
    """`17` or `10..20`, both ends included. Raises `UserError` on anything else."""
    from sapo.errors import UserError

    if text is None:
        return None
    first, dots, last = text.partition("..")
    if not first.isdecimal() or (dots and not last.isdecimal()):
        raise UserError("--round", text, "is neither a round nor a range", "write 17 or 10..20")
    low, high = int(first), int(last) if dots else int(first)
    if high < low:
        raise UserError("--round", text, "ends before it begins", f"write {high}..{low}")
    return low, high


def score_range(low: float | None, high: float | None) -> tuple[float, float] | None:
    """Both ends included; None when neither is given, so that unscored completions show too."""
    from sapo.errors import UserError

    if low is None and high is None:
        return None
    ends = (float("-inf") if low is None else low, float("inf") if high is None else high)
    if not ends[0] <= ends[1]:
        raise UserError("--min-score", low, f"is above --max-score {high}", "swap them")
    return ends


def write_parquet(table: "pa.Table", path: Path) -> None:
    """Write a table as Parquet, whole or not at all."""
    import pyarrow.parquet as pq

    from sapo.errors import UserError

    temporary = path.with_name(f".{path.name}.tmp")
    try:
        pq.write_table(table, temporary)
        temporary.replace(path)
    except OSError as error:
        raise UserError("--parquet", str(path), error.strerror or str(error), "name another file") from None
    finally:
        temporary.unlink(missing_ok=True)
    print(f"{table.num_rows} completions in {path}")


def show_rollouts(table: "pa.Table") -> None:
    """Completions as a table in the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if not table.num_rows:
        console.print("nothing in the history matches")
        return
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("node", "round", "task", "question", "completion", "score", "learned by"):
        shown.add_column(name, overflow="fold", no_wrap=name in ("node", "round", "score"))
    for row in table.to_pylist():
        learners = ([row["node"]] if row["trained_local"] else []) + list(row["trained_by"])
        cells = (
            row["node"],
            str(row["round"]),
            row["dataset"],
            row["question"],
            row["text"],
            score_text(row),
            " ".join(learners),
        )
        shown.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(shown)


def printable(text: str) -> str:
    """A text that cannot steer a terminal: peers wrote it, and may have written escape sequences."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def score_text(row: dict[str, Any]) -> str:
    """The verified score, `unscorable`, or a dash where nobody scored it."""
    if row["score"] is not None:
        return f"{row['score']:g}"
    return "–" if row["outcome"] is None else str(row["outcome"])


def report(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Write report.html and summary.json of a run, which may still be going on."""
    from sapo.report import write_report

    found = find_home(home)
    figures = write_report(found)
    if as_json:
        print_json(figures)
    else:
        from sapo.view import print_summary

        print_summary(figures, found, program())


def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Say how far each node is, what runs, and what is still to be delivered."""
    from sapo.sites import notes
    from sapo.supervise import snapshot

    found = find_home(home)
    config = found.load_config()
    now = snapshot(config, found)
    owed = {name: owed_by(found, name) for name in config.nodes}
    said = notes(found, config)
    if as_json:
        place = {"swarm": config.swarm.name, "home": str(found.root)}
        print_json({**place, **dataclasses.asdict(now), "owed": owed, "notes": said})
    else:
        show_status(now, owed)
        for note in said:
            print(note)


def owed_by(home: "Home", node: str) -> dict[str, int]:
    """Deliveries a node's journal still owes, by kind; empty where it has none yet."""
    from sapo.journal import Journal

    if not home.journal(node).exists():
        return {}
    with Journal.read_only(home.journal(node)) as journal:
        return {kind: count for kind, count in journal.owed_counts().items() if count}


def show_status(now: "SwarmStatus", owed: dict[str, dict[str, int]]) -> None:
    """A swarm's snapshot in the terminal."""
    from rich.console import Console

    from sapo.commands.launch import row
    from sapo.view import node_table

    console = Console()
    runs = f"runs (pid {now.pid})" if now.pid is not None else "does not run"
    console.print(f"{now.phase}; the swarm {runs}", highlight=False)
    console.print(node_table([row(node) for node in now.nodes]))
    for name, counts in owed.items():
        if counts:
            what = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            console.print(f"{name} has yet to deliver: {what}", highlight=False)
    if now.services is not None:
        for service in (now.services.prefect, now.services.mlflow):
            state = f" ({service.away})" if service.away else ""
            console.print(f"{service.name}: {service.url}{state}", highlight=False)
