"""Where a group ended up: who wrote it, who received it, who learned from it, in which model version it is.

Read from the history by the group's id alone; the versions come from MLflow, and the rest is shown without
them where that is away.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from sapo.core.config.load import LearnConfig
from sapo.core.config.secrets import public
from sapo.core.errors import Refused, Unavailable, UserError
from sapo.core.types import SignedGroup
from sapo.peers.signing import unseal
from sapo.store.history import lineage_queries
from sapo.store.history.rollout_rows import group_of
from sapo.store.history.rounds import digest_of, lacking
from sapo.store.history.tables import Store, TableName
from sapo.store.tracking import model_registry
from sapo.store.tracking.model_registry import Version
from sapo.store.tracking.tracker import CHAMPION, INCARNATION, ROUND

Row = Mapping[str, Any]
Rollbacks = Mapping[tuple[str, str], Mapping[int, int]]
"""Of each learner (node, incarnation): rounds that went back to older weights, and to which round's."""
LEFT = ("trained", "uninformative", "unscorable", "evicted")
"""What became of a received group."""
ALWAYS = 2**31
NAMED = 5
"""Of the groups that an ambiguous prefix means, how many are named."""


@dataclass(frozen=True, slots=True)
class Found:
    """A group and all rows the history has of it."""

    group_id: str
    rollouts: Sequence[Row]
    training: Sequence[Row]
    receipts: Sequence[Row]
    quarantine: Sequence[Row]


def find(store: Store, prefix: str) -> Found:
    """The one group whose id begins with `prefix`. Raises `UserError` where there is none, or several."""
    places = lineage_queries.places(store, prefix)
    ids = sorted({row["group_id"] for rows in places.values() for row in rows})
    if not ids:
        remedy = "sapo rollouts --json shows ids; what a node still owes comes later (sapo status)"
        raise UserError("WHAT", prefix, "the history holds no group of this id", remedy)
    if len(ids) > 1:
        shown = ", ".join(ids[:NAMED]) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")
        raise UserError("WHAT", prefix, f"begins the ids of {len(ids)} groups", f"name one of {shown}")

    def rows(name: TableName) -> list[Row]:
        return list(lineage_queries.rows_of(store, name, ids[0], places[name]))

    return Found(ids[0], rows("rollouts"), rows("training"), rows("receipts"), rows("quarantine"))


def journey(store: Store, found: Found, swarm: str, uri: str) -> dict[str, Any]:
    """A group's life as plain JSON values. `uri` is MLflow's; if it is away, `mlflow.away` is why.

    Rows with missing values, or numbers that are none, are named in `problems` and left out.
    """
    problems, found = _problems(found), _tellable(found)
    learners = sorted({(str(row["node"]), str(row["incarnation"])) for row in found.training})
    rollbacks = {learner: lineage_queries.rollbacks(store, swarm, *learner) for learner in learners}
    learned = _learned(found, rollbacks)
    away = _add_versions(learned, rollbacks, swarm, uri)
    return {
        "kind": "group",
        "reference": found.group_id,
        "swarm": swarm,
        "group_id": found.group_id,
        **_author(found),
        "published": _published(found),
        "completions": _completions(found),
        "quarantine": [
            {name: row[name] for name in ("reason", "detail", "found_at", "bus_position", "content_sha256")}
            for row in found.quarantine
        ],
        "received": _received(found.receipts),
        "learned": learned,
        "mlflow": {"uri": public(uri), "away": away},
        "notes": _notes(found),
        "problems": problems,
    }


def _problems(found: Found) -> list[str]:
    """What does not hold: the signature, a row's digest, or one content under two digests."""
    problems = []
    if found.rollouts:
        try:
            unseal(_signed(found))
        except (Refused, ValueError) as reason:
            why = " ".join(str(reason).split())[:300]
            problems.append(f"rollouts: what the history holds is not what was signed: {why}")
    for name, rows in (("rollouts", found.rollouts), ("receipts", found.receipts)):
        if len(_numbers(rows)) < len(rows):
            problems.append(f"{name}: a row holds a number that is none: it is left out")
    for row in found.training:
        wrong = lacking(row)
        if wrong is not None or digest_of(row) != row["row_digest"]:
            place = f"round {row['round']}, position {row['position']}, completion {row['k']}"
            what = "does not have its digest" if wrong is None else f"has no {wrong}"
            problems.append(f"training: the row of {row['node']}, {place} {what}")
    contents = {row["content_sha256"] for row in (*found.rollouts, *found.training)}
    if len(contents) > 1:
        problems.append(
            f"it stands in the history with {len(contents)} contents: {', '.join(sorted(contents))}"
        )
    return problems


def _tellable(found: Found) -> Found:
    """The group without the rows that cannot be read: values are missing, or numbers are none."""
    training = [row for row in _numbers(found.training) if lacking(row) is None]
    rollouts, receipts = _numbers(found.rollouts), _numbers(found.receipts)
    return Found(found.group_id, rollouts, training, receipts, _numbers(found.quarantine))


def _numbers(rows: Sequence[Row]) -> list[Row]:
    """Those rows whose numbers are all finite."""
    return [row for row in rows if all(isfinite(v) for v in row.values() if isinstance(v, float))]


def _notes(found: Found) -> list[str]:
    """What the history does not tell."""
    told = {row["node"] for row in found.receipts}
    silent = {row["node"] for row in found.training if row["source"] == "external"} - told
    return [
        f"when {node} received it is not recorded: it ran an earlier release then" for node in sorted(silent)
    ]


def _signed(found: Found) -> SignedGroup:
    row = found.rollouts[0]
    payload = group_of(found.rollouts).canonical().encode()
    names = ("group_id", "content_sha256", "key", "signature")
    return SignedGroup(**{name: row[name] for name in names}, payload=payload)


