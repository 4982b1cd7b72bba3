"""Whose groups does a node draw? A simulated swarm on a memory bus; admission, pool, sampler are real."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

from bus_authors import Author, tiny
from scipy.stats import chi2

from sapo.bus.base import Limits, Positions
from sapo.bus.memory import MemoryBus
from sapo.core.config.load import PoolConfig
from sapo.core.config.manifest import AllowedTask, Manifest
from sapo.core.rng import rng
from sapo.core.shares import Shares
from sapo.core.types import Group, Outcome, SignedGroup
from sapo.peers.admission import admit
from sapo.peers.pool import Entry, Pool, Verdict
from sapo.peers.sampling import sample_external, walk
from sapo.peers.signing import Identity, unseal

ROUND_S = 10.0
"""Simulated seconds a round takes."""
PARTITIONS = 12
READERS = 4
"""Nodes that draw: they read the same bus and share nothing else, so their draws may be counted together."""
MANIFEST = Manifest(
    swarm="s",
    reasoning_gym="any",
    tasks=(AllowedTask(dataset="chain_sum", config="{}"),),
    held_out=0.0,
    salt="",
    answer="text",
    min_completions=2,
    max_completions=8,
    max_text_chars=1_000,
    max_payload_bytes=100_000,
)
WARM_UP = 20
"""Rounds before draws are counted: with the default settings the pool of a small swarm fills meanwhile."""


@dataclass(frozen=True)
class Swarm:
    """Who publishes: `peers` authors, each `pace` groups a round on average, one `flood` times as much."""

    peers: int
    pace: float
    flood: float = 1.0

    def paces(self) -> list[float]:
        """Mean groups a round by author; the flooder is author 0."""
        return [self.pace * self.flood] + [self.pace] * (self.peers - 1)


@dataclass(frozen=True)
class Uniformity:
    """A chi-square test that every one of `cells` was equally probable."""

    statistic: float
    cells: int
    expected: float

    @property
    def freedom(self) -> int:
        """Degrees of freedom."""
        return self.cells - 1

    @property
    def p(self) -> float:
        """Probability of a statistic at least this large when all are equally probable."""
        return float(chi2.sf(self.statistic, self.freedom))


def uniformity(counts: Sequence[int]) -> Uniformity:
    """Pearson's chi-square of `counts` against equal shares. Raises `ValueError` for too few."""
    total = sum(counts)
    if len(counts) < 2 or total < 1:
        raise ValueError("needs at least two cells and one count")
    expected = total / len(counts)
    return Uniformity(sum((count - expected) ** 2 for count in counts) / expected, len(counts), expected)


class Reader:
    """A node without a model: it polls, admits, draws and forgets, and counts whom it drew."""

    def __init__(self, number: int, bus: MemoryBus, bounds: PoolConfig) -> None:
        self.name = f"reader{number}"
        self.drawn: Counter[str] = Counter()
        self._bus, self._bounds = bus, bounds
        self._pool = Pool(bounds)
        self._key = Identity.new().key
        self._positions: Positions = {}

    def round(self, number: int, now: float, want: int, *, count: bool) -> None:
        """Poll, admit, draw `want`; the draws enter the count if `count`."""
        order = rng("fairness", self.name, number, "poll")
        bounds = self._bounds
        shares = Shares(bounds.max_peer_share, bounds.newcomer_share)
        limits = Limits(bounds.poll_bytes, bounds.max_groups, bounds.tail, shares)
        poll = self._bus.poll(self._positions, limits, order)
        self._positions = poll.positions
        for received in poll.received:
            group = admit(
                received,
                manifest=MANIFEST,
                own_key=self._key,
                own_node=self.name,
                now=now,
                max_age_s=self._bounds.max_age_s,
                seen=self._pool.seen,
                has_control_tokens=lambda text: False,
            )
            self._pool.add(Entry(received=received, group=group, received_at=now))
        self._pool.evict(now)
        draw = sample_external(
            walk(self._pool.entries(), rng("fairness", self.name, number, "external")),
            want,
            verify,
            tolerance=1e-6,
        )
        self._pool.keep(draw.verified)
        self._pool.remove(draw.leaving)
        if count:
            self.drawn.update(entry.group.key for entry in draw.chosen)


def verify(entries: Sequence[Entry]) -> list[Entry]:
    """A fixed rule in place of scoring: a quarter of all groups, by id, are uninformative."""
    good = Verdict(outcomes=(Outcome.scored(1.0), Outcome.scored(0.0)))
    dull = Verdict(outcomes=(Outcome.scored(1.0), Outcome.scored(1.0)))
    return [replace(entry, verdict=dull if entry.group_id[-1] in "0123" else good) for entry in entries]


def draws(swarm: Swarm, rounds: int, want: int, pool: PoolConfig) -> list[int]:
    """How often each author was drawn by `READERS` nodes in `rounds` rounds of J = `want`; author 0 first."""
    now = [0.0]
    bus = MemoryBus(PARTITIONS, clock=lambda: now[0])
    authors = [Author(i, tiny) for i in range(swarm.peers)]
    readers = [Reader(i, bus, pool) for i in range(READERS)]
    opened: dict[str, Group] = {}

    def once(signed: SignedGroup) -> Group:
        """Signatures are really checked, but once for all readers."""
        if signed.group_id not in opened:
            opened[signed.group_id] = unseal(signed)
        return opened[signed.group_id]

    with mock.patch("sapo.peers.admission.unseal", once):
        for number in range(WARM_UP + rounds):
            chance = rng("fairness", number, "publish")
            batch = []
            for author, pace in zip(authors, swarm.paces(), strict=True):
                batch += author.groups(author.due(number, pace))
            chance.shuffle(batch)
            bus.publish(batch)
            bus.trim(2 * pool.tail)
            for reader in readers:
                reader.round(number, now[0], want, count=number >= WARM_UP)
            now[0] += ROUND_S
    total: Counter[str] = Counter()
    for reader in readers:
        total.update(reader.drawn)
    return [total[author.identity.key] for author in authors]
