"""Who taught a checkpoint: a model version, or a node as it stands, followed back to the authors.

The figures come from the history's `training` table; a version's tags in MLflow are held against
it, and the rows are checked against their digests, so that what is said is what was trained on. Answers are
plain values, as `sapo lineage --json` prints them (docs/lineage.md).
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from typing import Any

from sapo.core.config.load import Config
from sapo.core.config.secrets import public
from sapo.core.errors import UserError
from sapo.core.types import Gossiped
from sapo.store.history import lineage_queries
from sapo.store.history.lineage_queries import BINS, Fate, RoundFacts
from sapo.store.history.query import incarnations
from sapo.store.history.rounds import Recording
from sapo.store.history.tables import Damaged, Store
from sapo.store.tracking import model_registry as versions
from sapo.store.tracking.model_registry import Version
from sapo.store.tracking.tracker import (
    BATCHES,
    CHAIN,
    HISTORY,
    HISTORY_VERSION,
    INCARNATION,
    NODE,
    PASS_AT_1,
    ROUND,
)

_MODEL = re.compile(r"models:/([^@/'\"\s]+)[@/]([^@/'\"\s]+)")


@dataclass(frozen=True, slots=True)
class Subject:
    """The weights that are asked about: of a node's incarnation after `count` rounds, as a version or not."""

    reference: str
    swarm: str
    node: str
    incarnation: str
    count: int
    version: Version | None = None

    @property
    def name(self) -> str:
        """A name that can be a file's."""
        if self.version is None:
            return f"{self.node}-round-{self.count - 1}"
        return re.sub(r"[^A-Za-z0-9._-]", "_", f"{self.version.name}-v{self.version.number}")


def version_subject(uri: str, reference: str) -> Subject:
    """What `models:/<swarm>.<node>@<alias>` or `models:/<swarm>.<node>/<number>` names in MLflow at `uri`.

    Raises `UserError` where there is no such version, or sapo did not make it, and `Unavailable` when MLflow
    is away.
    """
    parts = _MODEL.fullmatch(reference)
    if parts is None:
        remedy = "write models:/<swarm>.<node>@champion, @latest or /<number>"
        raise UserError("WHAT", reference, "is no address of a model version", remedy)
    version = versions.find(uri, *parts.groups())
    tags = version.tags
    missing = [tag for tag in (NODE, INCARNATION, ROUND) if not tags.get(tag)]
    if missing or not tags[ROUND].isdecimal():
        problem = f"was not registered by sapo: it lacks the tag {(missing or [ROUND])[0]}"
        raise UserError("WHAT", reference, problem, "name a version that a node registered")
    swarm = tags.get("sapo.swarm", version.name.rpartition(".")[0])
    return Subject(reference, swarm, tags[NODE], tags[INCARNATION], int(tags[ROUND]), version)


def node_subject(store: Store, config: Config, node: str) -> Subject:
    """A node after the newest round that the history holds of it. Raises `UserError` where it holds none."""
    known = incarnations(store, node)
    table = store.find("training")
    if not known or table is None:
        remedy = "wait until its rounds are delivered (sapo status says what is owed)"
        raise UserError("WHAT", node, "the history holds no round of this node", remedy)
    count = Recording(table, config.swarm.name, node, known[-1]).count()
    return Subject(node, config.swarm.name, node, known[-1], count)


Row = Mapping[str, Any]
Document = dict[str, Any]
PEER = ("source", "producer", "producer_key")