def _author(found: Found) -> dict[str, Any]:
    """Who wrote it and what it answers; null if only a receipt or the quarantine knows it."""
    if found.rollouts:
        row = found.rollouts[0]
        author = {name: row[name] for name in ("node", "key", "incarnation", "round", "policy_version")}
        created = row["created_at"]
    elif found.training:
        row = min(found.training, key=lambda row: str(row["source"]) != "local")
        local = row["source"] == "local"
        author = {"node": row["producer"], "key": row["producer_key"]}
        author |= {name: row[name] if local else None for name in ("incarnation", "round")}
        author["policy_version"], created = row["producer_version"], None
    elif found.receipts:
        row, created = found.receipts[0], None
        author = {"node": row["producer"], "key": row["producer_key"]}
        author |= dict.fromkeys(("incarnation", "round", "policy_version"))
    else:
        key = found.quarantine[0]["key"] if found.quarantine else None
        author = {"node": None, "key": key} | dict.fromkeys(("incarnation", "round", "policy_version"))
        return {"author": {**author, "created_at": None}, "task": None}
    task = None
    if "question" in row:
        task = {name: row[name] for name in ("dataset", "config", "seed", "index", "question")}
    return {"author": {**author, "created_at": created}, "task": task}


def _published(found: Found) -> dict[str, Any] | None:
    """When and where it came onto the bus; None where the archive has not seen it."""
    if not found.rollouts:
        return None
    row = found.rollouts[0]
    return {
        "at": row["published_at"],
        "bus_position": row["bus_position"],
        "content_sha256": row["content_sha256"],
        "signature": row["signature"],
    }


def _completions(found: Found) -> list[dict[str, Any]]:
    """The answers, in order, with what the author claims of them."""
    rows = found.rollouts or found.training
    answers = {row["k"]: row for row in sorted(rows, key=lambda row: int(row["k"]))}
    return [
        {
            "k": k,
            "text": row["text"],
            "finish_reason": row["finish_reason"],
            "claimed_score": row.get("claimed_score"),
        }
        for k, row in answers.items()
    ]


def _received(receipts: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per node that received it: when, in which of its rounds, and what became of it there.

    `became` is null while the group waits in the pool, or when the node has stopped.
    """
    ordered = sorted(receipts, key=lambda row: (row["received_at"], row["node"], row["round"]))
    nodes: dict[tuple[str, str], dict[str, Any]] = {}
    for row in ordered:
        entry = nodes.setdefault(
            (row["node"], row["incarnation"]),
            {
                "node": row["node"],
                "incarnation": row["incarnation"],
                "received_at": row["received_at"],
                "published_at": row["published_at"],
                "round": row["round"],
                "became": None,
                "became_round": None,
            },
        )
        if row["event"] in LEFT:
            entry |= {"became": row["event"], "became_round": row["round"]}
        else:
            entry["round"] = row["round"]
    return list(nodes.values())


def _learned(found: Found, rollbacks: Rollbacks) -> list[dict[str, Any]]:
    """Each batch it was in: whose, when, what became of the step, and each completion's part in it."""
    batches: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(found.training, key=lambda row: (row["finished_at"], row["node"], row["k"])):
        batches.setdefault((row["node"], row["incarnation"], row["round"]), []).append(row)
    entries = []
    for (node, incarnation, round), rows in batches.items():
        completions = [_completion(row) for row in rows]
        lasts = _lasts(round, rollbacks[node, incarnation], ALWAYS)
        skipped = rows[0]["skipped"]
        entries.append(
            {
                "node": node,
                "incarnation": incarnation,
                "round": round,
                "source": rows[0]["source"],
                "fate": _fate(skipped, lasts, completions),
                "skipped": skipped,
                "age_s": rows[0]["age_s"],
                "finished_at": rows[0]["finished_at"],
                "tokens": sum(one["tokens"] for one in completions if one["trained"]),
                "completions": completions,
                "versions": [],
            }
        )
    return entries


def _fate(skipped: str | None, lasts: bool, completions: Sequence[Mapping[str, Any]]) -> str:
    """What came of it in a batch: `learned`, or why nothing did or does any more."""
    if skipped is not None:
        return "skipped"
    if not lasts:
        return "undone"
    return "learned" if any(one["trained"] for one in completions) else "no advantage"


def _completion(row: Row) -> dict[str, Any]:
    own = ("k", "outcome", "score", "advantage", "retokenised")
    staleness = row["round"] - row["producer_version"]
    admitted = row["source"] == "local" or LearnConfig.model_validate_json(row["learn"]).admits(
        row["advantage"], staleness
    )
    trained = row["advantage"] != 0 and admitted
    return {**{name: row[name] for name in own}, "tokens": sum(row["loss_mask"]), "trained": trained}


def _add_versions(
    learned: Iterable[dict[str, Any]], rollbacks: Rollbacks, swarm: str, uri: str
) -> str | None:
    """Add to each entry the first version that includes its step, and the champion where that does too.

    Returns why MLflow could not say, None when it could.
    """
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


def _includes(version: Version, entry: Mapping[str, Any], rollbacks: Mapping[int, int]) -> bool:
    """Whether the version's weights have seen the step of this entry."""
    tags = version.tags
    if not entry["tokens"] or entry["skipped"] is not None or tags.get(INCARNATION) != entry["incarnation"]:
        return False
    count = int(tags[ROUND]) if tags.get(ROUND, "").isdecimal() else 0
    return _lasts(entry["round"], rollbacks, count)


def _lasts(round: int, rollbacks: Mapping[int, int], count: int) -> bool:
    """Whether what a round did is in the weights after `count` rounds."""
    return any(round in span for span in lineage_queries.lasting(rollbacks, count))
