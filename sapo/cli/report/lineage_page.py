"""Lineage for people: the tables and sentences of its answers, and a page for each."""

import time
from pathlib import Path
from typing import Any

from sapo.cli.report.html import Figure, Table, percent, render
from sapo.cli.report.live_view import seconds
from sapo.cli.report.svg_charts import PALETTE, colour, stacked_bars
from sapo.core.atomic_file import write_atomically
from sapo.core.config.home import Home
from sapo.core.types import shown
from sapo.provenance.model_lineage import short

Document = dict[str, Any]
PEERS_SHOWN = len(PALETTE)
"""The picture shows so many by name; the rest is one more."""
SUMS = ("groups", "answers", "tokens", "share", "|adv|", "age", "versions")
"""Of these groups so many had an advantage; answers and their trained tokens are those with one; mean of its
absolute value; median age when trained on; range of their writer's policy versions."""
PEERS, TASKS = ("", "peer", "key", *SUMS), ("", "task", *SUMS)
AUTHORS = ("author", "key", "published", "accepted", "learned", "tokens", "of others", "share", "gradient")
NUMBERS = {*SUMS, *AUTHORS[2:]}
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
    write_atomically(path, _page(document))
    return path


def _page(document: Document) -> str:
    kind, picture, labels = document["kind"], None, {}
    if "when" in document:
        labels = _labels(document)
        note = "How much each peer taught when. Ticks at the top: grey where a round made no step, red where "
        picture = Figure(_strip(document, labels), note + "its step was rolled back.")
    return render(
        "lineage.html",
        title=headline(document),
        problems=document["problems"],
        notes=document["notes"],
        task=document.get("task"),
        lines=life(document) if kind == "group" else lines(document),
        picture=picture,
        colours=list(dict.fromkeys(labels.values())),
        tables=tables(document),
        made_by=f"sapo lineage {'--swarm' if kind == 'swarm' else document['reference']}",
    )


def headline(document: Document) -> str:
    """What the document is about."""
    version = document.get("version")
    if document["kind"] == "group":
        return f"group {document['group_id'][:16]}"
    if document["kind"] == "swarm":
        return f"swarm {document['swarm']}: who taught whom"
    if version is None:
        return f"{document['node']} after {document['rounds']['count']} rounds"
    aliases = "".join(f" @{alias}" for alias in version["aliases"])
    return f"{version['name']} version {version['number']}{aliases}"


def lines(document: Document) -> list[str]:
    """What there is to say of it in sentences."""
    if document["kind"] == "group":
        task = document["task"]  # None if only a receipt or the quarantine knows the group
        asked = [] if task is None else [f"{task['dataset']} asked:", *str(task["question"]).splitlines()]
        return [*asked, *life(document)]
    return [] if document["kind"] == "swarm" else [_coverage(document), _amount(document)]


def tables(document: Document) -> dict[str, Table]:
    """Its tables by their titles."""
    if document["kind"] == "group":
        return {"Answers": answer_table(document)}
    if document["kind"] == "swarm":
        authors = Table(AUTHORS, author_rows(document))
        return {
            "What each author contributed": authors,
            "Trained tokens by author and learner": taught_table(document),
        }
    peers = [
        (one["source"], one["producer"], one["producer_key"][:8], *_sums(one)) for one in document["peers"]
    ]
    tasks = [(one["source"], one["dataset"], *_sums(one)) for one in document["tasks"]]
    links = [
        (link["link"], short(link["version"]), short(link["history"]), link["state"])
        for link in document["links"]
    ]
    names = ("weights_sha256", "chain", "batch", "config")
    return {
        "Peers": Table(PEERS, peers),
        "Tasks": Table(TASKS, tasks),
        "Links": Table(("link", "the version", "the history", ""), links),
        "Digests": Table(("digest", ""), [(name, document["digests"][name] or "–") for name in names]),
    }


# -- a swarm ------------------------------------------------------------------------------------------------


def author_rows(document: Document) -> list[tuple[str, ...]]:
    """Cells of the table of authors, columns as `AUTHORS`."""
    counts = ("published", "accepted", "learned", "tokens", "tokens_of_others")
    return [
        (
            one["author"],
            one["key"][:8],
            *(f"{one[name]:,}" for name in counts),
            percent(one["share_tokens"]),
            percent(one["share_gradient"]),
        )
        for one in document["authors"]
    ]


def taught_table(document: Document) -> Table:
    """Trained tokens by author, a row each, and learner, a column each."""
    learners = sorted({one["learner"] for one in document["taught"]})
    tokens = {(one["key"], one["learner"]): one["tokens"] for one in document["taught"]}
    rows = [
        (one["author"], one["key"][:8], *(f"{tokens.get((one['key'], name), 0):,}" for name in learners))
        for one in document["authors"]
    ]
    return Table(("author", "key", *learners), rows)


# -- a version, or a node ---------------------------------------------------------------------------------


def _coverage(document: Document) -> str:
    rounds = document["rounds"]
    said = [f"{rounds['learned']} of {rounds['count']} rounds made a step that lasts"]
    for name, what in (
        ("skipped", "were skipped"),
        ("rolled_back", "were rolled back"),
        ("without_groups", "had no groups"),
        ("cut", "are not kept any more"),
    ):
        if rounds[name]:
            said.append(f"{rounds[name]} {what}")
    return f"{document['node']}, incarnation {document['incarnation']}: {', '.join(said)}."


