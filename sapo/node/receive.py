"""What comes in from peers: polled, admitted into the pool; it is verified only when a draw asks for it."""

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sapo.bus.base import Poll, Positions
from sapo.bus.poller import Listener
from sapo.core.config.load import Config
from sapo.core.config.manifest import Manifest
from sapo.core.errors import Refused, Unavailable
from sapo.core.outage import Outage
from sapo.core.own_code import Missing
from sapo.core.types import Group, Received, SignedGroup
from sapo.node.gossip import Gossip
from sapo.peers import blocks
from sapo.peers.admission import PROVEN, admit, said_before
from sapo.peers.announcements import is_announcement
from sapo.peers.blocks import Blocked
from sapo.peers.pool import Entry, Pool, Verdict
from sapo.peers.quotas import Quotas
from sapo.peers.rejections import Refusals, is_signed
from sapo.peers.resend_guard import KeyCloneDetector, ResendGuard
from sapo.policy.models import LoadedPolicy
from sapo.policy.tokenise import false_ids
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import PeerUpdates, PoolRow, SeenGroup
from sapo.tasks.questions import drawn_by

log = logging.getLogger(__name__)


@dataclass
class Arrivals:
    """Groups that came in this round, where reading goes on, and the series `pool/*`."""

    rows: list[PoolRow] = field(default_factory=list)
    useless: dict[str, str] = field(default_factory=dict)
    """Reasons, by group id, of those that left at once, judged at sight: they never had a place."""
    met: list[SeenGroup] = field(default_factory=list)
    positions: Positions = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass
