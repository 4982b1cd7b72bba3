"""What comes in from peers: polled, admitted into the pool; it is verified only when a draw asks for it."""

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sapo.bus.base import Poll, Positions
from sapo.bus.poller import Listener
from sapo.core.config.load import Config
from sapo.core.errors import Refused, Unavailable
from sapo.core.outage import Outage
from sapo.core.types import Group, Received, SignedGroup
from sapo.node.gossip import Gossip
from sapo.peers import blocks
from sapo.peers.admission import PROVEN, Admission
from sapo.peers.announcements import is_announcement
from sapo.peers.pool import Entry, Pool, Verdict
from sapo.peers.quotas import Quotas
from sapo.peers.rejections import Refusals, is_signed
from sapo.peers.resend_guard import KeyCloneDetector
from sapo.store.journal.journal import Journal
from sapo.store.journal.rows import PeerUpdates, PoolRow, SeenGroup

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
    clock: Callable[[], float]
    journal: Journal
    listener: Listener
    outage: Outage
    """Whether the bus can be read; the deliverer knows whether it can be written."""
    pool: Pool
    admission: Admission
    quotas: Quotas
    refusals: Refusals
    own_key: KeyCloneDetector
    blocklist: Path
    """File that names authors who are left out."""
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
        came, no_room = self.quotas.screen(
            received, rng, lambda one: self._admit(one, now), self.pool.entries()
        )
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
            streams=self.admission.streams.changed(),
            refusals=self.refusals.rows(),
            announced={} if self.gossip is None else self.gossip.changed(),
        )

    def _leave_out(self) -> None:
        """Look whom the node is to leave out from this round on, and take their groups from the pool."""
        before, found = self.admission.blocked, blocks.read(self.blocklist)
        round = self.journal.finished_rounds()
        for key in found.keys() - before.keys():
            log.warning("%s: %s is left out from round %d on", self.name, found[key], round)
        for key in before.keys() - found.keys():
            log.warning("%s: %s is taken in again from round %d on", self.name, before[key], round)
        self.admission.blocked = found
        self.pool.remove([one.group_id for one in self.pool.entries() if one.group.key in found])

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
        time if the signature holds, but not where another may have sent it again."""
        began = time.thread_time()
        entry, refused = None, None
        try:
            entry, copy = self.admission.let_in(received, now)
            if copy is not None:
                self._refuse(*copy)
        except Refused as reason:
            # the one that was raised names frames, which would keep the group for good
            refused = Refused(reason.code, reason.detail, reason.group, reason.proven)
            self._refuse(refused, received)
        if refused is None or (is_signed(refused) and refused.code != "replayed"):
            self.quotas.charge(received.signed.key, time.thread_time() - began)
        return entry

    def _refuse(self, refused: Refused, received: Received) -> None:
        self.pool.refuse(refused)
        self.refusals.note(refused, received)
        self.own_key.note(refused, received)
        # what a `wrong_key` has signed may be a sound group of its author
        if refused.group is not None or refused.code == "malformed":
            self.pool.seen.refuse(received.signed.content_sha256)
            if refused.code in PROVEN or refused.proven:
                self.quotas.fault(received.signed.key, refused.code)
