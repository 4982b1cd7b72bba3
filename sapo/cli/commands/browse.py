"""Commands that look at a run without touching it: `status`, `rollouts`, `report`."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sapo.cli.commands.options import HomeOption, JsonOption, find_home, print_json, typed
from sapo.core.errors import UserError
from sapo.core.unicode import say

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pyarrow as pa

    from sapo.core.config.home import Home
    from sapo.ops.supervisor import NodeStatus, SwarmStatus


def rollouts(
    home: HomeOption = None,
    node: Annotated[list[str] | None, typer.Option(metavar="NAME", help="Only by this author.")] = None,
    task: Annotated[list[str] | None, typer.Option(metavar="DATASET", help="Only of this data set.")] = None,
    round: Annotated[
        str | None, typer.Option(metavar="N|N..M", help="Only of these rounds of the author.")
    ] = None,
    min_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Verified score at least this.")
    ] = None,
    max_score: Annotated[
        float | None, typer.Option(min=0, max=1, help="Verified score at most this.")
    ] = None,
    source: Annotated[
        Literal["local", "external"] | None,
        typer.Option(metavar="local|external", help="Trained on by its author, or by another node."),
    ] = None,
    text: Annotated[str | None, typer.Option(help="Occurs in question or answer, whatever its case.")] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="At most so many rows, newest first: 20, or all with --parquet.")
    ] = None,
    completions: Annotated[bool, typer.Option("--completions", help="A row per completion.")] = False,
    as_json: JsonOption = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write completions as Parquet, instead of showing.")
    ] = None,
) -> None:
    """Browse what was written and how it was scored, newest first: a group a row, with its best answer.

    A group is shown if one of its completions matches. With --completions, --json and --parquet there is a
    row per completion that matches. Scores are those that learners gave when they trained on a completion;
    an unused one has none.
    """
    from sapo.store.history import open_store, query

    if as_json and parquet is not None:
        raise UserError("--parquet", str(parquet), "goes not with --json", "choose one of them")
    chosen, scores = parse_rounds(round), score_range(min_score, max_score)
    found = find_home(home)
    config = found.load_config()
    store = open_store(config, found)
    for option, asked, column, own in (
        ("--node", node, "node", config.nodes),
        ("--task", task, "dataset", [one.dataset for one in config.manifest_tasks()]),
    ):
        if unknown := set(asked or ()) - set(own):  # of other sites, or of earlier configs?
            there = sorted({*own, *query.names(store, "node" if column == "node" else "dataset")})
            if unknown := unknown - set(there):
                remedy = "name one of them"
                raise UserError(option, min(unknown), f"the swarm has {', '.join(there)}", remedy)
    one_by_one = completions or as_json or parquet is not None
    table = query.rollouts(
        store,
        nodes=node or (),
        tasks=task or (),
        rounds=chosen,
        scores=scores,
        source=source,
        text=text,
        limit=20 if limit is None and parquet is None else limit,
        per="completion" if one_by_one else "group",
    )
    if parquet is not None:
        write_parquet(table, parquet)
    elif as_json:
        print_json(table.to_pylist())
    elif completions:
        show_completions(table)
    else:
        show_groups(table)


def parse_rounds(text: str | None) -> tuple[int, int] | None:
    """`17` or `10..20`, both ends included. Raises `UserError` on anything else."""
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
    if low is None and high is None:
        return None
    ends = (float("-inf") if low is None else low, float("inf") if high is None else high)
    if not ends[0] <= ends[1]:
        raise UserError("--min-score", low, f"is above --max-score {high}", "swap them")
    return ends


def write_parquet(table: "pa.Table", path: Path) -> None:
    """Write a table as Parquet, whole or not at all."""
    import pyarrow.parquet as pq

    from sapo.core.atomic_file import whole_file

    try:
        with whole_file(path, synced=False) as new:
            pq.write_table(table, new)
    except OSError as error:
        raise UserError("--parquet", str(path), error.strerror or str(error), "name another file") from None
    say(f"{table.num_rows} completions in {path}")


def show_completions(table: "pa.Table") -> None:
    """Completions in the terminal, under their questions."""
    entries = []
    for row in table.to_pylist():
        length = "" if row["tokens"] is None else f"{row['tokens']} tokens"
        head = (*_place(row), f"score {score_text(row)}", length, *_learned(row))
        entries.append((head, row["question"], row["text"], row["finish_reason"]))
    show_answers(entries)


def show_groups(table: "pa.Table") -> None:
    """Groups in the terminal: each with its scores and its best answer."""
    entries = []
    for row in table.to_pylist():
        best, mean, worst = (score_text({**row, "score": row[name]}) for name in ("best", "mean", "worst"))
        scores = f"{row['completions']} answers: best {best}, mean {mean}, worst {worst}"
        head = (*_place(row), f"group {row['group_id'][:8]}", scores, *_learned(row))
        entries.append((head, row["question"], row["best_text"], row["finish_reason"]))
    show_answers(entries)


def _place(row: dict[str, Any]) -> tuple[str, ...]:
    return f"{row['node']} round {row['round']}", row["dataset"]


def _learned(row: dict[str, Any]) -> list[str]:
    names = sorted(row["learned_by"], key=lambda name: (name != row["node"], name))
    return [f"learned by {' '.join(names)}"] if names else []


def show_answers(entries: Sequence[tuple[Sequence[str], str, str, str]]) -> None:
    """Answers, each with a heading of parts and its question; peers may have written any of the texts. A
    question that stands above already is not written again."""
    from rich.padding import Padding

    from sapo.core.terminal import Terminal
    from sapo.core.types import shown

    console = Terminal()
    if not entries:
        console.print("nothing in the history matches")
    before = None
    for head, question, text, finish_reason in entries:
        console.print(" · ".join(filter(None, head)), style="bold")
        if question != before:
            console.print(Padding(question, (0, 0, 0, 2), style="dim", expand=False))
        console.print(Padding(shown(text, finish_reason), (0, 0, 0, 4), expand=False))
        before = question


def score_text(row: dict[str, Any]) -> str:
    """The verified score, `unscorable`, or a dash if it was not scored."""
    if row["score"] is not None:
        return f"{row['score']:.3g}"
    return "–" if row["outcome"] is None else str(row["outcome"])


def report(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Write report.html and summary.json of a run, which may still be going on."""
    from sapo.cli.commands import checks
    from sapo.cli.report.run_page import write_report

    found = find_home(home)
    checks.refuse_member(found.load_config(), "it has no curves: `sapo status` and MLflow have its figures")
    figures = write_report(found)
    if as_json:
        print_json(figures.written())
    else:
        from sapo.cli.report.run_tables import print_summary

        print_summary(figures, found)


