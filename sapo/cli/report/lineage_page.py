"""Lineage for people: the tables and sentences of both questions, and a page with a picture for each."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sapo.cli.report.html import Table, figure, percent, render
from sapo.cli.report.svg_charts import PALETTE, colour, stacked_bars
from sapo.cli.report.svg_diagrams import Event, Flow, flow_chart, lanes
from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.types import shown
from sapo.provenance.documents import HoldingVersion, Journey, Part, TaughtByPeer, TaughtByTask, Teachers
from sapo.provenance.model_lineage import short

PEERS_SHOWN, TASKS_SHOWN = len(PALETTE), 11
"""Of each a picture shows so many by name; the rest is one more."""
SUMS = ("groups", "answers", "tokens", "share", "|adv|", "age", "versions")
"""Of these groups so many had an advantage; answers and their trained tokens are those with one; mean of its
absolute value; median age when trained on; range of their writer's policy versions."""
PEERS, TASKS = ("", "peer", "key", *SUMS), ("", "task", *SUMS)
FATES = {
    "learned": "learned from it",
    "undone": "learned from it, and was rolled back",
    "skipped": "had it in a batch, but made no step",
    "no advantage": "had it in a batch: its scores are all alike, so it taught nothing",
}


def write_page(home: Home, name: str, document: Journey | Teachers) -> Path:
    """Write the page of a document to `<home>/lineage/<name>.html`, whole or not at all; returns its path."""
    home.lineage.mkdir(exist_ok=True)
    path = home.lineage / f"{name}.html"
    page = _group_page(document) if isinstance(document, Journey) else _teachers_page(document)
    write_atomically(path, page)
    return path


def headline(document: Journey | Teachers) -> str:
    """What the document is about."""
    if isinstance(document, Journey):
        return f"group {document.group_id[:16]}"
    if document.version is None:
        return f"{document.node} after {document.rounds.count} rounds"
    version = document.version
    aliases = "".join(f" @{alias}" for alias in version.aliases)
    return f"{version.name} version {version.number}{aliases}"


# -- a version, or a node ---------------------------------------------------------------------------------


def coverage(document: Teachers) -> str:
    """Which rounds made it, in a sentence."""
    rounds = document.rounds
    said = [f"{rounds.learned} of {rounds.count} rounds made a step that lasts"]
    for number, what in (
        (rounds.skipped, "were skipped"),
        (rounds.rolled_back, "were rolled back"),
        (rounds.without_groups, "had no groups"),
        (rounds.cut, "are not kept any more"),
    ):
        if number:
            said.append(f"{number} {what}")
    return f"{document.node}, incarnation {document.incarnation}: {', '.join(said)}."


def amount(document: Teachers) -> str:
    """How much taught it, in a sentence."""
    totals = document.totals
    foreign = sum(one.share for one in document.peers if one.source == "external")
    return (
        f"{totals.tokens:,} tokens of {totals.completions:,} completions in {totals.informative:,} "
        f"groups with an advantage taught it, {percent(foreign)} of the tokens by other nodes."
    )


def peer_rows(document: Teachers) -> list[tuple[str, ...]]:
    """Cells of the table of peers, columns as `PEERS`."""
    return [(one.source, one.producer, one.producer_key[:8], *_sums(one)) for one in document.peers]


def task_rows(document: Teachers) -> list[tuple[str, ...]]:
    """Cells of the table of tasks, columns as `TASKS`; own groups and those of others apart."""
    return [(one.source, one.dataset, *_sums(one)) for one in document.tasks]


def _sums(one: TaughtByPeer | TaughtByTask) -> tuple[str, ...]:
    versions = one.policy_versions
    return (
        f"{one.informative:,}/{one.groups:,}",
        f"{one.completions:,}",
        f"{one.tokens:,}",
        percent(one.share),
        "–" if one.advantage is None else f"{one.advantage:.3f}",
        "–" if one.age_s is None or one.source == "local" else seconds(one.age_s),
        "–" if versions is None else f"{versions[0]}–{versions[1]}",
    )


def link_rows(document: Teachers) -> list[tuple[str, ...]]:
    """The version's claims beside the history, and whether they agree."""
    return [(link.link, short(link.version), short(link.history), link.state) for link in document.links]


def digest_rows(document: Teachers) -> list[tuple[str, str]]:
    """The digests that name it, whole."""
    digests = document.digests
    named = {
        "weights_sha256": digests.weights_sha256,
        "chain": digests.chain,
        "batch": digests.batch,
        "config": digests.config,
    }
    return [(name, digest or "–") for name, digest in named.items()]