def teachers(store: Store, subject: Subject) -> Document:
    """Which peers, tasks and rounds taught these weights.

    `problems` lists every disagreement between version and history and where the history is damaged; it is
    empty if all links hold. Raises `Unavailable` if the history is away.
    """
    facts = lineage_queries.rounds(store, subject.node, subject.incarnation, subject.count)
    fates = lineage_queries.fates(facts, subject.count)
    learned = [round for round, fate in fates.items() if fate == "learned"]
    found = lineage_queries.taught(store, subject.node, subject.incarnation, learned, subject.count)
    found = sorted(found, key=lambda one: one["source"] != "local")
    covered, notes = _coverage(facts, fates, subject.count)
    notes += _averaged(facts, fates, {one["producer_key"]: one["producer"] for one in found})
    problems = _damage(store, subject, facts)
    links = [] if subject.version is None else _links(subject.version, subject, facts)
    for link in links:
        if link["state"] == "differs":
            problems.append(_difference(subject, link, facts))
        elif link["state"] == "missing":
            notes.append(f"the version has no tag {link['link']}: an earlier release registered it")
    total = next(one for one in found if one["source"] is None)

    def summed(*names: str) -> list[Document]:
        by = {"source", "producer", "producer_key", "dataset", "bin"}
        return [
            {name: one[name] for name in names} | _sums(one, total["tokens"])
            for one in found
            if {name for name in by if one[name] is not None} == {*names}
        ]

    version, tags = subject.version, {} if subject.version is None else subject.version.tags
    then, table = tags.get(HISTORY_VERSION, ""), store.find("training")
    passed = tags.get(PASS_AT_1)
    return {
        "kind": "node" if version is None else "version",
        "reference": subject.reference,
        "swarm": subject.swarm,
        "node": subject.node,
        "incarnation": subject.incarnation,
        "version": None
        if version is None
        else {
            "name": version.name,
            "number": version.number,
            "aliases": version.aliases,
            "registered_at": version.created_at,
            "pass_at_1": None if passed is None else float(passed),
        },
        "rounds": covered,
        "digests": _digests(tags, facts),
        "history": {
            "uri": public(store.uri),
            "registered_uri": tags.get(HISTORY),
            "version": None if table is None else table.version(),
            "registered_version": int(then) if then.isdecimal() else None,
        },
        "totals": _sums(total, total["tokens"]),
        "peers": summed(*PEER),
        "tasks": summed("source", "dataset"),
        "flows": summed(*PEER, "dataset"),
        "when": _when(found, subject.count, fates),
        "links": links,
        "notes": notes,
        "problems": problems,
    }


def _coverage(
    facts: Sequence[RoundFacts], fates: Mapping[int, Fate], count: int
) -> tuple[Document, list[str]]:
    """How many of the rounds before `count` did what, and what has to be said beside the numbers."""
    cut = 0
    notes = []
    if facts and facts[0].previous is not None:
        cut = facts[0].previous + 1
        notes.append(
            f"rounds 0 to {cut - 1} are not in the history any more: what they taught is not counted"
        )
    unlinked = [one.round for one in facts if one.chain is None]
    if unlinked:
        notes.append(
            f"rounds up to {unlinked[-1]} were written by a release that kept no chain: one of them that is "
            "missing cannot be told from one without groups"
        )
    reasons: dict[str, int] = {}
    for one in facts:
        if one.skipped is not None and fates[one.round] == "skipped":
            reasons[one.skipped] = reasons.get(one.skipped, 0) + 1
    kinds = list(fates.values())
    covered = {
        "count": count,
        "learned": kinds.count("learned"),
        "skipped": kinds.count("skipped"),
        "skipped_because": reasons,
        "rolled_back": kinds.count("undone"),
        "rollbacks": [
            {"round": one.round, "to": one.rolled_back_to} for one in facts if one.rolled_back_to is not None
        ],
        "without_groups": count - cut - len(facts),
        "cut": cut,
    }
    return covered, notes


def _averaged(
    facts: Sequence[RoundFacts], fates: Mapping[int, Fate], names: Mapping[str | None, str]
) -> list[str]:
    """Partners this node averaged weights with. Their training data is not in this node's history."""
    steps = [
        Gossiped.model_validate_json(one.gossip)
        for one in facts
        if one.gossip is not None and fates[one.round] != "undone"
    ]
    partners = Counter(step.partner for step in steps if step.stepped)
    alone = partners.pop(None, 0)
    if not partners:
        return []
    said = [f"{names.get(key, short(key))} ({times})" for key, times in partners.most_common()]
    lonely = f", and made {alone} outer steps alone" if alone else ""
    return [f"it averaged its weights with {', '.join(said)}{lonely}; what they had learned is not in this"]


def _damage(store: Store, subject: Subject, facts: Sequence[RoundFacts]) -> list[str]:
    table = store.find("training")
    if table is None:
        return ["there is no history"]
    problems = []
    recording = Recording(table, subject.swarm, subject.node, subject.incarnation)
    if not facts:
        cut = f"; retention has cut its rounds below {recording.cut()}" if recording.cut() else ""
        said = f"the history holds no round of {subject.node}, incarnation {subject.incarnation}"
        return [f"{said}, before round {subject.count}{cut}"]
    taken = recording.count()
    if taken < subject.count:
        problems.append(
            f"rounds {taken} to {subject.count - 1} are not in the history: where {subject.node} owes them "
            "yet (sapo status says so), ask again later"
        )
    kept, gone = recording.cut(), facts[0].previous
    if kept is not None and gone is not None and gone >= kept:
        which = f"round {kept} is" if kept == gone else f"rounds {kept} to {gone} are"
        problems.append(f"{which} missing, and retention has not cut that far")
    try:
        for _ in recording.rounds(facts[0].round, subject.count - 1):
            pass
    except Damaged as damage:
        problems.append(str(damage))
    return problems


