"""Lineage for people: the tables and sentences of both questions, and a page with a picture for each."""

import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from sapo.cli.report.run_page import STYLE, percent, table
from sapo.cli.report.svg_charts import PALETTE, colour, stacked_bars
from sapo.cli.report.svg_diagrams import Event, Flow, flow_chart, lanes
from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.provenance.model_lineage import short

Document = Mapping[str, Any]
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


def write_page(home: Home, name: str, document: Document) -> Path:
    """Write the page of a document to `<home>/lineage/<name>.html`, whole or not at all; returns its path."""
    home.lineage.mkdir(exist_ok=True)
    path = home.lineage / f"{name}.html"
    body = _group_page(document) if document["kind"] == "group" else _teachers_page(document)
    title = headline(document)
    write_atomically(
        path,
        f"<!doctype html>\n<html lang=en><meta charset=utf-8><title>{escape(title)}</title>"
        f"<meta name=viewport content='width=device-width'><style>{STYLE}{ALARM}</style>"
        f"<body><h1>{escape(title)}</h1>{''.join(body)}"
        f"<footer>Made by <code>sapo lineage {escape(str(document['reference']))}</code>.</footer>"
        "</body></html>\n",
    )
    return path


def headline(document: Document) -> str:
    """What the document is about."""
    if document["kind"] == "group":
        return f"group {document['group_id'][:16]}"
    if document["version"] is None:
        return f"{document['node']} after {document['rounds']['count']} rounds"
    version = document["version"]
    aliases = "".join(f" @{alias}" for alias in version["aliases"])
    return f"{version['name']} version {version['number']}{aliases}"


# -- a version, or a node ---------------------------------------------------------------------------------


def coverage(document: Document) -> str:
    """Which rounds made it, in a sentence."""
    rounds = document["rounds"]
    said = [f"{rounds['learned']} of {rounds['count']} rounds made a step that lasts"]
    for key, what in (
        ("skipped", "were skipped"),
        ("rolled_back", "were rolled back"),
        ("without_groups", "had no groups"),
        ("cut", "are not kept any more"),
    ):
        if rounds[key]:
            said.append(f"{rounds[key]} {what}")
    return f"{document['node']}, incarnation {document['incarnation']}: {', '.join(said)}."


def amount(document: Document) -> str:
    """How much taught it, in a sentence."""
    totals = document["totals"]
    foreign = sum(one["share"] for one in document["peers"] if one["source"] == "external")
    return (
        f"{totals['tokens']:,} tokens of {totals['completions']:,} completions in {totals['informative']:,} "
        f"groups with an advantage taught it, {percent(foreign)} of the tokens by other nodes."
    )


def peer_rows(document: Document) -> list[tuple[str, ...]]:
    """Cells of the table of peers, columns as `PEERS`."""
    return [
        (one["source"], one["producer"], one["producer_key"][:8], *_sums(one)) for one in document["peers"]
    ]


def task_rows(document: Document) -> list[tuple[str, ...]]:
    """Cells of the table of tasks, columns as `TASKS`; own groups and those of others apart."""
    return [(one["source"], one["dataset"], *_sums(one)) for one in document["tasks"]]


def _sums(one: Document) -> tuple[str, ...]:
    versions = one["policy_versions"]
    return (
        f"{one['informative']:,}/{one['groups']:,}",
        f"{one['completions']:,}",
        f"{one['tokens']:,}",
        percent(one["share"]),
        "–" if one["advantage"] is None else f"{one['advantage']:.3f}",
        "–" if one["age_s"] is None or one["source"] == "local" else seconds(one["age_s"]),
        "–" if versions is None else f"{versions[0]}–{versions[1]}",
    )


def link_rows(document: Document) -> list[tuple[str, ...]]:
    """The version's claims beside the history, and whether they agree."""
    return [
        (link["link"], short(link["version"]), short(link["history"]), link["state"])
        for link in document["links"]
    ]


def digest_rows(document: Document) -> list[tuple[str, str]]:
    """The digests that name it, whole."""
    digests = document["digests"]
    return [(name, digests[name] or "–") for name in ("weights_sha256", "chain", "batch", "config")]


