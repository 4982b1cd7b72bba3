"""Where a group ended up: who wrote it, who received it, who learned from it, in which model version it is.

Read from the history by the group's id alone; the versions come from MLflow, and the rest is shown without
them where that is away. Answers are plain values, as `sapo lineage --json` prints them (docs/lineage.md).
"""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from sapo.core.config.load import LearnConfig
from sapo.core.config.secrets import public
from sapo.core.errors import Refused, Unavailable, UserError
from sapo.core.types import SignedGroup
from sapo.peers.signing import unseal
from sapo.store.history import lineage_queries
from sapo.store.history.rollout_rows import group_of
from sapo.store.history.rounds import digest_of, lacking, settings
from sapo.store.history.tables import Store, TableName
from sapo.store.tracking import model_registry
from sapo.store.tracking.model_registry import Version
from sapo.store.tracking.tracker import CHAMPION, INCARNATION, ROUND

Row = Mapping[str, Any]
Document = dict[str, Any]
Rows = dict[TableName, list[Row]]
"""Of one group, by table: all that the history has."""
Rollbacks = Mapping[tuple[str, str], Mapping[int, int]]
"""Of each learner (node, incarnation): rounds that went back to older weights, and to which round's."""
LEFT = ("trained", "uninformative", "unscorable", "evicted")
"""What became of a received group."""
NAMED = 5
"""Of the groups that an ambiguous prefix means, how many are named."""
TASK = ("dataset", "config", "seed", "index", "question")
QUARANTINED = ("reason", "detail", "found_at", "bus_position", "content_sha256")
PART = ("k", "outcome", "score", "advantage", "retokenised")


def find(store: Store, prefix: str) -> tuple[str, Rows]:
    """The id of the one group that begins with `prefix`, and its rows.

    Raises `UserError` where there is none, or several.
    """
    places = lineage_queries.places(store, prefix)
    ids = sorted({row["group_id"] for rows in places.values() for row in rows})
    if not ids:
        remedy = "sapo rollouts --json shows ids; what a node still owes comes later (sapo status)"
        raise UserError("WHAT", prefix, "the history holds no group of this id", remedy)
    if len(ids) > 1:
        shown = ", ".join(ids[:NAMED]) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")
        raise UserError("WHAT", prefix, f"begins the ids of {len(ids)} groups", f"name one of {shown}")
    return ids[0], {name: [*lineage_queries.rows_of(store, name, ids[0], at)] for name, at in places.items()}


def journey(store: Store, group_id: str, rows: Rows, swarm: str, uri: str) -> Document:
    """A group's life, told by its rows. `uri` is MLflow's; if it is away, `mlflow.away` is why.
    Rows with missing values, or numbers that are none, are named in `problems` and left out."""
    problems = _problems(rows)
    rows = {name: _numbers(held) for name, held in rows.items()}
    rows["training"] = training = [row for row in rows["training"] if lacking(row) is None]
    learners = sorted({(str(row["node"]), str(row["incarnation"])) for row in training})
    rollbacks = {learner: lineage_queries.rollbacks(store, swarm, *learner) for learner in learners}
    learned = _learned(training, rollbacks)
    away = _add_versions(learned, rollbacks, swarm, uri)
    told = {row["node"] for row in rows["receipts"]}
    silent = {row["node"] for row in training if row["source"] == "external"} - told
    return {
        "kind": "group",
        "reference": group_id,
        "swarm": swarm,
        "group_id": group_id,
        **_author(rows),
        "completions": _completions(rows["rollouts"] or training),
        "quarantine": [_picked(row, QUARANTINED) for row in rows["quarantine"]],
        "received": _received(rows["receipts"]),
        "learned": learned,
        "mlflow": {"uri": public(uri), "away": away},
        "notes": [
            f"when {node} received it is not recorded: it ran an earlier release then"
            for node in sorted(silent)
        ],
        "problems": problems,
    }


def _picked(row: Row, names: Sequence[str]) -> Document:
    return {name: row[name] for name in names}


def _problems(rows: Rows) -> list[str]:
    """What does not hold: the signature, a row's digest, or one content under two digests."""
    problems = []
    if rows["rollouts"]:
        try:
            unseal(_signed(rows["rollouts"]))
        except (Refused, ValueError) as reason:
            why = " ".join(str(reason).split())[:300]
            problems.append(f"rollouts: what the history holds is not what was signed: {why}")
    for name, held in rows.items():
        if name in ("rollouts", "receipts") and len(_numbers(held)) < len(held):
            problems.append(f"{name}: a row holds a number that is none: it is left out")
    for row in rows["training"]:
        wrong = lacking(row)
        if wrong is not None or digest_of(row) != row["row_digest"]:
            place = f"round {row['round']}, position {row['position']}, completion {row['k']}"
            what = "does not have its digest" if wrong is None else f"has no {wrong}"
            problems.append(f"training: the row of {row['node']}, {place} {what}")
    contents = {row["content_sha256"] for row in (*rows["rollouts"], *rows["training"])}
    if len(contents) > 1:
        which = ", ".join(sorted(contents))
        problems.append(f"it stands in the history with {len(contents)} contents: {which}")
    return problems


def _numbers(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if all(isfinite(v) for v in row.values() if isinstance(v, float))]


