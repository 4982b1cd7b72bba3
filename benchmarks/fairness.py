"""Benchmark of a flood: what 2,000 new identities, junk and forgeries do to one node's intake and batches.

    python benchmarks/fairness.py [--json FILE] [--quick]

Four known peers publish as in preset starter, an attacker 1, 10 and 100 times as much. The bus, screening,
admission, pool, accounts and draw are the node's own; only scoring is a fixed rule. Every figure stands
beside the same node's without an attacker. Exits 1 when newcomers get more than their share.
"""

import hashlib
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from common import Report, benchmark, parser

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

from bus_authors import Author, small
from bus_fairness import MANIFEST, PARTITIONS, ROUND_S

from sapo.bus.base import Positions
from sapo.bus.memory import MemoryBus
from sapo.core.config.load import PoolConfig
from sapo.core.errors import Refused
from sapo.core.rng import rng
from sapo.core.types import Outcome, Received, SignedGroup
from sapo.peers.admission import admit
from sapo.peers.pool import Entry, Pool, Verdict
from sapo.peers.quotas import Quotas
from sapo.peers.sampling import sample_external, walk
from sapo.peers.signing import Identity

PACKAGES = ("cryptography", "pydantic")
HONEST, GROUPS, WANT = 4, 8, 8
"""Known peers, groups each publishes in a round, and J."""
NAMES = 2_000
POOL = PoolConfig(max_groups=64)
NEWCOMERS = int(POOL.newcomer_share * POOL.max_groups)
"""As in preset starter."""
OWN_S, GROUP_S = 0.3, 0.003
"""Own work of a round, and what verifying a group costs: about those of preset starter."""
WARM_UP = 3
"""Rounds in which the pool fills."""
GOOD, DULL = (Verdict(outcomes=tuple(Outcome.scored(float(k < right)) for k in range(8))) for right in (4, 8))
"""A fixed rule in place of scoring: a quarter of all groups, by id, are uninformative."""

Flood = Iterator[SignedGroup]
Attack = Callable[[list[Author]], Flood]


def identities(honest: list[Author]) -> Flood:
    """Good groups, really signed, under as many names as there are."""
    crowd = [Author(10 + i, small) for i in range(NAMES)]
    while True:
        for author in crowd:
            yield from author.groups(1)


def junk(honest: list[Author]) -> Flood:
    """What nobody signed, every record under a name of its own."""
    (like,) = Author(9, small).groups(1)
    number = 0
    while True:
        number += 1
        name = hashlib.sha256(f"junk {number}".encode()).hexdigest()
        yield like.model_copy(update={"group_id": name, "key": name})


def forgeries(honest: list[Author]) -> Flood:
    """Groups that name the known peers as their authors, with a signature of somebody else's."""
    twins = [Author(i, small) for i in range(len(honest))]
    for author in twins:
        author.groups(200)  # places that the real ones have not come to yet
    while True:
        for author in twins:
            (group,) = author.groups(1)
            yield group.model_copy(update={"signature": "00" * 64})


ATTACKS: dict[str, Attack] = {"2,000 identities": identities, "unsigned junk": junk, "forgeries": forgeries}


@dataclass(frozen=True)
class Turn:
    """What a round of the node came to."""

    cpu_ms: float
    """For reading, screening, admitting and evicting."""
    looked: float
    honest_pool: int
    others_pool: int
    honest_batch: int
    others_batch: int