def _amount(document: Document) -> str:
    totals = document["totals"]
    foreign = sum(one["share"] for one in document["peers"] if one["source"] == "external")
    return (
        f"{totals['tokens']:,} tokens of {totals['completions']:,} completions in "
        f"{totals['informative']:,} groups with an advantage taught it, {percent(foreign)} of the tokens by "
        "other nodes."
    )


def _sums(one: Document) -> tuple[str, ...]:
    versions, own = one["policy_versions"], one["source"] == "local"
    return (
        f"{one['informative']:,}/{one['groups']:,}",
        f"{one['completions']:,}",
        f"{one['tokens']:,}",
        percent(one["share"]),
        "–" if one["advantage"] is None else f"{one['advantage']:.3f}",
        seconds(None if own else one["age_s"]),
        "–" if versions is None else f"{versions[0]}–{versions[1]}",
    )


def _labels(document: Document) -> dict[tuple[str, str], tuple[str, str]]:
    peers = document["peers"]
    names = [one["producer"] for one in peers]
    found = {}
    for place, one in enumerate(peers):
        name, own = one["producer"], one["source"] == "local"
        if names.count(name) > 1 and not own:
            name += f" {one['producer_key'][:8]}"
        rest = place >= PEERS_SHOWN
        label = f"{len(peers) - PEERS_SHOWN} more" if rest else f"{name} (itself)" if own else name
        found[one["producer_key"], one["source"]] = label, "#8a8a8a" if rest else colour(place)
    return found


def _strip(document: Document, labels: dict[tuple[str, str], tuple[str, str]]) -> str:
    when = document["when"]
    lengths = [last - first + 1 for first, last in when["stretches"]]
    taught = {(one["producer_key"], one["source"]): one["tokens"] for one in when["peers"]}
    series: dict[str, list[float]] = {}
    for peer, (label, _) in labels.items():
        if peer in taught:
            so_far = series.get(label, [0.0] * len(lengths))
            series[label] = [a + b / n for a, b, n in zip(so_far, taught[peer], lengths, strict=True)]
    shades = dict(labels.values())
    return stacked_bars(
        "When it was taught",
        [first for first, _ in when["stretches"]] + [document["rounds"]["count"]],
        series,
        [shades[label] for label in series],
        x_label="round",
        y_label="tokens a round",
        marks={"no step": when["skipped"], "rolled back": when["rolled_back"]},
    )


# -- a group ----------------------------------------------------------------------------------------------


def life(document: Document) -> list[str]:
    """A group's life in sentences, in order."""
    author, published, said = document["author"], document["published"], []
    if author["node"] is not None:
        where = "" if author["round"] is None else f" in its round {author['round']}"
        version = author["policy_version"]
        policy = "" if version is None else f", policy version {version}"
        said.append(f"{author['node']} ({(author['key'] or '')[:8]}) wrote it{where}{policy}.")
    if published is not None:
        said.append(f"Published {moment(published['at'])} at {published['bus_position']}, signed.")
    elif not document["quarantine"]:
        said.append(
            "The archive has no record of it on the bus: its author kept it, or it is not archived yet."
        )
    for copy in document["quarantine"]:
        said.append(f"QUARANTINED {moment(copy['found_at'])}: {copy['reason']}, {copy['detail']}.")
    for one in document["received"]:
        at = one["published_at"]
        after = "" if at is None else f" {seconds(one['received_at'] - at)} later"
        became = "it is in the pool, or the node has stopped"
        if one["became"] is not None:
            became = f"{one['became']} in round {one['became_round']}"
        said.append(f"{one['node']} received it{after} in round {one['round']}: {became}.")
    for batch in document["learned"]:
        own = ", its author," if batch["source"] == "local" else ""
        why = f" ({batch['skipped']})" if batch["skipped"] else ""
        fate = f"{batch['node']}{own} {FATES[batch['fate']]}{why}"
        said.append(f"{fate} in round {batch['round']}: {batch['tokens']} tokens.")
        for version in batch["versions"]:
            first = ", the first that has it" if version["first"] else ""
            champion = ", the champion" if version["champion"] else ""
            which = f"{version['name']} version {version['number']} ({version['rounds']} rounds)"
            said.append(f"It is in {which}{first}{champion}.")
    if document["mlflow"]["away"] is not None:
        said.append("MLflow is away, so in which model versions it is cannot be told.")
    return said


def answer_table(document: Document) -> Table:
    """Each completion with the score and advantage that every batch gave it."""
    learned = document["learned"]
    rows = []
    for answer in document["completions"]:
        parts = [{part["k"]: part for part in entry["completions"]}.get(answer["k"]) for entry in learned]
        text = shown(answer["text"], answer["finish_reason"])
        rows.append((text, *("–" if part is None else _verdict(part) for part in parts)))
    head = ("completion", *(f"{one['node']}, round {one['round']}" for one in learned))
    return Table(head, rows, code=True)


def _verdict(part: Document) -> str:
    score = part["outcome"] if part["score"] is None else f"{part['score']:g}"
    return f"{score} ({part['advantage']:+.3f}, {part['tokens']} tokens)"


def moment(at: float) -> str:
    """A point in time, in UTC; in seconds where it lies outside any calendar, as a peer may say."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return f"{at:g} s"
