"""What comes in from peers: polled, admitted into the pool, and verified only when a draw asks for it."""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean
from types import MappingProxyType

from sapo.bus.base import Poll, Positions
from sapo.core.errors import Refused, Unavailable
from sapo.core.types import Group, Outcome, Received
from sapo.learn.advantage import informative
from sapo.node.parts import NodeParts
from sapo.peers.admission import PROVEN, admit, said_before
from sapo.peers.allowance import too_costly, too_long
from sapo.peers.pool import Entry, Verdict
from sapo.peers.rejections import is_signed
from sapo.policy.tokenise import Tokens, false_ids
from sapo.store.journal.journal import Met, PoolRow
from sapo.tasks.questions import drawn_by
from sapo.tasks.workers import Claim


@dataclass
class Arrivals:
    """Groups that came in this round, where reading goes on, and the series `pool/*`."""

    rows: list[PoolRow] = field(default_factory=list)
    useless: dict[str, str] = field(default_factory=dict)
    """Reasons, by group id, of those that left at once, judged at sight: they never had a place."""
    met: list[Met] = field(default_factory=list)
    positions: Positions = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


def receive(parts: NodeParts, rng: random.Random) -> Arrivals:
    """Read the bus and let into the pool what may enter it. A bus that is away leaves the node in silo."""
    metrics: dict[str, float] = {}
    try:
        poll = _poll(parts, rng)
        parts.bus_outage.ended()
    except Unavailable as error:
        parts.bus_outage.began(error)
        poll = Poll((), parts.journal.positions())
    now = parts.clock()
    for position in poll.malformed:
        parts.refusals.note_malformed(position)
    # by the bus's time stamps: within a poll, too, a copy comes after its original
    received = sorted(poll.received, key=lambda one: one.timestamp)
    came, no_room = parts.quotas.screen(received, rng, lambda one: _admit(parts, one, now))
    for one in no_room:
        _refuse(parts, Refused("no_room"), one)
    rows = [entry.to_row() for entry in came if entry.group_id in parts.pool]
    useless = {entry.group_id: entry.verdict.reason or "" for entry in came if entry.verdict is not None}
    parts.pool.remove(useless)
    metrics["pool/useless"] = float(len(useless))
    metrics["pool/passed_over"] = float(poll.passed)
    parts.pool.evict(now)
    met = [
        parts.pool.met(entry.group, entry.received.signed.content_sha256, entry.received.timestamp)
        for entry in came
    ]
    return Arrivals(
        rows, useless, met, poll.positions, metrics | parts.pool.metrics(now) | parts.own_key.metrics()
    )


def take_in(parts: NodeParts, received: Sequence[Received], arrivals: Arrivals) -> None:
    """Put groups into the pool that no bus brought, past admission: an experiment's controls do that."""
    now = parts.clock()
    for one in received:
        group = Group.model_validate_json(one.signed.payload)
        if Verdict.at_sight(group) is None:
            entry = Entry(received=one, group=group, received_at=now)
            arrivals.rows.append(entry.to_row())
            parts.pool.add(entry)
    parts.pool.evict(now)


def _poll(parts: NodeParts, rng: random.Random) -> Poll:
    return parts.listener.poll(parts.journal.positions(), parts.quotas.limits(), rng)


def _admit(parts: NodeParts, received: Received, now: float) -> Entry | None:
    """Put a group into the pool and return its entry; None where it is refused. Its author pays for the time
    if the signature holds."""
    began = time.thread_time()
    entry, refused = _looked_at(parts, received, now)
    if refused is not None:
        _refuse(parts, refused, received)
    if refused is None or is_signed(refused):
        parts.quotas.charge(received.signed.key, time.thread_time() - began)
    return entry


def _looked_at(parts: NodeParts, received: Received, now: float) -> tuple[Entry | None, Refused | None]:
    """The entry of a group that may enter the pool, and is in it now; or why it may not."""
    group_id = received.signed.group_id
    try:
        if group_id in parts.dropped:
            raise Refused("duplicate")
        group = admit(
            received,
            manifest=parts.manifest,
            own_key=parts.identity.key,
            own_node=parts.name,
            now=now,
            max_age_s=parts.config.pool.max_age_s,
            seen=parts.pool.seen,
            has_control_tokens=parts.policy.has_control_tokens,
            has_false_ids=lambda group: false_ids(parts.policy, group),
            own_group=lambda group: parts.own_key.may_be_own(group, received.timestamp),
            drawn=partial(_drawn, parts),
        )
        parts.streams.check(group, received.timestamp)
        if group_id in parts.pool:  # the memory of ids is bounded, and may have forgotten it
            raise Refused("duplicate", "it is in the pool", group)
    except Refused as reason:
        # the one that was raised names frames, which would keep the group for good
        return None, Refused(reason.code, reason.detail, reason.group, reason.proven)
    _turn_out_copy(parts, group, received)
    entry = Entry(received=received, group=group, received_at=now, verdict=Verdict.at_sight(group))
    parts.streams.note(group, received.timestamp)
    parts.pool.add(entry)
    return entry, None