def _teachers_page(document: Teachers) -> str:
    labels = _labels(document)
    flows = "Trained tokens: who wrote them, for which task, and into what they went. Only completions with "
    flows += "an advantage in rounds whose step lasts."
    strip = "How much each peer taught when. Ticks at the top: grey where a round made no step, red where "
    strip += "its step was rolled back."
    return render(
        "teachers.html",
        **_heading(document),
        amount=amount(document),
        coverage=coverage(document),
        pictures=[figure(_flows(document, labels), flows), figure(_strip(document, labels), strip)],
        colours=list(dict.fromkeys(labels.values())),
        peers=Table(PEERS, peer_rows(document)),
        tasks=Table(TASKS, task_rows(document)),
        links=Table(("", "the version", "the history", ""), link_rows(document)),
        digests=Table(("", ""), digest_rows(document)),
    )


def _labels(document: Teachers) -> dict[tuple[str, str], tuple[str, str]]:
    """Name and colour of every peer, by key and source; those past the first are others."""
    peers = document.peers
    names = [one.producer for one in peers]
    found = {}
    for place, one in enumerate(peers):
        name = one.producer
        if names.count(name) > 1 and one.source == "external":
            name += f" {one.producer_key[:8]}"
        if one.source == "local":
            name += " (itself)"
        rest = place >= PEERS_SHOWN
        label = f"{len(peers) - PEERS_SHOWN} more" if rest else name
        found[one.producer_key, one.source] = label, "#8a8a8a" if rest else colour(place)
    return found


