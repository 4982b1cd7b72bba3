"""Where a group ended up: who wrote it, who received it, who learned from it, in which model version it is.

Read from the history by the group's id alone; the versions come from MLflow, and the rest is shown without
them where that is away.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any, TypeVar

from sapo.core.config.load import LearnConfig
from sapo.core.config.secrets import public
from sapo.core.errors import Refused, Unavailable, UserError
from sapo.core.types import SignedGroup
from sapo.peers.signing import unseal
from sapo.provenance.documents import (
    Answer,
    Author,
    Fate,
    HoldingVersion,
    Journey,
    Learned,
    MlflowState,
    Part,
    Published,
    Quarantined,
    Received,
    Task,
)
from sapo.store.history import lineage_queries
from sapo.store.history.rollout_rows import group_of
from sapo.store.history.rounds import digest_of, lacking
from sapo.store.history.tables import Store, TableName
from sapo.store.tracking import model_registry
from sapo.store.tracking.model_registry import Version
from sapo.store.tracking.tracker import CHAMPION, INCARNATION, ROUND

Row = Mapping[str, Any]
Record = TypeVar("Record", Task, Quarantined, Part)
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


def journey(store: Store, found: Found, swarm: str, uri: str) -> Journey:
    """A group's life. `uri` is MLflow's; if it is away, `mlflow.away` is why.

    Rows with missing values, or numbers that are none, are named in `problems` and left out.
    """
    problems, found = _problems(found), _tellable(found)
    learners = sorted({(str(row["node"]), str(row["incarnation"])) for row in found.training})
    rollbacks = {learner: lineage_queries.rollbacks(store, swarm, *learner) for learner in learners}
    learned, away = _with_versions(_learned(found, rollbacks), rollbacks, swarm, uri)
    author, task = _author(found)
    return Journey(
        kind="group",
        reference=found.group_id,
        swarm=swarm,
        group_id=found.group_id,
        author=author,
        task=task,
        published=_published(found),
        completions=_completions(found),
        quarantine=[_picked(Quarantined, row) for row in found.quarantine],
        received=_received(found.receipts),
        learned=learned,
        mlflow=MlflowState(public(uri), away),
        notes=_notes(found),
        problems=problems,
    )


def _picked(record: type[Record], row: Row, **more: Any) -> Record:
    """A record whose fields are columns of the row, but for those given."""
    names = {field.name for field in fields(record)} - {*more}
    return record(**{name: row[name] for name in names}, **more)


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


def _author(found: Found) -> tuple[Author, Task | None]:
    task = None
    if found.rollouts:
        row = found.rollouts[0]
        task = _picked(Task, row)
        author = Author(
            row["node"],
            row["key"],
            row["incarnation"],
            row["round"],
            row["policy_version"],
            row["created_at"],
        )
    elif found.training:
        row = min(found.training, key=lambda row: str(row["source"]) != "local")
        task = _picked(Task, row)
        local = row["source"] == "local"
        incarnation, round = (row["incarnation"], row["round"]) if local else (None, None)
        author = Author(row["producer"], row["producer_key"], incarnation, round, row["producer_version"])
    elif found.receipts:
        author = Author(found.receipts[0]["producer"], found.receipts[0]["producer_key"])
    else:
        author = Author(None, found.quarantine[0]["key"] if found.quarantine else None)
    return author, task


def _published(found: Found) -> Published | None:
    if not found.rollouts:
        return None
    row = found.rollouts[0]
    return Published(row["published_at"], row["bus_position"], row["content_sha256"], row["signature"])


def _completions(found: Found) -> list[Answer]:
    rows = found.rollouts or found.training
    answers = {row["k"]: row for row in sorted(rows, key=lambda row: int(row["k"]))}
    return [
        Answer(k, row["text"], row["finish_reason"], row.get("claimed_score")) for k, row in answers.items()
    ]


def _received(receipts: Sequence[Row]) -> list[Received]:
    ordered = sorted(receipts, key=lambda row: (row["received_at"], row["node"], row["round"]))
    nodes: dict[tuple[str, str], Received] = {}
    for row in ordered:
        learner = row["node"], row["incarnation"]
        entry = nodes.get(learner) or Received(
            *learner, row["received_at"], row["published_at"], row["round"]
        )
        if row["event"] in LEFT:
            entry = replace(entry, became=row["event"], became_round=row["round"])
        else:
            entry = replace(entry, round=row["round"])
        nodes[learner] = entry
    return list(nodes.values())


def _learned(found: Found, rollbacks: Rollbacks) -> list[Learned]:
    """Each batch it was in: whose, when, what became of the step, and each completion's part in it."""
    batches: dict[tuple[str, str, int], list[Row]] = {}
    for row in sorted(found.training, key=lambda row: (row["finished_at"], row["node"], row["k"])):
        batches.setdefault((row["node"], row["incarnation"], row["round"]), []).append(row)
    entries = []
    for (node, incarnation, round), rows in batches.items():
        parts = [_part(row) for row in rows]
        lasts = _lasts(round, rollbacks[node, incarnation], ALWAYS)
        skipped = rows[0]["skipped"]
        entries.append(
            Learned(
                node=node,
                incarnation=incarnation,
                round=round,
                source=rows[0]["source"],
                fate=_fate(skipped, lasts, parts),
                skipped=skipped,
                age_s=rows[0]["age_s"],
                finished_at=rows[0]["finished_at"],
                tokens=sum(one.tokens for one in parts if one.trained),
                completions=parts,
                versions=[],
            )
        )
    return entries