def _links(version: Version, subject: Subject, facts: Sequence[RoundFacts]) -> list[Document]:
    tags, last = version.tags, facts[-1] if facts else None
    newest = last if last is not None and last.round == subject.count - 1 else None
    name, own = version.name, f"{subject.swarm}."
    pairs = {
        # a copy under another name, as for production, has another name
        NODE: (tags.get(NODE), name.removeprefix(own) if name.startswith(own) else None),
        "sapo.rounds": (tags.get("sapo.rounds"), f"0-{subject.count - 1}"),
        CHAIN: (tags.get(CHAIN), None if last is None else last.chain),
        BATCHES: (tags.get(BATCHES), None if newest is None else " ".join(newest.digests)),
        # a round without rows changes no weight, so those after the last one with rows are the version's
        "sapo.weights_sha256": (
            tags.get("sapo.weights_sha256"),
            None if last is None else last.weights_sha256 or None,
        ),
    }
    return [
        {"link": link, "version": said, "history": found, "state": _state(said, found)}
        for link, (said, found) in pairs.items()
    ]


def _state(said: str | None, found: str | None) -> str:
    """`missing`: the version has no such tag. `unknown`: the history holds nothing to compare with."""
    if not said:
        return "missing"
    if found is None:
        return "unknown"
    return "agrees" if said == found else "differs"


def _difference(subject: Subject, link: Document, facts: Sequence[RoundFacts]) -> str:
    assert subject.version is not None
    said, found = short(link["version"]), short(link["history"])
    says = f"{link['link']} of {subject.version.name} version {subject.version.number} is {said}"
    last = facts[-1].round if facts else -1
    meanings = {
        CHAIN: f"the batches up to round {last} make {found}: they are not those that made this version, the "
        "history was rewritten or is another one",
        BATCHES: f"the batch of round {last} has {found}: it was rewritten",
        "sapo.weights_sha256": f"round {last} ended with {found} by the record: these are others",
        NODE: f"its model is {found}'s",
        "sapo.rounds": f"it was made after round {subject.count - 1} ({found})",
    }
    return f"{says}, {meanings[link['link']]}"


def _digests(tags: Mapping[str, str], facts: Sequence[RoundFacts]) -> Document:
    """The digests that name these weights and what made them; `configs` are those in force, in order."""
    last = facts[-1] if facts else None
    configs = []
    for config, members in groupby(facts, key=lambda one: one.config):
        of = list(members)
        configs.append({"digest": config, "first": of[0].round, "last": of[-1].round})
    return {
        "weights_sha256": tags.get("sapo.weights_sha256") or (last.weights_sha256 if last else None) or None,
        "chain": None if last is None else last.chain,
        "batch": None if last is None else " ".join(last.digests),
        "config": tags.get("sapo.config_digest") or (configs[-1]["digest"] if configs else None),
        "configs": configs,
    }


def _sums(one: Row, tokens: int) -> Document:
    """What some groups taught: completions and tokens are those with an advantage in steps that last."""
    first, last = one["first_version"], one["last_version"]
    return {
        **{name: one[name] for name in ("groups", "informative", "completions", "tokens")},
        "share": one["tokens"] / tokens if tokens else 0.0,
        **{name: one[name] if one[name] is not None and isfinite(one[name]) else None for name in MEANS},
        "policy_versions": None if first is None else [first, last],
    }


MEANS = ("advantage", "age_s")
"""None where a damaged row makes them no number."""


def _when(found: Sequence[Row], count: int, fates: Mapping[int, Fate]) -> Document:
    """Tokens of each peer in each stretch of rounds, and which rounds taught nothing in the end."""
    bins = min(BINS, count)
    firsts = [-(-place * count // bins) for place in range(bins)]
    tokens: dict[tuple[str, ...], list[int]] = {}
    for one in found:
        if one["bin"] is not None:
            peer = tuple(str(one[name]) for name in PEER)
            tokens.setdefault(peer, [0] * bins)[one["bin"]] += one["tokens"]
    return {
        "stretches": [[first, after - 1] for first, after in zip(firsts, [*firsts[1:], count], strict=True)],
        "peers": [dict(zip(PEER, peer, strict=True)) | {"tokens": counts} for peer, counts in tokens.items()],
        "skipped": [round for round, fate in fates.items() if fate == "skipped"],
        "rolled_back": [round for round, fate in fates.items() if fate == "undone"],
    }


def short(digest: str | None) -> str:
    """The first digits of a digest, or a dash where there is none; anything shorter as it is."""
    return "–" if not digest else digest if len(digest) <= 16 else f"{digest[:12]}…"