def _teachers_page(document: Document) -> list[str]:
    labels = _labels(document)
    return [
        f"<p class=lead>{escape(amount(document))}</p><p>{escape(coverage(document))}</p>",
        *_said(document),
        _figure(
            _flows(document, labels),
            "Trained tokens: who wrote them, for which task, and into what they went. Only completions with "
            "an advantage in rounds whose step lasts.",
        ),
        _figure(
            _strip(document, labels),
            "How much each peer taught when. Ticks at the top: grey where a round made no step, red where "
            "its step was rolled back.",
        ),
        _legend(labels),
        "<h2>Peers</h2>",
        table(PEERS, peer_rows(document)),
        "<h2>Tasks</h2>",
        table(TASKS, task_rows(document)),
        "<h2>Links</h2>" if document["links"] else "",
        table(("", "the version", "the history", ""), link_rows(document)) if document["links"] else "",
        "<h2>Digests</h2>",
        table(("", ""), digest_rows(document)),
    ]


def _labels(document: Document) -> dict[tuple[str, str], tuple[str, str]]:
    """Name and colour of every peer, by key and source; those past the first are others."""
    peers = document["peers"]
    names = [one["producer"] for one in peers]
    found = {}
    for place, one in enumerate(peers):
        name = one["producer"]
        if names.count(name) > 1 and one["source"] == "external":
            name += f" {one['producer_key'][:8]}"
        if one["source"] == "local":
            name += " (itself)"
        rest = place >= PEERS_SHOWN
        label = f"{len(peers) - PEERS_SHOWN} more" if rest else name
        found[one["producer_key"], one["source"]] = label, "#8a8a8a" if rest else colour(place)
    return found