def _fate(skipped: str | None, lasts: bool, parts: Sequence[Part]) -> Fate:
    """What came of it in a batch: `learned`, or why nothing did or does any more."""
    if skipped is not None:
        return "skipped"
    if not lasts:
        return "undone"
    return "learned" if any(one.trained for one in parts) else "no advantage"


def _part(row: Row) -> Part:
    staleness = row["round"] - row["producer_version"]
    admitted = row["source"] == "local" or LearnConfig.model_validate_json(row["learn"]).admits(
        row["advantage"], staleness
    )
    trained = row["advantage"] != 0 and admitted
    return _picked(Part, row, tokens=sum(row["loss_mask"]), trained=trained)


def _with_versions(
    learned: Sequence[Learned], rollbacks: Rollbacks, swarm: str, uri: str
) -> tuple[list[Learned], str | None]:
    """Each entry with the first version that includes its step, and the champion if that does too.

    The second value is why MLflow did not answer; None if it did.
    """
    known: dict[str, list[Version]] = {}
    found: list[Learned] = []
    for place, entry in enumerate(learned):
        name = f"{swarm}.{entry.node}"
        if name not in known:
            try:
                known[name] = model_registry.versions_of(uri, name)
            except Unavailable as problem:
                return [*found, *learned[place:]], str(problem)
        undone = rollbacks[entry.node, entry.incarnation]
        holding = sorted(
            (one for one in known[name] if _includes(one, entry, undone)),
            key=lambda one: int(one.tags[ROUND]),
        )
        versions = [
            HoldingVersion(
                name=one.name,
                number=one.number,
                rounds=int(one.tags[ROUND]),
                registered_at=one.created_at,
                first=one is holding[0],
                champion=CHAMPION in one.aliases,
            )
            for one in holding
            if one is holding[0] or CHAMPION in one.aliases
        ]
        found.append(replace(entry, versions=versions))
    return found, None


def _includes(version: Version, entry: Learned, rollbacks: Mapping[int, int]) -> bool:
    tags = version.tags
    if not entry.tokens or entry.skipped is not None or tags.get(INCARNATION) != entry.incarnation:
        return False
    count = int(tags[ROUND]) if tags.get(ROUND, "").isdecimal() else 0
    return _lasts(entry.round, rollbacks, count)


def _lasts(round: int, rollbacks: Mapping[int, int], count: int) -> bool:
    """Whether what a round did is in the weights after `count` rounds."""
    return any(round in span for span in lineage_queries.lasting(rollbacks, count))