def _signed(rollouts: Sequence[Row]) -> SignedGroup:
    payload = group_of(rollouts).canonical().encode()
    names = ("group_id", "content_sha256", "key", "signature")
    return SignedGroup(**_picked(rollouts[0], names), payload=payload)


def _author(rows: Rows) -> Document:
    names = ("node", "key", "incarnation", "round", "policy_version", "created_at")
    author: Document = dict.fromkeys(names)
    task = published = None
    if rows["rollouts"]:
        row = rows["rollouts"][0]
        author, task = _picked(row, names), _picked(row, TASK)
        published = {
            "at": row["published_at"],
            **_picked(row, ("bus_position", *QUARANTINED[4:], "signature")),
        }
    elif rows["training"]:
        row = min(rows["training"], key=lambda row: str(row["source"]) != "local")
        author |= {"node": row["producer"], "key": row["producer_key"]}
        author["policy_version"], task = row["producer_version"], _picked(row, TASK)
        if row["source"] == "local":
            author |= _picked(row, ("incarnation", "round"))
    elif rows["receipts"]:
        author |= {"node": rows["receipts"][0]["producer"], "key": rows["receipts"][0]["producer_key"]}
    elif rows["quarantine"]:
        author["key"] = rows["quarantine"][0]["key"]
    return {"author": author, "task": task, "published": published}


def _completions(rows: Sequence[Row]) -> list[Document]:
    answers = {row["k"]: row for row in sorted(rows, key=lambda row: int(row["k"]))}
    return [
        _picked(row, ("k", "text", "finish_reason")) | {"claimed_score": row.get("claimed_score")}
        for row in answers.values()
    ]


def _received(receipts: Sequence[Row]) -> list[Document]:
    """One entry per node; `became` is None while the group waits in the pool, or if the node has stopped."""
    nodes: dict[tuple[str, str], Document] = {}
    for row in sorted(receipts, key=lambda row: (row["received_at"], row["node"], row["round"])):
        first = _picked(row, ("node", "incarnation", "received_at", "published_at", "round"))
        entry = nodes.setdefault(
            (row["node"], row["incarnation"]), first | {"became": None, "became_round": None}
        )
        if row["event"] in LEFT:
            entry |= {"became": row["event"], "became_round": row["round"]}
        else:
            entry["round"] = row["round"]
    return list(nodes.values())


def _learned(training: Sequence[Row], rollbacks: Rollbacks) -> list[Document]:
    batches: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(training, key=lambda row: (row["finished_at"], row["node"], row["k"])):
        batches.setdefault((row["node"], row["incarnation"], row["round"]), []).append(row)
    entries = []
    for (node, incarnation, round), rows in batches.items():
        parts = [_part(row) for row in rows]
        lasts, skipped = lineage_queries.lasts(round, rollbacks[node, incarnation]), rows[0]["skipped"]
        trained = [one for one in parts if one["trained"]]
        fate = "learned" if trained else "no advantage"
        entries.append(
            {
                **_picked(rows[0], ("node", "incarnation", "round", "source", "skipped", "age_s")),
                "finished_at": rows[0]["finished_at"],
                "fate": "skipped" if skipped is not None else fate if lasts else "undone",
                "tokens": sum(one["tokens"] for one in trained),
                "completions": parts,
                "versions": [],
            }
        )
    return entries


def _part(row: Row) -> Document:
    admitted = row["source"] == "local"
    if not admitted:
        learn = settings(LearnConfig, row["learn"], row["node"], row["round"])
        late, told = row["round"] - row["producer_version"], row["behaviour_logprobs"] is not None
        admitted = learn.admits(row["advantage"], late, told=told)
    trained = row["advantage"] != 0 and admitted
    return _picked(row, PART) | {"tokens": sum(row["loss_mask"]), "trained": trained}


def _add_versions(learned: Sequence[Document], rollbacks: Rollbacks, swarm: str, uri: str) -> str | None:
    """Add to each entry the first version that includes its step, and the champion if that does too.
    Returns why MLflow did not answer; None if it did."""
    known: dict[str, list[Version]] = {}
    for entry in learned:
        name = f"{swarm}.{entry['node']}"
        if name not in known:
            try:
                known[name] = model_registry.versions_of(uri, name)
            except Unavailable as problem:
                return str(problem)
        undone = rollbacks[entry["node"], entry["incarnation"]]
        holding = sorted(
            (one for one in known[name] if _includes(one, entry, undone)),
            key=lambda one: int(one.tags[ROUND]),
        )
        entry["versions"] = [
            {
                "name": one.name,
                "number": one.number,
                "rounds": int(one.tags[ROUND]),
                "registered_at": one.created_at,
                "first": one is holding[0],
                "champion": CHAMPION in one.aliases,
            }
            for one in holding
            if one is holding[0] or CHAMPION in one.aliases
        ]
    return None


def _includes(version: Version, entry: Document, rollbacks: Mapping[int, int]) -> bool:
    tags = version.tags
    if not entry["tokens"] or entry["skipped"] is not None or tags.get(INCARNATION) != entry["incarnation"]:
        return False
    count = int(tags[ROUND]) if tags.get(ROUND, "").isdecimal() else 0
    return lineage_queries.lasts(entry["round"], rollbacks, count)