def _flows(document: Document, labels: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    tokens: dict[str, int] = {}
    for one in document["flows"]:
        tokens[one["dataset"]] = tokens.get(one["dataset"], 0) + one["tokens"]
    ranked = sorted(tokens, key=lambda name: -tokens[name])
    rest = set(ranked[TASKS_SHOWN:])
    amounts: dict[tuple[str, str, str], int] = {}
    for one in document["flows"]:
        label, shade = labels[one["producer_key"], one["source"]]
        task = f"{len(rest)} more" if one["dataset"] in rest else one["dataset"]
        amounts[label, task, shade] = amounts.get((label, task, shade), 0) + one["tokens"]
    order = [label for label, _ in labels.values()]
    flows = [Flow(label, task, n, shade) for (label, task, shade), n in amounts.items() if n]
    flows.sort(key=lambda flow: (order.index(flow.start), -tokens.get(flow.by, 0)))
    version = document["version"]
    end = document["node"] if version is None else f"{document['node']} v{version['number']}"
    return flow_chart("Who taught it", flows, end)


def _strip(document: Document, labels: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    when = document["when"]
    lengths = [last - first + 1 for first, last in when["stretches"]]
    series: dict[str, list[float]] = {}
    shades: dict[str, str] = {}
    for one in when["peers"]:
        label, shade = labels[one["producer_key"], one["source"]]
        so_far = series.get(label, [0.0] * len(lengths))
        series[label] = [a + b / n for a, b, n in zip(so_far, one["tokens"], lengths, strict=True)]
        shades[label] = shade
    order = list(dict.fromkeys(label for label, _ in labels.values() if label in series))
    edges = [first for first, _ in when["stretches"]] + [document["rounds"]["count"]]
    return stacked_bars(
        "When it was taught",
        edges,
        {label: series[label] for label in order},
        [shades[label] for label in order],
        x_label="round",
        y_label="tokens a round",
        marks={"no step": when["skipped"], "rolled back": when["rolled_back"]},
    )


def _legend(labels: Mapping[tuple[str, str], tuple[str, str]]) -> str:
    items = "".join(
        f"<span><i style='background:{shade}'></i>{escape(label)}</span>"
        for label, shade in dict.fromkeys(labels.values())
    )
    return f"<p class=legend>{items}</p>"


# -- a group ----------------------------------------------------------------------------------------------


def asked(document: Document) -> list[str]:
    """The task and its question; nothing if only a receipt or the quarantine knows the group."""
    task = document["task"]
    return [] if task is None else [f"{task['dataset']} asked:", *str(task["question"]).splitlines()]


def life(document: Document) -> list[str]:
    """A group's life in sentences, in order."""
    author, said = document["author"], []
    if author["node"] is not None:
        where = "" if author["round"] is None else f" in its round {author['round']}"
        policy = "" if author["policy_version"] is None else f", policy version {author['policy_version']}"
        said.append(f"{author['node']} ({author['key'][:8]}) wrote it{where}{policy}.")
    if document["published"] is not None:
        published = document["published"]
        said.append(f"Published {moment(published['at'])} at {published['bus_position']}, signed.")
    elif not document["quarantine"]:
        said.append(
            "The archive has no record of it on the bus: its author kept it, or it is not archived yet."
        )
    for one in document["quarantine"]:
        said.append(f"QUARANTINED {moment(one['found_at'])}: {one['reason']}, {one['detail']}.")
    for one in document["received"]:
        after = (
            ""
            if one["published_at"] is None
            else f" {seconds(one['received_at'] - one['published_at'])} later"
        )
        became = "it is in the pool, or the node has stopped"
        if one["became"] is not None:
            became = f"{one['became']} in round {one['became_round']}"
        said.append(f"{one['node']} received it{after} in round {one['round']}: {became}.")
    for one in document["learned"]:
        own = ", its author," if one["source"] == "local" else ""
        why = f" ({one['skipped']})" if one["skipped"] else ""
        said.append(
            f"{one['node']}{own} {FATES[one['fate']]}{why} in round {one['round']}: {one['tokens']} tokens."
        )
        said += [f"It is in {_named(version)}." for version in one["versions"]]
    if document["mlflow"]["away"] is not None:
        said.append("MLflow is away, so in which model versions it is cannot be told.")
    return said


def _named(version: Document) -> str:
    first = ", the first that has it" if version["first"] else ""
    champion = ", the champion" if version["champion"] else ""
    return f"{version['name']} version {version['number']} ({version['rounds']} rounds){first}{champion}"


def answer_head(document: Document) -> tuple[str, ...]:
    """Column names of `answer_rows`."""
    return ("completion", *(f"{one['node']}, round {one['round']}" for one in document["learned"]))


def answer_rows(document: Document) -> list[tuple[str, ...]]:
    """Each completion with the score and advantage that every batch gave it."""
    rows = []
    for answer in document["completions"]:
        cells = []
        for entry in document["learned"]:
            part = next((one for one in entry["completions"] if one["k"] == answer["k"]), None)
            cells.append("–" if part is None else _verdict(part))
        rows.append((answer["text"], *cells))
    return rows


def _verdict(part: Document) -> str:
    score = part["outcome"] if part["score"] is None else f"{part['score']:g}"
    return f"{score} ({part['advantage']:+.3f}, {part['tokens']} tokens)"


def _group_page(document: Document) -> list[str]:
    task = document["task"]
    question = f"<h2>{escape(task['dataset'])}</h2><pre>{escape(task['question'])}</pre>" if task else ""
    told = "".join(f"<li>{escape(line)}</li>" for line in life(document))
    return [
        *_said(document),
        _figure(_time_line(document), "In order of time, each by the clock of whoever tells of it."),
        f"<ul>{told}</ul>",
        question,
        table(answer_head(document), answer_rows(document), code=True),
        f"<p><small>group {escape(document['group_id'])}</small></p>",
    ]


def _time_line(document: Document) -> str:
    """Its life as lanes: the author's, and one for each node that received it or learned from it."""
    found: list[tuple[float, str, str, str, bool]] = []
    author = str(document["author"]["node"])
    if document["author"]["created_at"] is not None:
        found.append((document["author"]["created_at"], author, "written", "", False))
    if document["published"] is not None:
        found.append((document["published"]["at"], author, "published", "", False))
    for one in document["received"]:
        found.append((one["received_at"], one["node"], "received", f"round {one['round']}", True))
        if one["became"] not in (None, "trained"):
            note = f"round {one['became_round']}"
            found.append((one["received_at"], one["node"], one["became"], note, True))
    for one in document["learned"]:
        found.append((one["finished_at"], one["node"], one["fate"], f"round {one['round']}", False))
        for version in one["versions"]:
            star = " ★" if version["champion"] else ""
            label = f"version {version['number']}{star}"
            found.append((version["registered_at"], one["node"], label, f"{version['rounds']} rounds", False))
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


def _figure(picture: str, caption: str) -> str:
    return f"<figure class='broad wide'>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _said(document: Document) -> list[str]:
    """What does not hold, and what has to be known beside the figures."""
    problems = [f"<p class=alarm>{escape(problem)}</p>" for problem in document["problems"]]
    return problems + [f"<p>{escape(note)}</p>" for note in document.get("notes", ())]


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


ALARM = """
.broad{max-width:62rem}
.alarm{border-left:4px solid #c0392b;padding-left:.8rem;font-weight:600}
""".replace("\n", "")