def _refuse(parts: NodeParts, refused: Refused, received: Received) -> None:
    """Count a record that is not taken, keep a sample of it, and tell who keeps account of its author."""
    parts.pool.refuse(refused)
    parts.refusals.note(refused, received)
    parts.own_key.note(refused, received)
    if refused.group is not None and (refused.code in PROVEN or refused.proven):
        parts.quotas.fault(refused.group.key, refused.code)


def _drawn(parts: NodeParts, met: Met) -> bool:
    """Whether a group met before answers a question that was its author's to draw, as far as is known."""
    entry = parts.pool.get(met.group_id)
    return met.stamp is None or (entry is not None and drawn_by(entry.group))


def _turn_out_copy(parts: NodeParts, original: Group, received: Received) -> None:
    """Remove from the pool a copy of this group that arrived first: partitions may lag."""
    found = said_before(original, received.timestamp, parts.pool.seen, partial(_drawn, parts))
    entry = parts.pool.get(found[0].group_id) if found is not None else None
    if found is None or entry is None or found[1].met == "stays":
        return
    proven = found[1].met == "proven"
    _refuse(
        parts, Refused("copy", f"says what {original.group_id} says", entry.group, proven), entry.received
    )
    parts.pool.remove([entry.group_id])


@dataclass(frozen=True, slots=True)
class Standard:
    """The best and the mean score of answers; by default nothing falls short of it."""

    best: float = 0.0
    mean: float = 0.0

    def above(self, scores: Sequence[float], tolerance: float) -> bool:
        """Whether `scores` fall short of it: in the best of them, or by half in their mean."""
        return max(scores) < self.best - tolerance or fmean(scores) < self.mean / 2 - tolerance


def own_standards(groups: Sequence[Group], outcomes: Sequence[Sequence[Outcome]]) -> dict[str, Standard]:
    """What a round's own answers reach, by data set, and all of them together under ``""``."""
    scores: dict[str, list[float]] = {}
    for group, row in zip(groups, outcomes, strict=True):
        for name in (group.recipe.dataset, ""):
            scores.setdefault(name, []).extend(one.score for one in row if one.score is not None)
    return {name: Standard(max(found), fmean(found)) for name, found in scores.items() if found}


def verified(
    parts: NodeParts, entries: Sequence[Entry], standards: Mapping[str, Standard] = MappingProxyType({})
) -> list[Entry]:
    """Regenerate and score foreign groups: no question, answer or score of a peer is believed (DESIGN 2).

    Returns the entries with their verdicts and tokens. A newcomer's group that falls short of the node's own
    (`own_standards`) is `substandard`: until its author is known, half-right answers are not learned from.
    """
    found: dict[int, Verdict] = {}
    tokens: list[Tokens] = []
    seconds = [0.0] * len(entries)
    for i, entry in enumerate(entries):
        began = time.thread_time()
        tokens.append(Tokens.of(parts.policy, entry.group))
        lengths = [len(ids) for ids, _ in tokens[i].completions]
        if tokens[i].longest > parts.policy.max_length or too_long(parts.config, lengths):
            found[i] = _bad(parts, entry, "too_long")
        elif too_costly(parts.config, lengths):
            found[i] = _bad(parts, entry, "too_costly")
        seconds[i] = time.thread_time() - began
    good = [i for i in range(len(entries)) if i not in found]
    judgements = parts.workers.judge([_claim(entries[i].group) for i in good])
    for i, judgement in zip(good, judgements, strict=True):
        seconds[i] += judgement.seconds
        if judgement.reason is None:
            found[i] = Verdict(outcomes=judgement.outcomes)
        else:
            found[i] = _bad(parts, entries[i], judgement.reason)
    for i, entry in enumerate(entries):
        newcomer = not parts.quotas.known(entry.group.key)
        short = newcomer and _falls_short(parts, entry.group, found[i], standards)
        useful = not short and informative(found[i].scores, parts.config.learn.zero_tolerance)
        parts.quotas.judged(entry.group.key, seconds[i], useful)
        if short:
            found[i] = found[i].model_copy(update={"reason": "substandard"})
    return [replace(entry, verdict=found[i], tokens=tokens[i]) for i, entry in enumerate(entries)]


def _falls_short(parts: NodeParts, group: Group, verdict: Verdict, standards: Mapping[str, Standard]) -> bool:
    """Whether informative scores fall short of the node's own, on that data set if it can tell."""
    tolerance = parts.config.learn.zero_tolerance
    if not informative(verdict.scores, tolerance):
        return False
    known = [score for score in verdict.scores if score is not None]
    standard = standards.get(group.recipe.dataset) or standards.get("") or Standard()
    return standard.above(known, tolerance)


def _claim(group: Group) -> Claim:
    return Claim(group.recipe, group.question, tuple(completion.text for completion in group.completions))


def _bad(parts: NodeParts, entry: Entry, reason: str) -> Verdict:
    """The verdict on a group that is unusable as a whole; counted by author in metrics and history."""
    parts.refusals.note(Refused(reason, "found when it was verified", entry.group), entry.received)
    if reason in PROVEN:
        parts.quotas.fault(entry.group.key, reason)
    return Verdict.bad(reason)