class Intake:
    """Reads the bus for a node and lets into its pool what may enter it."""

    config: Config
    name: str
    key: str
    """The node's own."""
    manifest: Manifest
    policy: LoadedPolicy
    clock: Callable[[], float]
    journal: Journal
    listener: Listener
    outage: Outage
    """Whether the bus can be read; the deliverer knows whether it can be written."""
    pool: Pool
    quotas: Quotas
    streams: ResendGuard
    refusals: Refusals
    own_key: KeyCloneDetector
    lacking: Mapping[str, Missing]
    """Sources of tasks that cannot be used here."""
    dropped: set[str]
    """Foreign groups used or evicted before the node was opened: a resent copy must not come in again."""
    blocklist: Path
    """File that names authors who are left out."""
    blocked: Mapping[str, Blocked] = field(default_factory=dict)
    """Those of the round in hand, by key."""
    gossip: Gossip | None = None
    """What takes announcements; without it they are refused, and without J groups are passed over."""

    def receive(self, rng: random.Random) -> Arrivals:
        """Read the bus and let into the pool what may enter it. If the bus is away the node goes on in
        silo."""
        self._leave_out()
        poll = self._poll(rng)
        now = self.clock()
        for found in poll.malformed:
            self.refusals.note_malformed(found)
        announced = [one for one in poll.received if is_announcement(one)]
        if self.gossip is not None:
            self.gossip.hear(announced, rng)
        else:
            for one in announced:
                self._refuse(Refused("announcement"), one)
        groups = [one for one in poll.received if not is_announcement(one)]
        # by the bus's time stamps: within a poll, too, a copy comes after its original
        received = sorted(groups, key=lambda one: one.timestamp) if self.config.batch.external else []
        came, no_room = self.quotas.screen(received, rng, lambda one: self._admit(one, now))
        for one in no_room:
            self._refuse(Refused("no_room"), one)
        rows = [entry.to_row() for entry in came if entry.group_id in self.pool]
        useless = {entry.group_id: entry.verdict.reason or "" for entry in came if entry.verdict is not None}
        self.pool.remove(useless)
        self.pool.evict(now)
        met = [
            self.pool.met(entry.group, entry.received.signed.content_sha256, entry.received.timestamp)
            for entry in came
        ]
        metrics = {"pool/useless": float(len(useless)), "pool/passed_over": float(poll.passed)}
        metrics |= self.pool.metrics(now) | self.own_key.metrics()
        return Arrivals(rows, useless, met, poll.positions, metrics)

    def take_in(self, received: Sequence[Received], arrivals: Arrivals) -> None:
        """Put groups into the pool that no bus brought, past admission: an experiment's controls do that."""
        now = self.clock()
        for one in received:
            group = Group.model_validate_json(one.signed.payload)
            if Verdict.at_sight(group) is None:
                entry = Entry(received=one, group=group, received_at=now)
                arrivals.rows.append(entry.to_row())
                self.pool.add(entry)
        self.pool.evict(now)

    def heard(self, own: Iterable[tuple[Group, SignedGroup]], arrivals: Arrivals) -> PeerUpdates:
        """What the journal is to remember of a round's groups, the node's own and those that came."""
        met = [self.pool.met(group, signed.content_sha256) for group, signed in own]
        return PeerUpdates(
            met=[*met, *arrivals.met],
            forgotten=self.pool.seen.forgotten(),
            peers=self.quotas.changed(),
            gone=self.quotas.gone(),
            streams=self.streams.changed(),
            refusals=self.refusals.rows(),
            announced={} if self.gossip is None else self.gossip.changed(),
        )

    def _leave_out(self) -> None:
        """Look whom the node is to leave out from this round on, and take their groups from the pool."""
        found = blocks.read(self.blocklist)
        round = self.journal.finished_rounds()
        for key in found.keys() - self.blocked.keys():
            log.warning("%s: %s is left out from round %d on", self.name, found[key], round)
        for key in self.blocked.keys() - found.keys():
            log.warning("%s: %s is taken in again from round %d on", self.name, self.blocked[key], round)
        self.blocked = found
        self.pool.remove([one.group_id for one in self.pool.entries() if one.group.key in self.blocked])

    def _poll(self, rng: random.Random) -> Poll:
        try:
            poll = self.listener.poll(self.journal.positions(), self.quotas.limits(self.pool.seen.holds), rng)
        except Unavailable as error:
            self.outage.began(error)
            return Poll((), self.journal.positions())
        self.outage.ended()
        return poll

    def _admit(self, received: Received, now: float) -> Entry | None:
        """Put a group into the pool and return its entry; None where it is refused. Its author pays for the
        time if the signature holds."""
        began = time.thread_time()
        entry, refused = self._looked_at(received, now)
        if refused is not None:
            self._refuse(refused, received)
        if refused is None or is_signed(refused):
            self.quotas.charge(received.signed.key, time.thread_time() - began)
        return entry

    def _looked_at(self, received: Received, now: float) -> tuple[Entry | None, Refused | None]:
        """The entry of a group that may enter the pool, and is in it now; or why it may not."""
        group_id = received.signed.group_id
        try:
            if group_id in self.dropped:
                raise Refused("duplicate")
            group = admit(
                received,
                manifest=self.manifest,
                own_key=self.key,
                own_node=self.name,
                now=now,
                max_age_s=self.config.pool.max_age_s,
                seen=self.pool.seen,
                has_control_tokens=self.policy.has_control_tokens,
                has_false_ids=lambda group: false_ids(self.policy, group),
                own_group=lambda group: self.own_key.may_be_own(group, received.timestamp),
                drawn=self._drawn,
                blocked=self.blocked,
            )
            if (dataset := group.recipe.dataset) in self.lacking:
                raise Refused("unavailable", f"{dataset}: {self.lacking[dataset].problem}", group)
            self.streams.check(group, received.timestamp)
            if group_id in self.pool:  # the memory of ids is bounded, and may have forgotten it
                raise Refused("duplicate", "it is in the pool", group)
        except Refused as reason:
            # the one that was raised names frames, which would keep the group for good
            return None, Refused(reason.code, reason.detail, reason.group, reason.proven)
        self._turn_out_copy(group, received)
        entry = Entry(received=received, group=group, received_at=now, verdict=Verdict.at_sight(group))
        self.streams.note(group, received.timestamp)
        self.pool.add(entry)
        return entry, None

    def _refuse(self, refused: Refused, received: Received) -> None:
        self.pool.refuse(refused)
        self.refusals.note(refused, received)
        self.own_key.note(refused, received)
        if refused.group is not None and (refused.code in PROVEN or refused.proven):
            self.quotas.fault(refused.group.key, refused.code)

    def _drawn(self, met: SeenGroup) -> bool:
        """Whether a group met before answers a question that was its author's to draw, as far as is known."""
        entry = self.pool.get(met.group_id)
        return met.stamp is None or (entry is not None and drawn_by(entry.group))

    def _turn_out_copy(self, original: Group, received: Received) -> None:
        """Remove from the pool a copy of this group that arrived first: partitions may lag."""
        found = said_before(original, received.timestamp, self.pool.seen, self._drawn)
        entry = self.pool.get(found[0].group_id) if found is not None else None
        if found is None or entry is None or found[1].met == "stays":
            return
        proven = found[1].met == "proven"
        said = f"says what {original.group_id} says"
        self._refuse(Refused("copy", said, entry.group, proven), entry.received)
        self.pool.remove([entry.group_id])