class Node:
    """A node without a model: it reads, admits, verifies by a rule, and draws."""

    def __init__(self, bus: MemoryBus, honest: list[Author]) -> None:
        self._bus = bus
        self._honest = frozenset(author.identity.key for author in honest)
        self._quotas = Quotas(POOL, self._honest)
        self._pool = Pool(POOL, self._quotas.shares)
        self._key = Identity.new().key
        self._positions: Positions = {}

    def round(self, number: int, now: float) -> Turn:
        """One round's intake and draw."""
        began = time.process_time()
        poll = self._bus.poll(self._positions, self._quotas.limits(), rng("flood", number, "poll"))
        self._positions = poll.positions
        self._quotas.screen(poll.received, rng("flood", number, "screen"), lambda one: self._admit(one, now))
        self._pool.evict(now)
        spent = time.process_time() - began
        entries = self._pool.entries()
        inside = sum(entry.group.key in self._honest for entry in entries)
        self._quotas.earn(OWN_S)
        draw = sample_external(
            walk(entries, rng("flood", number, "external"), self._quotas.known),
            WANT,
            self._verify,
            tolerance=1e-6,
            ready=lambda entry, beside: self._quotas.may_verify(
                entry.group.key, [other.group.key for other in beside]
            ),
            known=self._quotas.known,
            trials=self._quotas.trials(WANT),
        )
        self._pool.keep(draw.verified)
        self._pool.remove(draw.leaving)
        drawn = sum(entry.group.key in self._honest for entry in draw.chosen)
        looked = self._quotas.metrics()["peers/looked"]
        return Turn(1000 * spent, looked, inside, len(entries) - inside, drawn, len(draw.chosen) - drawn)

    def _admit(self, received: Received, now: float) -> Entry | None:
        try:
            group = admit(
                received,
                manifest=MANIFEST,
                own_key=self._key,
                own_node="reader",
                now=now,
                max_age_s=POOL.max_age_s,
                seen=self._pool.seen,
                has_control_tokens=lambda text: False,
            )
        except Refused:
            return None
        entry = Entry(received=received, group=group, received_at=now)
        self._pool.add(entry)
        return entry

    def _verify(self, entries: Sequence[Entry]) -> list[Entry]:
        for entry in entries:
            self._quotas.judged(entry.group.key, GROUP_S, True)
        return [replace(one, verdict=DULL if one.group_id[-1] in "0123" else GOOD) for one in entries]


def rounds(attack: Attack | None, volume: int, count: int) -> list[Turn]:
    """A node's rounds once its pool is full, while an attacker publishes `volume` times what others do."""
    now = [0.0]
    bus = MemoryBus(PARTITIONS, clock=lambda: now[0])
    honest = [Author(i, small) for i in range(HONEST)]
    flood = attack(honest) if attack is not None else iter(())
    node = Node(bus, honest)
    turns = []
    for number in range(WARM_UP + count):
        batch = [group for author in honest for group in author.groups(GROUPS)]
        batch += [group for _, group in zip(range(volume * HONEST * GROUPS), flood, strict=False)]
        rng("flood", number, "publish").shuffle(batch)
        bus.publish(batch)
        bus.trim(2 * POOL.tail)
        turns.append(node.round(number, now[0]))
        now[0] += ROUND_S
    return turns[WARM_UP:]


def measure(report: Report, quick: bool, folder: Path) -> None:
    """All attacks at all volumes."""
    count = 4 if quick else 12
    calm = rounds(None, 0, count)
    for name, attack in ATTACKS.items():
        for volume in (1, 10) if quick else (1, 10, 100):
            turns = rounds(attack, volume, count)
            for what, value in FIGURES.items():
                ours, baseline = [value(turn) for turn in turns], [value(turn) for turn in calm]
                report.measured(f"{name}, {volume}x: {what}", ours, baseline)
            most = max(turn.others_pool for turn in turns)
            report.check(
                f"{name}, {volume}x: newcomers hold at most their share",
                most <= NEWCOMERS,
                f"{most} of {POOL.max_groups} places",
            )
            drawn = mean(turn.honest_batch for turn in turns)
            report.check(
                f"{name}, {volume}x: known peers fill three quarters of the batches",
                drawn >= least_drawn(count),
                f"{drawn:.1f} of {WANT} groups, {mean(turn.others_batch for turn in turns):.1f} of others",
            )


def least_drawn(count: int) -> float:
    """What the mean of `count` batches does not fall below (three standard errors) at the fair share."""
    share = POOL.newcomer_share
    return WANT * (1 - share) - 3 * math.sqrt(WANT * share * (1 - share) / count)


FIGURES: dict[str, Callable[[Turn], float]] = {
    "known peers' groups in the pool": lambda turn: turn.honest_pool,
    "known peers' groups in a batch": lambda turn: turn.honest_batch,
    "records looked at in a round": lambda turn: turn.looked,
    "intake, CPU ms a round": lambda turn: turn.cpu_ms,
}


if __name__ == "__main__":
    sys.exit(benchmark(__doc__, "fairness", PACKAGES, measure))