def _flows(document: Teachers, labels: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    tokens: dict[str, int] = {}
    for one in document.flows:
        tokens[one.dataset] = tokens.get(one.dataset, 0) + one.tokens
    ranked = sorted(tokens, key=lambda name: -tokens[name])
    rest = set(ranked[TASKS_SHOWN:])
    amounts: dict[tuple[str, str, str], int] = {}
    for one in document.flows:
        label, shade = labels[one.producer_key, one.source]
        task = f"{len(rest)} more" if one.dataset in rest else one.dataset
        amounts[label, task, shade] = amounts.get((label, task, shade), 0) + one.tokens
    order = [label for label, _ in labels.values()]
    flows = [Flow(label, task, n, shade) for (label, task, shade), n in amounts.items() if n]
    flows.sort(key=lambda flow: (order.index(flow.start), -tokens.get(flow.by, 0)))
    version = document.version
    end = document.node if version is None else f"{document.node} v{version.number}"
    return flow_chart("Who taught it", flows, end)


def _strip(document: Teachers, labels: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    when = document.when
    lengths = [last - first + 1 for first, last in when.stretches]
    series: dict[str, list[float]] = {}
    shades: dict[str, str] = {}
    for one in when.peers:
        label, shade = labels[one.producer_key, one.source]
        so_far = series.get(label, [0.0] * len(lengths))
        series[label] = [a + b / n for a, b, n in zip(so_far, one.tokens, lengths, strict=True)]
        shades[label] = shade
    order = list(dict.fromkeys(label for label, _ in labels.values() if label in series))
    edges = [first for first, _ in when.stretches] + [document.rounds.count]
    return stacked_bars(
        "When it was taught",
        edges,
        {label: series[label] for label in order},
        [shades[label] for label in order],
        x_label="round",
        y_label="tokens a round",
        marks={"no step": when.skipped, "rolled back": when.rolled_back},
    )


# -- a group ----------------------------------------------------------------------------------------------


def asked(document: Journey) -> list[str]:
    """The task and its question; nothing if only a receipt or the quarantine knows the group."""
    task = document.task
    return [] if task is None else [f"{task.dataset} asked:", *str(task.question).splitlines()]


def life(document: Journey) -> list[str]:
    """A group's life in sentences, in order."""
    author, said = document.author, []
    if author.node is not None:
        where = "" if author.round is None else f" in its round {author.round}"
        policy = "" if author.policy_version is None else f", policy version {author.policy_version}"
        said.append(f"{author.node} ({(author.key or '')[:8]}) wrote it{where}{policy}.")
    if document.published is not None:
        published = document.published
        said.append(f"Published {moment(published.at)} at {published.bus_position}, signed.")
    elif not document.quarantine:
        said.append(
            "The archive has no record of it on the bus: its author kept it, or it is not archived yet."
        )
    for copy in document.quarantine:
        said.append(f"QUARANTINED {moment(copy.found_at)}: {copy.reason}, {copy.detail}.")
    for receipt in document.received:
        after = (
            ""
            if receipt.published_at is None
            else f" {seconds(receipt.received_at - receipt.published_at)} later"
        )
        became = "it is in the pool, or the node has stopped"
        if receipt.became is not None:
            became = f"{receipt.became} in round {receipt.became_round}"
        said.append(f"{receipt.node} received it{after} in round {receipt.round}: {became}.")
    for batch in document.learned:
        own = ", its author," if batch.source == "local" else ""
        why = f" ({batch.skipped})" if batch.skipped else ""
        said.append(
            f"{batch.node}{own} {FATES[batch.fate]}{why} in round {batch.round}: {batch.tokens} tokens."
        )
        said += [f"It is in {_named(version)}." for version in batch.versions]
    if document.mlflow.away is not None:
        said.append("MLflow is away, so in which model versions it is cannot be told.")
    return said


def _named(version: HoldingVersion) -> str:
    first = ", the first that has it" if version.first else ""
    champion = ", the champion" if version.champion else ""
    return f"{version.name} version {version.number} ({version.rounds} rounds){first}{champion}"


def answer_head(document: Journey) -> tuple[str, ...]:
    """Column names of `answer_rows`."""
    return ("completion", *(f"{one.node}, round {one.round}" for one in document.learned))


def answer_rows(document: Journey) -> list[tuple[str, ...]]:
    """Each completion with the score and advantage that every batch gave it."""
    rows = []
    for answer in document.completions:
        cells = []
        for entry in document.learned:
            part = next((one for one in entry.completions if one.k == answer.k), None)
            cells.append("–" if part is None else _verdict(part))
        rows.append((shown(answer.text, answer.finish_reason), *cells))
    return rows


def _verdict(part: Part) -> str:
    score = part.outcome if part.score is None else f"{part.score:g}"
    return f"{score} ({part.advantage:+.3f}, {part.tokens} tokens)"


def _group_page(document: Journey) -> str:
    return render(
        "group.html",
        **_heading(document),
        time_line=figure(_time_line(document), "In order of time, each by the clock of whoever recorded it."),
        life=life(document),
        task=document.task,
        answers=Table(answer_head(document), answer_rows(document), code=True),
        group_id=document.group_id,
    )


def _time_line(document: Journey) -> str:
    """Its life as lanes: the author's, and one for each node that received it or learned from it."""
    found: list[tuple[float, str, str, str, bool]] = []
    author = str(document.author.node)
    if document.author.created_at is not None:
        found.append((document.author.created_at, author, "written", "", False))
    if document.published is not None:
        found.append((document.published.at, author, "published", "", False))
    for receipt in document.received:
        found.append((receipt.received_at, receipt.node, "received", f"round {receipt.round}", True))
        if receipt.became not in (None, "trained"):
            note = f"round {receipt.became_round}"
            found.append((receipt.received_at, receipt.node, receipt.became, note, True))
    for batch in document.learned:
        found.append((batch.finished_at, batch.node, batch.fate, f"round {batch.round}", False))
        for version in batch.versions:
            star = " ★" if version.champion else ""
            label = f"version {version.number}{star}"
            found.append((version.registered_at, batch.node, label, f"{version.rounds} rounds", False))
    found.sort(key=lambda one: one[0])
    names = list(dict.fromkeys([author, *(lane for _, lane, *_ in found)]))
    events = []
    for place, (at, lane, label, note, hollow) in enumerate(found):
        since = f"+{seconds(at - found[0][0])}" if place else moment(at)
        events.append(Event(lane, place, label, f"{note} {since}".strip(), colour(names.index(lane)), hollow))
    start = next((i for i, event in enumerate(events) if event.label == "published"), None)
    received = [i for i, event in enumerate(events) if event.label == "received"]
    return lanes("Its life", events, [] if start is None else [(start, i) for i in received])


# -- both -------------------------------------------------------------------------------------------------


def _heading(document: Journey | Teachers) -> dict[str, Any]:
    return {
        "title": headline(document),
        "problems": document.problems,
        "notes": document.notes,
        "made_by": f"sapo lineage {document.reference}",
    }


def seconds(value: float) -> str:
    """A duration for a person to read."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(value) >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.2f} s"


def moment(at: float) -> str:
    """A point in time, in UTC; in seconds where it lies outside any calendar, as a peer may say."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return f"{at:g} s"