def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Say how far each node is, what runs, and what is still to be delivered."""
    from sapo.cli.report.pages import pages_of
    from sapo.ops.sites import notes
    from sapo.ops.supervisor import snapshot

    found = find_home(home)
    config = found.load_config()
    now = snapshot(config, found)
    owed = {name: owed_by(found, name) for name in config.nodes}
    said = notes(found, config)
    named = config.track.uri or os.environ.get("MLFLOW_TRACKING_URI")  # then it need not be the swarm's own
    untracked = now.services is None and not named
    if untracked and any(node.pid is not None and "track" in owed[node.name] for node in now.nodes):
        said.append("no MLflow is named: series stay in the journal until `track.uri` names one")
    links = {} if now.services is None else pages_of(now.services, config.swarm.name)[0]
    if as_json:
        place = {"swarm": config.swarm.name, "home": str(found.root)}
        print_json({**place, **dataclasses.asdict(now), "pages": links, "owed": owed, "notes": said})
    else:
        _show_status(now, owed, links, found)
        for note in said:
            say(note)


def owed_by(home: "Home", node: str) -> dict[str, int]:
    """Deliveries a node's journal still owes, by kind; empty where it has none yet."""
    from sapo.store.journal.journal import Journal

    if not home.journal(node).exists():
        return {}
    with Journal.read_only(home.journal(node)) as journal:
        return {kind: count for kind, count in journal.owed_counts().items() if count}


def of_member(node: "NodeStatus", home: "Home") -> "Iterator[str]":
    """What is to be said of a member that only answers: what it has spent, and where people answer."""
    found = node.metrics or {}
    if "member/answers" in found:
        spent = f", {found['member/tokens']:,.0f} tokens and {found['member/cost']:g} spent"
        spent = spent if found["member/tokens"] else ""
        yield f"{node.name} only answers: {found['member/answers']:,.0f} answers so far{spent}"
    if node.pid is None:
        return
    if home.waiting(node.name).exists():
        yield f"{node.name} waits: {home.waiting(node.name).read_text(encoding='utf-8').strip()}"
    if home.page(node.name).exists():
        yield f"answer for {node.name}: {home.page(node.name).read_text(encoding='utf-8').strip()}"


def _show_status(
    now: "SwarmStatus", owed: dict[str, dict[str, int]], links: dict[str, str], home: "Home"
) -> None:
    from sapo.cli.report.live_view import NodeTable
    from sapo.core.terminal import Terminal

    console = Terminal()
    runs = f"runs (pid {now.pid})" if now.pid is not None else "does not run"
    stopping = ", and was asked to stop" if now.stopping else ""
    console.print(f"{now.phase}; the swarm {runs}{stopping}")
    if now.progress is not None:
        label, done, total = now.progress
        console.print(f"held-out questions: {label}: {done:,} of {total:,}")
    console.print(NodeTable(now.nodes))
    for node in now.nodes:
        for line in of_member(node, home):
            console.print(line, soft_wrap=True)
    for name, counts in owed.items():
        if counts:
            what = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            console.print(f"{name} has yet to deliver: {what}")
    if now.services is not None:
        away = {"MLflow": now.services.mlflow.away, "Prefect": now.services.prefect.away}
        for name, link in links.items():
            state = f" ({away[name]})" if away[name] else ""
            console.print(f"{name:<8}{link}{state}", soft_wrap=True)
    elif any(node.rounds for node in now.nodes):
        console.print(f"`{typed(home, 'ui')}` opens MLflow and Prefect", soft_wrap=True)
